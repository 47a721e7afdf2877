"""Compare many words of memory with what they held before, all at once.

CPython keeps a number in each dict that every change of the dict changes, another one
in each class, and pointers to its class and its attributes in each object; torch keeps
a tensor's metadata in a few words. Asked for one by one, through Python, they cost 0.04
µs each, and ten times that right after a program has filled the processor's caches with
its own data: a model of 24 layers has four thousand. Asked for at once, the processor
waits for many of them at a time. A program for a CPU brings a C++ function for that
(calls.cpp), which a call reaches in a microsecond; without it torch's gathered load
does it, whose own code is a dozen microseconds away from a cold cache.
"""

from __future__ import annotations

import array
import bisect
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

WORD_BYTES = 8
# What every object begins with; the last word of it points to the object's class.
_HEAD_BYTES = object.__basicsize__


def class_address(value: object) -> int:
    """Where an object holds the pointer to its class.

    Source: Include/object.h, PyObject (CPython 3.11, 3.12).
    """
    return id(value) + _HEAD_BYTES - WORD_BYTES


def version_address(value: dict[Any, Any]) -> int:
    """Where a dict holds the number that changes whenever the dict does.

    Storing the same object again doesn't change it.

    Source: Include/cpython/dictobject.h, PyDictObject.ma_version_tag, behind the head
    and the length (CPython 3.11, 3.12; 3.13 gives up the rule that every change of an
    instance's attribute changes it).
    """
    return id(value) + _HEAD_BYTES + WORD_BYTES


def class_version_address(value: type) -> int:
    """Where a class holds the number that changes whenever it or a base of it does.

    Source: Include/cpython/object.h, PyTypeObject.tp_version_tag, the 49th word, and 32
    bits that stay 0 (CPython 3.11, 3.12). A number is given out at the first look-up.
    """
    type.__getattribute__(value, "__init__")
    return id(value) + 48 * WORD_BYTES


def attributes_address(value: object) -> int | None:
    """Where an object holds the pointer to its ``__dict__``; None for an unusual one.

    Source: Objects/object.c, _PyObject_GetDictPtr: three words before the object, or at
    an offset that its class names (CPython 3.11, 3.12). An object that has been asked
    for its ``__dict__`` keeps one.
    """
    attributes, offset = id(vars(value)), type(value).__dictoffset__
    places = [id(value) - 3 * WORD_BYTES, id(value) + offset]
    address = places[offset > 0]
    if address % WORD_BYTES or word_at(address) != attributes:
        return None
    return address


def word_at(address: int) -> int:
    """What lies in memory there."""
    return ctypes.c_int64.from_address(address).value


class Words:
    """Words of memory, to notice that any of them changed.

    Args:
        levels: Addresses, multiples of 8. Those of a level are read only if the words
            of every level before it are as they were, and the caller keeps alive what
            lies there so long.
        changed: From calls.cpp: takes the address of a table, gives True if a word
            isn't what it says; None = torch does it, for a single level.
    Attributes:
        address: Of that table, as long as this object lives; 0 = torch does it.
    """

    def __init__(
        self, levels: Sequence[Sequence[int]], changed: Callable[[int], bool] | None
    ) -> None:
        found = [sorted(addresses) for addresses in levels if addresses]
        self._first = found[0]
        self.address = 0
        if changed is None:
            (addresses,) = found
            self.changed, self._known = _gathered(addresses)
            return
        # No operator of torch: inside torch.func it would make tensors of another kind.
        table = array.array("q", [len(found)])
        for addresses in found:
            table.append(len(addresses))
            table.extend(addresses)
            table.extend(map(word_at, addresses))
        self._table = table
        self.address = table.buffer_info()[0]
        self._known = self.address + WORD_BYTES * (2 + len(self._first))
        self.changed = functools.partial(changed, self.address)

    def expects(self, address: int, word: int) -> bool:
        """Whether it is what is expected of a word of the first level."""
        return word_at(self._expected_at(address)) == word

    def accept(self, address: int, word: int) -> None:
        """From now on, a word of the first level is expected to be another one."""
        ctypes.c_int64.from_address(self._expected_at(address)).value = word

    def _expected_at(self, address: int) -> int:
        return self._known + WORD_BYTES * bisect.bisect_left(self._first, address)


def _gathered(addresses: Sequence[int]) -> tuple[Callable[[], bool], int]:
    """Whether words are no more what they are now, by torch's operators.

    Returns:
        The check, and where it keeps the words that it expects.
    """
    first, last = addresses[0], addresses[-1]
    # A tensor over all memory between them, of which only these words are read.
    span = ctypes.c_int64 * ((last - first) // WORD_BYTES + 1)
    memory = torch.frombuffer(span.from_address(first), dtype=torch.int64)
    places = torch.tensor(
        [(address - first) // WORD_BYTES for address in addresses], device="cpu"
    )
    before = torch.take(memory, places)

    def changed() -> bool:
        return not torch.equal(torch.take(memory, places), before)

    return changed, before.data_ptr()
