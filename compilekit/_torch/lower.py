"""Private Inductor and AOTAutograd names: from a captured graph to output code."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.codecache
import torch._inductor.config
import torch._inductor.cpu_vec_isa as cpu_vec_isa
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from compilekit._torch.capture import Capture
from compilekit._torch.freezing import fold_weights
from compilekit._torch.triton_kernels import kept_triton_kernels


@dataclasses.dataclass(frozen=True)
class CppSource:
    """One C++ kernel as Inductor wrote it.

    Attributes:
        argtypes: C types of the kernel's arguments, e.g. ``const float*``.
        code: Kernel plus its Python binding; the module's init is ``PyInit_kernel``.
    """

    argtypes: tuple[str, ...]
    code: str


class NothingLowered(Exception):
    """AOTAutograd left no operation for Inductor."""


@dataclasses.dataclass(frozen=True)
class Lowered:
    """What Inductor made of one graph.

    Attributes:
        output_code: The Python module Inductor would have run.
        kernels: Kernel body (as it stands in the output code) → complete source.
        triton: Name in the output code → kernel, for `kernel_facts`.
        constants: Name in the output code → tensor.
        mutated: Indices of graph inputs that the program writes.
        aligned: Indices of graph inputs whose address must be 16-byte aligned.
        input_count: Graph inputs the program takes.
        output_count: Graph outputs the program returns.
        extra_outputs: Outputs that come before the graph's own (mutations to copy).
        refusals: What AOTAutograd does outside the program → what to do about it.
        frozen: Indices of graph inputs that constants were computed from.
    """

    output_code: str
    kernels: Mapping[str, CppSource]
    triton: Mapping[str, Any]
    constants: Mapping[str, torch.Tensor]
    mutated: frozenset[int]
    aligned: frozenset[int]
    input_count: int
    output_count: int
    refusals: Mapping[str, str]
    frozen: frozenset[int]


def lower(
    capture: Capture,
    options: Mapping[str, Any],
    simd_width: int,
    tuned: Mapping[str, Mapping[str, Any]],
    weights: Mapping[int, torch.Tensor],
) -> Lowered:
    """Run AOTAutograd and Inductor on a captured graph without compiling kernels.

    Args:
        options: Inductor options, those that the program route forces included.
        simd_width: Bits of the target's vectors (256, 512); 0 = scalar code.
        tuned: Digest of a Triton kernel's source → the config it gets.
        weights: Graph input → the value that is folded into the program.
    Source: torch/_inductor/compile_fx.py, compile_fx and compile_fx_inner (2.11, 2.13).
    """
    kernels: dict[str, CppSource] = {}
    triton: dict[str, Any] = {}
    inner: list[tuple[torch.fx.GraphModule, Any]] = []
    frozen: frozenset[int] = frozenset()

    def keep(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        nonlocal frozen
        if weights:
            frozen = fold_weights(graph, inputs, weights, context.fw_metadata)
        # What was folded has values.
        with mock.patch.object(capture.fake_mode, "allow_non_fake_inputs", True):
            code = compile_fx_inner(graph, inputs, **kwargs)
        inner.append((graph, code))
        return code

    with (
        lowering(capture, options, simd_width) as context,
        _kept_kernels(kernels),
        _without_comments(),
        kept_triton_kernels(triton, tuned),
    ):
        compile_fx(capture.graph, list(capture.example_inputs), inner_compile=keep)
    if len(inner) != 1:
        raise ValueError(f"expected one Inductor graph, got {len(inner)}")
    graph, code = inner[0]
    if not any(node.op.startswith("call_") for node in graph.graph.nodes):
        raise NothingLowered
    nodes = list(graph.graph.nodes)
    return Lowered(
        output_code=code.source_code,
        kernels=kernels,
        triton=triton,
        constants=dict(code.constants or {}),
        mutated=frozenset(code.mutated_input_idxs),
        aligned=frozenset(code.inputs_to_check),
        input_count=sum(node.op == "placeholder" for node in nodes),
        output_count=len(nodes[-1].args[0]),
        refusals=_refusals(context.fw_metadata, capture),
        frozen=frozen,
    )


@contextlib.contextmanager
def lowering(
    capture: Capture, options: Mapping[str, Any], simd_width: int
) -> Iterator[TracingContext]:
    """What has to be in place around ``compile_fx`` of a captured graph.

    Source: torch/_dynamo/convert_frame.py, CaptureOutput (2.11, 2.13).
    """
    context = TracingContext(capture.fake_mode)
    backend = capture.raw.backend_input
    if backend is None:
        raise ValueError("nothing was captured")
    context.tensor_to_context = backend.tensor_to_context
    with (
        torch.no_grad(),
        get_metrics_context(),
        dynamo_timed("compilekit_lower"),
        tracing(context),
        torch._inductor.config.patch(dict(options)),
        torch._functorch.config.patch(enable_autograd_cache=False),
        _target_isa(simd_width),
    ):
        yield context


def _refusals(metadata: Any, capture: Capture) -> dict[str, str]:
    """What AOTAutograd's wrappers would do around the program → what to do about it.

    Source: torch/_functorch/_aot_autograd/schemas.py, ViewAndMutationMeta (2.11, 2.13).
    """
    found = {}
    if metadata.tokens:
        effects = ", ".join(sorted({str(token) for token in metadata.tokens}))
        found[f"ordered side effects ({effects})"] = (
            "Keep printing and other side effects out of the compiled method."
        )
    if metadata.traced_tangent_metas or metadata.num_backward_tokens:
        found["a backward graph"] = (
            "A program computes no gradients: leave torch.enable_grad() out."
        )
    for index, info in enumerate(metadata.input_info):
        if info.mutates_metadata:
            found[f"a new shape or stride for {capture.sources[index]}"] = (
                "Return the new tensor instead."
            )
    for index in metadata.mutated_inp_runtime_indices:
        found[f"a write to {capture.sources[index]} outside the graph"] = (
            "Write it in place under torch.no_grad()."
        )
    known = {
        OutputType.non_alias,
        OutputType.alias_of_input,
        OutputType.is_input,
        OutputType.alias_of_intermediate,
        OutputType.unsafe_view_alias,
    }
    for info in metadata.output_info:
        if info.output_type not in known:
            found[f"an output of kind {info.output_type.name}"] = "Return a copy of it."
    if metadata.num_intermediate_bases:
        found["views of intermediates that autograd would track"] = (
            "Leave torch.enable_grad() out."
        )
    if metadata.grad_enabled_mutation is not None:
        found["a change of grad mode that outlives the call"] = (
            "Use `with torch.no_grad():` instead of torch.set_grad_enabled."
        )
    if metadata.is_rng_op_functionalized:
        found["functionalised random numbers"] = (
            "Unset torch._functorch.config.functionalize_rng_ops."
        )
    return found


@contextlib.contextmanager
def _target_isa(simd_width: int) -> Iterator[None]:
    """Make Inductor generate for the target's vector width, whatever this CPU has.

    Source: torch/_inductor/cpu_vec_isa.py, valid_vec_isa_list and pick_vec_isa
    (2.11, 2.13); `vec_isa_ok` skips the probe that compiles and runs a kernel.
    """
    choices = {256: cpu_vec_isa.VecAVX2, 512: cpu_vec_isa.VecAVX512}
    isas = [choices[simd_width]()] if simd_width else []
    with (
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=isas),
        torch._inductor.config.patch(
            {"cpp.simdlen": simd_width or 1, "cpp.vec_isa_ok": True}
        ),
    ):
        yield


@contextlib.contextmanager
def _kept_kernels(into: dict[str, CppSource]) -> Iterator[None]:
    """Keep every C++ kernel's source instead of compiling and loading it.

    Source: torch/_inductor/codecache.py, CppPythonBindingsCodeCache
    .load_pybinding_async, suffix_template, call_entry_function (2.11, 2.13).
    """
    cache = torch._inductor.codecache.CppPythonBindingsCodeCache

    def keep(cls: Any, argtypes: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
        arguments = ", ".join(
            f"parse_arg<{argtype.replace('const ', '')}>(args, {index})"
            for index, argtype in enumerate(argtypes)
        )
        binding = cache.suffix_template.format(
            arg_len=len(argtypes),
            call_entry_func=cache.call_entry_function.format(arguments),
            entry_func=cache.entry_function,
            extra_parse_arg=cache.extra_parse_arg,
        )
        into[main_code] = CppSource(tuple(argtypes), main_code + binding)
        return lambda: _never_called

    with mock.patch.object(cache, "load_pybinding_async", classmethod(keep)):
        yield


def _never_called(*args: Any) -> None:
    raise RuntimeError("a kernel can't run while a program is being built")


@contextlib.contextmanager
def _without_comments() -> Iterator[None]:
    """Write no comments about a kernel's origins, which host code wouldn't keep.

    They take 2 % of the time: each prints its part of the graph.

    Source: torch/_inductor/utils.py, get_kernel_metadata (2.11, 2.13).
    """
    from torch._inductor import ir
    from torch._inductor.codegen import triton

    with (
        mock.patch.object(triton, "get_kernel_metadata", _no_comment),
        mock.patch.object(ir, "get_kernel_metadata", _no_comment),
    ):
        yield


def _no_comment(node_schedule: Any, wrapper: Any) -> tuple[str, str]:
    return "", ""


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor options behind a mode name (``default``, ``reduce-overhead``, …)."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic=False))


def program_options(threads: int) -> dict[str, Any]:
    """Options that the program route forces, and why.

    Args:
        threads: Fixed thread count, or 0 = decided at each call.
    """
    return {
        # The implicit mode sizes accumulators for the build's thread count and
        # crashes at any other (torch/_inductor/codegen/cpp.py, 2.13).
        "cpp.dynamic_threads": threads == 0,
        "cpp.threads": threads or -1,
        # Kernels are compiled by compilekit, once each; nothing is cached or forked.
        "compile_threads": 1,
        "fx_graph_cache": False,
        "cpp_wrapper": False,
        "graph_partition": False,
        "triton.cudagraphs": False,
        # One name for all: equal kernels get equal cubins, whatever their number.
        "triton.unique_kernel_names": False,
        "triton.descriptive_names": False,
        "static_launch_user_defined_triton_kernels": True,
        # A kernel that needs Triton's own launcher says why.
        "strict_static_cuda_launcher": True,
        "freezing": False,
        # Random numbers as eager draws them, so that seeds mean the same.
        "fallback_random": True,
        "benchmark_kernel": False,
    }
