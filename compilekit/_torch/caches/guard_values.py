"""Guards that torch can't store, as texts that can: what a value is, not where it lies.

torch drops every guard on an object's identity from a package: a function, class or
module that is replaced later would go unnoticed. Here such a guard becomes a pair of
expression and text; `checker` makes a function that compares a frame with the pairs.
"""

from __future__ import annotations

import enum
import functools
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import guards
from torch._dynamo.source import GlobalSource
from torch._library.custom_ops import CustomOpDef

from compilekit._torch.caches.operators import describe_operator
from compilekit.runtime.code import function_digest

# Guard types that torch leaves out of a package or can't store.
# Source: torch/_dynamo/guards.py, CheckFunctionManager
# .UNSUPPORTED_SERIALIZATION_GUARD_TYPES and its use under caching_precompile
# (2.11, 2.13).
_UNSTORABLE = frozenset(
    {*guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES}
)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), type(...))
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# An attribute, cell or default of a function: the function itself may not unpickle.
_INSIDE_FUNCTION = (
    ".__closure__",
    ".__code__",
    ".__defaults__",
    ".__kwdefaults__",
    ".cell_contents",
    ".__func__",
)
# Text of a value that isn't there; a guard on it says that it must stay away.
ABSENT = "absent"


def unpicklable_globals(entries: Any) -> frozenset[str]:
    """Globals that a frame's guards look at and pickle refuses (a custom operator).

    Args:
        entries: The frame's ``GuardFilterEntry`` objects.
    """
    found = set()
    for entry in entries:
        source = entry.orig_guard.originating_source
        if not (entry.has_value and isinstance(source, GlobalSource)):
            continue
        if isinstance(entry.value, (types.ModuleType, torch.nn.Module, torch.Tensor)):
            continue
        try:
            pickle.dumps(entry.value)
        except (pickle.PicklingError, AttributeError, TypeError):
            found.add(source.global_name)
    return frozenset(found)


def is_ours(entry: Any, unpicklable: frozenset[str]) -> bool:
    """True for a guard that torch can't store, so that `checker` must hold it.

    Args:
        entry: A ``GuardFilterEntry``.
        unpicklable: See `unpicklable_globals`.
    Source: torch/_dynamo/types.py, GuardFilterEntry (2.11, 2.13).
    """
    if entry.guard_type in _UNSTORABLE or _UNSTORABLE & {*entry.derived_guard_types}:
        return True
    guard = entry.orig_guard
    if any(part in guard.name for part in _INSIDE_FUNCTION):
        return True
    source = guard.originating_source
    while source is not None:
        if getattr(source, "is_derefed_cell_contents", False):
            return True
        if isinstance(source, GlobalSource) and source.global_name in unpicklable:
            return True
        source = getattr(source, "base", None)
    return False


def describe(value: Any, depth: int = 3) -> str:
    """What a value is, the same in every process.

    Functions by their code, defaults and closure; other objects by their class, because
    what was read from them has guards of its own.
    """
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (*_SCALARS, *_TORCH_VALUES)):
        return repr(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"class {_name(value)}"
    if isinstance(value, functools.partial):
        inner = (value.func, value.args, sorted(value.keywords.items()))
        return f"partial {describe(inner, depth - 1)}" if depth else "partial"
    if isinstance(value, types.MethodType):
        owner = _name(type(value.__self__))
        return f"method of {owner}: {describe(value.__func__, depth)}"
    if isinstance(value, types.FunctionType):
        return _describe_function(value, depth)
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return f"builtin {getattr(value, '__module__', None)}:{value.__qualname__}"
    if type(value) in (tuple, list) and depth:
        return f"({', '.join(describe(item, depth - 1) for item in value)})"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"operator {value}"
    if isinstance(value, CustomOpDef):
        return f"operator {describe_operator(value._qualname)}"
    return f"instance of {_name(type(value))}"


@functools.lru_cache(maxsize=8192)
def _describe_function(function: types.FunctionType, depth: int) -> str:
    # Kept per function: each layer of a model holds the same few, and their closures
    # hold each other.
    text = f"function {_name(function)} {function_digest(function)[:16]}"
    if not function.__closure__ or not depth:
        return text
    cells = []
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__, strict=True
    ):
        try:
            cells.append(f"{name}={describe(cell.cell_contents, depth - 1)}")
        except ValueError:
            cells.append(f"{name}: empty")
    return f"{text} [{', '.join(cells)}]"


def _name(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def evaluate(
    expression: str, frame_locals: Mapping[str, Any], frame_globals: dict[str, Any]
) -> Any:
    """The value behind a guard's name, such as ``L['self'].act`` or ``G['F'].relu``.

    Source: torch/_dynamo/guards.py, CLOSURE_VARS (2.11, 2.13): the functions that a
    name may call.
    """
    scope = {**guards._get_closure_vars(), "L": frame_locals, "G": frame_globals}
    return eval(expression, scope)


def text_of(
    expression: str, frame_locals: Mapping[str, Any], frame_globals: dict[str, Any]
) -> str:
    """`describe` of the value behind an expression; `ABSENT` if there is none."""
    try:
        return describe(evaluate(expression, frame_locals, frame_globals))
    except (AttributeError, LookupError, TypeError, NameError):
        return ABSENT


def checker(
    wanted: Sequence[tuple[str, str]], frame_globals: dict[str, Any]
) -> Callable[[Mapping[str, Any]], bool]:
    """A function that says whether a frame's values are the stored ones.

    A value is described once; as long as the frame holds the same object, comparing it
    is one identity test (70 ns per guard).
    """
    texts = [text for _, text in wanted]
    read = _reader([expression for expression, _ in wanted])
    scope = {**guards._get_closure_vars(), "G": frame_globals}
    known: list[Any] = []

    def check(frame_locals: Mapping[str, Any]) -> bool:
        try:
            values = read(scope, frame_locals)
        except (AttributeError, LookupError, TypeError, NameError):
            values = None
        if values is None:
            # Some expression leads nowhere: each on its own, the slow way.
            found = [text_of(e, frame_locals, frame_globals) for e, _ in wanted]
            return found == texts
        if known and all(a is b for a, b in zip(known, values, strict=True)):
            return True
        if [describe(value) for value in values] != texts:
            return False
        known[:] = values
        return True

    return check


def _reader(expressions: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """One compiled function for all expressions: calling `eval` for each is slow."""
    body = "".join(f"{expression}, " for expression in expressions)
    code = compile(f"({body})", "<guards>", "eval")

    def read(scope: dict[str, Any], frame_locals: Mapping[str, Any]) -> Any:
        return eval(code, scope, {"L": frame_locals})

    return read


def differing(
    wanted: Sequence[tuple[str, str]],
    frame_locals: Mapping[str, Any],
    frame_globals: dict[str, Any],
) -> tuple[tuple[str, str, str], ...]:
    """Expression, stored text and present text of every guard that fails."""
    found = (
        (expression, text, text_of(expression, frame_locals, frame_globals))
        for expression, text in wanted
    )
    return tuple(item for item in found if item[1] != item[2])
