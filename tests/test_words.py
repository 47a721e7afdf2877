"""`Words`: what changes a dict or a class is seen in memory, and nothing else is."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compilekit.runtime.program import Native
from compilekit.runtime.words import Words, class_address, version_address

Changed = Callable[[int], bool] | None

CHANGES: dict[str, Callable[[dict[Any, Any]], object]] = {
    "another value": lambda d: d.__setitem__("a", object()),
    "another key": lambda d: d.__setitem__("b", None),
    "no key": lambda d: d.pop("a"),
    "update": lambda d: d.update(a=object()),
    "clear": lambda d: d.clear(),
    "setdefault": lambda d: d.setdefault("b", 1),
}


class Plain:
    """An object with attributes."""


class Other:
    """Another class of the same layout."""


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_dict_is_seen(
    name: str, kind: type[dict[Any, Any]], changed: Changed
) -> None:
    """Whatever the change, and for the hooks' ordered dicts too."""
    value, other = kind(a=object()), kind()
    words = Words([[version_address(other), version_address(value)]], changed)
    assert not words.changed()
    CHANGES[name](value)
    assert words.changed()


def test_what_changes_nothing_is_not_seen(changed: Changed) -> None:
    """Reads, and storing the same object again."""
    value = {"a": object()}
    words = Words([[version_address(value)]], changed)
    value["a"] = value["a"]
    value.get("b")
    list(value.items())
    assert not words.changed()


def test_an_attribute_and_a_class_are_seen(changed: Changed) -> None:
    """Of objects whose attributes lie in a dict, and whose class is assigned to."""
    one = Plain()
    attributes = Words([[version_address(vars(one))]], changed)
    kind = Words([[class_address(one)]], changed)
    one.name = 1  # type: ignore[attr-defined]
    assert attributes.changed()
    assert not kind.changed()
    one.__class__ = Other  # type: ignore[assignment]
    assert kind.changed()


def test_every_one_of_many_is_watched(changed: Changed) -> None:
    """Spread over the heap, in any order, each alone is noticed."""
    dicts: list[dict[str, int]] = [{"a": number} for number in range(2000)]
    random.Random(3).shuffle(dicts)
    for each in dicts[::97]:
        words = Words([list(map(version_address, dicts))], changed)
        assert not words.changed()
        each["a"] = -1
        assert words.changed()


@pytest.mark.parametrize("inference", [False, True])
def test_modes_of_torch_do_not_matter(inference: bool, changed: Changed) -> None:
    """Made in one mode and asked in the other, with another default device."""
    value, other = {"a": 1}, {"b": 1}
    with torch.inference_mode(inference), torch.device("meta"):
        words = Words([[version_address(value), version_address(other)]], changed)
    with torch.inference_mode(not inference), torch.device("meta"):
        assert not words.changed()
        value["a"] = 2
        assert words.changed()


def test_threads_ask_side_by_side(changed: Changed) -> None:
    """No thread disturbs another's answer."""
    values = [{"a": 1} for _ in range(500)]
    words = Words([list(map(version_address, values))], changed)
    seen: list[bool] = []

    def ask() -> None:
        seen.extend(words.changed() for _ in range(200))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] * 800


def test_a_level_is_read_only_if_those_before_hold(
    native: Native,
) -> None:
    """What a word pointed at may be gone once the word has changed."""
    first = (ctypes.c_int64 * 4)(1, 2, 3, 4)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    second = ctypes.addressof(ctypes.c_char.from_buffer(page))
    levels = [[ctypes.addressof(first) + 8 * i for i in range(4)], [], [second]]
    words = Words(levels, native.changed)
    assert not words.changed()
    page[0] = 1
    assert words.changed()
    page[0] = 0
    assert not words.changed()
    first[3] = 0
    forbidden = ctypes.CDLL(None, use_errno=True).mprotect
    assert forbidden(ctypes.c_void_p(second), mmap.PAGESIZE, 0) == 0
    assert words.changed()
    assert forbidden(ctypes.c_void_p(second), mmap.PAGESIZE, 3) == 0


@pytest.mark.parametrize("table", [0, 2**70, "text", None])
def test_what_is_no_table_is_an_error(table: object, native: Native) -> None:
    """Not a crash, as far as it can be told."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        native.changed(table)  # type: ignore[arg-type]
