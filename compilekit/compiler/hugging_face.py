"""Hugging Face models: their configuration, class and weights.

Only ``config.json`` is read, unless weights are asked for.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compilekit.compiler.names import (
    model_dtype,
    nearest,
    torch_dtype,
)
from compilekit.config import Config, model_directory
from compilekit.errors import FOREIGN_ERRORS, CompilekitError, ConfigError

if TYPE_CHECKING:
    # It loads Dynamo, which a replay doesn't need.
    from compilekit._torch.breaks import Place

_logger = logging.getLogger("compilekit")


def is_hugging_face(config: Config) -> bool:
    """True if the model's source is a Hugging Face directory or id."""
    return config.model.source.startswith("hf:")


def vocabulary_size(config: Config) -> int | None:
    """The vocabulary's size by the Hugging Face configuration, None if it has none."""
    if not is_hugging_face(config):
        return None
    hf_config = _configuration(config)
    size = getattr(hf_config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def construct(config: Config, device: torch.device) -> nn.Module:
    """The model with random weights, made as ``from_pretrained`` makes it.

    Raises:
        ConfigError: its configuration or class can't be found or constructed.
    """
    hf_config = _configuration(config)
    model_class = _class(config, hf_config)
    dtype = _dtype(config, hf_config)
    try:
        with device:
            model: Any = _constructor(model_class)(hf_config, dtype=dtype)
            model.tie_weights()
    except CompilekitError:
        raise
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"[model] source {config.model.source!r}: {model_class.__name__} can't be"
            f" constructed: {type(exc).__name__}: {exc}"
        ) from exc
    _keep_in_float32(model, dtype)
    result: nn.Module = model
    return result


def from_pretrained(config: Config, weights: str) -> nn.Module:
    """The model with weights from a directory or id, in eval mode, on the CPU.

    Raises:
        ConfigError: there are none, or they don't fit.
    """
    hf_config = _configuration(config)
    model_class = _class(config, hf_config)
    dtype = _dtype(config, hf_config)
    location = weights.removeprefix("hf:")
    directory = model_directory(config.path.parent, location)
    try:
        model, info = model_class.from_pretrained(
            directory or location,
            config=hf_config,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=directory is not None,
        )
    except CompilekitError:
        raise
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"weights {weights!r} can't be loaded into {model_class.__name__}:"
            f" {type(exc).__name__}: {exc}"
        ) from exc
    missing = sorted(info["missing_keys"])
    if missing:
        _logger.warning(
            "weights %r lack %d tensors of %s, which keep random values: %s",
            weights,
            len(missing),
            model_class.__name__,
            ", ".join(missing[:5]) + (", …" if len(missing) > 5 else ""),
        )
    result: nn.Module = model.eval()
    return result


_COLLECTING = "transformers.utils.output_capturing"


def installs_output_hooks(place: Place | None) -> bool:
    """True for the place where transformers hooks a model to collect its outputs.

    It does so at the first call that wants hidden states or attentions, and under a
    lock, where Dynamo breaks the graph.
    """
    module = sys.modules.get(_COLLECTING)
    return place is not None and module is not None and place.file == module.__file__


def install_output_hooks(model: nn.Module) -> None:
    """Do what transformers does at the first call that wants hidden states.

    Source: transformers 5.17 and 5.24, utils/output_capturing.py,
    maybe_install_capturing_hooks.
    """
    pretrained: Any = _transformers().PreTrainedModel
    install: Any = importlib.import_module(_COLLECTING).maybe_install_capturing_hooks
    for module in model.modules():
        if isinstance(module, pretrained):
            install(module)


def _configuration(config: Config) -> Any:
    """Read ``config.json`` and nothing else, with ``[model] config`` laid over it."""
    transformers = _transformers()
    location = config.model.source.removeprefix("hf:")
    directory = model_directory(config.path.parent, location)
    try:
        hf_config = transformers.AutoConfig.from_pretrained(
            directory or location,
            local_files_only=directory is not None,
            trust_remote_code=False,
        )
        return _lay_over(hf_config, config.model.config)
    except CompilekitError:
        raise
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"[model] source {config.model.source!r}: transformers"
            f" {transformers.__version__} can't make a configuration from it:"
            f" {type(exc).__name__}: {exc}",
            hint=_configuration_hint(config, directory),
        ) from exc


def _configuration_hint(config: Config, directory: Path | None) -> str:
    if directory is None:
        return (
            f"There is no such directory in {config.path.parent} either, so it was"
            " taken for an id of the Hugging Face hub."
        )
    return (
        "Code that a checkpoint brings along isn't run; for such a model write a"
        " factory and name it: source = 'package.module:factory'."
    )


def _lay_over(hf_config: Any, values: Mapping[str, Any]) -> Any:
    """Set configuration values and derive the others again from them."""
    if not values:
        return hf_config
    data = hf_config.to_dict()
    for key, value in values.items():
        *parents, name = key.split(".")
        node = data
        for parent in parents:
            node = node.get(parent, {})
        if not isinstance(node, dict) or name not in node:
            known = node if isinstance(node, dict) else data
            raise ConfigError(
                f"[model] config {key!r}: {type(hf_config).__name__} has no such value",
                hint=nearest(name, known),
            )
        node[name] = value
        # One kind per layer: fewer layers keep the first ones.
        kinds = node.get("layer_types")
        if name == "num_hidden_layers" and isinstance(kinds, list):
            node["layer_types"] = kinds[:value]
    return type(hf_config).from_dict(data)


def _class(config: Config, hf_config: Any) -> Any:
    transformers = _transformers()
    architectures = getattr(hf_config, "architectures", None) or ()
    name = config.model.model_class or next(iter(architectures), "")
    if not name:
        raise ConfigError(
            f"[model] source {config.model.source!r}: its config.json names no"
            " architecture",
            hint='Name the class: [model] class = "BertModel"',
        )
    found = getattr(transformers, name, None)
    if inspect.isclass(found) and _constructor(found) is not None:
        return found
    raise ConfigError(
        f"[model] class {name!r}: transformers {transformers.__version__} has no such"
        " model class",
        hint=nearest(name, dir(transformers)),
    )


def _constructor(model_class: Any) -> Any:
    """The class method that constructs a model without weights; None if it has none.

    It does what ``from_pretrained`` does: default dtype, patches, attention choice.
    Auto classes offer it under a public name and call it on the class they choose.
    Source: transformers 5.17 and 5.24, modeling_utils.py, ``_from_config``.
    """
    public = getattr(model_class, "from_config", None)
    return public or getattr(model_class, "_from_config", None)


def _dtype(config: Config, hf_config: Any) -> torch.dtype:
    chosen = model_dtype(config) or getattr(hf_config, "dtype", None) or torch.float32
    if isinstance(chosen, torch.dtype):
        return chosen
    return torch_dtype(str(chosen), "config.json dtype")


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what a model class keeps in float32, as ``from_pretrained`` does.

    Source: transformers 5.17 and 5.24, modeling_utils.py ``_get_dtype_plan``,
    core_model_loading.py ``build_glob_alternation`` (patterns are searched in names).
    """
    patterns: set[str] = set()
    if dtype is torch.float16:
        patterns.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not patterns:
        return
    kept = re.compile("|".join(sorted(patterns)).replace("*", ".*"))
    # Only what a checkpoint holds: other buffers keep what the constructor gave them.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as exc:
        raise ConfigError(
            f"a Hugging Face model needs the package transformers: {exc}",
            hint='Install it: pip install "compilekit[hf]"',
        ) from exc
