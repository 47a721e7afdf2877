"""What the buckets of one entry say about it, together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compilekit.artifact.program import Entry
from compilekit.errors import HarvestError


def merge_entries(parts: list[Entry]) -> Entry:
    """What all buckets of an entry say, together.

    Raises:
        HarvestError: two buckets contradict each other.
    """
    first = parts[0]
    tensors, frozen = dict(first.tensors), dict(first.frozen)
    reads = {(read.path, read.kind): read for read in first.reads}
    code, custom_ops = dict(first.code), dict(first.custom_ops)
    for part in parts[1:]:
        _merge(tensors, part.tensors, "tensor")
        _merge(frozen, part.frozen, "weight")
        _merge(reads, {(r.path, r.kind): r for r in part.reads}, "value")
        _merge(code, part.code, "function")
        _merge(custom_ops, part.custom_ops, "operator")
    return first._replace(
        tensors=dict(sorted(tensors.items())),
        frozen=dict(sorted(frozen.items())),
        reads=tuple(reads[key] for key in sorted(reads)),
        code=dict(sorted(code.items())),
        custom_ops=dict(sorted(custom_ops.items())),
        mutates_model=any(part.mutates_model for part in parts),
    )


def _merge(into: dict[Any, Any], more: Mapping[Any, Any], what: str) -> None:
    for key, value in more.items():
        if into.setdefault(key, value) != value:
            raise HarvestError(
                f"two buckets of one entry disagree about {what} {key}:"
                f" {into[key]} and {value}",
                hint="The model changes between calls; make it the same for each.",
            )
