"""How products of few rows are cut into blocks."""

from __future__ import annotations

import pytest

from compilekit.kernels.blocks import MOST_ROWS, Blocks, candidates, untuned

PROCESSORS = 132


@pytest.mark.parametrize("rows", [1, 2, 8, MOST_ROWS])
@pytest.mark.parametrize(
    ("columns", "inner"),
    [((3584, 512, 512), 3584), ((18944, 18944), 3584), ((48,), 384), ((16,), 128)],
)
def test_every_candidate_covers_a_product_exactly(
    rows: int, columns: tuple[int, ...], inner: int
) -> None:
    """No block crosses into another weight, and none ends inside a row."""
    found = candidates(rows, columns, inner)
    assert found
    for blocks in found:
        assert inner % blocks.inner == 0
        assert all(n % blocks.columns == 0 for n in columns)
    assert untuned(rows, columns, inner, PROCESSORS) in found


@pytest.mark.parametrize(
    ("rows", "columns", "inner"), [(1, (64,), 100), (8, (50257,), 768), (8, (8,), 256)]
)
def test_a_product_that_no_block_fits_is_left_to_torch(
    rows: int, columns: tuple[int, ...], inner: int
) -> None:
    """A row of an odd length, or columns that no tile divides."""
    assert candidates(rows, columns, inner) == []
    assert untuned(rows, columns, inner, PROCESSORS) is None


def test_blocks_are_wide_where_there_are_enough() -> None:
    """Wide ones read a large weight faster, and too few leave processors idle."""
    assert untuned(8, (18944, 18944), 3584, PROCESSORS) == Blocks(64, 128, 4, 3)
    assert untuned(8, (3584,), 3584, PROCESSORS) == Blocks(16, 256, 2, 5)
    assert untuned(1, (152064,), 3584, PROCESSORS) == Blocks(1, 512, 1, 4)
