"""Which tensors share memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compilekit.runtime.overlap import first_overlap, storages

Pair = tuple[torch.Tensor, torch.Tensor]


def halves() -> Pair:
    """Two halves of one storage."""
    base = torch.zeros(8)
    return base[:4], base[4:]


@pytest.mark.parametrize(
    ("make", "meet"),
    [
        (lambda x: (x, x), True),
        (lambda x: (x, x[:]), True),
        (lambda x: (x, x.detach()), True),
        (lambda x: (x[:3], x[2:5]), True),
        (lambda x: (x[:3], x[3:5]), False),
        (lambda x: (x, x.clone()), False),
        (lambda x: (x[:0], x), False),
        (lambda x: (x, x[0].expand(6)), True),
        # A stretch counts from its first to its last element.
        (lambda x: (x[::2], x[1::2]), True),
        (lambda x: (x[0:5:2], x[5:]), False),
        (lambda x: (x.view(torch.int32), x), True),
        (lambda x: (torch.empty(0), torch.empty(0)), False),
    ],
)
def test_pairs(make: Callable[[torch.Tensor], Pair], meet: bool) -> None:
    """Both as two arguments, and as an argument and a tensor of the model."""
    one, other = make(torch.zeros(6))
    found = first_overlap([one, other], [0], [], frozenset())
    assert found == ((0, 1) if meet else None)
    found = first_overlap([one], [], [other], storages([other]))
    assert found == ((0, None) if meet else None)


def test_reading_one_tensor_twice_is_fine() -> None:
    """Only what is written must lie apart."""
    x, y = torch.zeros(4), torch.zeros(4)
    assert first_overlap([x, x, y], [2], [], frozenset()) is None
    assert first_overlap([y, x, x], [2], [], frozenset()) == (2, 1)


def test_one_storage_without_a_common_byte() -> None:
    """Halves lie apart, also from the model's."""
    one, other = halves()
    assert first_overlap([one, other], [0, 1], [], frozenset()) is None
    assert first_overlap([one], [0], [other], storages([other])) is None
