"""How products of few rows are cut into blocks: candidates, and the untuned choice."""

from __future__ import annotations

from typing import NamedTuple

MOST_ROWS = 16
"""Rows that one tile of a tensor core holds."""

MOST_WEIGHTS = 3
"""Weights that share a launch: query, key and value."""


class Blocks(NamedTuple):
    """How a product is cut into blocks.

    Attributes:
        columns: Rows of a weight (columns of the output) that one block computes.
        inner: Elements of each that it reads at a time.
        warps: Warps of a block.
        depth: Reads in flight: iterations that are unrolled (one row), or stages of
            the pipeline (several).
    """

    columns: int
    inner: int
    warps: int
    depth: int


ONE_ROW = (
    Blocks(1, 512, 1, 4),
    Blocks(2, 256, 1, 4),
    Blocks(1, 256, 1, 4),
    Blocks(4, 512, 2, 4),
    Blocks(1, 128, 1, 7),
)
"""Candidates for one row; the first that fits is taken untuned."""

FEW_ROWS = (
    Blocks(16, 256, 2, 5),
    Blocks(64, 128, 4, 3),
    Blocks(16, 128, 2, 5),
    Blocks(32, 256, 4, 3),
    Blocks(32, 256, 2, 5),
)
"""Candidates for 2 to 16 rows."""


def candidates(rows: int, columns: tuple[int, ...], inner: int) -> list[Blocks]:
    """The ways in which a product can be cut; empty if there is none.

    Args:
        columns: Output columns of each weight.
        inner: Length of a row.
    """
    known = ONE_ROW if rows == 1 else FEW_ROWS
    return [
        blocks
        for blocks in known
        if inner % blocks.inner == 0 and all(n % blocks.columns == 0 for n in columns)
    ]


def untuned(
    rows: int, columns: tuple[int, ...], inner: int, processors: int
) -> Blocks | None:
    """The way that a build takes without a tuning file; None if there is none.

    Wide blocks where there are enough of them for every multiprocessor to have two
    (measured on an NVIDIA H200, torch 2.11, driver 580).
    """
    fitting = candidates(rows, columns, inner)
    wide = [b for b in fitting if sum(columns) // b.columns >= 2 * processors]
    if rows > 1 and wide:
        return max(wide, key=lambda blocks: blocks.columns)
    return fitting[0] if fitting else None
