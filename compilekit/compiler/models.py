"""Models from a configuration: fake ones to compile, real ones to run.

`build_fake` makes the model from ``config.json`` or the user's factory; weights are
never read and nothing is allocated. `build_real` makes the same model with weights, for
verify, bench and explain.

A model is constructed as ``from_pretrained(dtype=…)`` does it: the default dtype is set
while the constructor runs, so that buffers which ask for float32 (rotary frequencies)
stay float32 in a bfloat16 model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from compilekit._torch.fake import (
    FakeTensorMode,
    UnfakeableTensorError,
    make_fake,
    new_fake_mode,
)
from compilekit.compiler import hugging_face
from compilekit.compiler.names import (
    import_function,
    model_dtype,
    nearest,
)
from compilekit.config import Config, EntryConfig, model_directory
from compilekit.errors import FOREIGN_ERRORS, CompilekitError, ConfigError


def build_fake(
    config: Config, device: str = "cpu", *, mode: FakeTensorMode | None = None
) -> nn.Module:
    """Make the configured model with fake parameters and buffers, in eval mode.

    All its tensors share one `FakeTensorMode`, which `fake_mode_of` gives back.

    Args:
        config: The configuration.
        device: The device that the tensors pretend to be on, e.g. ``cuda:0``.
        mode: The mode of the tensors; None = a new one.
    Raises:
        ConfigError: the model can't be found, imported or constructed.
    """
    model = _construct(config, torch.device("meta"))
    try:
        return make_fake(model, mode or new_fake_mode(), device)
    except UnfakeableTensorError as exc:
        raise ConfigError(
            f"[model] source {config.model.source!r}: {exc}, and only plain tensors can"
            " be compiled",
            hint="Build before it's quantised, pruned or wrapped.",
        ) from exc


def build_real(
    config: Config, *, weights: str = "", seed: int = 0, device: str = "cpu"
) -> nn.Module:
    """Make the configured model with real tensors, in eval mode.

    Args:
        config: The configuration.
        weights: Directory for ``from_pretrained`` (a Hugging Face source) or a
            safetensors file (a factory), relative to the configuration's folder;
            ``package:NAME/DIR`` looks inside an installed package. Empty = the model's
            own random initialisation.
        seed: Seed of the initialisation; tensors that `weights` lacks get it too.
        device: Where the model is made (random weights) or moved to.
    Raises:
        ConfigError: the model or its weights can't be found or don't fit.
    """
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        if not weights:
            return _construct(config, place)
        if hugging_face.is_hugging_face(config):
            return hugging_face.from_pretrained(config, weights).to(place)
        model = _construct(config, torch.device("cpu"))
        _load_weights(model, config, weights)
        return model.to(place)


def entry_callable(model: nn.Module, entry: EntryConfig) -> Callable[..., Any]:
    """The bound method of `model` that `entry` compiles; the model for ``forward``."""
    if entry.method == "forward":
        return model
    method = getattr(model, entry.method, None)
    if not callable(method):
        raise ConfigError(
            f"[entries.{entry.name}] method {entry.method!r}:"
            f" {type(model).__name__} has no such method",
            hint=nearest(entry.method, dir(model)),
        )
    return method  # type: ignore[no-any-return]


def _construct(config: Config, device: torch.device) -> nn.Module:
    if hugging_face.is_hugging_face(config):
        model = hugging_face.construct(config, device)
    else:
        model = _call_factory(config, device)
    return model.eval()


def _call_factory(config: Config, device: torch.device) -> nn.Module:
    factory = import_function(config, config.model.source, "[model] source")
    dtype = model_dtype(config)
    try:
        with _default_dtype(dtype), device:
            model = factory()
    except CompilekitError:
        raise
    except FOREIGN_ERRORS as exc:
        hint = (
            "Without weights a factory runs on the meta device, where tensors have no"
            " values: read none, or compute such tensors with device='cpu'."
            if device.type == "meta"
            else ""
        )
        raise ConfigError(
            f"[model] source {config.model.source!r} failed:"
            f" {type(exc).__name__}: {exc}",
            hint=hint,
        ) from exc
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"[model] source {config.model.source!r}: expected the factory to return a"
            f" torch.nn.Module, it returned {type(model).__name__}"
        )
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _load_weights(model: nn.Module, config: Config, weights: str) -> None:
    import safetensors.torch

    file = model_directory(config.path.parent, weights)
    if file is None or not os.path.isfile(file):
        raise ConfigError(
            f"weights {weights!r}: expected a safetensors file (a factory's model is"
            " loaded from one file)"
        )
    try:
        safetensors.torch.load_model(model, file)
    except (RuntimeError, safetensors.SafetensorError) as exc:
        raise ConfigError(f"weights {weights!r} don't fit the model: {exc}") from exc
