"""CUDA graphs without a device: what capturing and replaying do, on CPU tensors.

Capturing runs nothing and returns memory that holds nothing yet. A replay reads the
addresses that were captured, whatever tensors are there by now, and writes the memory
that was returned. What this can't show is the driver's part: whether kernels may be
captured, and what the memory pool shares.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from compilekit.runtime.program import Call


class Device:
    """What stands in for ``torch.cuda``.

    Attributes:
        captured: Graphs captured so far.
        replayed: Replays so far.
        refuses: What a program raises while it's captured, if anything.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.refuses: Exception | None = None
        self._capturing: Graph | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Answer for ``torch.cuda`` until the test ends."""
        replacements = {
            "Stream": lambda _: Stream(),
            "current_stream": lambda _: Stream(),
            "stream": lambda _: contextlib.nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "memory_reserved": lambda _: 1_000_000 * self.captured,
            "CUDAGraph": functools.partial(Graph, self),
        }
        for name, replacement in replacements.items():
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)

    def program(self, call: Call) -> Call:
        """A program as it behaves on the device: captured, it doesn't run."""
        like: list[torch.Tensor] = []

        def on_device(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            graph = self._capturing
            if graph is None:
                returned = call(inputs)
                like[:] = returned
                return returned
            if self.refuses is not None:
                raise self.refuses
            addresses = [tensor.detach() for tensor in inputs]
            memory = tuple([torch.full_like(one, 77) for one in like])

            def run() -> None:
                for place, made in zip(memory, call(list(addresses)), strict=True):
                    place.copy_(made)

            graph.work.append(run)
            return memory

        return on_device

    @contextlib.contextmanager
    def capturing(self, graph: Graph) -> Iterator[None]:
        """What runs inside is kept by the graph."""
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None


class Stream:
    """All work is done in order anyway."""

    def wait_stream(self, _: Stream) -> None:
        """Nothing to wait for."""


class Graph:
    """What was captured, in order."""

    def __init__(self, device: Device) -> None:
        self.work: list[Callable[[], None]] = []
        self._device = device
        self._capturing = contextlib.ExitStack()

    def capture_begin(self, _: object, *, capture_error_mode: str) -> None:
        """Keep from now on what would run."""
        if capture_error_mode != "thread_local":
            raise ValueError(capture_error_mode)
        self._capturing.enter_context(self._device.capturing(self))

    def capture_end(self) -> None:
        """Run again from now on."""
        self._capturing.close()
        self._device.captured += 1

    def replay(self) -> None:
        """Run what was captured, on what its addresses hold now."""
        self._device.replayed += 1
        for run in self.work:
            run()
