"""What names in a configuration stand for: functions, directories, dtypes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from compilekit.config import Config
from compilekit.errors import (
    FOREIGN_ERRORS,
    CompilekitError,
    ConfigError,
    nearest_name,
)


def import_function(config: Config, source: str, where: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` in a configuration names.

    Raises:
        ConfigError: there is none, or its module can't be imported.
    """
    module_name, _, name = source.partition(":")
    if not module_name or not name:
        raise ConfigError(
            f"{where}: expected package.module:function, found {source!r}"
        )
    # The configuration's folder stays on the path: user code imports lazily as well.
    folder = str(config.path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except CompilekitError:
        raise
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"{where}: can't import {module_name!r}: {type(exc).__name__}: {exc}",
            hint=f"Modules are looked for in {folder} and the installed packages.",
        ) from exc
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{where}: module {module_name!r} has no function {name!r}",
            hint=nearest(name, dir(module)),
        )
    return function  # type: ignore[no-any-return]


def torch_dtype(name: str, where: str) -> torch.dtype:
    """The torch dtype called `name`; `where` names the place in the configuration."""
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    known = [key for key in dir(torch) if isinstance(getattr(torch, key), torch.dtype)]
    raise ConfigError(f"{where}: {name!r} is no torch dtype", hint=nearest(name, known))


def model_dtype(config: Config) -> torch.dtype | None:
    """The dtype that ``[model] dtype`` names; None if it leaves it to the model."""
    if not config.model.dtype:
        return None
    dtype = torch_dtype(config.model.dtype, "[model] dtype")
    if not dtype.is_floating_point:
        raise ConfigError(
            f"[model] dtype: expected a floating-point dtype, found {dtype}"
        )
    return dtype


def nearest(name: str, known: Any) -> str:
    """A hint that names what was probably meant; empty if nothing is close."""
    near = nearest_name(name, known)
    return f"Did you mean {near!r}?" if near else ""
