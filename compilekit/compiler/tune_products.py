"""Measure how a step's products of few rows are computed fastest on this device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compilekit.compiler.decode_kernels import Product
from compilekit.kernels.blocks import Blocks, candidates
from compilekit.kernels.products import product

_REPLAYS = 7
# Weights are read from memory in a step, so no copy may still be in a cache.
_CACHES = 5


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was found for one product.

    Attributes:
        product: Its key in the tuning file.
        blocks: How our kernel cuts it; empty = the library is faster.
        milliseconds: Of the faster of both.
        library_milliseconds: Of torch's own way: a call for each weight.
        measured: How many ways of cutting were measured.
    """

    product: str
    blocks: tuple[int, ...]
    milliseconds: float
    library_milliseconds: float
    measured: int

    def as_json(self) -> dict[str, Any]:
        """As the tuning file has it."""
        return {
            "blocks": list(self.blocks),
            "ms": round(self.milliseconds, 6),
            "library_ms": round(self.library_milliseconds, 6),
            "measured": self.measured,
        }


def measure(found: Product) -> Choice:
    """Time a product by torch and by our kernel, cut in each way that fits.

    Every call has weights of its own, and all calls are one CUDA graph: as in a step,
    weights come from memory, and a launch costs what it does on the device.
    """
    make = functools.partial(torch.randn, dtype=found.dtype, device="cuda")
    cache = torch.cuda.get_device_properties().L2_cache_size
    elements = sum(found.columns) * found.inner
    copies = max(2, -(-_CACHES * cache // (elements * found.dtype.itemsize)))
    x = make(found.rows, found.inner)
    weights = [
        [make(columns, found.inner) for columns in found.columns] for _ in range(copies)
    ]
    biases = [
        make(columns) if biased else None
        for columns, biased in zip(found.columns, found.biased, strict=True)
    ]
    linear = torch.nn.functional.linear

    def library(each: list[torch.Tensor]) -> None:
        for weight, bias in zip(each, biases, strict=True):
            linear(x, weight, bias)

    def ours(blocks: Blocks, each: list[torch.Tensor]) -> None:
        product(x, each, biases, list(blocks))

    ways = candidates(found.rows, found.columns, found.inner)
    times = {
        blocks: _milliseconds(functools.partial(ours, blocks), weights)
        for blocks in ways
    }
    library_time = _milliseconds(library, weights)
    best = min(ways, key=times.__getitem__)
    return Choice(
        product=found.key,
        blocks=tuple(best) if times[best] < library_time else (),
        milliseconds=min(times[best], library_time),
        library_milliseconds=library_time,
        measured=len(ways),
    )


def _milliseconds(
    call: Callable[[list[torch.Tensor]], Any], arguments: Sequence[list[torch.Tensor]]
) -> float:
    """Of one call: the fastest replay of a graph that holds one for each argument."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call(arguments[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for each in arguments:
            call(each)
    times: list[float] = []
    for _ in range(_REPLAYS):
        began = _mark()
        graph.replay()
        ended = _mark()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return min(times) / len(arguments)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
