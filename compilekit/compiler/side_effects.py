"""Python state that a captured call changes, and its program wouldn't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compilekit._torch import capture as dynamo
from compilekit.compiler.reads import is_plain
from compilekit.compiler.sources import REGISTRIES, Scope, readable, steps_of
from compilekit.errors import UnsupportedByProgramError


def refuse_side_effects(
    capture: dynamo.Capture,
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    before: Mapping[dynamo.SideEffect, Any],
) -> None:
    """Refuse a call that leaves anything changed besides tensors.

    Args:
        before: `snapshot` taken before the bytecode ran.
    Raises:
        UnsupportedByProgramError: names every object that the call changes.
    """
    after = snapshot(capture, model, kwargs)
    changed: list[str] = []
    for effect, old in before.items():
        if after[effect] != old:
            changed += _changes(effect, old, after[effect])
    if changed:
        raise UnsupportedByProgramError(
            f"the call changes Python state: {'; '.join(changed)}. A program runs the"
            " graph only, so that change would be lost",
            hint="Move it out of the compiled method, or keep the state in a buffer"
            " and write that in place (self.state.copy_(new)).",
            thing="; ".join(changed),
        )


def _changes(effect: dynamo.SideEffect, old: Any, new: Any) -> list[str]:
    """What a side effect changed, by name: ``model.calls``, ``model.state``."""
    name = readable(effect.source)
    if effect.attributes:
        dot = "" if name.endswith(":") else "."
        return [f"{name}{dot}{attribute}" for attribute in effect.attributes]
    owner, _, registry = name.rpartition(".")
    if registry in REGISTRIES:
        keys = dict.fromkeys(key for key, _ in set(old) ^ set(new))
        return [f"{owner}.{key}" for key in sorted(keys)]
    return [f"the contents of {name}"]


def snapshot(
    capture: dynamo.Capture, model: torch.nn.Module, kwargs: Mapping[str, Any]
) -> dict[dynamo.SideEffect, Any]:
    """What the objects that Dynamo's bytecode writes look like now."""
    scope = Scope(capture, model, kwargs)
    state: dict[dynamo.SideEffect, Any] = {}
    for effect in capture.side_effects:
        steps = steps_of(effect.source)
        if steps is None:
            state[effect] = ("unreadable", object())
            continue
        try:
            target = scope.follow(steps)
        except (AttributeError, KeyError, IndexError, TypeError):
            state[effect] = ("missing",)
            continue
        if effect.attributes:
            missing = object
            state[effect] = tuple(
                _identity(getattr(target, name, missing)) for name in effect.attributes
            )
        else:
            state[effect] = _contents(target)
    return state


def _identity(value: Any) -> Any:
    """Scalars by value, everything else by identity."""
    return ("value", value) if is_plain(value) else ("id", id(value))


def _contents(target: Any) -> Any:
    if isinstance(target, Mapping):
        return tuple((key, _identity(value)) for key, value in target.items())
    if isinstance(target, (list, tuple, set, frozenset)):
        return tuple(_identity(value) for value in target)
    return _identity(target)
