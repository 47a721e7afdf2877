"""Products of a few rows with weights: ``x @ weight.T + bias``, as a decode step has.

Such a product is a read of its weights. Libraries' kernels are made for tiles of many
rows: they split the inner dimension over blocks, add up what those found in a second
kernel, and leave projections of the same rows to launches of their own. Here a block
reads whole rows of weights, and projections of one input share a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from compilekit.kernels.blocks import MOST_ROWS, MOST_WEIGHTS, Blocks


@triton.jit
def one_row(
    x,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    y,
    N0: tl.constexpr,
    N1: tl.constexpr,
    K: tl.constexpr,
    BIASED0: tl.constexpr,
    BIASED1: tl.constexpr,
    BIASED2: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``y[n] = sum(x[k] * w[n, k]) + b[n]``, the outputs one behind the other."""
    block = tl.program_id(0)
    at = block * COLUMNS
    last = at >= N0 + N1
    biased = tl.where(last, BIASED2, tl.where(at >= N0, BIASED1, BIASED0))
    w = w0
    b = b0
    if last:
        at -= N0 + N1
        w = w2
        b = b2
    elif at >= N0:
        at -= N0
        w = w1
        b = b1
    columns = at + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    total = tl.zeros([COLUMNS, INNER], tl.float32)
    weights = w + columns.to(tl.int64)[:, None] * K + inner[None, :]
    for k in tl.range(0, K, INNER, loop_unroll_factor=DEPTH):
        row = tl.load(x + k + inner).to(tl.float32)
        # Read once: leave the cache to what the next kernel reads again.
        part = tl.load(weights + k, eviction_policy="evict_first")
        total += part.to(tl.float32) * row[None, :]
    result = tl.sum(total, 1)
    bias = tl.load(b + columns, mask=(columns >= 0) & (biased != 0), other=0.0)
    result += bias.to(tl.float32)
    tl.store(y + block * COLUMNS + tl.arange(0, COLUMNS), result)


@triton.jit
def few_rows(
    x,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    y,
    M: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    BIASED0: tl.constexpr,
    BIASED1: tl.constexpr,
    BIASED2: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
):
    """``y[m, n] = sum(x[m, k] * w[n, k]) + b[n]``; each weight's output by itself."""
    block = tl.program_id(0)
    at = block * COLUMNS
    last = at >= N0 + N1
    biased = tl.where(last, BIASED2, tl.where(at >= N0, BIASED1, BIASED0))
    width = tl.where(last, N2, tl.where(at >= N0, N1, N0))
    w = w0
    b = b0
    out = y
    if last:
        at -= N0 + N1
        w = w2
        b = b2
        out = y + M * (N0 + N1)
    elif at >= N0:
        at -= N0
        w = w1
        b = b1
        out = y + M * N0
    columns = at + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    rows = tl.arange(0, TILE)
    total = tl.zeros([COLUMNS, TILE], tl.float32)
    weights = w + columns.to(tl.int64)[:, None] * K + inner[None, :]
    inputs = x + rows[None, :] * K + inner[:, None]
    # Weights are the left operand: their rows fill a tensor core's tile.
    for k in tl.range(0, K, INNER, num_stages=STAGES):
        right = tl.load(inputs + k, mask=rows[None, :] < M, other=0.0)
        left = tl.load(weights + k)
        total = tl.dot(left, right, total)
    bias = tl.load(b + columns, mask=(columns >= 0) & (biased != 0), other=0.0)
    total += bias.to(tl.float32)[:, None]
    places = out + rows[None, :] * width + columns[:, None]
    tl.store(places, total.to(y.dtype.element_ty), mask=rows[None, :] < M)


class Launch(NamedTuple):
    """What tells the launches of two ways to cut a product apart.

    Attributes:
        symbol: The kernel's name.
        programs: Triton programs.
        warps: Of each.
    """

    symbol: str
    programs: int
    warps: int


def launch(rows: int, columns: Sequence[int], cut: Blocks) -> Launch:
    """How a product is launched."""
    symbol = "one_row" if rows == 1 else "few_rows"
    return Launch(symbol, sum(columns) // cut.columns, cut.warps)


@triton_op("compilekit::few_rows", mutates_args={})
def product(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    blocks: list[int],
) -> torch.Tensor:
    """Products of the same few rows with up to three weights, in one launch.

    Args:
        x: ``[..., k]``, at most `MOST_ROWS` rows, float16 or bfloat16.
        weights: ``[n, k]`` each, contiguous, of the same dtype.
        biases: ``[n]`` or None for each weight.
        blocks: `Blocks`.
    Returns:
        Flat: ``[rows, n]`` of the first weight, then of the second and third.
    """
    inner = x.shape[-1]
    rows = x.numel() // inner
    cut = Blocks(*blocks)
    x = x.contiguous()
    sizes = [weight.shape[0] for weight in weights] + [0] * MOST_WEIGHTS
    result = torch.empty(rows * sum(sizes), dtype=x.dtype, device=x.device)
    # What a product lacks is never read; a pointer is passed all the same.
    three = (weights * MOST_WEIGHTS)[:MOST_WEIGHTS]
    given = [*biases, *[None] * MOST_WEIGHTS][:MOST_WEIGHTS]
    added = [weights[0] if bias is None else bias for bias in given]
    shared = {
        "K": inner,
        **{f"BIASED{i}": bias is not None for i, bias in enumerate(given)},
        "COLUMNS": cut.columns,
        "INNER": cut.inner,
        "num_warps": cut.warps,
    }
    grid = (launch(rows, sizes, cut).programs,)
    if rows == 1:
        wrap_triton(one_row)[grid](
            x,
            *three,
            *added,
            result,
            N0=sizes[0],
            N1=sizes[1],
            DEPTH=cut.depth,
            **shared,
        )
    else:
        wrap_triton(few_rows)[grid](
            x,
            *three,
            *added,
            result,
            M=rows,
            N0=sizes[0],
            N1=sizes[1],
            N2=sizes[2],
            STAGES=cut.depth,
            TILE=MOST_ROWS,
            **shared,
        )
    return result


OPERATOR = torch.ops.compilekit.few_rows.default
