"""The Python values that a captured graph depends on, from Dynamo's guards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from compilekit import paths
from compilekit._torch import capture as dynamo
from compilekit.artifact.program import Read
from compilekit.compiler.attention import GROUPED
from compilekit.compiler.sources import (
    MODEL,
    Scope,
    module_of_alias,
    steps_above,
    steps_of,
    without_registries,
)
from compilekit.runtime.model import (
    FUNCTIONS,
    MISSING,
    SCALARS,
    ModelView,
    is_shown,
    shown,
    value_at,
)
from compilekit.runtime.result import class_name

_VALUE_GUARDS = frozenset(
    {"CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH", "BOOL_MATCH", "NONE_MATCH"}
)
_SHOWN_GUARDS = _VALUE_GUARDS | {"SET_CONTAINS"}
_NAMED_GUARDS = frozenset(
    {
        *("CLOSURE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "ID_MATCH"),
        *("CLASS_MATCH", "MODULE_MATCH"),
    }
)
_LENGTH_GUARDS = frozenset(
    {"SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT"}
)
_CONTAINS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS"})
_INHERITED = "NOT_PRESENT_IN_GENERIC_DICT"
_KEY_GUARDS = frozenset({"DICT_KEYS_MATCH"})
# What `runtime.model.module_mismatches` looks at itself: the training flag and hooks
# (and any forward), and a mark that transformers leaves on a model with hooks.
_OUR_FLAGS = frozenset(
    {"training", "_is_full_backward_hook", "_output_capturing_hooks_installed"}
)
_HOOKS = frozenset(
    {
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_backward_hooks"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
        "_backward_pre_hooks",
    }
)
# Guards here are about torch itself, or us; both versions are factors.
_NOT_THE_MODELS = frozenset(
    {"torch", "compilekit", "collections", "inspect", "typing", "functools", "math"}
)


def reads(
    capture: dynamo.Capture, model: torch.nn.Module, kwargs: Mapping[str, Any]
) -> tuple[Read, ...]:
    """The Python values the graph depends on, from Dynamo's guards.

    Only values that JSON can hold are kept, names of functions and classes, and classes
    of objects below the model.
    """
    scope, view = Scope(capture, model, kwargs), ModelView(model)
    found: dict[tuple[str, str], Read] = {}
    for guard in capture.reads:
        steps = _asked(guard)
        path = None if steps is None else _read_path(steps, view)
        read = None
        if steps is None:
            read = _whole(guard, scope, view)
        elif path is not None:
            read = _read(guard, steps, path, scope, view)
        # `absent` of a registry may be a property of the class.
        if read is not None and (
            read.kind != "absent" or value_at(view, read.path) is MISSING
        ):
            found[(read.path, read.kind)] = read
    return tuple(found[key] for key in sorted(found))


def _asked(guard: dynamo.GuardedRead) -> tuple[paths.Step, ...] | None:
    """The steps to what a guard is about; None if no path leads there."""
    steps = steps_of(guard.source)
    if steps is None:
        return None
    if guard.kind in ("HASATTR", _INHERITED) and guard.attribute:
        return (*steps, guard.attribute)
    if guard.kind in _CONTAINS:
        return (*steps, (guard.key,)) if type(guard.key) in (str, int) else None
    return steps


def _read(
    guard: dynamo.GuardedRead,
    steps: tuple[paths.Step, ...],
    path: str,
    scope: Scope,
    view: ModelView,
) -> Read | None:
    """What of a value is to be the same; None if nothing is."""
    # The attribute is the class's, as most methods are.
    inherited = guard.kind == _INHERITED
    try:
        value = scope.follow(steps)
    except (AttributeError, KeyError, IndexError, TypeError):
        absent = guard.kind in ("HASATTR", "DICT_NOT_CONTAINS")
        return Read(path, "absent", None) if absent else None
    if isinstance(value, torch.Tensor):
        return None
    if guard.kind == "DICT_CONTAINS":
        return Read(path, "type", class_name(type(value)))
    if (guard.kind in _VALUE_GUARDS or inherited) and is_plain(value):
        # Infinity and NaN have no JSON; they are kept as they print.
        if is_json(value):
            return Read(path, "value", value)
        return Read(path, "repr", shown(value))
    if (guard.kind in _SHOWN_GUARDS or inherited) and is_shown(value):
        return Read(path, "repr", shown(value))
    if guard.kind in _NAMED_GUARDS and _is_found_by_name(steps, path, value):
        return Read(path, "repr", shown(value))
    if inherited and _is_own_method(path, value, view):
        return Read(path, "inherited", None)
    if guard.kind in _KEY_GUARDS and is_plain(list(value)):
        # What a loop goes through: the layers of a list of modules, a dict's items.
        return Read(path, "keys", list(value))
    if guard.kind in _LENGTH_GUARDS and _has_own_length(path, value):
        return Read(path, "length", len(value))
    if guard.kind == "TYPE_MATCH" and _names_own_class(path, value):
        return Read(path, "type", class_name(type(value)))
    return None


def _whole(guard: dynamo.GuardedRead, scope: Scope, view: ModelView) -> Read | None:
    """All of a dict below the model, some key of which no path can hold.

    Dicts of Python modules are left out: a registry grows with each model that a
    process makes.
    """
    contains = guard.kind in _CONTAINS
    steps = (steps_of if contains else steps_above)(guard.source)
    path = None if steps is None else _read_path(steps, view)
    if steps is None or path is None or path.startswith("module:"):
        return None
    try:
        value = scope.follow(steps)
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
    return Read(path, "repr", shown(value)) if isinstance(value, dict) else None


def _is_found_by_name(steps: tuple[paths.Step, ...], path: str, value: Any) -> bool:
    """True for a function, class or Python module that stands there under a name.

    Of a function in the file that defines it the code is kept, and of a class's method.
    """
    if isinstance(value, FUNCTIONS):
        is_here = path == f"module:{value.__module__}:{value.__qualname__}"
        return not (is_here or _is_method(steps, value))
    return isinstance(value, (type, ModuleType))


def _is_method(steps: tuple[paths.Step, ...], value: Any) -> bool:
    """True for a class's own function, and for what that one wraps."""
    if "__class__" not in steps or not isinstance(value, FunctionType):
        return False
    *_, last = (place for place, step in enumerate(steps) if step == "__class__")
    below = list(steps[last + 1 :])
    if below[:1] == ["__mro__"]:
        del below[:2]
    if below[:1] == ["__dict__"]:
        del below[0]
    return "__closure__" in below or all(isinstance(step, str) for step in below[1:])


def _is_own_method(path: str, value: Any, view: ModelView) -> bool:
    """False for a forward, which is looked at anyhow, for what Python looks up in the
    class whatever an instance has, and for how torch calls a module."""
    owner, _, name = path.rpartition(".")
    module = str(getattr(value, "__module__", ""))
    return (
        not (name == "forward" and owner in view.modules)
        and not (name.startswith("__") and name.endswith("__"))
        and module != torch.nn.Module.__module__
    )


def _has_own_length(path: str, value: Any) -> bool:
    """False for a module's registry: it grows with each model that a process makes."""
    registry = path.startswith("module:") and isinstance(value, Mapping)
    return hasattr(value, "__len__") and not registry


def _names_own_class(path: str, value: Any) -> bool:
    """True for objects below the model; a builtin's class says nothing new."""
    return not path.startswith("module:") and type(value).__module__ != "builtins"


def _read_path(steps: tuple[paths.Step, ...], view: ModelView) -> str | None:
    """Where a value lies; None for what is no part of the model or looked at anyhow."""
    if len(steps) < 3:
        return None
    if steps[0] == "L" and steps[1] == (MODEL,):
        below = without_registries(steps[2:])
        return None if _is_looked_at(below, view) else paths.render(below)
    if steps[0] == "G" and isinstance(steps[1], tuple):
        module = module_of_alias(str(steps[1][0]))
        if module is None or module.split(".")[0] in _NOT_THE_MODELS:
            return None
        path = f"module:{module}:{paths.render(steps[2:])}"
        owner = value_at(view, f"module:{module}:{steps[2]}")
        # What a file knows torch by counts; what torch has under it is torch's.
        is_foreign = isinstance(owner, ModuleType) and (
            owner.__name__.split(".")[0] in _NOT_THE_MODELS
        )
        is_ours = any(isinstance(s, tuple) and s[0] == GROUPED for s in steps)
        return None if is_ours or (is_foreign and len(steps) > 3) else path
    return None


def _is_looked_at(steps: tuple[paths.Step, ...], view: ModelView) -> bool:
    """True for what `module_mismatches` compares of each module by itself."""
    if not steps or steps[-1] == "__class__":
        return True
    for place, step in enumerate(steps):
        if step in _OUR_FLAGS or step in _HOOKS:
            return paths.render(steps[:place]) in view.modules
    return False


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
