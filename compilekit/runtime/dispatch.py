"""Send a call to its bucket: bind, check, pad, run, cut, put the result together.

One `Dispatcher` per entry replaces the model's method. A call goes through

    arguments → axis sizes → bucket → padded tensors → program → outputs → result

and costs tens of microseconds besides the program; docs/runtime.md lists what each call
checks. Anything that moved since attach sends the call through a full comparison with
the entry (see `Watch`), and is bound again or refused by name.

Threads: calls run side by side. Programs that write parameters or buffers take a lock,
and so does the comparison after a change.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled

from compilekit._torch.runtime import (
    has_tangent,
    in_dual_level,
    is_deterministic,
    is_tracing,
    same_layout,
    untraceable,
)
from compilekit.artifact.program import Entry, GraphOutput, Program, TensorSpec
from compilekit.buckets import BucketTable, bucket_table, no_bucket_error
from compilekit.errors import CallRefusedError, CompilekitError, MismatchError
from compilekit.plan import Bucket
from compilekit.runtime.arguments import Arguments, Given, contiguous_spec
from compilekit.runtime.exact import (
    MISSED,
    ExactCall,
    ExactCalls,
    ExactProgram,
    native_call,
)
from compilekit.runtime.model import (
    ALIGNMENT,
    AttachedMethod,
    ModelView,
    model_mismatches,
    own_method,
)
from compilekit.runtime.overlap import first_overlap, storages
from compilekit.runtime.program import Call, Native
from compilekit.runtime.result import (
    ModelOutputFields,
    Outputs,
    ResultBuilder,
    model_output_fields,
    result_builder,
)
from compilekit.runtime.watch import Watch

# How often one call compares a model whose modules are replaced meanwhile.
_COMPARISONS = 5

OnRefusal = Callable[[CompilekitError, tuple[Any, ...], dict[str, Any]], Any]


class BoundProgram(NamedTuple):
    """A program with everything that a call needs looked up.

    Attributes:
        call: The host code.
        order: Graph input i is element ``order[i]`` of the model's tensors followed by
            the arguments.
        arguments: (graph input, argument) of each graph input that a call passes.
        specs: Expected metadata of each argument.
        outputs: Graph outputs.
        plain: True if every graph output is what the program returns, in order.
        simple: True if besides it writes no input, and runs on a CPU.
        mutated: Graph inputs that the program writes.
        writes: Their paths.
        build: Makes the caller's output.
        fields: The same for a call that wasn't padded, as data where that is enough.
        aligned: Arguments among the graph inputs whose address a GPU kernel needs to be
            a multiple of 16 → True if a copy would do.
    """

    bucket: Bucket
    call: Call
    order: tuple[int, ...]
    arguments: tuple[tuple[int, int], ...]
    specs: tuple[TensorSpec, ...]
    outputs: tuple[GraphOutput, ...]
    plain: bool
    simple: bool
    mutated: tuple[int, ...]
    writes: tuple[str, ...]
    build: ResultBuilder
    fields: ModelOutputFields | None
    aligned: tuple[tuple[int, bool], ...]


class Dispatcher(AttachedMethod):
    """An entry bound to a live model; calling it runs the right bucket's program.

    A copy of the model (``copy.deepcopy``, pickle) gets its class's own method: it has
    other tensors, which nothing was bound to.

    Args:
        model: The live model; it must fit the entry (`model_mismatches`).
        entry: The calling convention.
        class_name: The class that was compiled, for the comparison after a change.
        device: Where the programs run.
        programs: Every bucket's program and host code.
        native: What the artifact brings for its calls; None = Python and torch do it.
        on_refusal: What to do with a call that no program covers: called with the
            error and the call's arguments, returns the result (or raises).
        on_rebind: Called after a changed model was compared and bound again.
        lock: Taken by programs that write the model; one for all entries of a model.
    Raises:
        AttachError: a class of the output can't be imported.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        entry: Entry,
        class_name: str,
        device: torch.device,
        programs: Mapping[str, tuple[Program, Call]],
        native: Native | None,
        on_refusal: OnRefusal,
        on_rebind: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        method = own_method(model, entry.method)
        # inspect.signature(model.forward) and help() still see the model's own method.
        functools.update_wrapper(self, method, updated=())
        self.__code__ = method.__code__
        self.model = model
        self.entry = entry
        self.class_name = class_name
        self.device = device
        self.native = native
        self.on_refusal = on_refusal
        self.on_rebind = on_rebind
        self.table: BucketTable = bucket_table(
            [_bucket(program, entry.axes) for program, _ in programs.values()],
            entry.inputs,
        )
        self.arguments = Arguments(
            entry,
            method,
            _live([program for program, _ in programs.values()]),
            [bucket.name for bucket in self.table.buckets],
            device,
        )
        self.programs = {
            name: self._bind(program, call)
            for name, (program, call) in programs.items()
        }
        self.by_sizes = {
            tuple(bound.bucket.axes.values()): bound for bound in self.programs.values()
        }
        self._deterministic: bool = entry.ambient["deterministic"]
        self.lock = lock
        self.serial: contextlib.AbstractContextManager[Any] = (
            lock if entry.mutates_model else contextlib.nullcontext()
        )
        self.watch: Watch
        # One of them: C++ of the artifact, or torch's guards.
        self.native_call: ExactCall | None = None
        self._guards: ExactCalls | None = None

    def start_watching(self, view: ModelView) -> None:
        """Note what the model looks like, as it was compared and with us in it."""
        self.follow(self._watch(view))
        # Not at a later change: a guard made inside a trace would hold for it.
        if self.native_call is None:
            specs = {sizes: bound.specs for sizes, bound in self.by_sizes.items()}
            self._guards = ExactCalls(self.arguments, specs)

    def follow(self, watch: Watch) -> None:
        """From now on, a call takes the model's tensors from here."""
        self.watch = watch
        self.native_call = self._bind_native(watch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call's bucket; refuse, or hand over, what none covers."""
        try:
            exact = self.native_call or self._guarded
            result = exact(args, kwargs)
            return self._run_fitted(args, kwargs) if result is MISSED else result
        except CompilekitError as exc:
            error = exc
        return self.on_refusal(error, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built again before the copy's attributes are set, so it finds the class's.
        return getattr, (self.model, self.entry.method)

    def _watch(self, view: ModelView) -> Watch:
        return Watch(view, self.entry, self.native and self.native.changed)

    def _bind_native(self, watch: Watch) -> ExactCall | None:
        """Exact calls in C++, if nothing about the entry or the model needs Python."""
        bounds = self.by_sizes.values()
        if self.native is None or not all(bound.simple for bound in bounds):
            return None
        programs = [
            ExactProgram(
                bound.specs,
                watch.inputs(bound.bucket.name, bound.order),
                bound.arguments,
                bound.call,
                bound.build,
                bound.fields,
            )
            for bound in bounds
        ]
        return native_call(
            self.native, self.arguments, programs, watch, self._deterministic
        )

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An exact call without C++ of the artifact."""
        match = self._guards.match(args, kwargs) if self._guards is not None else None
        if match is None:
            return MISSED
        values, fitted, sizes = match
        bound = self.by_sizes[sizes]
        return bound.build(self._run(bound, fitted, fitted), values, None)

    def _run_fitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that isn't an exact one: checked part by part, padded and cut."""
        self._refuse_modes()
        values = self.arguments.named(args, kwargs)
        given, sizes = self.arguments.given(values)
        bound, cut = self._bucket(sizes)
        fitted = self.arguments.fitted(given, bound.specs, values)
        return bound.build(self._run(bound, fitted, given), values, cut)

    def _run(
        self, bound: BoundProgram, fitted: Sequence[torch.Tensor], given: Given
    ) -> Outputs:
        """The graph outputs of a program on arguments that fit it."""
        watch = self._checked_watch()
        if bound.mutated:
            self._refuse_overlap(bound, fitted, watch)
        inputs = _graph_inputs(bound, watch, fitted)
        for index, copied in bound.aligned:
            if inputs[index].data_ptr() % ALIGNMENT:
                inputs[index] = self._aligned(bound, inputs[index], index, copied)
        if is_grad_enabled():
            # Operators that write into out= refuse to run with gradients on.
            with torch.no_grad():
                return self._call(bound, inputs, given)
        return bound.call(inputs) if bound.simple else self._call(bound, inputs, given)

    def run_own(self, bound: BoundProgram, fitted: list[torch.Tensor]) -> Outputs:
        """Run a bucket's program on memory that was made for it.

        For whoever owns the arguments, and so knows that they lie apart and aligned.
        """
        self._refuse_modes()
        inputs = _graph_inputs(bound, self._checked_watch(), fitted)
        return self._call(bound, inputs, fitted)

    def _aligned(
        self, bound: BoundProgram, tensor: torch.Tensor, index: int, copied: bool
    ) -> torch.Tensor:
        """A copy at an address that GPU kernels can read 16 bytes at once from."""
        if copied:
            return same_layout(tensor)
        path = self.arguments.tensors[bound.order[index] - len(self.entry.tensors)].path
        raise CallRefusedError(
            f"{self.entry.name}: {path} starts {tensor.data_ptr() % ALIGNMENT} bytes"
            f" beyond a multiple of {ALIGNMENT}, and the call writes it or returns a"
            " view of it, so no copy would do",
            hint="Pass a tensor of its own memory, or a view that starts at one.",
        )

    def _bucket(
        self, sizes: tuple[int, ...]
    ) -> tuple[BoundProgram, tuple[int, ...] | None]:
        """The program for a call's sizes, and what its outputs are cut to."""
        if sizes in self.by_sizes:
            return self.by_sizes[sizes], None
        bucket = self.table.choose(sizes)
        if bucket is None:
            raise no_bucket_error(self.table, sizes, self.entry.name)
        bound = self.programs[bucket.name]
        if bound.writes:
            names = ", ".join(bucket.name for bucket in self.table.buckets)
            raise CallRefusedError(
                f"{self.entry.name}: the call writes {', '.join(bound.writes)}, so it"
                f" can't be padded to bucket {bucket.name}",
                hint=f"Pass exactly a bucket's shape: {names}.",
            )
        return bound, sizes

    def _refuse_overlap(
        self,
        bound: BoundProgram,
        arguments: Sequence[torch.Tensor],
        watch: Watch,
    ) -> None:
        """A program's inputs lie apart, or else none of them may be written."""
        model_tensors = watch.tensors
        count = len(model_tensors)
        written = [bound.order[index] for index in bound.mutated]
        own = [position - count for position in written if position >= count]
        others = model_tensors if own else [model_tensors[i] for i in written]
        found = first_overlap(
            arguments, own, others, watch.storages() if own else storages(others)
        )
        if found is None:
            return
        one, other = found
        path = self.arguments.tensors[one].path
        second = (
            "a tensor of the model"
            if other is None
            else f"input {self.arguments.tensors[other].path}"
        )
        raise CallRefusedError(
            f"{self.entry.name}: input {path} shares memory with {second}, and the"
            f" call writes {', '.join(bound.writes)}",
            hint="Pass a copy: the program was compiled for tensors that lie apart.",
            argument=path,
        )

    def _call(
        self, bound: BoundProgram, inputs: list[torch.Tensor], given: Given
    ) -> Outputs:
        """Run the program; graph outputs in graph order."""
        if self.device.type == "cuda":
            # Host code allocates on the current device.
            with torch.cuda.device(self.device):
                return self._launch(bound, inputs, given)
        return self._launch(bound, inputs, given)

    def _launch(
        self, bound: BoundProgram, inputs: list[torch.Tensor], given: Given
    ) -> Outputs:
        if bound.plain and not bound.mutated:
            return bound.call(inputs)
        # The host code empties the list it is given.
        kept = list(inputs)
        with self.serial:
            returned = bound.call(inputs)
            if bound.mutated:
                written = [kept[index] for index in bound.mutated]
                torch.autograd.graph.increment_version(written)
        return returned if bound.plain else self._outputs(bound, kept, returned, given)

    def _outputs(
        self,
        bound: BoundProgram,
        inputs: list[torch.Tensor],
        returned: tuple[torch.Tensor, ...],
        given: Given,
    ) -> Outputs:
        """Graph outputs that are inputs, or views of inputs, from the live inputs."""
        outputs = []
        for output in bound.outputs:
            if output.source == "program":
                outputs.append(returned[output.index])
                continue
            base = inputs[output.index]
            if output.source == "view":
                spec, offset = output.spec, base.storage_offset() + output.offset
                outputs.append(base.as_strided(spec.shape, spec.stride, offset))
                continue
            # The caller's own tensor, not the copy that was padded or made contiguous.
            position = bound.order[output.index] - len(self.entry.tensors)
            own = given[position] if position >= 0 else None
            outputs.append(base if own is None else own)
        return outputs

    def _refuse_modes(self) -> None:
        """Refuse a call inside autocast, a trace or a fake mode.

        No call there is an exact one (exact.py), so those aren't asked.
        """
        autocast = torch.is_autocast_enabled(self.device.type)
        if autocast != self.entry.ambient["autocast"]:
            raise CallRefusedError(
                f"{self.entry.name} was built with autocast off, and the call is inside"
                " an autocast region",
                hint="Call it outside, or build with the dtype you want.",
            )
        if is_tracing():
            raise CallRefusedError(
                f"{self.entry.name} is being traced, and kernels leave no trace",
                hint="Call receipt.detach() before tracing or exporting the model.",
            )

    def _checked_watch(self) -> Watch:
        """What holds the live tensors, after the checks of each call."""
        deterministic = is_deterministic()
        if deterministic != self._deterministic:
            raise CallRefusedError(
                f"{self.entry.name} was built with deterministic algorithms"
                f" {_on(not deterministic)}, and they are {_on(deterministic)} now",
                hint="Call torch.use_deterministic_algorithms as it was at build.",
            )
        watch = self.watch
        if watch.changed():
            watch = self._bind_again()
        if is_grad_enabled() and watch.requires_grad():
            raise CallRefusedError(
                f"{self.entry.name} is called with gradients on, and parameters require"
                " them; a program computes no gradients",
                hint="Call it under torch.inference_mode() or torch.no_grad(), or"
                " call model.requires_grad_(False) once.",
            )
        if in_dual_level() and any(map(has_tangent, watch.tensors)):
            raise CallRefusedError(
                f"{self.entry.name} is called inside forward-mode AD, and parameters"
                " carry tangents; a program computes none",
                hint="Call it outside torch.autograd.forward_ad.dual_level().",
            )
        return watch

    def _bind_again(self) -> Watch:
        """After something moved: compare everything, then bind again or refuse."""
        with self.lock:
            if not self.watch.changed():
                return self.watch
            for _ in range(_COMPARISONS):
                # Watched before it is compared: a later change is noticed, by the next
                # call. This one began before it.
                view = ModelView(self.model)
                watch = self._watch(view)
                later = ModelView(self.model)
                mismatches = model_mismatches(later, self.entry, self.class_name)
                if mismatches:
                    raise MismatchError(
                        f"the model changed after attach ({self.entry.name})",
                        mismatches,
                        hint="Put it back, or call receipt.detach().",
                    )
                if watch.complete and later.modules == view.modules:
                    self.follow(watch)
                    self.on_rebind()
                    return watch
        raise CallRefusedError(
            f"{self.entry.name}: the model's modules change while they are compared",
            hint="Let the thread that replaces them finish first.",
        )

    def _bind(self, program: Program, call: Call) -> BoundProgram:
        tensors = {path: i for i, path in enumerate(self.entry.tensors)}
        arguments = {
            argument.path: len(tensors) + i
            for i, argument in enumerate(self.arguments.tensors)
        }
        specs = {g.path: g.spec for g in program.inputs if g.spec is not None}
        mutated = {
            index: graph_input.path
            for index, graph_input in enumerate(program.inputs)
            if graph_input.mutated
        }
        bucket = _bucket(program, self.entry.axes)
        order = tuple(
            (arguments if g.kind == "argument" else tensors)[g.path]
            for g in program.inputs
        )
        plain = all(
            output.source == "program" and output.index == index
            for index, output in enumerate(program.outputs)
        )
        return BoundProgram(
            bucket=bucket,
            call=call,
            order=order,
            arguments=tuple(
                (index, position - len(tensors))
                for index, position in enumerate(order)
                if position >= len(tensors)
            ),
            specs=tuple(
                specs.get(argument.path) or contiguous_spec(argument.rule, bucket.axes)
                for argument in self.arguments.tensors
            ),
            outputs=program.outputs,
            plain=plain,
            simple=plain and not mutated and self.device.type == "cpu",
            mutated=tuple(mutated),
            writes=tuple(mutated.values()),
            build=result_builder(
                program.result, self.entry.cuts, self.entry.axes, self.model
            ),
            fields=model_output_fields(program.result),
            aligned=_aligned_arguments(program) if self.device.type == "cuda" else (),
        )


def _graph_inputs(
    bound: BoundProgram, watch: Watch, arguments: Sequence[torch.Tensor]
) -> list[Any]:
    """A program's graph inputs: the model's tensors, and the call's."""
    inputs = watch.inputs(bound.bucket.name, bound.order)
    for index, argument in bound.arguments:
        inputs[index] = arguments[argument]
    return inputs


def _aligned_arguments(program: Program) -> tuple[tuple[int, bool], ...]:
    viewed = {out.index for out in program.outputs if out.source != "program"}
    return tuple(
        (index, not given.mutated and index not in viewed)
        for index, given in enumerate(program.inputs)
        if given.kind == "argument" and given.aligned
    )


untraceable(
    Dispatcher.__call__,
    "compilekit.attach put compiled programs in this method's place; call"
    " receipt.detach() before torch.compile",
)


def _live(programs: list[Program]) -> dict[str, str]:
    """Arguments that can't be copied → why."""
    live: dict[str, str] = {}
    for program in programs:
        viewed = [o.index for o in program.outputs if o.source == "view"]
        arguments = [(i, g) for i, g in enumerate(program.inputs) if g.spec is not None]
        for index, graph_input in arguments:
            if graph_input.mutated:
                live[graph_input.path] = "writes"
            elif index in viewed:
                live[graph_input.path] = "returns a view of"
    return live


def _bucket(program: Program, axes: tuple[str, ...]) -> Bucket:
    # The keys of a JSON file are sorted; the order of axes is the entry's.
    return Bucket(program.bucket, {axis: program.axes[axis] for axis in axes})


def _on(value: bool) -> str:
    return "on" if value else "off"
