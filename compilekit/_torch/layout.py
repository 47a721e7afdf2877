"""Where torch keeps a tensor's metadata in memory, found out on live tensors.

torch says nothing about it, and it differs between versions; so what is assumed is held
against tensors whose metadata are known. Checked on torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from compilekit._torch.runtime import dispatch_keys, in_plain_thread

_WORD_BYTES = 8
_MASK = 2**64 - 1
# Sizes and strides of so many dimensions lie in the object itself.
# Source: c10/core/impl/SizesAndStrides.h, C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE.
_INLINE = 5
# Of a word, dtype (2 bytes) and device (type, index, whether there is one); flags that
# follow, of sizes and strides mostly, and padding that nobody sets.
# Source: c10/core/TensorImpl.h, data_type_ and device_opt_ (2.11, 2.12, 2.13).
KIND_BITS = (1 << 40) - 1
# None of what is looked for lies further in.
_REACH = 32


class TensorLayout(NamedTuple):
    """Words of 8 bytes, counted from the start of each object.

    Attributes:
        implementation: In a Python tensor: where its TensorImpl is.
        sizes: In a TensorImpl: the number of dimensions; behind it sizes and strides,
            or where these are if there are many.
        kind: There: dtype and device (`KIND_BITS`), then flags.
        keys: There: the dispatch keys.
        most_dimensions: With more of them, sizes and strides lie elsewhere.
    """

    implementation: int
    sizes: int
    kind: int
    keys: int
    most_dimensions: int = _INLINE


class TensorKind(NamedTuple):
    """Words of a plain CPU tensor of some dtype.

    Attributes:
        kind: See `TensorLayout`; only its first bits count.
        outside: Its dispatch keys if it was made outside inference mode.
        inside: The same for inside.
    """

    kind: int
    outside: int
    inside: int


@functools.cache
def tensor_layout() -> TensorLayout | None:
    """The layout of this torch's tensors; None if it isn't one that is known.

    Source: torch/csrc/autograd/python_variable.h, THPVariable; c10/core/TensorImpl.h,
    TensorImpl (behind the sizes: offset, element count, dtype with device and flags,
    keys) (2.11, 2.12, 2.13).
    """
    return in_plain_thread(_probed)


def _probed() -> TensorLayout | None:
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
    # Tensors of other sizes, strides and origins are of the same kind, others aren't.
    equal = [example.detach(), example.transpose(0, 1), example[0, 0, 0]]
    kinds = {_word(tensor._cdata, kind) & KIND_BITS for tensor in every}
    same = {_word(tensor._cdata, kind) & KIND_BITS for tensor in (example, *equal)}
    fit = all(_fits(found, tensor) for tensor in (*every, *equal))
    return found if fit and len(kinds) == len(every) and len(same) == 1 else None


@functools.cache
def tensor_kind(dtype: torch.dtype, layout: TensorLayout) -> TensorKind:
    """What plain CPU tensors of a dtype hold."""

    def learn() -> TensorKind:
        made = []
        for inside in (False, True):
            with torch.inference_mode(inside):
                made.append(torch.empty((1,), dtype=dtype, device="cpu"))
        keys = [_word(tensor._cdata, layout.keys) for tensor in made]
        return TensorKind(_word(made[0]._cdata, layout.kind), *keys)

    return in_plain_thread(learn)


def shape_words(
    shape: Sequence[int], stride: Sequence[int], layout: TensorLayout
) -> list[tuple[int, int]]:
    """(word of a TensorImpl, what it holds) for a tensor's sizes and strides."""
    first = layout.sizes + 1
    return [
        (layout.sizes, len(shape)),
        *((first + i, size) for i, size in enumerate(shape)),
        *((first + _INLINE + i, step) for i, step in enumerate(stride)),
    ]


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
