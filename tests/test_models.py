"""Models and example calls: `compilekit.compiler.models`, `compilekit._torch.fake`."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compilekit._torch import fake
from compilekit.compiler import models
from compilekit.config import Config, EntryConfig, InputConfig, ModelConfig
from compilekit.errors import ConfigError
from compilekit.plan import Bucket

BUCKET = Bucket("b2_s8", {"b": 2, "s": 8})
IDS = InputConfig(("b", "s"), "int64", pad=0)

SMALL: dict[str, tuple[str, dict[str, Any], dict[str, InputConfig]]] = {
    # model_type: (class, values of its configuration, inputs)
    "bert": (
        "BertModel",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 97,
        },
        {"input_ids": IDS},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 97,
            "tie_word_embeddings": True,
        },
        {"input_ids": IDS},
    ),
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 97,
        },
        {"input_ids": IDS},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97},
        {"input_ids": IDS},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "num_layers": 2,
            "num_heads": 2,
            "d_kv": 16,
            "d_ff": 64,
            "vocab_size": 97,
        },
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "whisper": (
        "WhisperModel",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 97,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 1,
        },
        {
            "input_features": InputConfig(("b", 16, 40), "float32"),
            "decoder_input_ids": IDS,
        },
    ),
    "vit": (
        "ViTModel",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
        {"pixel_values": InputConfig(("b", 3, 32, 32), "float32")},
    ),
    "resnet": (
        "ResNetModel",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        {"pixel_values": InputConfig(("b", 3, 32, 32), "float32")},
    ),
}


def hugging_face(folder: Path, name: str, **model: Any) -> Config:
    """A configuration for a small random model of the type `name`."""
    cls, values, inputs = SMALL[name]
    content = {"model_type": name, "architectures": [cls], **values}
    (folder / "config.json").write_text(json.dumps(content))
    kwargs = {} if name in {"vit", "resnet"} else {"use_cache": False}
    if name == "bert":
        kwargs = {}
    entry = EntryConfig("forward", "forward", inputs, kwargs=kwargs)
    return Config(
        folder / "compilekit.toml",
        ModelConfig("hf:.", **model),
        {"b": (2,), "s": (8,)},
        {"forward": entry},
    )


def factory(
    folder: Path, source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, **model: Any
) -> Config:
    """A configuration whose model a function of this file makes."""
    module = types.ModuleType("user_model")
    module.make = source  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_model", module)
    monkeypatch.syspath_prepend(str(folder))
    return Config(
        folder / "compilekit.toml", ModelConfig("user_model:make", **model), {}, {}
    )


def layout(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Name → dtype, shape and stride of every parameter and buffer.

    requires_grad is left out: transformers 5.24 loses Whisper's own when it loads.
    """
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {n: (t.dtype, t.shape, t.stride()) for n, t in named}


def ties(model: nn.Module) -> set[frozenset[str]]:
    """Groups of names that are one tensor object."""
    groups: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def flat(output: Any) -> list[torch.Tensor]:
    """Every tensor of an output."""
    leaves = torch.utils._pytree.tree_leaves(dict(output))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", SMALL)
def test_a_fake_model_has_the_layout_of_a_loaded_one(name: str, tmp_path: Path) -> None:
    """Fake, random and loaded models agree on every dtype, shape, stride and tie."""
    config = hugging_face(tmp_path, name)
    real = models.build_real(config)
    real.save_pretrained(tmp_path / "saved")
    loaded = models.build_real(config, weights="saved")
    faked = models.build_fake(config)
    assert layout(faked) == layout(real) == layout(loaded)
    assert ties(faked) == ties(real) == ties(loaded)
    assert not faked.training
    assert all(
        isinstance(t, fake.FakeTensor) and t.device.type == "cpu"
        for t in (*faked.parameters(), *faked.buffers())
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen2", "t5", "resnet", "whisper"])
def test_dtypes_follow_from_pretrained(name: str, dtype: str, tmp_path: Path) -> None:
    """In half precision the buffers and modules kept in float32 are the same ones."""
    config = hugging_face(tmp_path, name, dtype=dtype)
    models.build_real(config).save_pretrained(tmp_path / "saved")
    loaded = models.build_real(config, weights="saved")
    assert layout(models.build_fake(config)) == layout(loaded)
    assert layout(models.build_real(config)) == layout(loaded)


@pytest.mark.parametrize("name", SMALL)
def test_a_fake_call_gives_the_layout_of_a_real_call(name: str, tmp_path: Path) -> None:
    """Running fake model and fake inputs gives outputs laid out like real ones."""
    config = hugging_face(tmp_path, name)
    entry = config.entries["forward"]
    faked, real = models.build_fake(config), models.build_real(config)
    mode = models.fake_mode_of(faked)
    with torch.no_grad():
        kwargs = models.example_kwargs(config, entry, BUCKET, fake=mode)
        with mode:
            fake_out = flat(faked(**kwargs))
        real_out = flat(real(**models.example_kwargs(config, entry, BUCKET)))
    assert [(t.dtype, t.shape) for t in fake_out] == [
        (t.dtype, t.shape) for t in real_out
    ]
