"""Private Dynamo names: capture one call as one FX graph, with what it depends on."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture
from torch._dynamo.eval_frame import set_enable_dynamic
from torch._dynamo.exc import (
    TensorifyScalarRestartAnalysis,
    Unsupported,
    UserError,
)
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
)
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

from compilekit._torch.breaks import describe_place, place_in

CaptureRestart = TensorifyScalarRestartAnalysis
CaptureUnsupported = (Unsupported, UserError)


class GraphRunError(Exception):
    """A captured graph can't be run on fake tensors.

    Attributes:
        operation: What was being run, e.g. ``aten.nonzero.default``.
        where: The line of user code, or "".
        data_dependent: True if it asked for the values of a tensor.
    """

    def __init__(self, operation: str, where: str, data_dependent: bool) -> None:
        super().__init__(operation, where, data_dependent)
        self.operation = operation
        self.where = where
        self.data_dependent = data_dependent


class NumpyArray:
    """Stands in for an array that Dynamo's bytecode makes of a graph output."""


@dataclasses.dataclass(frozen=True)
class SideEffect:
    """A Python object that existed before the call and that the call changes.

    Attributes:
        source: Python expression for the object, over ``L`` (arguments) and ``G``.
        attributes: Attributes written; empty = its contents (a list, a dict).
    """

    source: str
    attributes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GuardedRead:
    """One guard: a value that capture looked at.

    Attributes:
        source: Python expression for the value, over ``L`` and ``G``.
        kind: Dynamo's guard type, e.g. ``CONSTANT_MATCH``.
        attribute: What a ``HASATTR`` guard asked the value for; empty in 2.11, where
            the attribute is part of the source.
        key: What a ``DICT_CONTAINS`` or ``DICT_NOT_CONTAINS`` guard looked for.
    """

    source: str
    kind: str
    attribute: str = ""
    key: Any = None


@dataclasses.dataclass(frozen=True)
class Capture:
    """One captured call.

    Attributes:
        graph: The FX graph; parameters, buffers and arguments are placeholders.
        example_inputs: Fake tensors in placeholder order.
        sources: Python expression of each placeholder, over ``L`` and ``G``.
        fake_mode: The mode of the example inputs.
        raw: Dynamo's own record, for `lower` and `replay`.
        reads: Every guard.
        side_effects: Every object changed outside the graph.
        globals: The globals that ``G`` in an expression stands for.
    """

    graph: torch.fx.GraphModule
    example_inputs: tuple[Any, ...]
    sources: tuple[str, ...]
    fake_mode: Any
    raw: CaptureOutput
    reads: tuple[GuardedRead, ...]
    side_effects: tuple[SideEffect, ...]
    globals: dict[str, Any]


def capture_call(function: Callable[..., Any], args: tuple[Any, ...]) -> Capture | None:
    """Trace ``function(*args)`` on fake tensors into one graph, shapes static.

    Returns:
        The capture, or None if no tensor operation was found.
    Raises:
        CaptureUnsupported: Dynamo would have to break the graph.
    Source: torch/_dynamo/convert_frame.py, fullgraph_capture; config.py, allow_rnn
    (2.11, 2.13).
    """
    effects: list[SideEffect] = []
    with (
        torch.no_grad(),
        get_metrics_context(),
        dynamo_timed("compilekit_capture"),
        set_enable_dynamic(False),
        # Otherwise it breaks the graph at nn.LSTM, nn.GRU and nn.RNN.
        torch._dynamo.config.patch(allow_rnn=True),
        _recorded_side_effects(effects),
    ):
        try:
            raw = fullgraph_capture(function, args, {})
        except CaptureRestart:
            # Dynamo asks for a second run once it knows which scalars matter.
            effects.clear()
            raw = fullgraph_capture(function, args, {})
    backend = raw.backend_input
    if backend is None:
        return None
    placeholders = [
        n for n in backend.graph_module.graph.nodes if n.op == "placeholder"
    ]
    output_graph = raw.graph_capture_output.output_graph
    return Capture(
        graph=backend.graph_module,
        example_inputs=tuple(backend.example_inputs),
        sources=tuple(node._dynamo_source.name for node in placeholders),
        fake_mode=backend.fake_mode,
        raw=raw,
        reads=tuple(
            _guarded_read(guard.name, guard.create_fn_name(), guard.create_fn)
            for guard in output_graph.guards
            if guard.name
        ),
        side_effects=tuple(dict.fromkeys(effects)),
        globals=raw.graph_capture_output.f_globals,
    )


def _guarded_read(source: str, kind: str, create_guard: Any) -> GuardedRead:
    """A guard, with what its arguments ask for: ``partial(HASATTR, attr="bias")``.

    Source: torch/_dynamo/guards.py, GuardBuilder.HASATTR, DICT_CONTAINS (2.11, where
    ``invert`` may turn it round) and DICT_NOT_CONTAINS (2.13).
    """
    asked = getattr(create_guard, "keywords", {})
    if kind == "DICT_CONTAINS" and asked.get("invert"):
        kind = "DICT_NOT_CONTAINS"
    return GuardedRead(source, kind, str(asked.get("attr", "")), asked.get("key"))


@contextlib.contextmanager
def _recorded_side_effects(into: list[SideEffect]) -> Iterator[None]:
    """Note which existing objects Dynamo's bytecode will change.

    Source: torch/_dynamo/side_effects.py, SideEffects.codegen_update_mutated and
    _get_modified_vars (2.11, 2.13).
    """
    original = SideEffects.codegen_update_mutated

    def record(self: SideEffects, *args: Any, **kwargs: Any) -> Any:
        for variable in self._get_modified_vars():
            kind = variable.mutation_type
            # It has no name; `function_modes` sees a call that leaves one behind.
            if isinstance(variable, TorchFunctionModeStackVariable):
                continue
            if variable.source is None or not isinstance(
                kind, (AttributeMutationExisting, ValueMutationExisting)
            ):
                continue
            attributes = self.store_attr_mutations.get(variable, {})
            into.append(SideEffect(variable.source.name, tuple(attributes)))
        return original(self, *args, **kwargs)

    with mock.patch.object(SideEffects, "codegen_update_mutated", record):
        yield


def function_modes() -> int:
    """How many torch function modes are active (a default device is one of them).

    Source: torch/overrides.py, _get_current_function_mode_stack (2.11, 2.13).
    """
    return int(torch._C._len_torch_function_stack())


def operations(capture: Capture) -> int:
    """How many operations the graph holds."""
    return sum(node.op.startswith("call_") for node in capture.graph.graph.nodes)


def foreign_device(capture: Capture, expected: str) -> tuple[str, str] | None:
    """Device type and line of the first tensor that isn't on the expected one."""
    for node in capture.graph.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.device.type != expected:
            where = describe_place(place_in(node.meta.get("stack_trace") or ""))
            return value.device.type, where or str(node.target)
    return None


def run_graph(
    capture: Capture, attention: list[tuple[str, str]] | None = None
) -> tuple[Any, ...]:
    """Run the captured graph on its fake inputs; the outputs in graph order.

    Args:
        attention: Filled with backend and description of every attention call.
    Raises:
        GraphRunError: an operation needs values, which fake tensors don't have.
    """
    # Fake inputs keep the mode they were made in; Dynamo's own mode is another one.
    modes = {t.fake_mode for t in capture.example_inputs if isinstance(t, FakeTensor)}
    mode = modes.pop() if modes else capture.fake_mode
    interpreter = _Located(capture.graph)
    interpreter.attention = [] if attention is None else attention
    with torch.no_grad(), mode:
        try:
            return tuple(interpreter.run(*capture.example_inputs))
        except (DataDependentOutputException, DynamicOutputShapeException) as exc:
            raise GraphRunError(str(exc.func), interpreter.where(), True) from exc
        except (AttributeError, RuntimeError) as exc:
            operation = interpreter.operation()
            raise GraphRunError(operation, interpreter.where(), False) from exc


class _Located(torch.fx.Interpreter):
    """Knows which node it is at, and which backend attention gets."""

    attention: list[tuple[str, str]]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.flex_attention:
            self.attention.append(("flex", self.where()))
        if getattr(target, "_opname", "") == "decode_attention":
            self.attention.append(("decode", self.where()))
        if target is not torch.nn.functional.scaled_dot_product_attention:
            return super().call_function(target, args, kwargs)
        seen = _AttentionOperators()  # type: ignore[no-untyped-call]
        with seen:
            result = super().call_function(target, args, kwargs)
        tensors = [*args, *kwargs.values()]
        texts = [_described(t) for t in tensors if isinstance(t, torch.Tensor)]
        where = f" at {self.where()}" if self.where() else ""
        self.attention.append((seen.backend, f"{', '.join(texts)}{where}"))
        return result

    def run_node(self, n: torch.fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def operation(self) -> str:
        target = self._node.target
        return str(getattr(target, "__name__", target))

    def where(self) -> str:
        return describe_place(place_in(self._node.meta.get("stack_trace") or ""))


class _AttentionOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which operator attention becomes on fake tensors of the target's device.

    PyTorch's C++ chooses as it will for the compiled code. Asking it
    (``torch._fused_sdp_choice``) would always give math for fake tensors.

    Source: aten/src/ATen/native/transformers/attention.cpp,
    scaled_dot_product_attention (2.11, 2.13).
    """

    backend = "math"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for backend in ("cudnn", "flash", "efficient"):
            if f"_scaled_dot_product_{backend}_attention" in str(func):
                self.backend = backend
        return func(*args, **(kwargs or {}))


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} strides {list(tensor.stride())}"


def replay(
    capture: Capture,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    outputs: tuple[Any, ...],
) -> Any:
    """Run Dynamo's bytecode around the graph with stand-in graph outputs.

    What comes back is the caller's own output object, in which graph outputs, inputs
    passed through and constants can be told apart by identity. A graph output that
    the caller gets as a NumPy array comes back as a `NumpyArray`.

    Source: torch/_dynamo/convert_frame.py, GraphRuntimeEnv.forward_callable
    and torch/_dynamo/utils.py, to_numpy_helper (2.11, 2.13).
    """
    environment = capture.raw.graph_capture_output.get_runtime_env()
    backend = capture.raw.backend_input
    if backend is None:
        raise ValueError("nothing was captured")
    known = capture.globals
    # 2.11 doesn't look for built-ins by itself.
    scope = {**vars(builtins), **known}
    extra = {name: scope[name] for name in environment.external_refs if name in scope}
    # C code that imports a module looks for it in the caller's globals.
    extra["__builtins__"] = builtins
    call = environment.forward_callable(
        backend.backend_id, lambda *inputs: outputs, extra_globals=extra
    )
    arrays = mock.patch.object(
        torch._dynamo.utils, "to_numpy_helper", return_value=NumpyArray()
    )
    with torch.no_grad(), arrays:
        return call(*args)


def traced_functions(capture: Capture) -> list[tuple[str, CodeType]]:
    """``module:qualname`` and code of every function that tracing went through.

    Source: torch/_dynamo/convert_frame.py, GraphCaptureOutput.traced_code (2.11, 2.13).
    """
    modules = {
        file: name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None))
    }
    return [
        (f"{modules[code.co_filename]}:{code.co_qualname}", code)
        for code in capture.raw.graph_capture_output.traced_code
        if code.co_filename in modules
    ]


def normalise_annotations(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
    """Write the placeholder types that a run on real tensors would have written.

    Dynamo annotates a placeholder with the type of its example; ``FakeTensor`` there
    is the one thing in which AOTAutograd's cache key differs from a real run's.

    Args:
        examples: The example of each placeholder, in order.
    Source: torch/_dynamo/output_graph.py, create_graph_input (2.11, 2.13).
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for node, example in zip(placeholders, examples, strict=True):
        if node.type is FakeTensor:
            is_parameter = isinstance(example, torch.nn.Parameter)
            node.type = torch.nn.Parameter if is_parameter else torch.Tensor
    graph.recompile()


def reset() -> None:
    """Forget everything Dynamo compiled or specialised in this process."""
    torch._dynamo.reset()
