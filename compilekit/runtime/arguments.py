"""What a call passes: checked against an entry, fitted to a bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from compilekit import paths
from compilekit._torch.runtime import has_tangent, in_dual_level, is_plain
from compilekit.artifact.program import Entry, InputRule, TensorSpec
from compilekit.errors import CallRefusedError
from compilekit.runtime.model import SCALARS, tensor_spec

Given = Sequence[torch.Tensor | None]
"""The call's tensors in the order of `Arguments.tensors`; None = left out."""


class Argument(NamedTuple):
    """One tensor argument, prepared for the check of each call.

    Attributes:
        path: Where it lies below the call's arguments.
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


class Arguments:
    """An entry's arguments, ready for the checks of each call.

    Args:
        entry: The calling convention.
        method: The model's own method; its defaults may be passed.
        live: Arguments that a program must get as they are, because it writes them or
            returns views of them → what it does.
        buckets: Names, for messages.
        device: Where every tensor must be.
    """

    def __init__(
        self,
        entry: Entry,
        method: Callable[..., Any],
        live: Mapping[str, str],
        buckets: Sequence[str],
        device: torch.device,
    ) -> None:
        self.entry = entry.name
        self.device = device
        # What Tensor.get_device gives: -1 for the CPU.
        self._index = -1 if device.index is None else device.index
        self.axes = entry.axes
        self.tensors = tuple(
            _argument(path, rule, entry.axes) for path, rule in entry.inputs.items()
        )
        self._live = live
        self._buckets = ", ".join(buckets)
        self.positional = tuple(
            p.name for p in entry.signature if p.kind == "positional"
        )
        self._names = frozenset(argument.name for argument in self.tensors)
        self.fixed = dict(entry.fixed)
        self._defaults = {
            p.name: p.default
            for p in inspect.signature(method).parameters.values()
            if p.default is not p.empty
        }
        parsed = {path: paths.parse(path) for path in entry.fixed}
        self.fixed_below = tuple(
            (steps, path, entry.fixed[path])
            for path, steps in parsed.items()
            if len(steps) > 1
        )
        self._containers = _containers((*entry.inputs, *entry.fixed))

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name; what isn't a tensor of the entry is checked.

        Raises:
            CallRefusedError: the entry wasn't built with an argument, or its value.
        """
        if len(args) > len(self.positional):
            raise CallRefusedError(
                f"{self.entry} takes {len(self.positional)} positional arguments, got"
                f" {len(args)}"
            )
        values = dict(zip(self.positional, args, strict=False))
        if args:
            for name in kwargs:
                if name in values:
                    raise CallRefusedError(
                        f"{self.entry} got argument {name} twice", argument=name
                    )
        values.update(kwargs)
        for name, value in values.items():
            if name not in self._names:
                self._check_extra(name, value)
        for steps, path, expected in self.fixed_below:
            self._check_nested(steps, path, expected, values)
        for steps, keys in self._containers:
            self._check_keys(steps, keys, values)
        return values

    def _check_extra(self, name: str, value: Any) -> None:
        """An argument that isn't an input must be what was baked in, or the default."""
        if name in self.fixed:
            expected, what = self.fixed[name], "was built with"
        elif name in self._defaults:
            expected, what = self._defaults[name], "was built with the default,"
        else:
            raise CallRefusedError(
                f"{self.entry} wasn't built with argument {name}",
                hint=f"Declare it as [entries.{self.entry}.inputs.{name}] or in kwargs,"
                " and build again.",
                argument=name,
            )
        if not _same(value, expected):
            raise CallRefusedError(
                f"{self.entry}: argument {name} {what} {expected!r}, got"
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
                f"{self.entry}: argument {path} was built with {expected!r}, got"
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
        unknown = [paths.render((*steps, (key,))) for key in have if key not in keys]
        if unknown:
            path = paths.render(steps)
            raise CallRefusedError(
                f"{self.entry} wasn't built with {', '.join(unknown)}",
                hint=f"{path} was built with {sorted(keys, key=str)}.",
                argument=path,
            )

    def given(self, values: Mapping[str, Any]) -> tuple[Given, tuple[int, ...]]:
        """The call's tensors, and the size of each axis.

        Raises:
            CallRefusedError: a tensor is missing, of another dtype or rank, or two
                disagree about an axis.
        """
        found: list[int | None] = [None] * len(self.axes)
        tensors: list[torch.Tensor | None] = []
        gradients, dual = torch.is_grad_enabled(), in_dual_level()
        for argument in self.tensors:
            tensor = values.get(argument.name)
            if argument.below:
                tensor = _below(tensor, argument.below)
            if tensor is None:
                if argument.rule.default is None:
                    raise CallRefusedError(
                        f"{self.entry} needs input {argument.path}, and the call leaves"
                        " it out",
                        hint="Pass it, or give it a default in the configuration.",
                        argument=argument.path,
                    )
                tensors.append(None)
                continue
            if not isinstance(tensor, torch.Tensor):
                raise CallRefusedError(
                    f"{self.entry}: input {argument.path} must be a tensor, got a"
                    f" {type(tensor).__name__}",
                    argument=argument.path,
                )
            if not is_plain(tensor, self.device.type):
                tensor = self._resolved(argument, tensor)
            if tensor.get_device() != self._index:
                raise self._wrong(argument, tensor)
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
                        f"{self.entry}: axis {self.axes[position]} is {found[position]}"
                        f" in one input and {length} in {argument.path}",
                        hint="Every input must have the same size along an axis.",
                        argument=argument.path,
                    )
            if gradients and tensor.requires_grad:
                raise CallRefusedError(
                    f"{self.entry}: input {argument.path} requires gradients, and a"
                    " program computes none",
                    hint="Call it under torch.inference_mode() or torch.no_grad().",
                    argument=argument.path,
                )
            if dual and has_tangent(tensor):
                raise CallRefusedError(
                    f"{self.entry}: input {argument.path} carries a tangent of"
                    " forward-mode AD, and a program computes none",
                    hint="Call it outside torch.autograd.forward_ad.dual_level(), or"
                    " with the primal (unpack_dual).",
                    argument=argument.path,
                )
            tensors.append(tensor)
        if None in found:
            axis = self.axes[found.index(None)]
            raise CallRefusedError(
                f"{self.entry}: no input that the call passes has axis {axis}"
            )
        return tensors, tuple(found)  # type: ignore[arg-type]

    def _resolved(self, argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
        """The memory behind a lazy conjugate or negative; anything else is refused."""
        if tensor.device.type != self.device.type:
            raise self._wrong(argument, tensor)
        dense = tensor.layout is torch.strided and not tensor.is_nested
        if dense and not _is_named(tensor) and argument.path not in self._live:
            resolved = tensor.resolve_conj().resolve_neg()
            if is_plain(resolved, self.device.type):
                return resolved
        raise CallRefusedError(
            f"{self.entry}: input {argument.path} must be a dense tensor with memory of"
            f" its own, got {_kind(tensor)}",
            hint="Pass a plain tensor, outside torch.func and torch.export.",
            argument=argument.path,
        )

    def _wrong(self, argument: Argument, tensor: torch.Tensor) -> CallRefusedError:
        shape = ", ".join(map(str, argument.rule.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return CallRefusedError(
            f"{self.entry}: input {argument.path} must be {argument.rule.dtype}"
            f" [{shape}] on {self.device}, got {dtype} {list(tensor.shape)} on"
            f" {tensor.device}",
            hint=f"Buckets: {self._buckets}.",
            argument=argument.path,
        )

    def fitted(
        self, tensors: Given, specs: Sequence[TensorSpec], values: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The call's tensors at a bucket's shape and stride.

        Args:
            tensors: From `given`.
            specs: What the bucket's program takes.
            values: From `named`; inputs that the call left out are added to it.
        Raises:
            CallRefusedError: a live argument would have to be copied.
        """
        fitted = []
        for argument, tensor, spec in zip(self.tensors, tensors, specs, strict=True):
            if tensor is None:
                tensor = self._filled(argument, tensors)
                # What the output passes through is found by its whole path.
                values[argument.path] = tensor
            if tensor.shape != spec.shape or (
                tensor.stride() != spec.stride and not _same_stride(tensor, spec)
            ):
                if argument.path in self._live:
                    raise CallRefusedError(
                        f"{self.entry}: the call {self._live[argument.path]}"
                        f" {argument.path}, which must be {list(spec.shape)} with"
                        f" stride {list(spec.stride)}, got {list(tensor.shape)} with"
                        f" stride {list(tensor.stride())}",
                        hint="Pass it contiguous, and at exactly a bucket's shape:"
                        f" {self._buckets}.",
                        argument=argument.path,
                    )
                tensor = _copied(tensor, spec, argument)
            fitted.append(tensor)
        return fitted

    def _filled(self, argument: Argument, tensors: Given) -> torch.Tensor:
        """A left-out input at the call's own size, full of its default."""
        sizes = {
            position: tensor.shape[dimension]
            for other, tensor in zip(self.tensors, tensors, strict=True)
            if tensor is not None
            for dimension, position in other.axes
        }
        shape = [
            sizes[self.axes.index(size)] if isinstance(size, str) else size
            for size in argument.rule.shape
        ]
        value = argument.rule.default or 0
        return torch.full(shape, value, dtype=argument.dtype, device=self.device)


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


def contiguous_spec(rule: InputRule, axes: Mapping[str, int]) -> TensorSpec:
    """Metadata of an argument that no graph reads."""
    shape = tuple(axes[s] if isinstance(s, str) else s for s in rule.shape)
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return TensorSpec(rule.dtype, shape, tuple(reversed(stride)))


def _copied(tensor: torch.Tensor, spec: TensorSpec, argument: Argument) -> torch.Tensor:
    """A tensor in new memory of a bucket's shape and stride, padded by the rule."""
    copy = torch.empty_strided(
        spec.shape, spec.stride, dtype=argument.dtype, device=tensor.device
    )
    if tensor.shape == spec.shape:
        return copy.copy_(tensor)
    # A bucket that would need padding isn't chosen for an input without a pad rule.
    copy.fill_(argument.rule.pad or 0)
    copy[tuple(map(slice, tensor.shape))] = tensor
    return copy


def _same_stride(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Equal strides wherever they matter (a size of 1 has none)."""
    return all(
        size == 1 or have == want
        for size, have, want in zip(
            spec.shape, tensor.stride(), spec.stride, strict=True
        )
    )


def _is_named(tensor: Any) -> bool:
    """Torch 2.13 has no such tensors any more."""
    return tensor.layout is torch.strided and any(getattr(tensor, "names", ()))


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if _is_named(tensor):
        return "a tensor with named dimensions"
    return "a lazy or wrapped one (conjugated, negated, inside torch.func)"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        spec = tensor_spec(value)
        return f"a {spec.dtype} tensor {list(spec.shape)}"
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
