"""Recognise calls that pass a bucket's very tensors, and run them in one go.

Most calls of a server that pads by itself are of this kind. What they pass is held
against tables made at attach, which takes the place of every check of `Arguments`: no
other argument but all of those that were built in, the right type, dtype, shape,
stride, device, memory of its own. A program for a CPU brings C++ that does it, and all
else that a call does besides the program (`native_calls`); elsewhere torch's own guards
do (`ExactCalls`).
"""

from __future__ import annotations

import array
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import is_inference_mode_enabled

from compilekit._torch.layout import (
    KIND_BITS,
    TensorLayout,
    shape_words,
    tensor_kind,
    tensor_layout,
)
from compilekit._torch.runtime import (
    DUAL_LEVEL,
    count_modes,
    in_dual_level,
    is_deterministic,
    tensor_guard,
    thread_keys,
)
from compilekit.artifact.program import TensorSpec
from compilekit.runtime.arguments import Arguments
from compilekit.runtime.program import Call, Native
from compilekit.runtime.result import ModelOutputFields, ResultBuilder
from compilekit.runtime.watch import Watch
from compilekit.runtime.words import WORD_BYTES

# calls.cpp, MOST_ARGUMENTS.
_MOST_ARGUMENTS = 16


class ExactProgram(NamedTuple):
    """What an exact call of a bucket needs.

    Attributes:
        specs: Expected metadata of each argument.
        inputs: The program's graph inputs: tensors of the model, and None for each
            argument.
        arguments: (graph input, argument) of each of those.
        call: The host code.
        build: Makes the caller's output.
        fields: The same, as data, where that is enough.
    """

    specs: Sequence[TensorSpec]
    inputs: Sequence[torch.Tensor | None]
    arguments: Sequence[tuple[int, int]]
    call: Call
    build: ResultBuilder
    fields: ModelOutputFields | None


ExactCall = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""(args, kwargs) → the call's result, or `MISSED` if it isn't an exact one."""

MISSED: Final = object()


def native_call(
    native: Native,
    arguments: Arguments,
    programs: Sequence[ExactProgram],
    watch: Watch,
    deterministic: bool,
) -> ExactCall | None:
    """Exact calls in C++ (calls.cpp); None if it can't say what a call must pass.

    For programs that write no input and return what their host code does, called with
    gradients off.

    Args:
        native: From the artifact.
        arguments: The entry's.
        programs: One a bucket.
        watch: What must not have changed; all of it words.
        deterministic: Whether it was built with deterministic algorithms.
    """
    layout = tensor_layout()
    specs = [spec for program in programs for spec in program.specs]
    if (
        layout is None
        or not watch.all_words
        or not can_be_exact(arguments)
        or len(arguments.tensors) > _MOST_ARGUMENTS
        or any(len(spec.shape) > layout.most_dimensions for spec in specs)
    ):
        return None
    # A call in another thread may outlast the dispatcher's own reference to the watch.
    kept: list[Any] = [watch]

    def address(value: Any) -> int:
        kept.append(value)
        return id(value)

    outside, inside = thread_keys()
    positional, fixed = arguments.positional, arguments.fixed
    table = array.array(
        "q",
        [
            *(watch.words.address, address(is_deterministic), address(deterministic)),
            *map(address, DUAL_LEVEL),
            *(outside[0], inside[0], outside[1], inside[1]),
            *(address(torch.Tensor), layout.implementation * WORD_BYTES),
            *(layout.kind * WORD_BYTES, KIND_BITS, layout.keys * WORD_BYTES),
            address(MISSED),
            *(len(arguments.tensors), len(positional), len(fixed), len(programs)),
        ],
    )
    for argument in arguments.tensors:
        name = argument.name
        position = positional.index(name) if name in positional else -1
        table.extend([address(name), position])
    table.extend([address(name) for name in positional])
    for name, value in fixed.items():
        table.extend([address(name), address(value)])
    for program in programs:
        table.extend(_bucket_words(program, layout, address))
    # Bytes, so that a call can't see half of a change; words of 8 as they lie there.
    return functools.partial(native.call, table.tobytes(), tuple(kept))


def _bucket_words(
    program: ExactProgram,
    layout: TensorLayout,
    address: Callable[[Any], int],
) -> list[int]:
    """A bucket's part of the table (calls.cpp, Bucket)."""
    words: list[int] = []
    for spec in program.specs:
        expected = shape_words(spec.shape, spec.stride, layout)
        kind = tensor_kind(getattr(torch, spec.dtype), layout)
        words += [*kind, len(expected)]
        for offset, word in expected:
            words += [offset * WORD_BYTES, word]
    inputs = [0 if tensor is None else address(tensor) for tensor in program.inputs]
    for index, argument in program.arguments:
        inputs[index] = -1 - argument
    result_class, fields = program.fields or (None, ())
    words += inputs
    for name, output, value in fields:
        words += [address(name), -1 if output is None else output, address(value)]
    head = [
        *(address(program.call), address(program.build)),
        0 if result_class is None else address(result_class),
        *(len(inputs), len(fields)),
    ]
    return [1 + len(head) + len(words), *head, *words]


def can_be_exact(arguments: Arguments) -> bool:
    """Whether a call's arguments can be looked up by name, one tensor each."""
    return bool(arguments.tensors) and not any(
        (*(argument.below for argument in arguments.tensors), arguments.fixed_below)
    )


class ExactCalls:
    """Recognises exact calls by torch's own guards, one check in C++.

    Args:
        arguments: The entry's.
        specs: Sizes of a bucket's axes → what its program takes, in order.
    """

    def __init__(
        self,
        arguments: Arguments,
        specs: Mapping[tuple[int, ...], Sequence[TensorSpec]],
    ) -> None:
        self._pick = _picker([argument.name for argument in arguments.tensors])
        self._positional = arguments.positional
        self._fixed = tuple(arguments.fixed.items())
        self._buckets = {
            tuple(spec.shape for spec in each): (sizes, _guards(each, arguments.device))
            for sizes, each in specs.items()
            if can_be_exact(arguments)
        }

    def match(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], Sequence[torch.Tensor], tuple[int, ...]] | None:
        """The call's arguments by name, its tensors and sizes; None if it isn't one."""
        # Autocast and a trace are among what a guard holds a tensor to, modes aren't.
        if not self._buckets or count_modes() or in_dual_level():
            return None
        if args:
            if kwargs or len(args) > len(self._positional):
                return None
            kwargs = dict(zip(self._positional, args, strict=False))
        try:
            tensors = self._pick(kwargs)
            if len(kwargs) != len(tensors) and (
                len(kwargs) != len(tensors) + len(self._fixed)
                # True, False and None; an equal number may be another object.
                or any(kwargs[name] is not value for name, value in self._fixed)
            ):
                return None
            # Asking a nested tensor for its shape fails, and torch's guard would crash.
            found = self._buckets.get(tuple([tensor.shape for tensor in tensors]))
        except (AttributeError, KeyError, TypeError, RuntimeError):
            # `Arguments` says what is wrong.
            return None
        if found is None:
            return None
        sizes, guards = found
        for guard in guards[is_inference_mode_enabled()]:
            if guard(*tensors):
                return kwargs, tensors, sizes
        return None


def _picker(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Takes the values of some keys out of a dict, in order."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda values: tuple([values[name] for name in names])


def _guards(
    specs: Sequence[TensorSpec], device: torch.device
) -> dict[bool, list[Callable[..., bool]]]:
    """Inference mode → checks for tensors made outside of it, and inside."""
    guards: dict[bool, list[Callable[..., bool]]] = {False: [], True: []}
    for made_inside in (False, True):
        with torch.inference_mode(made_inside):
            examples = [
                torch.empty_strided(
                    spec.shape,
                    spec.stride,
                    dtype=getattr(torch, spec.dtype),
                    device=device,
                )
                for spec in specs
            ]
        for inside in guards:
            # They hold for the modes they are made in, of which autocast is one.
            autocast = torch.autocast(device.type, enabled=False)
            with torch.inference_mode(inside), autocast:
                guards[inside].append(tensor_guard(examples))
    return guards
