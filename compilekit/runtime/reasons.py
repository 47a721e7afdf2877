"""Why a cache key missed: the component that differs, with both values.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Component → (hash, text), as stored with each key.
Components = Mapping[str, Sequence[str]]

_SHOWN = 4
_WIDTH = 160
# A graph's own parts, and a Triton kernel's: keys that agree in them are about the same
# code.
_GRAPH = ("gm", "example_inputs", "source")


class Stored(NamedTuple):
    """A key of the artifact, its components read when they're needed."""

    key: str
    bucket: str
    components: Callable[[], Components]


def explain_miss(kind: str, components: Components, stored: Sequence[Stored]) -> str:
    """Compare a missed key with the stored one that is closest to it.

    Returns:
        ``FX graph key of bucket forward/b1_s128: NAME was A, is B``, with a few names.
    """
    if not stored:
        return f"{kind} key: the artifact holds none"
    compared = [(one, _differing(one.components(), components)) for one in stored]
    best, differing = min(compared, key=lambda pair: _weight(pair[1]))
    theirs = best.components()
    parts = [
        _difference(name, theirs.get(name), components.get(name))
        for name in differing[:_SHOWN]
    ]
    if len(differing) > _SHOWN:
        parts.append(f"and {len(differing) - _SHOWN} more")
    if not parts:
        # Equal parts in another order, or a part that torch hashes and doesn't show.
        parts.append(f"every component is equal, yet the key was {best.key}")
    return f"{kind} key of bucket {best.bucket}: {'; '.join(parts)}"


def _differing(theirs: Components, ours: Components) -> list[str]:
    """Names of components that differ, the graph's own last."""
    names = [
        name
        for name in {**theirs, **ours}
        if _hash(theirs.get(name)) != _hash(ours.get(name))
    ]
    return sorted(names, key=lambda name: (name.startswith(_GRAPH), name))


def _hash(component: Sequence[str] | None) -> str | None:
    # Most of Triton's components have no hash; their text says everything.
    return None if component is None else component[0] or component[1]


def _weight(differing: Sequence[str]) -> int:
    return sum(100 if name.startswith(_GRAPH) else 1 for name in differing)


def _difference(
    name: str, theirs: Sequence[str] | None, ours: Sequence[str] | None
) -> str:
    was = "absent" if theirs is None else theirs[1]
    now = "absent" if ours is None else ours[1]
    if was == now and theirs is not None and ours is not None:
        return f"{name} was {_short(was)} (hash {theirs[0]}), is the same to look at"
    was, now = _first_difference(was, now)
    return f"{name} was {was}, is {now}"


def _first_difference(was: str, now: str) -> tuple[str, str]:
    """The first lines in which two texts differ, around the place if they're long."""
    lines = zip(was.splitlines(), now.splitlines(), strict=False)
    pair = next(((a, b) for a, b in lines if a != b), (was, now))
    place = next(
        (i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b),
        min(map(len, pair)),
    )
    start = max(0, place - _WIDTH // 2)
    first, second = (_short(text[start:].strip()) for text in pair)
    return first, second


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def explain_settings(
    stored: Mapping[str, str], here: Mapping[str, str]
) -> tuple[str, ...]:
    """The settings of a compiled function that differ, with both values; a few."""
    names = [n for n in sorted({**stored, **here}) if stored.get(n) != here.get(n)]
    found = [
        f"{name} was {_short(stored.get(name, 'absent'))},"
        f" is {_short(here.get(name, 'absent'))}"
        for name in names[:_SHOWN]
    ]
    more = len(names) - _SHOWN
    return (*found, *([f"and {more} more settings"] if more > 0 else []))
