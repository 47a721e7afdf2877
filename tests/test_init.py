"""Tests of the configurations that `init` writes."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from compilekit import init as init_module
from compilekit.cli import run
from compilekit.config import Config, InputConfig, OutputConfig, load
from compilekit.errors import ConfigError
from compilekit.init import render
from compilekit.plan import buckets

IDS = InputConfig(("b", "s"), "int64", pad=0, high=1000)
MASK = InputConfig(("b", "s"), "int64", pad=0, default=1)
REPLY = InputConfig(("b", "t"), "int64", pad=0, high=1000)
ROWS = OutputConfig({0: "b"})
TOKENS = OutputConfig({0: "b", 1: "s"})
REPLIES = OutputConfig({0: "b", 1: "t"})
NO_CACHE = {"use_cache": False}

# Name → (config.json, inputs, outputs, fixed arguments), for the usual architectures.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]]
KINDS = {
    "bert": (
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "vocab_size": 1000,
            "type_vocab_size": 2,
            "max_position_embeddings": 512,
            "use_cache": True,
        },
        {
            "input_ids": IDS,
            "attention_mask": MASK,
            "token_type_ids": InputConfig(
                ("b", "s"), "int64", pad=0, default=0, high=2
            ),
        },
        {"last_hidden_state": TOKENS, "pooler_output": ROWS},
        {},
    ),
    "roberta": (
        {
            "architectures": ["RobertaForSequenceClassification"],
            "model_type": "roberta",
            "vocab_size": 1000,
            "pad_token_id": 1,
            "type_vocab_size": 1,
        },
        {
            "input_ids": InputConfig(("b", "s"), "int64", pad=1, high=1000),
            "attention_mask": MASK,
        },
        {"logits": ROWS},
        {},
    ),
    "distilbert": (
        {
            "architectures": ["DistilBertForQuestionAnswering"],
            "model_type": "distilbert",
            "vocab_size": 1000,
        },
        {"input_ids": IDS, "attention_mask": MASK},
        {"start_logits": TOKENS, "end_logits": TOKENS},
        {},
    ),
    "qwen2": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 1000,
            "max_position_embeddings": 32768,
        },
        {"input_ids": IDS},
        {"logits": TOKENS},
        NO_CACHE,
    ),
    "llama": (
        {
            "architectures": ["LlamaModel"],
            "model_type": "llama",
            "vocab_size": 1000,
            "pad_token_id": -1,
        },
        {"input_ids": IDS},
        {"last_hidden_state": TOKENS},
        NO_CACHE,
    ),
    "gpt2": (
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 1000,
            "n_positions": 1024,
        },
        {"input_ids": IDS},
        {"logits": TOKENS},
        NO_CACHE,
    ),
    "t5": (
        {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "vocab_size": 1000,
            "n_positions": 512,
        },
        {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": REPLY},
        {"logits": REPLIES, "encoder_last_hidden_state": TOKENS},
        NO_CACHE,
    ),
    "t5 encoder": (
        {
            "architectures": ["T5EncoderModel"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "vocab_size": 1000,
        },
        {"input_ids": IDS, "attention_mask": MASK},
        {"last_hidden_state": TOKENS},
        {},
    ),
    "whisper": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "vocab_size": 1000,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "max_target_positions": 448,
        },
        {
            "input_features": InputConfig(("b", 80, 3000), "float32", pad=0.0),
            "decoder_input_ids": REPLY,
        },
        {"logits": REPLIES, "encoder_last_hidden_state": ROWS},
        NO_CACHE,
    ),
    "wav2vec2": (
        {
            "architectures": ["Wav2Vec2Model"],
            "model_type": "wav2vec2",
            "vocab_size": 32,
        },
        {"input_values": InputConfig(("b", 160_000), "float32", pad=0.0)},
        {"last_hidden_state": ROWS},
        {},
    ),
    "vit": (
        {
            "architectures": ["ViTForImageClassification"],
            "model_type": "vit",
            "image_size": 384,
            "num_channels": 3,
            "torch_dtype": "bfloat16",
        },
        {"pixel_values": InputConfig(("b", 3, 384, 384), "bfloat16", pad=0.0)},
        {"logits": ROWS},
        {},
    ),
    "resnet": (
        {
            "architectures": ["ResNetModel"],
            "model_type": "resnet",
            "num_channels": 3,
            "dtype": "float16",
        },
        {"pixel_values": InputConfig(("b", 3, 224, 224), "float16", pad=0.0)},
        {"last_hidden_state": ROWS, "pooler_output": ROWS},
        {},
    ),
    "detr": (
        {
            "architectures": ["DetrForSegmentation"],
            "model_type": "detr",
            "is_encoder_decoder": True,
            "num_channels": 3,
        },
        {"pixel_values": InputConfig(("b", 3, 224, 224), "float32", pad=0.0)},
        {"logits": ROWS},
        {},
    ),
    "clip text": (
        {
            "architectures": ["CLIPTextModelWithProjection"],
            "model_type": "clip_text_model",
            "vocab_size": 1000,
        },
        {"input_ids": IDS, "attention_mask": MASK},
        {"text_embeds": ROWS, "last_hidden_state": TOKENS},
        {},
    ),
}


def written(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "compilekit.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def scoring(text: str) -> str:
    """The tables that stand as a comment in the place of ``[generate]``."""
    if "# Instead," not in text:
        return text
    before, after = text.split("# Steps behind model.generate", 1)
    _, comment = after.split("# Instead,", 1)
    tables, rest = comment.split("\n[compile]", 1)
    lines = [line.removeprefix("#").removeprefix(" ") for line in tables.split("\n")]
    return before + "\n".join(lines[2:]) + "\n[compile]" + rest


def model_directory(tmp_path: Path, config: object) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_language_models_are_generated_from(kind: str, tmp_path: Path) -> None:
    """A model with a language head gets prefill and decode within its positions."""
    directory = model_directory(tmp_path, KINDS[kind][0])
    config = written(tmp_path, render(str(directory)))
    assert list(config.entries) == ["prefill", "decode"]
    assert max(config.axes["s"]) <= max(config.axes["c"]) <= 1024
    assert len(buckets(config, "prefill")) == len(buckets(config, "decode")) == 4


@pytest.mark.parametrize("before", ["", "hf:"])
def test_a_model_that_a_package_ships(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a source may name, `compilekit init` takes too."""
    package = tmp_path / "ships_a_bert"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    model_directory(package, KINDS["bert"][0])
    monkeypatch.syspath_prepend(tmp_path)
    name = "package:ships_a_bert/model"
    config = written(tmp_path, render(f"{before}{name}"))
    assert config.model.source == f"hf:{name}"
    with pytest.raises(ConfigError, match="no Python package 'ships_none'"):
        render("package:ships_none/model")


@pytest.mark.parametrize("kind", KINDS)
def test_known_kinds(kind: str, tmp_path: Path) -> None:
    """Each usual architecture gets its inputs, outputs and fixed arguments."""
    hf_config, inputs, outputs, kwargs = KINDS[kind]
    directory = model_directory(tmp_path, hf_config)
    config = written(tmp_path, scoring(render(str(directory))))
    assert config.model.source == f"hf:{directory}"
    assert config.model.dtype == hf_config.get(
        "dtype", hf_config.get("torch_dtype", "float32")
    )
    entry = config.entries["forward"]
    assert entry.inputs == inputs
    assert entry.outputs == outputs
    assert entry.kwargs == kwargs
    assert 1 < len(buckets(config, "forward")) <= 16


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("t5", ("is_encoder_decoder",)),
        ("resnet", ("num_channels",)),
        ("vit", ("num_channels",)),
    ],
)
def test_defaults_may_be_left_out(
    kind: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    """A file that holds only what differs from its class's defaults is understood."""
    hf_config, inputs, outputs, _ = KINDS[kind]
    short = {key: hf_config[key] for key in hf_config if key not in left_out}
    config = written(tmp_path, render(str(model_directory(tmp_path, short))))
    assert config.entries["forward"].inputs == inputs
    assert config.entries["forward"].outputs == outputs


@pytest.mark.parametrize("kind", KINDS)
def test_optional_parts_load(kind: str, tmp_path: Path) -> None:
    """What stands there as a comment to be uncommented is right as well."""
    text = scoring(render(str(model_directory(tmp_path, KINDS[kind][0]))))
    start = "# [entries.forward.inputs.attention_mask]"
    lines = text.splitlines()
    if start in lines:
        first = lines.index(start)
        end = lines.index("", first)
        lines[first:end] = [line.removeprefix("# ") for line in lines[first:end]]
    lines = [
        line.removeprefix("# ")
        if line.startswith(("# options", "# atol", "# rtol", "# weights"))
        else line
        for line in lines
    ]
    config = written(tmp_path, "\n".join(lines))
    if start in text:
        assert config.entries["forward"].inputs["attention_mask"] == MASK
    assert config.verify.atol == 1e-5
    assert config.compile.options == {"epilogue_fusion": True}


def test_lengths_stop_at_the_positions(tmp_path: Path) -> None:
    """No bucket is longer than the model's positions."""
    hf_config = KINDS["bert"][0] | {"max_position_embeddings": 200}
    text = render(str(model_directory(tmp_path, hf_config)))
    assert written(tmp_path, text).axes["s"] == (64, 128)


def test_shifted_positions(tmp_path: Path) -> None:
    """RoBERTa's first positions belong to padding, so fewer are left."""
    hf_config = KINDS["roberta"][0] | {"max_position_embeddings": 129}
    text = render(str(model_directory(tmp_path, hf_config)))
    assert written(tmp_path, text).axes["s"] == (64,)


def test_very_few_positions(tmp_path: Path) -> None:
    """A model with fewer positions than the smallest length gets just those."""
    hf_config = KINDS["bert"][0] | {"max_position_embeddings": 40}
    text = render(str(model_directory(tmp_path, hf_config)))
    assert written(tmp_path, text).axes["s"] == (40,)


def test_image_of_two_sizes(tmp_path: Path) -> None:
    """A height and width of their own are taken over."""
    hf_config = KINDS["vit"][0] | {"image_size": [224, 160]}
    config = written(tmp_path, render(str(model_directory(tmp_path, hf_config))))
    rule = config.entries["forward"].inputs["pixel_values"]
    assert rule.shape == ("b", 3, 224, 160)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_short(kind: str, tmp_path: Path) -> None:
    """The file reads well: no line is longer than 88 columns."""
    text = render(str(model_directory(tmp_path, KINDS[kind][0])))
    source = next(line for line in text.splitlines() if line.startswith("source"))
    assert all(len(line) <= 88 for line in text.splitlines() if line != source)
    assert text.endswith("\n")
    assert "\n\n\n" not in text


def test_factory(tmp_path: Path) -> None:
    """A factory gets a configuration to edit, which loads as it is."""
    config = written(tmp_path, render("package.module:factory"))
    assert config.model.source == "package.module:factory"
    assert config.entries["forward"].outputs == {"": TOKENS}


def test_relative_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory is written so that it's found from the file's folder."""
    model_directory(tmp_path, KINDS["bert"][0])
    monkeypatch.chdir(tmp_path)
    assert 'source = "hf:model"' in render("model")
    assert 'source = "hf:model"' in render("hf:model")
    assert 'source = "hf:../model"' in render("model", tmp_path / "configs")


def test_quotes_in_the_path(tmp_path: Path) -> None:
    """A directory's name can't break out of its string."""
    odd = tmp_path / 'a"\n[x]é'
    odd.mkdir()
    directory = model_directory(odd, KINDS["gpt2"][0])
    config = written(tmp_path, scoring(render(str(directory))))
    assert config.model.source == f"hf:{directory}"


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (
            {"architectures": ["CLIPModel"], "model_type": "clip"},
            "what CLIPModel takes",
        ),
        (
            {"architectures": ["LayoutLMv2Model"], "vocab_size": 9, "num_channels": 3},
            "what LayoutLMv2Model takes",
        ),
        (
            {"architectures": ["ClapAudioModel"], "patch_size": 4, "num_mel_bins": 64},
            "what ClapAudioModel takes",
        ),
        ({}, "what its model takes"),
        ({"architectures": "x", "vocab_size": "many"}, "what its model takes"),
        ([], "expected a JSON object"),
    ],
)
def test_unknown_kind(tmp_path: Path, hf_config: object, message: str) -> None:
    """A model whose inputs can't be told is refused, not guessed."""
    directory = model_directory(tmp_path, hf_config)
    with pytest.raises(ConfigError, match=message):
        render(str(directory))


def test_directory_without_configuration(tmp_path: Path) -> None:
    """A directory that is no model's is refused."""
    with pytest.raises(ConfigError, match=r"config\.json: can't be read"):
        render(str(tmp_path))


def test_broken_json(tmp_path: Path) -> None:
    """A damaged config.json is named."""
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        render(str(tmp_path))


class HubError(Exception):
    """Stands for huggingface_hub's own error."""


def pretend_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.__dict__["hf_hub_download"] = download
    hub.__dict__["errors"] = types.SimpleNamespace(HfHubHTTPError=HubError)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model on the hub just config.json is fetched."""
    directory = model_directory(tmp_path, KINDS["gpt2"][0])
    asked = []

    def download(model: str, file: str) -> str:
        asked.append((model, file))
        return str(directory / file)

    pretend_hub(monkeypatch, download)
    assert 'source = "hf:owner/name"' in render("hf:owner/name")
    assert asked == [("owner/name", "config.json")]


@pytest.mark.parametrize(
    "error", [HubError("404"), OSError("offline"), ValueError("id")]
)
def test_hub_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What the hub says is passed on, with what else would do."""

    def download(model: str, file: str) -> str:
        raise error

    pretend_hub(monkeypatch, download)
    with pytest.raises(ConfigError, match=str(error)) as caught:
        render("owner/name")
    assert "directory" in caught.value.hint


@pytest.mark.parametrize("key", ["model_type", "dtype", "text_config", "image_size"])
@pytest.mark.parametrize("odd", [0, 1.5, "", "x", [], [1.5, ""], {}, None])
def test_an_odd_config_json(key: str, odd: Any, tmp_path: Path) -> None:
    """Whatever stands in it, a configuration comes of it, or a refusal."""
    config = {"model_type": "clip", "architectures": ["CLIPModel"], key: odd}
    directory = model_directory(tmp_path, config)
    with contextlib.suppress(ConfigError):
        written(tmp_path, render(str(directory)))


def test_a_relative_model_is_found_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``init`` writes what is found from the folder that it writes into."""
    model_directory(tmp_path, KINDS["bert"][0])
    monkeypatch.chdir(tmp_path)
    assert run(["init", "model", "-o", "sub/compilekit.toml"]) == 0
    config = load(tmp_path / "sub" / "compilekit.toml")
    assert config.model.source == "hf:../model"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "found an empty name"),
        ("hf:", "found an empty name"),
        ("own.py", "found a Python file"),
        ("own", "found a Python file"),
        ("pkg.own", "found a Python file"),
    ],
)
def test_no_model_is_asked_for_at_the_hub(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be an id of the hub is refused at once."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "own.py").touch()
    (tmp_path / "pkg" / "own.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        render(model)


def test_no_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub an id is refused with what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="no such directory") as caught:
        render("owner/name")
    assert "compilekit[hf]" in caught.value.hint


def test_loads_no_torch(tmp_path: Path) -> None:
    """Writing a configuration loads neither torch nor transformers."""
    directory = model_directory(tmp_path, KINDS["bert"][0])
    program = (
        "import sys; from compilekit.init import render; render(sys.argv[1]);"
        "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(init_module.__file__).parents[1])},
    )
    assert done.stdout.strip() == "set()"


SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
REAL = {
    "BertModel": SMALL,
    "BertForTokenClassification": SMALL,
    "RobertaForSequenceClassification": SMALL,
    "Qwen2ForCausalLM": SMALL,
    "LlamaModel": SMALL,
    "GPT2LMHeadModel": {
        "vocab_size": 100,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    },
    "T5ForConditionalGeneration": {
        "vocab_size": 100,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
    },
    "MarianMTModel": {
        "vocab_size": 100,
        "decoder_vocab_size": 100,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "WhisperForConditionalGeneration": {
        "vocab_size": 100,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 50,
        "max_target_positions": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "CLIPTextModelWithProjection": SMALL | {"eos_token_id": 2},
    "SiglipVisionModel": PATCHES,
    "ViTModel": PATCHES,
    "ResNetForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("architecture", REAL)
def test_transformers_agrees(architecture: str, tmp_path: Path) -> None:
    """A real model takes these inputs and gives these outputs, at the cut sizes."""
    import torch

    from compilekit.compiler import examples, models
    from compilekit.paths import follow, parse

    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, architecture)
    hf_config = model_class.config_class(**REAL[architecture])
    hf_config.architectures = [architecture]
    hf_config.save_pretrained(tmp_path / "model")
    config = written(tmp_path, scoring(render(str(tmp_path / "model"))))
    entry = config.entries["forward"]
    model = models.build_real(config)
    for bucket in buckets(config, "forward")[::3]:
        kwargs = examples.example_kwargs(config, entry, bucket)
        assert set(kwargs) == {*entry.inputs, *entry.kwargs}
        with torch.no_grad():
            result = model(**kwargs)
        for path, rule in entry.outputs.items():
            tensor = follow(result, parse(path))
            for dimension, axis in rule.cut.items():
                assert tensor.shape[dimension] == bucket.axes[axis]
        # Every output with the batch in front is cut back to it.
        batched = {name for name, value in result.items() if torch.is_tensor(value)}
        assert batched == set(entry.outputs)
