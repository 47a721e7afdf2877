"""Replay what a program launches as one CUDA graph.

A decode step of a small batch launches some 300 kernels that run for microseconds each;
starting them from Python takes longer than running them. A graph starts them at once.
Graphs hold addresses, so they can't be stored: each is captured in milliseconds, at
load or at a bucket's first call, when its kernels are there already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from compilekit.errors import AttachError
from compilekit.runtime.program import Call


class GraphPool:
    """What all graphs of one attach share: memory between kernels, and a stream.

    Graphs of one pool are never replayed at the same time, so that they can use the
    same memory, and the largest decides how much there is.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.handle = torch.cuda.graph_pool_handle()

    def reserved(self) -> int:
        """Bytes that the allocator holds on the device, all pools together."""
        return int(torch.cuda.memory_reserved(self.device))


class GraphedCall:
    """A program's host code, captured at its first call and replayed at later ones.

    The first call runs as it is and is captured afterwards: capturing runs nothing, so
    what a program writes is written once. A call with tensors at other addresses (the
    model's weights were replaced, say) is treated as a first one.

    Outputs are copies: the graph's own are overwritten by the next replay.

    Args:
        name: Entry and bucket, for messages.
        call: The host code.
        pool: Shared by all graphs that are replayed one after the other.
        on_capture: Told by how many bytes capturing it made the pool grow.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        pool: GraphPool,
        on_capture: Callable[[int], None],
    ) -> None:
        self._name = name
        self._call = call
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: list[int] = []
        self._inputs: list[torch.Tensor] = []
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._on_capture = on_capture

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        addresses = [tensor.data_ptr() for tensor in inputs]
        if self._graph is None or addresses != self._addresses:
            return self._capture(inputs, addresses)
        self._graph.replay()
        return tuple([output.clone() for output in self._outputs])

    def _capture(
        self, inputs: list[torch.Tensor], addresses: list[int]
    ) -> tuple[torch.Tensor, ...]:
        pool, current = self._pool, torch.cuda.current_stream(self._pool.device)
        # The graph reads their memory for as long as it lives.
        kept = list(inputs)
        pool.stream.wait_stream(current)
        with torch.cuda.stream(pool.stream):
            # Also loads kernels, and has libraries make their plans and workspaces.
            returned = self._call(inputs)
            self._graph = None
            graph = torch.cuda.CUDAGraph()
            warm = pool.reserved()
            # Other threads may allocate meanwhile.
            graph.capture_begin(pool.handle, capture_error_mode="thread_local")
            try:
                with _ended(graph):
                    self._outputs = self._call(list(kept))
            except RuntimeError as exc:
                raise AttachError(
                    f"what {self._name} launches can't be captured as a CUDA graph:"
                    f" {str(exc).strip().splitlines()[0]}",
                    hint="An operator of your own may wait for the device. Without"
                    " graphs: COMPILEKIT_CUDA_GRAPHS=0, [serve] cuda_graphs = false.",
                ) from exc
        current.wait_stream(pool.stream)
        for output in returned:
            output.record_stream(current)
        self._graph, self._addresses, self._inputs = graph, addresses, kept
        self._on_capture(pool.reserved() - warm)
        return returned


@contextlib.contextmanager
def _ended(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """End a capture, whatever happens; after an error that fails as well."""
    failed = True
    try:
        yield
        failed = False
    finally:
        known = (
            contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext()
        )
        with known:
            graph.capture_end()
