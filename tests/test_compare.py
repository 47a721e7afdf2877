"""Comparing a program's result with eager's: `compilekit.compiler.compare`."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import pytest
import torch

from compilekit.compiler.compare import compare, compare_aliases, tolerance


@dataclasses.dataclass
class Output:
    """An output class."""

    logits: torch.Tensor
    cache: object = None


Pair = collections.namedtuple("Pair", "first second")
ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    "value",
    [
        ONE,
        (ONE, [ONE, None]),
        {"a": ONE, "b": {"c": 3}},
        Output(ONE),
        Pair(ONE, "x"),
        torch.tensor([math.nan, math.inf, -math.inf]),
        torch.tensor([1 + 2j]),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
    ],
)
def test_equal_results_don_t_differ(value: Any) -> None:
    """Every kind of part is taken for equal to itself; NaN equals NaN."""
    found = compare(value, value)
    assert (found.max_abs_error, found.message) == (0.0, "")


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (ONE, ONE.double(), "expected dtype torch.float64, found torch.float32"),
        (ONE[:1], ONE, "expected shape torch.Size([2, 3]), found torch.Size([1, 3])"),
        (ONE + 1, ONE, "differs from eager by 1 (atol 0.0001, rtol 0.0001)"),
        (ONE * math.nan, ONE, "differs from eager by inf (atol 0.0001, rtol 0.0001)"),
        (torch.tensor([1]), torch.tensor([2]), "other values"),
        ({"a": ONE}, {"b": ONE}, "expected keys ['b'], found ['a']"),
        ([ONE], [ONE, ONE], "expected 2 parts, found 1"),
        ((ONE,), [ONE], "expected a builtins:list, found a builtins:tuple"),
        ("x", "y", "expected 'y', found 'x'"),
    ],
)
def test_a_difference_is_told(found: Any, expected: Any, message: str) -> None:
    """Metadata, structure and values: each difference says both sides."""
    assert message in compare(found, expected).message


def test_a_difference_is_located() -> None:
    """The path of the part that differs comes first."""
    found = compare({"a": [Output(ONE)]}, {"a": [Output(ONE + 1)]})
    assert found.message.startswith('["a"][0].logits: ')
    assert found.max_abs_error == 1.0


def test_tolerances_can_be_set() -> None:
    """A configured tolerance replaces the dtype's."""
    assert compare(ONE + 0.01, ONE).message
    assert not compare(ONE + 0.01, ONE, atol=0.1).message
    assert tolerance(torch.float32, None, 1.0) == (1e-4, 1.0)
    assert tolerance(torch.int64, None, None) == (0.0, 0.0)


def test_shared_memory_must_be_shared() -> None:
    """An output that is a view of an argument in eager must be one here."""
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    eager = {"output": x.view(-1), "argument": x}
    assert compare_aliases({"output": y.view(-1), "argument": y}, eager) == ""
    copied = compare_aliases({"output": y.view(-1).clone(), "argument": y}, eager)
    assert copied == 'in eager, ["argument"] shares memory with ["output"]'


def test_separate_memory_must_be_separate() -> None:
    """Two outputs that a caller may write apart in eager can't be one here."""
    x, y, z = torch.ones(2), torch.ones(2), torch.ones(2)
    found = compare_aliases((z, z), (x, y))
    assert found == "in eager, [1] doesn't share memory with [0]"
