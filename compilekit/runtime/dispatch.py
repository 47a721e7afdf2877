"""Send a call to its bucket: bind, check, pad, run, cut, put the result together.

One `Dispatcher` per entry replaces the model's method. A call goes through

    arguments → axis sizes → bucket → padded tensors → program → outputs → result

and costs tens of microseconds besides the program. What the per-call checks look at:
autocast and deterministic mode, grad mode, identity of every submodule, parameter and
buffer, metadata of every tensor the program reads, training flags and forward hooks.
Anything that moved since attach sends the call through a full comparison with the
entry, and is bound again or refused by name.

Threads: calls run side by side. Programs that write parameters or buffers take a lock,
and so does the comparison after a drift.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

from compilekit import paths
from compilekit._torch.runtime import reinterpret, tensor_guard
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
from compilekit.runtime.model import ModelView, model_mismatches, tensor_spec
from compilekit.runtime.program import Call
from compilekit.runtime.result import Outputs, ResultBuilder, result_builder

_training = attrgetter("training")
_values = methodcaller("values")


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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
        mutated_arguments: Names of arguments that it writes.
        build: Makes the caller's output.
    """

    bucket: Bucket
    call: Call
    order: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    outputs: tuple[GraphOutput, ...]
    plain: bool
    mutated: tuple[int, ...]
    mutated_arguments: tuple[str, ...]
    build: ResultBuilder


@dataclasses.dataclass
class Watch:
    """What the model looked like when it was last compared with the entry.

    Attributes:
        registries: Every module's parameter, buffer and submodule dicts.
        ids: Identities of everything in them.
        tensors: The tensors that programs read, in the entry's order.
        plain: (position, path) of those that no registry holds.
        modules: Every module.
        hooks: Forward-hook dicts of every submodule.
        requires_grad: True if any of the tensors does.
        guards: Inference mode → check of the tensors' metadata.
    """

    registries: tuple[Mapping[str, Any], ...]
    ids: list[int]
    tensors: list[torch.Tensor]
    plain: tuple[tuple[int, tuple[paths.Step, ...]], ...]
    modules: tuple[torch.nn.Module, ...]
    hooks: tuple[Mapping[int, Any], ...]
    requires_grad: bool
    guards: dict[bool, Callable[..., bool]]


class Dispatcher:
    """An entry bound to a live model; calling it runs the right bucket's program.

    Args:
        model: The live model; it must fit the entry (`model_mismatches`).
        entry: The calling convention.
        class_name: The class that was compiled, for the comparison after a drift.
        programs: Every bucket's program and host code.
        on_refusal: What to do with a call that no program covers: called with the
            error and the call's arguments, returns the result (or raises).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        entry: Entry,
        class_name: str,
        programs: Mapping[str, tuple[Program, Call]],
        on_refusal: Callable[[CompilekitError, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self.model = model
        self.entry = entry
        self.class_name = class_name
        self.on_refusal = on_refusal
        self.arguments = tuple(
            _argument(path, rule, entry.axes) for path, rule in entry.inputs.items()
        )
        self.positional = tuple(
            p.name for p in entry.signature if p.kind == "positional"
        )
        self.names = frozenset(argument.name for argument in self.arguments)
        self.defaults = {p.name: p.default for p in entry.signature if not p.required}
        self.fixed = dict(entry.fixed)
        self.nested_fixed = tuple(
            (paths.parse(path), path, value)
            for path, value in entry.fixed.items()
            if path not in self.defaults and not path.isidentifier()
        )
        self.tensor_paths = tuple(entry.tensors)
        buckets = tuple(
            Bucket(program.bucket, program.axes) for program, _ in programs.values()
        )
        self.table: BucketTable = bucket_table(buckets, entry.inputs)
        self.programs = {
            name: self._bind(program, call)
            for name, (program, call) in programs.items()
        }
        self.by_sizes = {
            tuple(bound.bucket.axes[axis] for axis in self.table.axes): bound
            for bound in self.programs.values()
        }
        self.lock = threading.RLock()
        self.serial: contextlib.AbstractContextManager[Any] = (
            self.lock if entry.mutates_model else contextlib.nullcontext()
        )
        self.watch = self._observe()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call's bucket; refuse, or hand over, what none covers."""
        try:
            return self._run(args, kwargs)
        except CompilekitError as error:
            return self.on_refusal(error, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = self._values(args, kwargs)
        tensors, sizes = self._tensors(values)
        bound = self.by_sizes.get(sizes)
        exact = bound is not None
        if bound is None:
            bucket = self.table.choose(sizes)
            if bucket is None:
                raise no_bucket_error(self.table, sizes, self.entry.name)
            bound = self.programs[bucket.name]
            if bound.mutated_arguments:
                raise CallRefusedError(
                    f"{self.entry.name}: the call writes"
                    f" {', '.join(bound.mutated_arguments)}, so it can't be padded to"
                    f" bucket {bucket.name}",
                    hint="Pass exactly a bucket's shape.",
                )
        real = [*self._model_tensors(), *self._fitted(tensors, bound, exact)]
        inputs = [real[position] for position in bound.order]
        if torch.is_grad_enabled():
            # Operators that write into out= refuse to run with gradients on.
            with torch.no_grad():
                outputs = self._call(bound, inputs)
        else:
            outputs = self._call(bound, inputs)
        return bound.build(outputs, values, None if exact else sizes)

    def _call(self, bound: BoundProgram, inputs: list[torch.Tensor]) -> Outputs:
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
        return returned if bound.plain else _graph_outputs(bound, kept, returned)

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name; everything that isn't an input is checked."""
        values = kwargs
        if args:
            if len(args) > len(self.positional):
                raise CallRefusedError(
                    f"{self.entry.name} takes {len(self.positional)} positional"
                    f" arguments, got {len(args)}"
                )
            values = dict(zip(self.positional, args, strict=False))
            for name in kwargs:
                if name in values:
                    raise CallRefusedError(
                        f"{self.entry.name} got argument {name} twice"
                    )
            values.update(kwargs)
        for name, value in values.items():
            if name not in self.names:
                self._check_extra(name, value)
        for steps, path, expected in self.nested_fixed:
            self._check_nested(steps, path, expected, values)
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
        if type(value) is not type(expected) or value != expected:
            raise CallRefusedError(
                f"{self.entry.name}: argument {name} {what} {expected!r}, got"
                f" {_shown(value)}",
                hint=f"Leave it out, declare it as an input, or build with"
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
        try:
            found = paths.follow(values[str(steps[0])], steps[1:])
        except (AttributeError, KeyError, IndexError, TypeError) as exc:
            raise CallRefusedError(
                f"{self.entry.name}: nothing at argument {path}, which was built as"
                f" {expected!r}"
            ) from exc
        if type(found) is not type(expected) or found != expected:
            raise CallRefusedError(
                f"{self.entry.name}: argument {path} was built with {expected!r}, got"
                f" {_shown(found)}"
            )

    def _tensors(
        self, values: dict[str, Any]
    ) -> tuple[list[torch.Tensor | None], tuple[int, ...]]:
        """Argument tensors in order (None = left out), and the size of each axis."""
        found: list[int | None] = [None] * len(self.table.axes)
        tensors: list[torch.Tensor | None] = []
        for argument in self.arguments:
            tensor = values.get(argument.name)
            if argument.below:
                tensor = _below(tensor, argument)
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
            if tensor.dtype != argument.dtype or tensor.device.type != "cpu":
                raise self._wrong(argument, tensor)
            shape = tensor.shape
            if len(shape) != len(argument.rule.shape):
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
                    )
            tensors.append(tensor)
        for position, known in enumerate(found):
            if known is None:
                raise CallRefusedError(
                    f"{self.entry.name}: no input that the call passes has axis"
                    f" {self.table.axes[position]}"
                )
        return tensors, tuple(found)  # type: ignore[arg-type]

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
        self, tensors: list[torch.Tensor | None], bound: BoundProgram, exact: bool
    ) -> list[torch.Tensor]:
        """Arguments at the bucket's shape and stride: padded, filled or copied."""
        fitted = []
        sizes: Mapping[str, int] | None = None
        for argument, tensor, spec in zip(
            self.arguments, tensors, bound.specs, strict=True
        ):
            if tensor is None:
                if sizes is None:
                    sizes = self._real_sizes(tensors)
                shape = [
                    sizes[s] if isinstance(s, str) else s for s in argument.rule.shape
                ]
                tensor = _full(shape, argument.rule.default, argument.dtype)
            if tuple(tensor.shape) != spec.shape:
                padded = _full(spec.shape, argument.rule.pad, argument.dtype)
                region = tuple(slice(0, size) for size in tensor.shape)
                padded[region] = tensor
                tensor = padded
            if tensor.stride() != spec.stride and not _same_stride(tensor, spec):
                if argument.path in bound.mutated_arguments:
                    raise CallRefusedError(
                        f"{self.entry.name}: the call writes {argument.path}, whose"
                        f" stride must be {list(spec.stride)}, got"
                        f" {list(tensor.stride())}",
                        argument=argument.path,
                    )
                copy = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype)
                copy.copy_(tensor)
                tensor = copy
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            fitted.append(tensor)
        return fitted

    def _real_sizes(self, tensors: list[torch.Tensor | None]) -> dict[str, int]:
        return {
            self.table.axes[position]: tensor.shape[dimension]
            for argument, tensor in zip(self.arguments, tensors, strict=True)
            if tensor is not None
            for dimension, position in argument.axes
        }

    def _model_tensors(self) -> list[torch.Tensor]:
        """The live tensors that programs read, after the checks of each call."""
        if torch.is_autocast_enabled("cpu") != self.entry.ambient["autocast"]:
            raise CallRefusedError(
                f"{self.entry.name} was built with autocast off, and the call is inside"
                " an autocast region",
                hint="Call it outside, or build with the dtype you want.",
            )
        if (
            torch.are_deterministic_algorithms_enabled()
            != self.entry.ambient["deterministic"]
        ):
            raise CallRefusedError(
                f"{self.entry.name} was built with deterministic algorithms"
                f" {self.entry.ambient['deterministic']}, the call has the opposite"
            )
        watch = self.watch
        values = itertools.chain.from_iterable(map(_values, watch.registries))
        drifted = list(map(id, values)) != watch.ids
        if not drifted and watch.plain:
            drifted = any(
                paths.follow(self.model, steps) is not watch.tensors[position]
                for position, steps in watch.plain
            )
        if not drifted and self.entry.training is False:
            drifted = any(map(_training, watch.modules)) or any(watch.hooks)
        if not drifted:
            inference = torch.is_inference_mode_enabled()
            guard = watch.guards.get(inference)
            if guard is None:
                guard = watch.guards[inference] = tensor_guard(watch.tensors)
            drifted = not guard(*watch.tensors)
        if drifted:
            watch = self._compare_again()
        if watch.requires_grad and torch.is_grad_enabled():
            raise CallRefusedError(
                f"{self.entry.name} is called with gradients on, and parameters require"
                " them; a program computes no gradients",
                hint="Call it under torch.inference_mode() or torch.no_grad(), or"
                " call model.requires_grad_(False) once.",
            )
        return watch.tensors

    def _compare_again(self) -> Watch:
        """After something moved: compare everything, then bind again or refuse."""
        with self.lock:
            mismatches = model_mismatches(self.model, self.entry, self.class_name)
            if mismatches:
                raise MismatchError(
                    f"the model changed after attach ({self.entry.name})", mismatches
                )
            self.watch = self._observe()
            return self.watch

    def _observe(self) -> Watch:
        modules = tuple(self.model.modules())
        registries = tuple(
            registry
            for module in modules
            for registry in (module._parameters, module._buffers, module._modules)
            if registry
        )
        ids = [id(value) for registry in registries for value in registry.values()]
        view = ModelView(self.model)
        tensors = [view.get(path) for path in self.tensor_paths]
        registered = set(ids)
        return Watch(
            registries=registries,
            ids=ids,
            tensors=tensors,
            plain=tuple(
                (position, paths.parse(path))
                for position, path in enumerate(self.tensor_paths)
                if id(tensors[position]) not in registered
            ),
            modules=modules,
            hooks=tuple(
                hooks
                for module in modules[1:]
                for hooks in (module._forward_hooks, module._forward_pre_hooks)
            ),
            requires_grad=any(tensor.requires_grad for tensor in tensors),
            guards={},
        )

    def _bind(self, program: Program, call: Call) -> BoundProgram:
        positions = {path: i for i, path in enumerate(self.tensor_paths)}
        first = len(self.tensor_paths)
        places = {argument.path: first + i for i, argument in enumerate(self.arguments)}
        order = tuple(
            places[graph_input.path]
            if graph_input.kind == "argument"
            else positions[graph_input.path]
            for graph_input in program.inputs
        )
        specs = {g.path: g.spec for g in program.inputs if g.spec is not None}
        return BoundProgram(
            bucket=Bucket(program.bucket, program.axes),
            call=call,
            order=order,
            specs=tuple(
                specs.get(argument.path) or _contiguous(argument, program.axes)
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
            mutated_arguments=tuple(
                graph_input.path
                for graph_input in program.inputs
                if graph_input.mutated and graph_input.kind == "argument"
            ),
            build=result_builder(
                program.result,
                self.entry.cuts,
                self.table.axes,
                self._argument_value,
                lambda path: ModelView(self.model).get(path),
            ),
        )

    @staticmethod
    def _argument_value(values: Mapping[str, Any], path: str) -> Any:
        steps = paths.parse(path)
        return paths.follow(values[str(steps[0])], steps[1:])


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


def _below(value: Any, argument: Argument) -> Any:
    try:
        return paths.follow(value, argument.below)
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _full(
    shape: Sequence[int], value: bool | int | float | None, dtype: torch.dtype
) -> torch.Tensor:
    # A bucket that would need padding isn't chosen for an input without a pad rule.
    return torch.full(tuple(shape), 0 if value is None else value, dtype=dtype)


def _contiguous(argument: Argument, axes: Mapping[str, int]) -> TensorSpec:
    """Metadata of an argument that the graph doesn't read."""
    shape = tuple(axes[s] if isinstance(s, str) else s for s in argument.rule.shape)
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return TensorSpec(argument.rule.dtype, shape, tuple(reversed(stride)))


def _same_stride(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Equal strides wherever they matter (a size of 1 has none)."""
    return all(
        size == 1 or have == want
        for size, have, want in zip(
            spec.shape, tensor.stride(), spec.stride, strict=True
        )
    )


def _graph_outputs(
    bound: BoundProgram, inputs: list[torch.Tensor], returned: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Graph outputs that are inputs, or views of inputs, made from the live inputs."""
    outputs = []
    for output in bound.outputs:
        if output.source == "program":
            outputs.append(returned[output.index])
        elif output.source == "input":
            outputs.append(inputs[output.index])
        else:
            base = inputs[output.index]
            spec = output.spec
            outputs.append(reinterpret(base, spec.shape, spec.stride, output.offset))
    return outputs


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        spec = tensor_spec(value)
        return f"a {spec.dtype} tensor {list(spec.shape)}"
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
