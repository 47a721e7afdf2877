"""Send a call to its bucket: bind, check, pad, run, cut, put the result together.

One `Dispatcher` per entry replaces the model's method. A call goes through

    arguments → axis sizes → bucket → padded tensors → program → outputs → result

and costs tens of microseconds besides the program; docs/runtime.md lists what each call
checks. Anything that moved since attach sends the call through a full comparison with
the entry (`Watch`), and is bound again or refused by name.

Threads: calls run side by side. Programs that write parameters or buffers take a lock,
and so does the comparison after a change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from compilekit import paths
from compilekit._torch.runtime import (
    dict_version,
    forward_hooks,
    global_forward_hooks,
    is_plain,
    is_tracing,
    registries,
    tensor_guard,
    untraceable,
)
from compilekit.artifact.program import (
    Entry,
    GraphOutput,
    InputRule,
    Program,
    TensorSpec,
)
from compilekit.buckets import BucketTable, bucket_table, no_bucket_error
from compilekit.errors import CallRefusedError, CompilekitError, MismatchError
from compilekit.plan import Bucket
from compilekit.runtime.model import (
    SCALARS,
    AttachedMethod,
    ModelView,
    model_mismatches,
    own_method,
    tensor_spec,
)
from compilekit.runtime.program import Call
from compilekit.runtime.result import Outputs, ResultBuilder, result_builder

OnRefusal = Callable[[CompilekitError, tuple[Any, ...], dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Argument:
    """One tensor argument, prepared for the check of each call.

    Attributes:
        path: For messages.
        name: The parameter it lies in.
        below: Steps from that parameter's value to the tensor; usually none.
        rule: As configured.
        dtype: The torch dtype.
        axes: (dimension, position in the entry's axes) of each axis.
        fixed: (dimension, size) of each fixed dimension.
    """

    path: str
    name: str
    below: tuple[paths.Step, ...]
    rule: InputRule
    dtype: torch.dtype
    axes: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program with everything that a call needs looked up.

    Attributes:
        call: The host code.
        order: Graph input i is pool element ``order[i]``; the pool is the model's
            tensors followed by the arguments.
        specs: Expected metadata of each of `Dispatcher.arguments`.
        outputs: Graph outputs.
        plain: True if every graph output is what the program returns, in order.
        mutated: Graph inputs that the program writes.
        writes: Paths of the arguments and of the model's tensors that it writes.
        live: Arguments that must be passed as they are, because it writes them or
            returns views of them → what it does.
        build: Makes the caller's output.
    """

    bucket: Bucket
    call: Call
    order: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    outputs: tuple[GraphOutput, ...]
    plain: bool
    mutated: tuple[int, ...]
    writes: tuple[str, ...]
    live: Mapping[str, str]
    build: ResultBuilder


class Watch:
    """What a model looks like, to notice cheaply that it changed.

    Looks at the identity of every parameter, buffer and submodule, at every attribute
    of every module (training flags and replaced methods among them) and of every
    object whose attributes the graphs read, at the classes of modules, at forward hooks
    and at the metadata of every tensor that a program reads. Values of tensors may
    change, and so may what lies in lists.

    A watch is made before the model is compared with its entry: what changes in
    between is noticed at the next call.

    Attributes:
        tensors: The tensors that programs read, in the entry's order.
        requires_grad: True if any of them does.
    """

    def __init__(self, model: torch.nn.Module, entry: Entry) -> None:
        view = ModelView(model)
        self._modules = tuple(dict.fromkeys(view.modules.values()))
        self._dicts = tuple(_watched_dicts(view, self._modules, entry))
        self._versions = list(map(dict_version, self._dicts))
        self._classes = list(map(type, self._modules))
        hooked = self._modules[1:] if entry.method == "forward" else self._modules
        self._hooks = (
            *global_forward_hooks(),
            *(hooks for module in hooked for hooks in forward_hooks(module)),
        )
        self.tensors: list[torch.Tensor] = [view.get(path) for path in entry.tensors]
        self.requires_grad = any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad
            for tensor in self.tensors
        )
        held = {id(value) for each in self._dicts for value in each.values()}
        self._unheld = tuple(
            (tensor, model, paths.parse(path))
            for path, tensor in zip(entry.tensors, self.tensors, strict=True)
            if id(tensor) not in held
        )
        self._guards: dict[bool, Callable[..., bool]] = {}

    def guard(self) -> None:
        """Hold the tensors to the metadata they have now; they must all be there."""
        for inference in (False, True):
            with torch.inference_mode(inference):
                self._guards[inference] = tensor_guard(self.tensors)

    def changed(self) -> bool:
        """True if anything moved since."""
        return (
            list(map(dict_version, self._dicts)) != self._versions
            or not self._guards[torch.is_inference_mode_enabled()](*self.tensors)
            or list(map(type, self._modules)) != self._classes
            or any(self._hooks)
            or any(_moved(*item) for item in self._unheld)
        )


def _moved(
    tensor: torch.Tensor, model: torch.nn.Module, steps: tuple[paths.Step, ...]
) -> bool:
    try:
        return paths.follow(model, steps) is not tensor
    except (AttributeError, KeyError, IndexError, TypeError):
        return True


def _watched_dicts(
    view: ModelView, modules: Sequence[torch.nn.Module], entry: Entry
) -> Iterator[dict[Any, Any]]:
    """The dicts that hold what a program depends on, each once."""
    seen: set[int] = set()
    owners: list[dict[Any, Any]] = [vars(module) for module in modules]
    # An empty registry holds nothing a program reads; filling one changes no forward.
    owners += [each for module in modules for each in registries(module) if each]
    for read in entry.reads:
        if read.path.startswith("module:"):
            continue
        parent = paths.render(paths.parse(read.path)[:-1])
        if parent not in view.modules:
            owners += _attributes(view.get(parent))
    for owner in owners:
        if id(owner) not in seen:
            seen.add(id(owner))
            yield owner


def _attributes(owner: Any) -> list[dict[Any, Any]]:
    """The dict behind an object (a model's configuration, say) if it has one."""
    if type(owner) is dict:
        return [owner]
    if isinstance(owner, (type, FunctionType, MethodType, ModuleType)):
        return []
    found = getattr(owner, "__dict__", None)
    return [found] if type(found) is dict else []


class Dispatcher(AttachedMethod):
    """An entry bound to a live model; calling it runs the right bucket's program.

    A copy of the model (``copy.deepcopy``, pickle) gets its class's own method: it has
    other tensors, which nothing was bound to.

    Args:
        model: The live model; it must fit the entry (`model_mismatches`).
        entry: The calling convention.
        class_name: The class that was compiled, for the comparison after a change.
        programs: Every bucket's program and host code.
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
        programs: Mapping[str, tuple[Program, Call]],
        on_refusal: OnRefusal,
        on_rebind: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        # inspect.signature(model.forward) and help() still see the model's own method.
        functools.update_wrapper(self, own_method(model, entry.method), updated=())
        self.model = model
        self.entry = entry
        self.class_name = class_name
        self.on_refusal = on_refusal
        self.on_rebind = on_rebind
        self.arguments = tuple(
            _argument(path, rule, entry.axes) for path, rule in entry.inputs.items()
        )
        self.positional = tuple(
            p.name for p in entry.signature if p.kind == "positional"
        )
        self.names = frozenset(argument.name for argument in self.arguments)
        self.fixed = dict(entry.fixed)
        self.defaults = {
            p.name: p.default
            for p in inspect.signature(self).parameters.values()
            if p.default is not p.empty
        }
        self.nested_fixed = tuple(
            (paths.parse(path), path, value)
            for path, value in entry.fixed.items()
            if len(paths.parse(path)) > 1
        )
        self.containers = _containers((*entry.inputs, *entry.fixed))
        self.positions = {path: i for i, path in enumerate(entry.tensors)}
        self.table: BucketTable = bucket_table(
            [_bucket(program, entry.axes) for program, _ in programs.values()],
            entry.inputs,
        )
        self.programs = {
            name: self._bind(program, call)
            for name, (program, call) in programs.items()
        }
        self.by_sizes = {
            tuple(bound.bucket.axes.values()): bound for bound in self.programs.values()
        }
        self.lock = lock
        self.serial: contextlib.AbstractContextManager[Any] = (
            lock if entry.mutates_model else contextlib.nullcontext()
        )
        self.watch = Watch(model, entry)
        self.watch.guard()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call's bucket; refuse, or hand over, what none covers."""
        try:
            return self._run(args, kwargs)
        except CompilekitError as exc:
            error = exc
        return self.on_refusal(error, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built again before the copy's attributes are set, so it finds the class's.
        return getattr, (self.model, self.entry.method)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = self._values(args, kwargs)
        tensors, sizes = self._tensors(values)
        bound = self.by_sizes.get(sizes)
        exact = bound is not None
        if bound is None:
            bound = self._padded_bucket(sizes)
        live = self._model_tensors()
        fitted = self._fitted(tensors, bound, values)
        real = [*live, *fitted]
        inputs = [real[position] for position in bound.order]
        if torch.is_grad_enabled():
            # Operators that write into out= refuse to run with gradients on.
            with torch.no_grad():
                outputs = self._call(bound, inputs, tensors)
        else:
            outputs = self._call(bound, inputs, tensors)
        return bound.build(outputs, values, None if exact else sizes)

    def _padded_bucket(self, sizes: tuple[int, ...]) -> BoundProgram:
        bucket = self.table.choose(sizes)
        if bucket is None:
            raise no_bucket_error(self.table, sizes, self.entry.name)
        bound = self.programs[bucket.name]
        if bound.writes:
            raise CallRefusedError(
                f"{self.entry.name}: the call writes {', '.join(bound.writes)}, so it"
                f" can't be padded to bucket {bucket.name}",
                hint=self._exact(),
            )
        return bound

    def _call(
        self,
        bound: BoundProgram,
        inputs: list[torch.Tensor],
        tensors: Sequence[torch.Tensor | None],
    ) -> Outputs:
        """Run the program; graph outputs in graph order."""
        if bound.plain and not bound.mutated:
            return bound.call(inputs)
        # The host code empties the list it is given.
        kept = list(inputs)
        with self.serial:
            returned = bound.call(inputs)
            if bound.mutated:
                written = [kept[index] for index in bound.mutated]
                torch.autograd.graph.increment_version(written)
        return (
            returned if bound.plain else self._outputs(bound, kept, returned, tensors)
        )

    def _outputs(
        self,
        bound: BoundProgram,
        inputs: list[torch.Tensor],
        returned: tuple[torch.Tensor, ...],
        tensors: Sequence[torch.Tensor | None],
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
            position = bound.order[output.index] - len(self.positions)
            given = tensors[position] if position >= 0 else None
            outputs.append(base if given is None else given)
        return outputs

    # --- What a call passes -----------------------------------------------------------

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name; everything that isn't an input is checked."""
        if len(args) > len(self.positional):
            raise CallRefusedError(
                f"{self.entry.name} takes {len(self.positional)} positional arguments,"
                f" got {len(args)}"
            )
        values = dict(zip(self.positional, args, strict=False))
        if args:
            for name in kwargs:
                if name in values:
                    raise CallRefusedError(
                        f"{self.entry.name} got argument {name} twice", argument=name
                    )
        values.update(kwargs)
        for name, value in values.items():
            if name not in self.names:
                self._check_extra(name, value)
        for steps, path, expected in self.nested_fixed:
            self._check_nested(steps, path, expected, values)
        for steps, keys in self.containers:
            self._check_keys(steps, keys, values)
        return values

    def _check_extra(self, name: str, value: Any) -> None:
        """An argument that isn't an input must be what was baked in, or the default."""
        if name in self.fixed:
            expected, what = self.fixed[name], "was built with"
        elif name in self.defaults:
            expected, what = self.defaults[name], "was built with the default,"
        else:
            raise CallRefusedError(
                f"{self.entry.name} wasn't built with argument {name}",
                hint=f"Declare it as [entries.{self.entry.name}.inputs.{name}] or in"
                " kwargs, and build again.",
                argument=name,
            )
        if not _same(value, expected):
            raise CallRefusedError(
                f"{self.entry.name}: argument {name} {what} {expected!r}, got"
                f" {_shown(value)}",
                hint="Leave it out, declare it as an input, or build with"
                f" kwargs = {{ {name} = … }}.",
                argument=name,
            )

    def _check_nested(
        self,
        steps: tuple[paths.Step, ...],
        path: str,
        expected: Any,
        values: Mapping[str, Any],
    ) -> None:
        found = _below(values.get(str(steps[0])), steps[1:])
        if not _same(found, expected):
            raise CallRefusedError(
                f"{self.entry.name}: argument {path} was built with {expected!r}, got"
                f" {_shown(found)}",
                argument=path,
            )

    def _check_keys(
        self,
        steps: tuple[paths.Step, ...],
        keys: frozenset[int | str],
        values: Mapping[str, Any],
    ) -> None:
        """A dict or list may hold only what the program was built with."""
        found = _below(values.get(str(steps[0])), steps[1:])
        have = found if isinstance(found, Mapping) else range(_length(found))
        unknown = [key for key in have if key not in keys]
        if unknown:
            path = paths.render(steps)
            listed = ", ".join(paths.render((*steps, (key,))) for key in unknown)
            raise CallRefusedError(
                f"{self.entry.name} wasn't built with {listed}",
                hint=f"{path} was built with {sorted(keys, key=str)}.",
                argument=path,
            )

    def _tensors(
        self, values: dict[str, Any]
    ) -> tuple[list[torch.Tensor | None], tuple[int, ...]]:
        """Argument tensors in order (None = left out), and the size of each axis."""
        found: list[int | None] = [None] * len(self.table.axes)
        tensors: list[torch.Tensor | None] = []
        gradients = torch.is_grad_enabled()
        for argument in self.arguments:
            tensor = values.get(argument.name)
            if argument.below:
                tensor = _below(tensor, argument.below)
            if tensor is None:
                if argument.rule.default is None:
                    raise CallRefusedError(
                        f"{self.entry.name} needs input {argument.path}, and the call"
                        " leaves it out",
                        hint="Pass it, or give it a default in the configuration.",
                        argument=argument.path,
                    )
                tensors.append(None)
                continue
            if not isinstance(tensor, torch.Tensor):
                raise CallRefusedError(
                    f"{self.entry.name}: input {argument.path} must be a tensor, got a"
                    f" {type(tensor).__name__}",
                    argument=argument.path,
                )
            if not is_plain(tensor):
                tensor = self._resolved(argument, tensor)
            shape = tensor.shape
            if tensor.dtype != argument.dtype or len(shape) != len(argument.rule.shape):
                raise self._wrong(argument, tensor)
            for dimension, size in argument.fixed:
                if shape[dimension] != size:
                    raise self._wrong(argument, tensor)
            for dimension, position in argument.axes:
                length = shape[dimension]
                if found[position] is None:
                    found[position] = length
                elif found[position] != length:
                    raise CallRefusedError(
                        f"{self.entry.name}: axis {self.table.axes[position]} is"
                        f" {found[position]} in one input and {length} in"
                        f" {argument.path}",
                        hint="Every input must have the same size along an axis.",
                        argument=argument.path,
                    )
            if gradients and tensor.requires_grad:
                raise CallRefusedError(
                    f"{self.entry.name}: input {argument.path} requires gradients, and"
                    " a program computes none",
                    hint="Call it under torch.inference_mode() or torch.no_grad().",
                    argument=argument.path,
                )
            tensors.append(tensor)
        for position, known in enumerate(found):
            if known is None:
                raise CallRefusedError(
                    f"{self.entry.name}: no input that the call passes has axis"
                    f" {self.table.axes[position]}"
                )
        return tensors, tuple(found)  # type: ignore[arg-type]

    def _resolved(self, argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
        """The memory behind a lazy conjugate or negative; anything else is refused."""
        if tensor.device.type != "cpu":
            raise self._wrong(argument, tensor)
        if tensor.layout is torch.strided and not tensor.is_nested:
            resolved = tensor.resolve_conj().resolve_neg()
            if is_plain(resolved) and not any(
                argument.path in bound.live for bound in self.programs.values()
            ):
                return resolved
        raise CallRefusedError(
            f"{self.entry.name}: input {argument.path} must be a dense tensor with"
            f" memory of its own, got {_kind(tensor)}",
            hint="Pass a plain tensor; call outside torch.func, torch.export and"
            " tracing.",
            argument=argument.path,
        )

    def _wrong(self, argument: Argument, tensor: torch.Tensor) -> CallRefusedError:
        shape = ", ".join(map(str, argument.rule.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return CallRefusedError(
            f"{self.entry.name}: input {argument.path} must be {argument.rule.dtype}"
            f" [{shape}] on cpu, got {dtype} {list(tensor.shape)} on"
            f" {tensor.device.type}",
            hint=f"Buckets: {', '.join(bucket.name for bucket in self.table.buckets)}.",
            argument=argument.path,
        )

    def _fitted(
        self,
        tensors: Sequence[torch.Tensor | None],
        bound: BoundProgram,
        values: dict[str, Any],
    ) -> list[torch.Tensor]:
        """Arguments at the bucket's shape and stride: padded, filled or copied."""
        fitted = []
        for argument, tensor, spec in zip(
            self.arguments, tensors, bound.specs, strict=True
        ):
            if tensor is None:
                tensor = self._filled(argument, tensors)
                # What the output passes through is found by its whole path.
                values[argument.path] = tensor
            padded = tensor.shape != spec.shape
            if padded or (
                tensor.stride() != spec.stride and not _same_stride(tensor, spec)
            ):
                if argument.path in bound.live:
                    raise CallRefusedError(
                        f"{self.entry.name}: the call {bound.live[argument.path]}"
                        f" {argument.path}, which must be {list(spec.shape)} with"
                        f" stride {list(spec.stride)}, got {list(tensor.shape)} with"
                        f" stride {list(tensor.stride())}",
                        hint=self._exact(),
                        argument=argument.path,
                    )
                tensor = _copied(tensor, spec, argument)
            fitted.append(tensor)
        return fitted

    def _filled(
        self, argument: Argument, tensors: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """A left-out input at the call's own size, full of its default."""
        sizes = {
            position: tensor.shape[dimension]
            for other, tensor in zip(self.arguments, tensors, strict=True)
            if tensor is not None
            for dimension, position in other.axes
        }
        shape = list(argument.rule.shape)
        for dimension, position in argument.axes:
            shape[dimension] = sizes[position]
        return torch.full(
            shape,  # type: ignore[arg-type]
            argument.rule.default,  # type: ignore[arg-type]
            dtype=argument.dtype,
            device="cpu",
        )

    def _exact(self) -> str:
        names = ", ".join(bucket.name for bucket in self.table.buckets)
        return f"Pass exactly a bucket's shape, contiguous. Buckets: {names}."

    # --- The live model ---------------------------------------------------------------

    def _model_tensors(self) -> list[torch.Tensor]:
        """The live tensors that programs read, after the checks of each call."""
        ambient = self.entry.ambient
        if torch.is_autocast_enabled("cpu") != ambient["autocast"]:
            raise CallRefusedError(
                f"{self.entry.name} was built with autocast off, and the call is inside"
                " an autocast region",
                hint="Call it outside, or build with the dtype you want.",
            )
        if torch.are_deterministic_algorithms_enabled() != ambient["deterministic"]:
            raise CallRefusedError(
                f"{self.entry.name} was built with deterministic algorithms"
                f" {_on(ambient['deterministic'])}, and they are"
                f" {_on(not ambient['deterministic'])} now",
                hint="Call torch.use_deterministic_algorithms as it was at build.",
            )
        if is_tracing():
            raise CallRefusedError(
                f"{self.entry.name} is being traced, and a program's kernels leave no"
                " trace",
                hint="Call receipt.detach() before tracing or exporting the model.",
            )
        watch = self.watch
        if watch.changed():
            watch = self._bind_again()
        if watch.requires_grad and torch.is_grad_enabled():
            raise CallRefusedError(
                f"{self.entry.name} is called with gradients on, and parameters require"
                " them; a program computes no gradients",
                hint="Call it under torch.inference_mode() or torch.no_grad(), or"
                " call model.requires_grad_(False) once.",
            )
        return watch.tensors

    def _bind_again(self) -> Watch:
        """After something moved: compare everything, then bind again or refuse."""
        with self.lock:
            while self.watch.changed():
                watch = Watch(self.model, self.entry)
                mismatches = model_mismatches(self.model, self.entry, self.class_name)
                if mismatches:
                    raise MismatchError(
                        f"the model changed after attach ({self.entry.name})",
                        mismatches,
                        hint="Put it back, or call receipt.detach().",
                    )
                watch.guard()
                self.watch = watch
                self.on_rebind()
            return self.watch

    # --- At attach --------------------------------------------------------------------

    def _bind(self, program: Program, call: Call) -> BoundProgram:
        first = len(self.positions)
        places = {argument.path: first + i for i, argument in enumerate(self.arguments)}
        mutated = [graph_input for graph_input in program.inputs if graph_input.mutated]
        viewed = [
            program.inputs[output.index]
            for output in program.outputs
            if output.source == "view"
        ]
        live = {item.path: "returns a view of" for item in viewed}
        live.update((item.path, "writes") for item in mutated)
        specs = {g.path: g.spec for g in program.inputs if g.spec is not None}
        bucket = _bucket(program, self.entry.axes)
        return BoundProgram(
            bucket=bucket,
            call=call,
            order=tuple(
                places[graph_input.path]
                if graph_input.kind == "argument"
                else self.positions[graph_input.path]
                for graph_input in program.inputs
            ),
            specs=tuple(
                specs.get(argument.path) or _contiguous(argument.rule, bucket.axes)
                for argument in self.arguments
            ),
            outputs=program.outputs,
            plain=all(
                output.source == "program" and output.index == index
                for index, output in enumerate(program.outputs)
            ),
            mutated=tuple(
                index
                for index, graph_input in enumerate(program.inputs)
                if graph_input.mutated
            ),
            writes=tuple(item.path for item in mutated),
            live={path: what for path, what in live.items() if path in places},
            build=result_builder(
                program.result, self.entry.cuts, self.entry.axes, self.model
            ),
        )


untraceable(
    Dispatcher.__call__,
    "compilekit.attach has put compiled programs in this method's place; call"
    " receipt.detach() before torch.compile",
)


def _bucket(program: Program, axes: tuple[str, ...]) -> Bucket:
    # A file's keys are sorted; the order of axes is the entry's.
    return Bucket(program.bucket, {axis: program.axes[axis] for axis in axes})


def _argument(path: str, rule: InputRule, axes: tuple[str, ...]) -> Argument:
    steps = paths.parse(path)
    dtype: torch.dtype = getattr(torch, rule.dtype)
    return Argument(
        path=path,
        name=str(steps[0]),
        below=steps[1:],
        rule=rule,
        dtype=dtype,
        axes=tuple(
            (dimension, axes.index(size))
            for dimension, size in enumerate(rule.shape)
            if isinstance(size, str)
        ),
        fixed=tuple(
            (dimension, size)
            for dimension, size in enumerate(rule.shape)
            if isinstance(size, int)
        ),
    )


def _containers(
    argument_paths: Sequence[str],
) -> tuple[tuple[tuple[paths.Step, ...], frozenset[int | str]], ...]:
    """Every dict and list among the arguments, with the keys it was built with."""
    found: dict[tuple[paths.Step, ...], set[int | str]] = {}
    for path in argument_paths:
        steps = paths.parse(path)
        for end, step in enumerate(steps):
            if isinstance(step, tuple):
                found.setdefault(steps[:end], set()).add(step[0])
    return tuple((steps, frozenset(keys)) for steps, keys in found.items())


def _below(value: Any, steps: tuple[paths.Step, ...]) -> Any:
    """What lies below an argument; None where nothing does."""
    try:
        return paths.follow(value, steps)
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 0


def _same(value: Any, expected: Any) -> bool:
    """Identical, or equal scalars of one type: a program holds the value itself."""
    return value is expected or (
        type(value) is type(expected)
        and type(value) in SCALARS
        and bool(value == expected)
    )


def _copied(tensor: torch.Tensor, spec: TensorSpec, argument: Argument) -> torch.Tensor:
    """A tensor in new memory of a bucket's shape and stride, padded by the rule."""
    copy = torch.empty_strided(
        spec.shape, spec.stride, dtype=argument.dtype, device="cpu"
    )
    if tensor.shape == spec.shape:
        return copy.copy_(tensor)
    # A bucket that would need padding isn't chosen for an input without a pad rule.
    copy.fill_(argument.rule.pad or 0)
    copy[tuple(map(slice, tensor.shape))] = tensor
    return copy


def _contiguous(rule: InputRule, axes: Mapping[str, int]) -> TensorSpec:
    """Metadata of an argument that the graph doesn't read."""
    shape = tuple(axes[s] if isinstance(s, str) else s for s in rule.shape)
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return TensorSpec(rule.dtype, shape, tuple(reversed(stride)))


def _same_stride(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Equal strides wherever they matter (a size of 1 has none)."""
    return all(
        size == 1 or have == want
        for size, have, want in zip(
            spec.shape, tensor.stride(), spec.stride, strict=True
        )
    )


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    return "a lazy or wrapped tensor (conjugated, negated, inside torch.func)"


def _on(value: bool) -> str:
    return "on" if value else "off"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        spec = tensor_spec(value)
        return f"a {spec.dtype} tensor {list(spec.shape)}"
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
