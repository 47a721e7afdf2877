"""Paths: where a value lies below a model or below a call's arguments.

``layers.0.weight``, ``cache.layers[3].keys``, ``batch["pixel_values"]``: names joined
by dots, integer and string keys in brackets. Standard library only.
"""

from __future__ import annotations

import json
import re
from typing import Any

Step = str | tuple[int | str]
"""A name (attribute, or submodule) or a one-element tuple holding a key."""

_TOKEN = re.compile(
    r"""\.?(?P<name>[^.\[\]"']+)"""
    r"""|\[(?P<index>-?\d+)\]"""
    r"""|\[(?P<key>"(?:[^"\\]|\\.)*"|'[^']*')\]"""
)


def parse(path: str) -> tuple[Step, ...]:
    """Split a path into steps.

    Raises:
        ValueError: the text isn't a path.
    """
    steps: list[Step] = []
    position = 0
    while position < len(path):
        match = _TOKEN.match(path, position)
        if match is None:
            raise ValueError(f"not a path: {path!r} (at character {position})")
        if match["name"] is not None:
            steps.append(match["name"])
        elif match["index"] is not None:
            steps.append((int(match["index"]),))
        elif match["key"].startswith('"'):
            steps.append((json.loads(match["key"]),))
        else:
            steps.append((match["key"][1:-1],))
        position = match.end()
    return tuple(steps)


def render(steps: tuple[Step, ...]) -> str:
    """The text of a path; the inverse of `parse`."""
    text = ""
    for step in steps:
        if isinstance(step, str):
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step[0], ensure_ascii=False)}]"
    return text


def join(path: str, name: str, kind: str) -> str:
    """Path of a part: ``a.b`` of a dataclass, ``a["b"]`` of a dict."""
    step: Step = (name,) if kind in ("dict", "mapping") else name
    return render((*parse(path), step))


def toml_key(path: str) -> str:
    """An output path as a TOML key."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", path):
        return path
    return f"'{path}'" if '"' in path else f'"{path}"'


def follow(root: Any, steps: tuple[Step, ...]) -> Any:
    """The value at a path below an object.

    A name is an attribute, and below a module list or dict also a submodule's key.

    Raises:
        AttributeError, KeyError, IndexError, TypeError: there is nothing there.
    """
    value = root
    for step in steps:
        value = getattr(value, step) if isinstance(step, str) else value[step[0]]
    return value
