"""Where torch keeps a tensor's metadata in memory, found out on live tensors.

torch says nothing about it, and it differs between versions; so what is assumed is held
against tensors whose metadata are known. Checked on torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from compilekit._torch.runtime import dispatch_keys

_WORD_BYTES = 8
_MASK = 2**64 - 1
# Sizes and strides of so many dimensions lie in the object itself.
# Source: c10/core/impl/SizesAndStrides.h, C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE.
_INLINE = 5
# None of what is looked for lies further in.
_REACH = 32


class TensorLayout(NamedTuple):
    """Words of 8 bytes, counted from the start of each object.

    Attributes:
        implementation: In a Python tensor: where its TensorImpl is.
        sizes: In a TensorImpl: the number of dimensions; behind it sizes and strides,
            or where these are if there are many.
        kind: There: dtype, device and flags.
        keys: There: the dispatch keys.
    """

    implementation: int
    sizes: int
    kind: int
    keys: int


_known: list[TensorLayout] = []


def tensor_layout() -> TensorLayout | None:
    """The layout of this torch's tensors; None if it isn't one that is known.

    Source: torch/csrc/autograd/python_variable.h, THPVariable; c10/core/TensorImpl.h,
    TensorImpl (behind the sizes: offset, element count, dtype with device and flags,
    keys) (2.11, 2.12, 2.13).
    """
    if not _known:
        found = _probed()
        # Inside torch.func the next attempt may do better.
        if found is None:
            return None
        _known.append(found)
    return _known[0]


def _probed() -> TensorLayout | None:
    with torch.inference_mode(False):
        example = torch.empty_strided(
            (3, 5, 7), (70, 14, 2), dtype=torch.float64, device="cpu"
        )
        others = [
            torch.empty((11,), dtype=torch.int8, device="cpu"),
            torch.empty((2, 1, 4, 1, 3), device="cpu"),
            torch.empty((), device="meta"),
        ]
    start = example._cdata
    implementation = _find(id(example), start)
    sizes = _find(start, 3, 3, 5, 7)
    if implementation is None or sizes is None:
        return None
    kind = sizes + 2 * _INLINE + 3
    found = TensorLayout(implementation, sizes, kind, kind + 1)
    every = [example, *others]
    kinds = {_word(tensor._cdata, found.kind) for tensor in every}
    fit = all(_fits(found, tensor) for tensor in every)
    return found if fit and len(kinds) == len(every) else None


def metadata_addresses(
    tensor: torch.Tensor, layout: TensorLayout
) -> tuple[list[int], list[int], list[int]]:
    """Where a tensor's class and metadata are kept: what a program was compiled for.

    Its values, its memory, how often it was written and whether it wants gradients
    don't count. The words of the second list are where they are as long as those of the
    first are as they are, and those of the third as long as those of the second are.
    """
    start, dimensions = tensor._cdata, tensor.dim()
    own = [id(tensor) + _WORD_BYTES * word for word in (1, layout.implementation)]
    first = layout.sizes + 1
    inside = [layout.sizes, layout.kind, layout.keys]
    beyond: list[int] = []
    if dimensions > _INLINE:
        inside.append(first)
        outside = _word(start, first)
        beyond = [outside + _WORD_BYTES * each for each in range(2 * dimensions)]
    else:
        inside += range(first, first + dimensions)
        inside += range(first + _INLINE, first + _INLINE + dimensions)
    return own, [start + _WORD_BYTES * word for word in inside], beyond


def _word(start: int, index: int) -> int:
    return ctypes.c_int64.from_address(start + _WORD_BYTES * index).value


def _find(start: int, *values: int) -> int | None:
    """The first word that begins a run of values; nothing behind the run is read."""
    for index in range(_REACH):
        if all(_word(start, index + i) == value for i, value in enumerate(values)):
            return index
    return None


def _fits(layout: TensorLayout, tensor: torch.Tensor) -> bool:
    """Whether a layout finds what torch says of a tensor."""
    start, first = tensor._cdata, layout.sizes + 1
    count = tensor.dim()
    keys = dispatch_keys(tensor)
    return (
        _word(id(tensor), layout.implementation) == start
        and _word(start, layout.sizes) == count
        and tensor.shape == tuple(_word(start, first + i) for i in range(count))
        and tensor.stride()
        == tuple(_word(start, first + _INLINE + i) for i in range(count))
        and _word(start, layout.keys) & _MASK == keys & _MASK
    )
