"""Compare many words of memory with what they held before, all at once.

CPython keeps a number in each dict that every change of the dict changes, and a pointer
to its class in each object; torch keeps a tensor's metadata in a few words. Asked for
one by one, through Python, they cost 0.04 µs each, and ten times that right after a
program has filled the processor's caches with its own data: a model of 24 layers has
four thousand. Asked for at once, the processor waits for many of them at a time. A
program for a CPU brings a C++ function for that (words.cpp), which a call reaches in a
microsecond; without it torch's gathered load does it, whose own code is a dozen
microseconds away from a cold cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
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
        levels: Addresses, multiples of 8. Those of a level are read only if the words
            of every level before it are as they were, and the caller keeps alive what
            lies there so long.
        compare: From words.cpp: takes the address of a table, gives True if a word
            isn't what it says; None = torch does it, for a single level.
    """

    def __init__(
        self, levels: Sequence[Sequence[int]], compare: Callable[[int], bool] | None
    ) -> None:
        found = [_Level(sorted(addresses)) for addresses in levels if addresses]
        if compare is None:
            (level,) = found
            self.changed = level.changed
            return
        parts = [torch.tensor([len(found)], device="cpu")]
        for level in found:
            count = torch.tensor([len(level.addresses)], device="cpu")
            parts += [count, level.addresses, level.before]
        # Alive as long as this object is.
        self._table = torch.cat(parts)
        self.changed = functools.partial(compare, self._table.data_ptr())


class _Level:
    """Words that are all where they are."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        first, last = min(addresses), max(addresses)
        # A tensor over all memory between them, of which only these words are read.
        span = ctypes.c_int64 * ((last - first) // _WORD_BYTES + 1)
        self._memory = torch.frombuffer(span.from_address(first), dtype=torch.int64)
        self._places = (self.addresses - first) // _WORD_BYTES
        self.before = torch.take(self._memory, self._places)

    def changed(self) -> bool:
        return not torch.equal(torch.take(self._memory, self._places), self.before)
