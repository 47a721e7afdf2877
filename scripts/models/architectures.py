"""The architectures that run.py builds: tiny configurations with random weights.

`CASES` has a name for each; the sizes are the smallest that keep what is particular to
an architecture (grouped heads, windows, experts). A class of transformers gets a
``config.json`` of its own class with `Case.config` laid over it. A name with a colon is
a factory in own.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        config: Values of the configuration class.
        kind: What it is, for the table.
        edits: What a user changes in the file that ``init`` wrote: text → text.
        tables: The tables from ``[axes]`` to ``[entries]`` where ``init`` can't know
            them, in place of its own.
        dtype: Of weights and floating-point inputs.
        generate: Build the steps of ``generate`` instead of the forward.
    """

    config: Mapping[str, Any]
    kind: str
    edits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: str = ""
    dtype: str = "float32"
    generate: bool = False


IDS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# RoBERTa's: positions start after the padding token's.
SHIFTED = {**IDS, "pad_token_id": 1, "bos_token_id": 0}
WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = {**IDS, **WIDTHS, "max_position_embeddings": 64}
ROBERTA = {**TEXT, **SHIFTED, "type_vocab_size": 1}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
BART = {
    **IDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PATCHES = {**WIDTHS, "image_size": 32, "patch_size": 8}
CLIP_TEXT = {**TEXT, "projection_dim": 16, "max_position_embeddings": 16}
CLIP_VISION = {**PATCHES, "projection_dim": 16}
SOUND = {
    **WIDTHS,
    "vocab_size": 32,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}

# What has no position in the model, so that init writes the usual lengths.
SHORT_SOUND = {"160000": "4000"}

TEXT_AND_IMAGES = """\
[axes]
b = [2]
s = [16]

[entries.forward.inputs.input_ids]
shape = ["b", "s"]
dtype = "int64"
high = 128

[entries.forward.inputs.attention_mask]
shape = ["b", "s"]
dtype = "int64"
low = 1

[entries.forward.inputs.pixel_values]
shape = ["b", 3, 32, 32]
dtype = "float32"
"""

CASES: dict[str, Case] = {
    # --- Encoders ---
    "DistilBertModel": Case(
        {
            **IDS,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 64,
        },
        "encoder",
    ),
    "RobertaModel": Case(ROBERTA, "encoder"),
    "RobertaForSequenceClassification": Case(ROBERTA, "cross-encoder"),
    "XLMRobertaModel": Case(ROBERTA, "encoder"),
    "XLMRobertaForSequenceClassification": Case(
        {**ROBERTA, "num_labels": 1}, "reranker"
    ),
    "AlbertModel": Case({**TEXT, "embedding_size": 16}, "encoder"),
    "ElectraForTokenClassification": Case(
        {**TEXT, "embedding_size": 16}, "token classifier"
    ),
    "DebertaV2ForSequenceClassification": Case(
        {
            **TEXT,
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
        "cross-encoder, DeBERTa v2 and v3",
    ),
    "ModernBertModel": Case(
        {
            **TEXT,
            "num_hidden_layers": 4,
            "local_attention": 8,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        "encoder",
    ),
    "ModernBertForMaskedLM": Case(
        {
            **TEXT,
            "num_hidden_layers": 4,
            "local_attention": 8,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        "masked language model",
    ),
    "MPNetModel": Case({**TEXT, **SHIFTED}, "encoder"),
    "LayoutLMModel": Case(TEXT, "encoder, called without boxes"),
    "T5EncoderModel": Case(
        {
            **IDS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
        },
        "encoder",
    ),
    "own:SentenceEncoder": Case(
        {},
        "pooled and normalised, as sentence-transformers",
        tables="""\
[axes]
b = [2]
s = [16]

[entries.forward.inputs.input_ids]
shape = ["b", "s"]
dtype = "int64"
pad = 0
high = 128

[entries.forward.inputs.attention_mask]
shape = ["b", "s"]
dtype = "int64"
pad = 0
default = 1
low = 1

[entries.forward.outputs.""]
cut = { 0 = "b" }
""",
    ),
    "Qwen3ForSequenceClassification": Case(
        {**GROUPED, "num_labels": 1}, "reranker on a decoder"
    ),
    # --- Text to text ---
    "BartForConditionalGeneration": Case(BART, "text to text"),
    "PegasusForConditionalGeneration": Case(BART, "text to text"),
    "MarianMTModel": Case({**BART, "decoder_vocab_size": 128}, "translation"),
    # --- Decoders ---
    "MistralForCausalLM": Case({**GROUPED, "sliding_window": 8}, "decoder"),
    "MixtralForCausalLM": Case(
        {
            **GROUPED,
            "sliding_window": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "decoder, mixture of experts",
    ),
    "Phi3ForCausalLM": Case(
        {
            **TEXT,
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 64,
        },
        "decoder",
    ),
    "Gemma2ForCausalLM": Case({**GROUPED, "sliding_window": 8}, "decoder"),
    "Gemma3ForCausalLM": Case(
        {
            **GROUPED,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "decoder",
    ),
    "Qwen3ForCausalLM": Case(GROUPED, "decoder"),
    "Qwen3MoeForCausalLM": Case({**GROUPED, **EXPERTS}, "decoder, mixture of experts"),
    "Olmo2ForCausalLM": Case(
        {k: v for k, v in GROUPED.items() if k != "head_dim"}, "decoder"
    ),
    "GPTNeoXForCausalLM": Case(TEXT, "decoder"),
    "OPTForCausalLM": Case(
        {
            **SHIFTED,
            **{k: v for k, v in WIDTHS.items() if k != "intermediate_size"},
            "max_position_embeddings": 64,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
        },
        "decoder",
    ),
    "FalconForCausalLM": Case(
        {
            **IDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "max_position_embeddings": 64,
        },
        "decoder",
    ),
    "BloomForCausalLM": Case(
        {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "decoder"
    ),
    "MptForCausalLM": Case(
        {**IDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "decoder",
    ),
    "MambaForCausalLM": Case(
        {
            **IDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "time_step_rank": 4,
        },
        "state space model",
    ),
    # --- Images ---
    "CLIPTextModelWithProjection": Case(CLIP_TEXT, "text tower"),
    "CLIPVisionModelWithProjection": Case(CLIP_VISION, "image tower"),
    "CLIPModel": Case(
        {
            "text_config": CLIP_TEXT,
            "vision_config": CLIP_VISION,
            "projection_dim": 16,
        },
        "text and images",
        tables=TEXT_AND_IMAGES,
    ),
    "SiglipVisionModel": Case(PATCHES, "image tower"),
    "SiglipModel": Case(
        {
            "text_config": {**TEXT, "max_position_embeddings": 16},
            "vision_config": PATCHES,
        },
        "text and images",
        tables=TEXT_AND_IMAGES,
    ),
    "Dinov2Model": Case(PATCHES, "image encoder"),
    "ViTModel": Case(PATCHES, "image encoder"),
    "SwinForImageClassification": Case(
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "image classifier",
    ),
    "ConvNextForImageClassification": Case(
        {**STAGES, "image_size": 32}, "image classifier"
    ),
    "SegformerForSemanticSegmentation": Case(
        {
            **STAGES,
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
        "segmentation",
        {"224": "64"},
    ),
    "DetrForObjectDetection": Case(
        {
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 16,
                "hidden_sizes": [16, 16, 16, 32],
                "depths": [1, 1, 1, 1],
                "out_features": ["stage4"],
            },
            "d_model": 32,
            "num_queries": 6,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
        "detection",
        {"224": "64"},
    ),
    "SamVisionModel": Case(
        {
            **PATCHES,
            "output_channels": 16,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
            "mlp_dim": 64,
        },
        "image encoder",
    ),
    "BlipVisionModel": Case(PATCHES, "image encoder"),
    # --- Sound ---
    "Wav2Vec2ForCTC": Case(
        {**SOUND, "pad_token_id": 0}, "speech recognition", SHORT_SOUND
    ),
    "HubertModel": Case(SOUND, "sound encoder", SHORT_SOUND),
    "own:whisper_encoder": Case(
        {},
        "sound encoder",
        tables="""\
[axes]
b = [2]

[entries.forward.inputs.input_features]
shape = ["b", 16, 40]
dtype = "float32"
pad = 0.0

[entries.forward.outputs.last_hidden_state]
cut = { 0 = "b" }
""",
    ),
    "ClapTextModelWithProjection": Case(
        {**ROBERTA, "projection_dim": 16}, "text tower"
    ),
    "ClapAudioModelWithProjection": Case(
        {
            "spec_size": 32,
            "num_mel_bins": 16,
            "window_size": 4,
            "patch_size": 2,
            "patch_stride": [2, 2],
            "depths": [2, 2],
            "num_attention_heads": [2, 4],
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "patch_embeds_hidden_size": 16,
            "projection_dim": 16,
        },
        "sound tower",
        tables="""\
[axes]
b = [2]

[entries.forward.inputs.input_features]
shape = ["b", 1, 64, 16]
dtype = "float32"
pad = 0.0
""",
    ),
    # --- Plain modules ---
    "own:LSTMTagger": Case(
        {},
        "recurrent",
        tables="""\
[axes]
b = [2]
s = [16]

[entries.forward.inputs.ids]
shape = ["b", "s"]
dtype = "int64"
high = 64
""",
    ),
    "own:GRUEncoder": Case(
        {},
        "recurrent",
        tables="""\
[axes]
b = [2]
s = [16]

[entries.forward.inputs.x]
shape = ["b", "s", 8]
dtype = "float32"
""",
    ),
    "own:UNet": Case(
        {},
        "convolutional",
        tables="""\
[axes]
b = [2]

[entries.forward.inputs.x]
shape = ["b", 3, 32, 32]
dtype = "float32"
pad = 0.0

[entries.forward.outputs.""]
cut = { 0 = "b" }
""",
    ),
    "own:TabularMLP": Case(
        {},
        "MLP with BatchNorm",
        tables="""\
[axes]
b = [4]

[entries.forward.inputs.x]
shape = ["b", 16]
dtype = "float32"
pad = 0.0

[entries.forward.outputs.""]
cut = { 0 = "b" }
""",
    ),
    "own:Translator": Case(
        {},
        "torch.nn.Transformer",
        tables="""\
[axes]
b = [2]
s = [8]
t = [6]

[entries.forward.inputs.src]
shape = ["b", "s", 32]
dtype = "float32"

[entries.forward.inputs.tgt]
shape = ["b", "t", 32]
dtype = "float32"
""",
    ),
    "own:PaddedEncoder": Case(
        {},
        "torch.nn.TransformerEncoder, padded",
        tables="""\
[axes]
b = [2]
s = [8]

[entries.forward.inputs.x]
shape = ["b", "s", 32]
dtype = "float32"

[entries.forward.inputs.padding]
shape = ["b", "s"]
dtype = "bool"
""",
    ),
    "own:SelfAttention": Case(
        {},
        "torch.nn.MultiheadAttention",
        tables="""\
[axes]
b = [2]
s = [8]

[entries.forward.inputs.x]
shape = ["b", "s", 32]
dtype = "float32"

[entries.forward.inputs.padding]
shape = ["b", "s"]
dtype = "bool"
""",
    ),
    "own:Recommender": Case(
        {},
        "DLRM: embedding bags",
        tables="""\
[axes]
b = [4]

[entries.forward.inputs.dense]
shape = ["b", 8]
dtype = "float32"

[entries.forward.inputs."bags[0]"]
shape = ["b", 3]
dtype = "int64"
high = 50

[entries.forward.inputs."bags[1]"]
shape = ["b", 5]
dtype = "int64"
high = 50
""",
    ),
    "own:CachedDecoder": Case(
        {},
        "keys and values in a list",
        tables="""\
[axes]
b = [2]
c = [8]

[entries.forward.inputs.x]
shape = ["b", 1, 32]
dtype = "float32"

[entries.forward.inputs."past[0][0]"]
shape = ["b", "c", 32]
dtype = "float32"

[entries.forward.inputs."past[0][1]"]
shape = ["b", "c", 32]
dtype = "float32"

[entries.forward.inputs."past[1][0]"]
shape = ["b", "c", 32]
dtype = "float32"

[entries.forward.inputs."past[1][1]"]
shape = ["b", "c", 32]
dtype = "float32"
""",
    ),
    "own:Int8MLP": Case(
        {},
        "int8 weights with scales",
        tables="""\
[axes]
b = [4]

[entries.forward.inputs.x]
shape = ["b", 32]
dtype = "float32"
pad = 0.0

[entries.forward.outputs.""]
cut = { 0 = "b" }
""",
    ),
}

_BFLOAT16 = ("RobertaModel", "MistralForCausalLM", "ViTModel")
_STEPS = tuple(name for name in CASES if name.endswith("ForCausalLM"))
CASES |= {
    f"{name} bfloat16": dataclasses.replace(CASES[name], dtype="bfloat16")
    for name in _BFLOAT16
} | {
    f"{name} generate": dataclasses.replace(CASES[name], generate=True)
    for name in _STEPS
}
