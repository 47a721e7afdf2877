"""Dynamo's source expressions as paths below the model, the arguments or a module."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from compilekit import paths
from compilekit._torch import capture as dynamo

# The parameters of the function that is traced (`convention.entry_function`).
MODEL, ARGUMENTS = "model", "kwargs"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a graph input comes from: ``tensor`` (of the model) or ``argument``."""

    kind: str
    path: str


def locate(source: str) -> Place | None:
    """Turn a Dynamo source expression into a place, or None if it lies elsewhere.

    ``L['model']._modules['fc']._parameters['weight']`` is ``fc.weight`` of the model,
    ``L['kwargs']['batch']['x']`` is the argument path ``batch["x"]``.
    """
    steps = steps_of(source)
    if steps is None or len(steps) < 3 or steps[0] != "L":
        return None
    root, rest = steps[1], steps[2:]
    if root == (ARGUMENTS,):
        name, *below = rest
        if isinstance(name, str) or not isinstance(name[0], str):
            return None
        return Place("argument", paths.render((name[0], *below)))
    if root == (MODEL,):
        return Place("tensor", paths.render(without_registries(rest)))
    return None


REGISTRIES: Final = ("_modules", "_parameters", "_buffers", "__dict__")


def without_registries(steps: tuple[paths.Step, ...]) -> tuple[paths.Step, ...]:
    """``_modules["fc"]`` → ``fc``: registries are only how nn.Module stores it."""
    kept: list[paths.Step] = []
    index = 0
    while index < len(steps):
        step = steps[index]
        if step in REGISTRIES and index + 1 < len(steps):
            key = steps[index + 1]
            if isinstance(key, tuple) and isinstance(key[0], str):
                kept.append(key[0])
                index += 2
                continue
        kept.append(step)
        index += 1
    return tuple(kept)


def steps_of(source: str) -> tuple[paths.Step, ...] | None:
    """The names and keys of an expression of attributes, subscripts and classes.

    ``type(x)`` is ``x.__class__``; ``dict(x.__dict__)``, as Dynamo writes the dict of a
    class, is ``x.__dict__``.
    """
    try:
        node: ast.expr = ast.parse(source, mode="eval").body
    except SyntaxError:
        return None
    steps: list[paths.Step] = []
    while True:
        if isinstance(node, ast.Attribute):
            steps.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            # True is an int as well, and no path has it as a key.
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                return None
            steps.append((key,))
            node = node.value
        elif isinstance(node, ast.Call) and len(node.args) == 1:
            called = ast.unparse(node.func)
            if called == "type":
                steps.append("__class__")
            elif called != "dict":
                return None
            (node,) = node.args
        elif isinstance(node, ast.Name):
            steps.append(node.id)
            return tuple(reversed(steps))
        else:
            return None


def steps_above(source: str) -> tuple[paths.Step, ...] | None:
    """The steps to the innermost thing that an expression looks into by a path.

    Dynamo writes ``x.d[None]``, ``x.d[list(dict.keys(x.d))[0]]`` and
    ``dict.__getitem__(x.d, …)`` for values of ``x.d`` whose key no path can hold.
    """
    node: ast.expr = ast.parse(source, mode="eval").body
    while True:
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        else:
            return None
        steps = steps_of(ast.unparse(node))
        if steps is not None:
            return steps


def readable(source: str) -> str:
    """A Dynamo source as users write it: ``model.state``, ``x``, ``module:TABLE``."""
    steps = steps_of(source)
    if steps is None or len(steps) < 2:
        return source
    root, first, *below = steps
    name = first if isinstance(first, str) else str(first[0])
    rest = without_registries(tuple(below))
    if root == "L" and name == ARGUMENTS and below:
        keyword, *inner = below
        word = keyword if isinstance(keyword, str) else str(keyword[0])
        return paths.render((word, *inner))
    module = module_of_alias(name)
    if root == "G" and module is not None:
        return f"{module}:{paths.render(rest)}"
    return paths.render((name, *rest))


def module_of_alias(name: str) -> str | None:
    """``__import_a_dot_b`` → ``a.b``; None if it isn't Dynamo's alias of a module."""
    prefix = "__import_"
    if not name.startswith(prefix):
        return None
    return name.removeprefix(prefix).replace("_dot_", ".")


class Scope:
    """What the roots of source expressions stand for in one captured call."""

    def __init__(
        self, capture: dynamo.Capture, model: torch.nn.Module, kwargs: Mapping[str, Any]
    ) -> None:
        self._roots = {"L": {MODEL: model, ARGUMENTS: kwargs}, "G": capture.globals}

    def follow(self, steps: tuple[paths.Step, ...]) -> Any:
        """The value at the steps of an expression (`steps_of`).

        Raises:
            AttributeError, KeyError, IndexError, TypeError: there is none.
        """
        return paths.follow(self._roots[str(steps[0])], steps[1:])
