"""Compile one bucket: capture → lower → harvest, up to kernels still in C++.

`compile_bucket` is the whole line, in order; everything it returns is bytes or JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import marshal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from compilekit._torch import capture as dynamo
from compilekit._torch.breaks import describe_break, place_of_error
from compilekit._torch.fake import FakeTensor
from compilekit._torch.lower import (
    CppSource,
    Lowered,
    NothingLowered,
    lower,
    mode_options,
    program_options,
)
from compilekit._torch.runtime import memory_order
from compilekit._torch.triton_kernels import (
    NotStaticError,
    TritonKernel,
    kernel_facts,
)
from compilekit.artifact.canonical import sha256
from compilekit.artifact.program import (
    Constant,
    Entry,
    GraphInput,
    Program,
)
from compilekit.compiler import convention, hugging_face, side_effects
from compilekit.compiler.attention import Attention, attention_from, counted, hold_gate
from compilekit.compiler.causal import pass_causality
from compilekit.compiler.entry import describe_entry, refuse_unfit
from compilekit.compiler.failures import explained, nothing_compiled, summary
from compilekit.compiler.freezing import FrozenWeights
from compilekit.compiler.harvest import host_code
from compilekit.compiler.sources import Place
from compilekit.compiler.traced_call import fake_device, traced_call
from compilekit.compiler.tuning import Tuning
from compilekit.config import Config, EntryConfig
from compilekit.errors import (
    CaptureError,
    GraphBreakError,
    UnsupportedByProgramError,
)
from compilekit.plan import Bucket
from compilekit.runtime.model import (
    ambient,
    tensor_spec,
)
from compilekit.targets import Target

OnStage = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class CompiledBucket:
    """One bucket, all but its kernels compiled.

    Attributes:
        program: Its description; `kernels` is still empty.
        entry: What this bucket says about the entry.
        code: ``call.py``.
        bytecode: ``call.pyc``, so that loading parses nothing.
        kernels: Name in `code` → C++ source.
        triton: Name in `code` → Triton kernel and its grid.
        tuned: Launches of our own kernels that the tuning file chose: symbol,
            programs, warps.
        constants: File name in ``constants/`` → bytes.
        attention: What its attention calls got.
        warning: What a gate has to say about it; empty if nothing.
    """

    program: Program
    entry: Entry
    code: str
    bytecode: bytes
    kernels: Mapping[str, CppSource]
    triton: Mapping[str, tuple[TritonKernel, tuple[int, int, int]]]
    tuned: frozenset[tuple[str, int, int]]
    constants: Mapping[str, bytes]
    attention: Attention
    warning: str


def compile_bucket(
    model: torch.nn.Module,
    config: Config,
    entry: EntryConfig,
    bucket: Bucket,
    target: Target,
    on_stage: OnStage,
    tuning: Tuning,
    weights: FrozenWeights | None = None,
) -> CompiledBucket:
    """Compile a bucket of an entry on fake tensors.

    Args:
        model: The fake model, from `compilekit.compiler.models.build_fake`.
        on_stage: Called with a stage's name and seconds when it ends.
        tuning: What won on a device, kernel by kernel.
        weights: What is folded into the program; None = nothing.
    Raises:
        GraphBreakError: Dynamo can't hold the call in one graph.
        UnsupportedByProgramError: the program route can't carry something.
        HarvestError: the compiled code can't travel.
    """
    dynamo.reset()
    began = time.perf_counter()
    call = traced_call(model, config, entry, bucket, fake_device(target))
    entry, kwargs, function = call.entry, call.kwargs, call.function
    with _ambient_kept(), call.around:
        captured = _capture(function, model, kwargs, target, config)
        places = convention.inputs(captured)
        asked: list[tuple[str, str]] = []
        with attention_from(config.compile.attention):
            stand_ins = _run_graph(captured, asked)
        before = side_effects.snapshot(captured, model, kwargs)
        with explained("Dynamo's own bytecode can't be run around the graph"):
            value = dynamo.replay(captured, function, (model, kwargs), stand_ins)
        side_effects.refuse_side_effects(captured, model, kwargs, before)
    attention = counted(asked)
    warning = hold_gate(attention, config.gates.math_attention)
    on_stage("capture", time.perf_counter() - began)

    began = time.perf_counter()
    _ready(captured, entry)
    tuned: frozenset[tuple[str, int, int]] = frozenset()
    if call.own_kernels:
        from compilekit.compiler import decode_kernels

        tuned = decode_kernels.replace(captured.graph, tuning)
    options = inductor_options(config)
    values = weights.values(places) if weights else {}
    with attention_from(config.compile.attention):
        lowered = _lower(captured, options, target, tuning.configs(), values)
    _refuse_wrappers(lowered, len(places))
    on_stage("lower", time.perf_counter() - began)

    began = time.perf_counter()
    host = host_code(
        lowered.output_code, lowered.constants, target.kind, _triton_kernels(lowered)
    )
    live = {
        id(example): place
        for example, place in zip(captured.example_inputs, places, strict=True)
    }
    code = _header(entry, bucket, target) + host.code
    constants = {
        name: _constant(name, lowered.constants[name]) for name in host.constants
    }
    compiled = CompiledBucket(
        program=Program(
            target=target.name,
            entry=entry.name,
            bucket=bucket.name,
            axes=dict(bucket.axes),
            inputs=_inputs(captured, places, lowered),
            outputs=convention.outputs(captured, stand_ins),
            result=convention.result(value, stand_ins, model, kwargs, live),
            kernels={},
            constants={name: constant for name, (constant, _) in constants.items()},
            externs=host.externs,
        ),
        entry=describe_entry(
            model,
            config,
            target,
            call,
            captured,
            places,
            lowered,
            host.operators,
            weights,
        ),
        code=code,
        bytecode=_bytecode(code),
        kernels={name: lowered.kernels[body] for name, body in host.kernels.items()},
        triton={
            name: (kernel, host.launches.grids[name])
            for name, kernel in host.launches.kernels.items()
        },
        tuned=tuned,
        constants={
            f"{constant.digest}.safetensors": data
            for constant, data in constants.values()
        },
        attention=attention,
        warning=warning,
    )
    refuse_unfit(model, compiled.entry)
    on_stage("harvest", time.perf_counter() - began)
    return compiled


def capture_bucket(
    model: torch.nn.Module,
    config: Config,
    entry: EntryConfig,
    bucket: Bucket,
    target: Target,
) -> dynamo.Capture:
    """Capture a bucket as `compile_bucket` does, for whoever runs the graph itself."""
    dynamo.reset()
    call = traced_call(model, config, entry, bucket, fake_device(target))
    with _ambient_kept(), call.around:
        captured = _capture(call.function, model, call.kwargs, target, config)
    _ready(captured, entry)
    return captured


def _ready(captured: dynamo.Capture, entry: EntryConfig) -> None:
    """Make a captured graph what is lowered; a tuner must see the same kernels."""
    dynamo.normalise_annotations(captured.graph, captured.example_inputs)
    if entry.role:
        from compilekit.compiler import generate

        generate.store_tables(captured.graph)


def inductor_options(config: Config) -> dict[str, Any]:
    """Inductor's options: of the mode, the configuration's, and those we force."""
    return {
        **mode_options(config.compile.mode),
        **config.compile.options,
        **program_options(config.compile.threads),
    }


@contextlib.contextmanager
def _ambient_kept() -> Iterator[None]:
    """Refuse a call that leaves process-wide state changed, and put it back.

    Raises:
        UnsupportedByProgramError: names the state.
    """
    before = {**ambient(), "torch function modes": dynamo.function_modes()}
    try:
        yield
        after = {**ambient(), "torch function modes": dynamo.function_modes()}
    finally:
        torch.set_default_dtype(getattr(torch, before["default_dtype"]))
        torch.use_deterministic_algorithms(before["deterministic"])
        torch.set_float32_matmul_precision(before["float32_matmul_precision"])
    changed = [name for name in before if after[name] != before[name]]
    if changed:
        raise UnsupportedByProgramError(
            f"the call changes process-wide state: {', '.join(changed)}. A program runs"
            " the graph only, so that change would be lost",
            hint="Set it at start, before attach.",
            thing=", ".join(changed),
        )


def _triton_kernels(lowered: Lowered) -> dict[str, TritonKernel]:
    kernels = {}
    for name, autotuner in lowered.triton.items():
        try:
            kernels[name] = kernel_facts(autotuner)
        except NotStaticError as exc:
            raise UnsupportedByProgramError(
                f"kernel {name} can't be launched without Triton: {exc}",
                hint="Build this bucket with the cache route.",
                thing=name,
            ) from exc
    return kernels


def _capture(
    function: Any,
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    target: Target,
    config: Config,
) -> dynamo.Capture:
    try:
        try:
            captured = _traced(function, model, kwargs)
        except dynamo.CaptureUnsupported as exc:
            if not hugging_face.installs_output_hooks(place_of_error(exc)):
                raise
            hugging_face.install_output_hooks(model)
            captured = _traced(function, model, kwargs)
    except dynamo.CaptureUnsupported as exc:
        raise GraphBreakError(
            f"Dynamo can't hold the call in one graph: {describe_break(exc)}",
            hint="`compilekit explain CONFIG` lists every break with its fix.",
            reason=str(exc).strip(),
        ) from exc
    if captured is None or not dynamo.operations(captured):
        raise nothing_compiled()
    foreign = dynamo.foreign_device(captured, target.kind)
    if foreign is not None:
        kind = target.kind.upper()
        raise UnsupportedByProgramError(
            f"the call uses a tensor on {foreign[0]} ({foreign[1]}), and a program for"
            f" a {kind} target has everything on the {kind}",
            hint="Take the device from an input: torch.ones(…, device=x.device).",
            thing=foreign[0],
        )
    if config.compile.attention:
        pass_causality(captured.graph)
    return captured


def _traced(
    function: Any, model: torch.nn.Module, kwargs: Mapping[str, Any]
) -> dynamo.Capture | None:
    with explained("the call can't be traced"):
        return dynamo.capture_call(function, (model, dict(kwargs)))


def _run_graph(
    captured: dynamo.Capture, attention: list[tuple[str, str]]
) -> tuple[Any, ...]:
    """The graph's outputs on its fake inputs.

    Raises:
        UnsupportedByProgramError: an operation depends on values, or gives an input
            another shape or storage.
        CaptureError: an operation can't be run on fake tensors.
    """
    before = convention.layouts(captured)
    try:
        stand_ins = dynamo.run_graph(captured, attention)
    except dynamo.GraphRunError as exc:
        where = f" ({exc.where})" if exc.where else ""
        if exc.data_dependent:
            raise UnsupportedByProgramError(
                f"{exc.operation} makes a size or a Python number out of a tensor's"
                f" values{where}, and a program has fixed shapes and no numbers",
                hint="Keep it a tensor of fixed shape: torch.where or a mask instead of"
                " indexing, padding instead of nonzero, no .item().",
                thing=exc.operation,
            ) from exc
        hint = "The bucket's log holds the traceback."
        if exc.operation == "scaled_dot_product_attention":
            hint = (
                'If [compile] attention rules out too much: "math" takes every call. '
                + hint
            )
        raise CaptureError(
            f"{exc.operation}{where} can't be run on fake tensors, so its outputs can't"
            f" be described: {summary(exc.__cause__)}",
            hint=hint,
        ) from exc
    convention.refuse_reshaped(captured, before)
    return stand_ins


def _lower(
    captured: dynamo.Capture,
    options: Mapping[str, Any],
    target: Target,
    tuned: Mapping[str, Mapping[str, Any]],
    weights: Mapping[int, torch.Tensor],
) -> Lowered:
    try:
        with explained("Inductor can't compile the graph"):
            return lower(captured, options, target.simd_width, tuned, weights)
    except NothingLowered as exc:
        raise nothing_compiled() from exc


def _refuse_wrappers(lowered: Lowered, input_count: int) -> None:
    refusals = dict(lowered.refusals)
    if lowered.input_count != input_count:
        refusals["inputs that share memory, one of them written"] = (
            "Pass tensors with memory of their own, or write to a copy."
        )
    if refusals:
        raise UnsupportedByProgramError(
            f"the program route can't carry {'; '.join(refusals)}",
            hint=" ".join(dict.fromkeys(refusals.values())),
            thing="; ".join(refusals),
        )


def _header(entry: EntryConfig, bucket: Bucket, target: Target) -> str:
    return (
        f'"""Inductor\'s output code: {entry.name} {bucket.name} for {target.name}.\n\n'
        "``call(args)`` takes the graph inputs of program.json in order (and empties\n"
        "the list), launches the kernels, and returns the graph outputs.\n"
        '"""\n\n'
    )


def _bytecode(code: str) -> bytes:
    """A ``.pyc`` in Python's own format, checked by the hash of its source.

    Source: PEP 552; marshal's version 2 writes no references, whose flags would depend
    on how often an object happens to be shared in this process.
    """
    compiled = compile(code, "call.py", "exec", dont_inherit=True, optimize=2)
    flags = (0b11).to_bytes(4, "little")
    source_hash = importlib.util.source_hash(code.encode())
    return (
        importlib.util.MAGIC_NUMBER + flags + source_hash + marshal.dumps(compiled, 2)
    )


def _constant(name: str, tensor: torch.Tensor) -> tuple[Constant, bytes]:
    """What a program says about a constant, and the bytes of its safetensors file."""
    from safetensors.torch import save

    if isinstance(tensor, FakeTensor) or tensor.is_mkldnn:
        raise UnsupportedByProgramError(
            f"the compiled code holds constant {name}, which has no plain values here"
            f" ({type(tensor).__name__}, {tensor.layout})",
            hint="Register it on the model with register_buffer.",
            thing=name,
        )
    order = memory_order(tensor)
    if order is None:
        raise UnsupportedByProgramError(
            f"the compiled code holds constant {name}, whose elements don't follow each"
            f" other in memory (stride {list(tensor.stride())})",
            hint="Make it contiguous, or register it with register_buffer.",
            thing=name,
        )
    data = save({"value": tensor.detach().permute(order)})
    in_order = order == tuple(range(tensor.dim()))
    return Constant(sha256(data), "value", () if in_order else order), data


def _inputs(
    captured: dynamo.Capture, places: tuple[Place, ...], lowered: Lowered
) -> tuple[GraphInput, ...]:
    return tuple(
        GraphInput(
            kind=place.kind,
            path=place.path,
            spec=tensor_spec(example) if place.kind == "argument" else None,
            mutated=index in lowered.mutated,
            aligned=index in lowered.aligned,
        )
        for index, (place, example) in enumerate(
            zip(places, captured.example_inputs, strict=True)
        )
    )
