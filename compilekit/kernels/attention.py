"""Attention of one token over a cache, split along the cache (flash decoding).

A library's kernel gives each head of keys one block: with four heads, four of a
device's hundred multiprocessors read the cache. Here it is cut into pieces that fill
the device, and a second kernel joins what the pieces found.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

SIZES = (64, 128, 256)
"""Head sizes that a tile holds without waste."""

DTYPES = (torch.float16, torch.bfloat16)


def fits(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a cache, ``[b, heads, c, head size]`` each, is one for these kernels."""
    return (
        keys.is_cuda
        and keys.dtype in DTYPES
        and keys.dtype == values.dtype
        and keys.shape == values.shape
        and keys.shape[3] in SIZES
        and keys.stride(3) == values.stride(3) == 1
    )


_LEAST_PLACES = 32
_BLOCKS_PER_PROCESSOR = 5
_JOINED = 16


@triton.jit
def write_token(
    keys,
    values,
    new_keys,
    new_values,
    start,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    K_BATCH: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_PLACE: tl.constexpr,
    V_BATCH: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_PLACE: tl.constexpr,
    NEW_K_BATCH: tl.constexpr,
    NEW_K_HEAD: tl.constexpr,
    NEW_V_BATCH: tl.constexpr,
    NEW_V_HEAD: tl.constexpr,
):
    """Put one token's key and value of one head behind those that are there."""
    pair = tl.program_id(0)
    batch = (pair // HEADS).to(tl.int64)
    head = (pair % HEADS).to(tl.int64)
    size = tl.arange(0, SIZE)
    place = tl.load(start)
    key = tl.load(new_keys + batch * NEW_K_BATCH + head * NEW_K_HEAD + size)
    value = tl.load(new_values + batch * NEW_V_BATCH + head * NEW_V_HEAD + size)
    to_key = keys + batch * K_BATCH + head * K_HEAD + place * K_PLACE
    to_value = values + batch * V_BATCH + head * V_HEAD + place * V_PLACE
    tl.store(to_key + size, key)
    tl.store(to_value + size, value)


@triton_op("compilekit::write_token", mutates_args={"keys", "values"})
def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    start: torch.Tensor,
) -> None:
    """Write one token of each sequence into the cache.

    An operator of its own, because torch's ``index_copy_`` on a window of a larger
    cache becomes a dense copy of the window before another kernel reads it.

    Args:
        keys: ``[b, heads, c, head size]``, the last dimension dense; written in place.
        values: Likewise.
        new_keys: ``[b, heads, 1, head size]``, the last dimension dense.
        new_values: Likewise.
        start: int64 ``[]``; the place that is written.
    """
    batch, heads, _, size = keys.shape
    wrap_triton(write_token)[(batch * heads,)](
        keys,
        values,
        new_keys,
        new_values,
        start,
        HEADS=heads,
        SIZE=size,
        K_BATCH=keys.stride(0),
        K_HEAD=keys.stride(1),
        K_PLACE=keys.stride(2),
        V_BATCH=values.stride(0),
        V_HEAD=values.stride(1),
        V_PLACE=values.stride(2),
        NEW_K_BATCH=new_keys.stride(0),
        NEW_K_HEAD=new_keys.stride(1),
        NEW_V_BATCH=new_values.stride(0),
        NEW_V_HEAD=new_values.stride(1),
        num_warps=1,
    )


@triton.jit
def split_attention(
    q,
    k,
    v,
    mask,
    part,
    tops,
    sums,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    K_BATCH: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_PLACE: tl.constexpr,
    V_BATCH: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_PLACE: tl.constexpr,
    MASK_BATCH: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What one piece of the cache gives to the query heads that share its keys.

    ``part`` are sums of values, weighted with ``2 ** (score - top)``; ``sums`` those
    of the weights.
    """
    pair = tl.program_id(0)
    piece = tl.program_id(1)
    batch = (pair // HEADS).to(tl.int64)
    head = (pair % HEADS).to(tl.int64)
    rows = tl.arange(0, ROWS)
    size = tl.arange(0, SIZE)
    real = rows < GROUPS
    query = tl.load(
        q + (pair * GROUPS + rows)[:, None] * SIZE + size[None, :],
        mask=real[:, None],
        other=0.0,
    )
    keys = k + batch * K_BATCH + head * K_HEAD
    values = v + batch * V_BATCH + head * V_HEAD
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, SIZE], tl.float32)
    for first in range(0, SPLIT, TILE):
        places = piece * SPLIT + first + tl.arange(0, TILE)
        there = places < PLACES
        seen = tl.load(mask + batch * MASK_BATCH + places, mask=there, other=0)
        key = tl.load(
            keys + places[:, None] * K_PLACE + size[None, :],
            mask=there[:, None],
            other=0.0,
        )
        value = tl.load(
            values + places[:, None] * V_PLACE + size[None, :],
            mask=there[:, None],
            other=0.0,
        )
        score = tl.dot(query, tl.trans(key)) * SCALE
        score = tl.where((seen != 0)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        before = tl.exp2(top - higher)
        total = total * before + tl.sum(weight, 1)
        result = result * before[:, None] + tl.dot(weight.to(value.dtype), value)
        top = higher
    pieces: tl.constexpr = (PLACES + SPLIT - 1) // SPLIT
    at = (pair * GROUPS + rows) * pieces + piece
    tl.store(part + at[:, None] * SIZE + size[None, :], result, mask=real[:, None])
    tl.store(tops + at, top, mask=real)
    tl.store(sums + at, total, mask=real)


@triton.jit
def join_attention(
    part,
    tops,
    sums,
    y,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    PADDED: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Add up the pieces of one query head, each weighted to the highest score."""
    head = tl.program_id(0)
    size = tl.arange(0, SIZE)
    pieces = tl.arange(0, PADDED)
    first = head * PIECES
    top = tl.load(tops + first + pieces, mask=pieces < PIECES, other=-1.0e30)
    total = tl.load(sums + first + pieces, mask=pieces < PIECES, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp2(top - highest), 0)
    result = tl.zeros([SIZE], tl.float32)
    for at in range(0, PIECES, JOINED):
        some = at + tl.arange(0, JOINED)
        there = some < PIECES
        height = tl.load(tops + first + some, mask=there, other=-1.0e30)
        values = tl.load(
            part + (first + some)[:, None] * SIZE + size[None, :],
            mask=there[:, None],
            other=0.0,
        )
        result += tl.sum(values * tl.exp2(height - highest)[:, None], 0)
    # Where a mask hides every place, nothing is the answer.
    result = tl.where(total > 0, result / total, 0.0)
    tl.store(y + head * SIZE + size, result.to(y.dtype.element_ty))


@triton_op("compilekit::decode_attention", mutates_args={})
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Scaled dot product attention of one token of each sequence.

    Args:
        query: ``[b, heads, 1, head size]``.
        key: ``[b, key heads, c, head size]``, the last dimension dense.
        value: Likewise.
        mask: bool ``[b, 1, 1, c]``; True where a place may be looked at.
        scale: Factor of the scores.
    Returns:
        ``[b, heads, 1, head size]``, contiguous.
    """
    batch, query_heads, _, size = query.shape
    heads, places = key.shape[1], key.shape[2]
    groups = query_heads // heads
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    split = _LEAST_PLACES
    while batch * heads * triton.cdiv(places, split) > (
        _BLOCKS_PER_PROCESSOR * processors
    ):
        split *= 2
    pieces = triton.cdiv(places, split)
    query = query.contiguous()
    shape = (batch * query_heads * pieces,)
    part = torch.empty(*shape, size, dtype=torch.float32, device=query.device)
    tops = torch.empty(shape, dtype=torch.float32, device=query.device)
    sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    result = torch.empty_like(query)
    wrap_triton(split_attention)[(batch * heads, pieces)](
        query,
        key,
        value,
        mask,
        part,
        tops,
        sums,
        # Powers of 2 are what the device computes: 2 ** (x / ln 2) = e ** x.
        SCALE=scale / math.log(2),
        HEADS=heads,
        GROUPS=groups,
        SIZE=size,
        PLACES=places,
        K_BATCH=key.stride(0),
        K_HEAD=key.stride(1),
        K_PLACE=key.stride(2),
        V_BATCH=value.stride(0),
        V_HEAD=value.stride(1),
        V_PLACE=value.stride(2),
        MASK_BATCH=mask.stride(0),
        SPLIT=split,
        TILE=min(split, 64),
        ROWS=max(16, triton.next_power_of_2(groups)),
        num_warps=4,
    )
    wrap_triton(join_attention)[(batch * query_heads,)](
        part,
        tops,
        sums,
        result,
        SIZE=size,
        PIECES=pieces,
        PADDED=triton.next_power_of_2(pieces),
        JOINED=_JOINED,
        num_warps=2,
    )
    return result


WRITE = torch.ops.compilekit.write_token.default
ATTEND = torch.ops.compilekit.decode_attention.default
