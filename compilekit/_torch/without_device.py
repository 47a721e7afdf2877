"""Fill torch's caches for a GPU that isn't here: everything is compiled, nothing run.

A call of the model on fake tensors makes torch.compile trace and compile what a call
on real ones would, under the same keys. Inductor's result can't be called, so each
graph gives the fake outputs of its operations, and the code between graphs runs on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from compilekit._torch.capture import normalise_annotations
from compilekit._torch.triton_kernels import kept_triton_kernels


def compile_only(patches: contextlib.ExitStack) -> None:
    """From now on ``torch.compile`` compiles calls on fake tensors, and runs nothing.

    Each Triton kernel is compiled for one config: nothing here could choose another,
    and a kernel with one config isn't benchmarked when it's first called, either.

    Source: torch/__init__.py, _TorchCompileInductorWrapper.__call__ (2.11, 2.13).
    """
    inductor: Any = torch._TorchCompileInductorWrapper
    compile_graph = inductor.__call__

    def call(self: Any, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        normalise_annotations(graph, examples)
        # Inductor changes the graph that it's given.
        kept = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
        compile_graph(self, graph, list(examples))

        def run(*inputs: Any) -> Any:
            fake = next((i for i in inputs if isinstance(i, FakeTensor)), None)
            with fake.fake_mode if fake is not None else contextlib.nullcontext():
                return kept.forward(*inputs)

        return run

    patches.enter_context(mock.patch.object(inductor, "__call__", call))
    patches.enter_context(kept_triton_kernels({}, {}))
