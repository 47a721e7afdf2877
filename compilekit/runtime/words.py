"""Compare many words of memory with what they held before, all at once.

CPython keeps a number in each dict that every change of the dict changes, and a pointer
to its class in each object. Asked for one by one, through Python, they cost 0.04 µs
each, and ten times that right after a program has filled the processor's caches with
its own data: a model of 24 layers has more than a thousand. One vectorised load reads
them in a few microseconds, because the processor waits for many of them at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

_WORD_BYTES = 8
# What every object begins with; the last word of it points to the object's class.
_HEAD_BYTES = object.__basicsize__


def class_address(value: object) -> int:
    """Where an object holds the pointer to its class.

    Source: Include/object.h, PyObject (CPython 3.11, 3.12).
    """
    return id(value) + _HEAD_BYTES - _WORD_BYTES


def version_address(value: dict[Any, Any]) -> int:
    """Where a dict holds the number that changes whenever the dict does.

    Storing the same object again doesn't change it.

    Source: Include/cpython/dictobject.h, PyDictObject.ma_version_tag, behind the head
    and the length (CPython 3.11, 3.12; 3.13 gives up the rule that every change of an
    instance's attribute changes it).
    """
    return id(value) + _HEAD_BYTES + _WORD_BYTES


class Words:
    """Words of memory, to notice that any of them changed.

    Args:
        addresses: Multiples of 8, at least one. The caller keeps alive what lies there.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        first, last = min(addresses), max(addresses)
        # A tensor over all memory between them, of which only these words are read.
        span = ctypes.c_int64 * ((last - first) // _WORD_BYTES + 1)
        self._memory = torch.frombuffer(span.from_address(first), dtype=torch.int64)
        self._places = torch.tensor(
            [(address - first) // _WORD_BYTES for address in addresses], device="cpu"
        )
        self._before = torch.take(self._memory, self._places)

    def changed(self) -> bool:
        """True if a word isn't what it was when this object was made."""
        return not torch.equal(torch.take(self._memory, self._places), self._before)
