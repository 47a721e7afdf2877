"""The Python values that a captured graph depends on, from Dynamo's guards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from compilekit import paths
from compilekit._torch import capture as dynamo
from compilekit.artifact.program import Read
from compilekit.compiler.sources import (
    MODEL,
    Scope,
    module_of_alias,
    steps_of,
    without_registries,
)
from compilekit.runtime.model import FUNCTIONS, SCALARS, is_shown, shown
from compilekit.runtime.result import class_name

_VALUE_GUARDS = frozenset(
    {"CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH", "BOOL_MATCH", "NONE_MATCH"}
)
_SHOWN_GUARDS = _VALUE_GUARDS | {"SET_CONTAINS"}
_FUNCTION_GUARDS = frozenset(
    {"CLOSURE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "ID_MATCH"}
)
_LENGTH_GUARDS = frozenset({"SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH"})
_KEY_GUARDS = frozenset({"DICT_KEYS_MATCH"})
# What `runtime.model.module_mismatches` looks at itself: the training flag and hooks
# (and any forward), and a mark that transformers leaves on a model with hooks.
_OUR_FLAGS = frozenset(
    {"training", "_is_full_backward_hook", "_output_capturing_hooks_installed"}
)
_NOT_READ = frozenset({"_forward_hooks", "_forward_pre_hooks", "__class__"})
# Guards here are about torch itself, or us; both versions are factors.
_NOT_THE_MODELS = frozenset(
    {"torch", "compilekit", "collections", "inspect", "typing", "functools", "math"}
)


def reads(
    capture: dynamo.Capture, model: torch.nn.Module, kwargs: Mapping[str, Any]
) -> tuple[Read, ...]:
    """The Python values the graph depends on, from Dynamo's guards.

    Only values that JSON can hold are kept, and classes of objects below the model.
    """
    scope = Scope(capture, model, kwargs)
    found: dict[tuple[str, str], Read] = {}
    for guard in capture.reads:
        steps = steps_of(guard.source)
        asked = guard.kind == "HASATTR"
        # The attribute is the class's, as most methods are.
        inherited = guard.kind == "NOT_PRESENT_IN_GENERIC_DICT"
        if steps is not None and guard.attribute and (asked or inherited):
            steps = (*steps, guard.attribute)
        if steps is None or len(steps) < 3:
            continue
        path = _read_path(steps)
        if path is None:
            continue
        try:
            value = scope.follow(steps)
        except (AttributeError, KeyError, IndexError, TypeError):
            if asked:
                found[(path, "absent")] = Read(path, "absent", None)
            continue
        if (guard.kind in _VALUE_GUARDS or inherited) and is_plain(value):
            # Infinity and NaN have no JSON; they are kept as they print.
            read = (
                Read(path, "value", value)
                if is_json(value)
                else Read(path, "repr", shown(value))
            )
        elif ((guard.kind in _SHOWN_GUARDS or inherited) and is_shown(value)) or (
            guard.kind in _FUNCTION_GUARDS and _is_the_models(path, value)
        ):
            read = Read(path, "repr", shown(value))
        elif inherited and _is_own_method(str(steps[-1]), value):
            read = Read(path, "inherited", None)
        elif guard.kind in _KEY_GUARDS and is_plain(list(value)):
            # What a loop goes through: the layers of a list of modules, a dict's items.
            read = Read(path, "keys", list(value))
        elif guard.kind in _LENGTH_GUARDS and _has_own_length(path, value):
            read = Read(path, "length", len(value))
        elif guard.kind == "TYPE_MATCH" and _names_own_class(path, value):
            read = Read(path, "type", class_name(type(value)))
        else:
            continue
        found[(path, read.kind)] = read
    return tuple(found[key] for key in sorted(found))


def _is_the_models(path: str, value: Any) -> bool:
    """True for a function that an object below the model has as a value.

    Of those in Python modules the code is kept.
    """
    return not path.startswith("module:") and isinstance(value, FUNCTIONS)


def _is_own_method(name: str, value: Any) -> bool:
    """False for a forward, which is looked at anyhow, for what Python looks up in the
    class whatever an instance has, and for torch's own methods."""
    package = str(getattr(value, "__module__", "")).split(".")[0]
    return (
        name != "forward"
        and not (name.startswith("__") and name.endswith("__"))
        and package not in _NOT_THE_MODELS
    )


def _has_own_length(path: str, value: Any) -> bool:
    """False for a module's registry: it grows with each model that a process makes."""
    registry = path.startswith("module:") and isinstance(value, Mapping)
    return hasattr(value, "__len__") and not registry


def _names_own_class(path: str, value: Any) -> bool:
    """True for objects below the model; a builtin's class says nothing new."""
    return not path.startswith("module:") and type(value).__module__ != "builtins"


def _read_path(steps: tuple[paths.Step, ...]) -> str | None:
    if steps[0] == "L" and steps[1] == (MODEL,):
        below = without_registries(steps[2:])
        if not below or below[-1] in _OUR_FLAGS or not _NOT_READ.isdisjoint(below):
            return None
        return paths.render(below)
    if steps[0] == "G" and isinstance(steps[1], tuple):
        module = module_of_alias(str(steps[1][0]))
        if module is None or module.split(".")[0] in _NOT_THE_MODELS:
            return None
        return f"module:{module}:{paths.render(steps[2:])}"
    return None


def is_json(value: Any) -> bool:
    """False for a number, or a sequence with one, that JSON can't hold."""
    if isinstance(value, (tuple, list)):
        return all(map(is_json, value))
    return not isinstance(value, float) or math.isfinite(value)


def is_plain(value: Any) -> bool:
    """True for scalars, and tuples and lists of them."""
    if type(value) in SCALARS:
        return True
    return type(value) in (tuple, list) and all(is_plain(part) for part in value)
