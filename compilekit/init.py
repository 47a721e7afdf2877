"""The text that ``compilekit init`` writes: a commented configuration for a model.

Of a Hugging Face model just ``config.json`` is read; what its forward takes and returns
follows from the architecture's name. Where that isn't enough, transformers adds the
defaults that the file leaves out.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compilekit.config import (
    MODEL_DTYPES,
    PACKAGE,
    Scalar,
    is_function,
    is_hub_id,
    package_data,
)
from compilekit.errors import FOREIGN_ERRORS, CompilekitError, ConfigError
from compilekit.targets import list_targets

# fmt: off
# Model types that attend to the past only, for classes whose name doesn't say it
# (LlamaModel, as against LlamaForCausalLM).
_DECODERS = frozenset({
    "bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox",
    "gptj", "llama", "mistral", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe",
})
_WAVEFORM_MODELS = frozenset({
    "data2vec-audio", "hubert", "unispeech", "unispeech-sat", "wav2vec2", "wavlm",
})
_TOKEN_TYPE_MODELS = frozenset({
    "albert", "bert", "convbert", "electra", "ernie", "megatron-bert", "mobilebert",
})
_POOLED_MODELS = frozenset({
    "albert", "bert", "blip_vision_model", "camembert", "clip_text_model",
    "clip_vision_model", "convnext", "dinov2", "ernie", "layoutlm", "megatron-bert",
    "mobilebert", "mpnet", "resnet", "roberta", "siglip_text_model",
    "siglip_vision_model", "swin", "vit", "xlm-roberta",
})
_TEXT_TO_TEXT_MODELS = frozenset({"longt5", "mt5", "switch_transformers", "t5", "umt5"})
# Their positions start after the padding token's.
_SHIFTED_MODELS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
# fmt: on

_LENGTHS = (64, 128, 256, 512)
_REPLIES = (32, 128)
_SAMPLES_10_S = 160_000  # 10 s of sound at 16 kHz


@dataclasses.dataclass(frozen=True)
class _Input:
    """One input table; `optional` ones are written as comments."""

    name: str
    shape: tuple[str | int, ...]
    dtype: str
    pad: int | float
    default: int | None = None
    high: int | None = None
    why: str = ""
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class _Sketch:
    """What is known about a model's forward.

    Attributes:
        generate: Keys of ``[generate]`` for a language model that has a head: it's
            what one serves, so the forward's own tables are written as comments.
    """

    axes: Mapping[str, tuple[int, ...]]
    inputs: tuple[_Input, ...]
    outputs: Mapping[str, Mapping[int, str]]
    kwargs: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    generate: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def render(model: str, folder: Path | None = None) -> str:
    """Write a configuration for a model, as text that `config.load` accepts.

    Args:
        model: A directory with a ``config.json``, an id on the Hugging Face hub or
            ``package:NAME/DIR``, each with or without ``hf:`` before it, or
            ``package.module:factory``.
        folder: Where the file will lie; a relative `model` is rewritten to be found
            from there. None = the current directory.

    Raises:
        ConfigError: ``config.json`` is missing or unreadable, or the architecture is
            of a kind whose inputs aren't known.
    """
    if is_function(model):
        return _document(model, "float32", _any_module(), guessed=True)
    name = model.removeprefix("hf:")
    directory = Path(name)
    if not name:
        raise ConfigError("expected a model, found an empty name")
    if name.endswith(".py") or os.path.isfile(name.replace(".", "/") + ".py"):
        module = name.removesuffix(".py").replace("/", ".")
        raise ConfigError(
            f"{name}: expected a model, found a Python file",
            hint=f"A factory is package.module:function: compilekit init {module}:NAME",
            model=model,
        )
    if name.startswith(PACKAGE):
        config = _read_json(package_data(name) / "config.json")
    elif os.path.isdir(directory) or not is_hub_id(name):
        config = _read_json(directory / "config.json")
        if not directory.is_absolute():
            name = os.path.relpath(directory, folder or Path())
    else:
        config = _read_json(_fetch(name))
    sketch = _sketch(config) or _sketch(config := _completed(config))
    if sketch is None:
        raise ConfigError(
            f"{name}: can't tell what {_architecture(config) or 'its model'} takes:"
            " expected a text, vision or speech model, found"
            f" model_type {config.get('model_type')!r}",
            hint="Start from `compilekit init package.module:factory` and name the"
            " inputs of your factory's model.",
            model=model,
        )
    return _document(f"hf:{name}", _dtype(config), sketch, guessed=False)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read: {error.strerror}",
            hint="A Hugging Face model directory holds a config.json.",
            path=str(path),
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", path=str(path)) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object", path=str(path))
    kind = config.get("model_type", "")
    if not isinstance(kind, str):
        raise ConfigError(
            f"{path}: model_type: expected a name, found {kind!r}", path=str(path)
        )
    return config


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with defaults of its class that ``config.json`` leaves out."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return config
    values = {name: value for name, value in config.items() if name != "model_type"}
    try:
        full = transformers.AutoConfig.for_model(config.get("model_type"), **values)
        completed = full.to_dict()
    except CompilekitError:
        raise
    except FOREIGN_ERRORS:
        return config
    return {**completed, **config}


def _fetch(model: str) -> Path:
    """``config.json`` of a model on the hub, or from the hub's local cache."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            f"{model}: no such directory, and reading an id from the Hugging Face hub"
            " needs the package huggingface_hub",
            hint='Install it (pip install "compilekit[hf]"), or name a directory.',
            model=model,
        ) from error
    try:
        return Path(hub.hf_hub_download(model, "config.json"))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise ConfigError(
            f"{model}: no such directory, and the Hugging Face hub gave no config.json"
            f" for it: {type(error).__name__}: {error}",
            hint="Name a directory with a config.json, or package.module:factory.",
            model=model,
        ) from error


# --- What a model takes and returns ---------------------------------------------------


def _sketch(config: Mapping[str, Any]) -> _Sketch | None:
    name, kind = _architecture(config), config.get("model_type")
    causal = name.endswith(("ForCausalLM", "LMHeadModel")) or kind in _DECODERS
    if _positive(config, "num_mel_bins") and _positive(config, "max_source_positions"):
        return _speech_to_text(config)
    if kind in _WAVEFORM_MODELS:
        return _waveform(config)
    text = _positive(config, "vocab_size")
    images = _positive(config, "num_channels", "patch_size")
    if text and not images:
        replies = config.get("is_encoder_decoder", kind in _TEXT_TO_TEXT_MODELS)
        if replies and not name.endswith("EncoderModel"):
            return _text_to_text(config)
        return _decoder(config) if causal else _encoder(config)
    # A spectrogram is cut into patches as well, and comes in several shapes.
    spectrogram = _positive(config, "num_mel_bins")
    return _vision(config) if images and not (text or spectrogram) else None


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _positive(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these values that is an integer above zero."""
    values = (config.get(name) for name in names)
    return next((v for v in values if type(v) is int and v > 0), None)


def _dtype(config: Mapping[str, Any]) -> str:
    # transformers 5 writes dtype, earlier ones torch_dtype.
    dtype = config.get("dtype") or config.get("torch_dtype")
    return str(dtype) if dtype in MODEL_DTYPES else "float32"


def _up_to(limit: int | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that the model's positions allow; the limit itself if none does."""
    if limit is None:
        return sizes
    return tuple(size for size in sizes if size <= limit) or (limit,)


def _token_ids(name: str, axis: str, config: Mapping[str, Any], why: str) -> _Input:
    vocabulary = _positive(config, "vocab_size")
    pad = config.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < (vocabulary or pad + 1):
        pad = 0
    return _Input(name, ("b", axis), "int64", pad, high=vocabulary, why=why)


def _mask(axis: str, why: str, *, optional: bool = False) -> _Input:
    return _Input(
        "attention_mask", ("b", axis), "int64", 0, 1, why=why, optional=optional
    )


def _lengths(config: Mapping[str, Any]) -> tuple[int, ...]:
    positions = _positive(config, "max_position_embeddings", "n_positions")
    if positions and config.get("model_type") in _SHIFTED_MODELS:
        positions -= 1 + (_positive(config, "pad_token_id") or 0)
    return _up_to(positions, _LENGTHS)


def _encoder(config: Mapping[str, Any]) -> _Sketch:
    inputs = [
        _token_ids("input_ids", "s", config, ""),
        _mask("s", "Padding is masked. A call without a mask means: all real."),
    ]
    kind = config.get("model_type")
    if kind in _TOKEN_TYPE_MODELS and _positive(config, "type_vocab_size") != 1:
        inputs.append(
            _Input("token_type_ids", ("b", "s"), "int64", 0, 0, high=2, why="Segments.")
        )
    return _Sketch(
        {"b": (1, 8), "s": _lengths(config)}, tuple(inputs), _outputs(config, "s")
    )


def _decoder(config: Mapping[str, Any]) -> _Sketch:
    ids = _token_ids(
        "input_ids",
        "s",
        config,
        "Attention is causal: what pads a prompt on the right changes nothing before.",
    )
    mask = _mask(
        "s",
        "For a batch of prompts of different lengths; without it attention is faster.",
        optional=True,
    )
    return _Sketch(
        {"b": (1, 8), "s": _lengths(config)},
        (ids, mask),
        _outputs(config, "s"),
        {"use_cache": False},
        _generate(config) if _architecture(config).endswith(_HEADS) else {},
    )


_HEADS = ("ForCausalLM", "LMHeadModel")


def _generate(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    limit = _positive(config, "max_position_embeddings", "n_positions")
    prompts = _up_to(limit, (128, 512))
    places = _up_to(limit, (256, 1024))
    if limit is not None and max(prompts) > max(places):
        places = (*places, limit)
    return {"batch": (1, 8), "prompt": prompts, "cache": places}


def _text_to_text(config: Mapping[str, Any]) -> _Sketch:
    positions = _positive(config, "max_position_embeddings", "n_positions")
    return _Sketch(
        {"b": (1, 8), "s": _lengths(config), "t": _up_to(positions, _REPLIES)},
        (
            _token_ids("input_ids", "s", config, "What the encoder reads."),
            _mask("s", "Padding is masked. A call without a mask means: all real."),
            _token_ids(
                "decoder_input_ids", "t", config, "What the decoder has so far."
            ),
        ),
        {**_outputs(config, "t"), "encoder_last_hidden_state": {0: "b", 1: "s"}},
        {"use_cache": False},
    )


def _speech_to_text(config: Mapping[str, Any]) -> _Sketch:
    # Whisper: a convolution of stride 2 makes one position out of two frames.
    frames = 2 * (_positive(config, "max_source_positions") or 1500)
    features = _Input(
        "input_features",
        ("b", _positive(config, "num_mel_bins") or 80, frames),
        _dtype(config),
        0.0,
        why="Mel spectrograms; always this many frames, so only the batch is padded.",
    )
    replies = _up_to(_positive(config, "max_target_positions"), _REPLIES)
    return _Sketch(
        {"b": (1, 4), "t": replies},
        (
            features,
            _token_ids(
                "decoder_input_ids", "t", config, "What the decoder has so far."
            ),
        ),
        {**_outputs(config, "t"), "encoder_last_hidden_state": {0: "b"}},
        {"use_cache": False},
    )


def _waveform(config: Mapping[str, Any]) -> _Sketch:
    wave = _Input(
        "input_values",
        ("b", _SAMPLES_10_S),
        _dtype(config),
        0.0,
        why="10 s of sound at 16 kHz; one length, so only the batch is padded.",
    )
    return _Sketch({"b": (1, 4)}, (wave,), _outputs(config, ""))


def _vision(config: Mapping[str, Any]) -> _Sketch:
    size = config.get("image_size")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size):
        height, width = size
    else:
        height = width = _positive(config, "image_size") or 224
    pixels = _Input(
        "pixel_values",
        ("b", _positive(config, "num_channels") or 3, height, width),
        _dtype(config),
        0.0,
        why="Images; only the batch is padded.",
    )
    return _Sketch({"b": (1, 8)}, (pixels,), _outputs(config, ""))


def _any_module() -> _Sketch:
    x = _Input("x", ("b", "s"), "float32", 0.0, why="Rename it to your argument.")
    return _Sketch({"b": (1, 8), "s": (64, 128)}, (x,), {"": {0: "b", 1: "s"}})


def _outputs(config: Mapping[str, Any], axis: str) -> dict[str, dict[int, str]]:
    """Output path → cut rule; `axis` is the length of token-wise outputs, if any."""
    name = _architecture(config)
    batch = {0: "b"}
    tokens = {0: "b", 1: axis} if axis else batch
    if name.endswith("ForQuestionAnswering"):
        return {"start_logits": tokens, "end_logits": tokens}
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"logits": batch}
    if "For" in name or name.endswith(("LMHeadModel", "WithLMHead", "MTModel")):
        return {"logits": tokens}
    if name.endswith("WithProjection"):
        embeds = "text_embeds" if axis else "image_embeds"
        return {embeds: batch, "last_hidden_state": tokens}
    outputs = {"last_hidden_state": tokens}
    if config.get("model_type") in _POOLED_MODELS:
        outputs["pooler_output"] = batch
    return outputs


# --- Text -----------------------------------------------------------------------------

_GUESSED = """\
# The factory takes no arguments and returns a torch.nn.Module. It is found in this
# file's folder or among the installed packages, and runs without weights.
"""

_REST = """\

[compile]
mode = "default"            # a GPU's kernels are tuned by `compilekit tune`
threads = 0                 # 0 = the code runs with any number of threads
# attention = ["flash", "efficient", "math"]   # which ones; left out = all
# options = { epilogue_fusion = true }      # Inductor's; misspelt ones are refused

[gates]
graph_breaks = 0            # how many `compilekit explain` accepts
math_attention = "warn"     # attention without fused kernel: "ignore", "warn", "error"

[verify]
# atol = 1e-5               # against eager; left out = by dtype
# rtol = 1e-5
# weights = "DIRECTORY"     # left out = random weights

[build]
# native = this machine's; or any of TARGETS
targets = ["native"]
routes = ["program"]

[serve]
on_uncovered = "error"      # a call that no bucket holds: "error", "eager" or "jit"
over_length = "error"       # longer than the largest bucket: "error" or "eager";
                            # "chunk" takes a prompt of [generate] in pieces
"""


def _document(source: str, dtype: str, sketch: _Sketch, *, guessed: bool) -> str:
    lines = [
        "# What compilekit builds. Next: `compilekit plan`, then `compilekit build`.",
        "",
        "[model]",
        *(_GUESSED.splitlines() if guessed else ("# Only config.json is read.",)),
        f"source = {_toml(source)}",
        f"dtype = {_toml(dtype)}",
        "",
        *(_generate_table(sketch.generate) if sketch.generate else ()),
    ]
    forward = [
        "# One bucket for each combination; a call goes to the one that pads least.",
        "[axes]",
        *(f"{axis} = {list(sizes)}" for axis, sizes in sketch.axes.items()),
        "",
    ]
    if sketch.kwargs:
        forward += [
            "# Fixed arguments. A program can't return the cache that a call makes.",
            "[entries.forward.kwargs]",
            *(f"{name} = {_toml(value)}" for name, value in sketch.kwargs.items()),
            "",
        ]
    for tensor in sketch.inputs:
        text = list(_input(tensor))
        forward += [f"# {line}" for line in text] if tensor.optional else text
        forward.append("")
    forward += ["# Outputs are cut back to the size of the call: dimension = axis."]
    for path, cut in sketch.outputs.items():
        rules = ", ".join(
            f"{dimension} = {_toml(axis)}" for dimension, axis in cut.items()
        )
        key = path or '""'
        forward += [f"[entries.forward.outputs.{key}]", f"cut = {{ {rules} }}", ""]
    lines += [f"# {line}".rstrip() for line in forward] if sketch.generate else forward
    cpus = [name for name in list_targets() if name.startswith("cpu-")]
    rest = _REST.replace("TARGETS", ", ".join(cpus))
    return "\n".join(lines[:-1]) + "\n" + rest


def _generate_table(sizes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    why = {
        "batch": "sequences at once",
        "prompt": "tokens of a prompt",
        "cache": "tokens that a sequence may reach",
    }
    yield '# Steps behind model.generate(..., cache_implementation="static"): prefill'
    yield "# for each batch and prompt, decode for each batch and cache."
    yield "[generate]"
    for name, values in sizes.items():
        yield f"{name} = {list(values)}".ljust(28) + f"# {why[name]}"
    yield ""
    yield "# Instead, the logits of every token of a text (scoring), without a cache:"
    yield "#"


def _input(tensor: _Input) -> Iterator[str]:
    if tensor.why:
        yield tensor.why if tensor.optional else f"# {tensor.why}"
    yield f"[entries.forward.inputs.{tensor.name}]"
    yield f"shape = [{', '.join(_toml(size) for size in tensor.shape)}]"
    yield f"dtype = {_toml(tensor.dtype)}"
    yield f"pad = {_toml(tensor.pad)}"
    if tensor.default is not None:
        yield f"default = {_toml(tensor.default)}"
    if tensor.high is not None:
        yield f"high = {tensor.high}"


def _toml(value: Scalar) -> str:
    # JSON's booleans, numbers and strings are TOML's.
    return json.dumps(value, ensure_ascii=False)
