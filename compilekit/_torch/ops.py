"""Private names about operators: where one comes from, what it writes, is it stored."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.inductor_prims import force_stride_order
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from compilekit._torch.runtime import operator_schema, storage_id


def operator_origin(name: str) -> dict[str, str]:
    """Module that registers ``namespace::name`` and the operator's schema.

    The module is empty for an operator registered from C++.

    Source: torch/_library/custom_ops.py, OPDEFS and CustomOpDef (2.11, 2.13).
    """
    namespace, _, own_name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), own_name)
    definition = OPDEFS.get(name)
    module = definition._init_fn.__module__ if definition is not None else ""
    return {"module": module, "schema": operator_schema(packet)}


# Python's in-place operators.
_WRITING = {
    *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul"),
    *("ior", "ipow", "irshift", "isub", "itruediv", "ixor", "setitem", "delitem"),
}


def may_write(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph may write into a tensor; rather yes than no.

    Source: torch/_ops.py, OpOverload._schema and HigherOrderOperator (2.11, 2.13).
    """
    target = node.target
    if not node.op.startswith("call_"):
        return False
    if isinstance(target, HigherOrderOperator):
        return True
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        names = target.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(target, name) for name in names]
        return any(overload._schema.is_mutable for overload in overloads)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.startswith("__") or getattr(target, "__module__", "") == "_operator":
        return name.strip("_") in _WRITING
    if "inplace" in _parameters(target):
        given = [*node.args, *node.kwargs.values()]
        return any(value is True for value in given)
    return name.endswith("_") or "out" in node.kwargs


def _parameters(target: Any) -> Sequence[str]:
    """Names of a Python function's parameters; none of a built-in one's."""
    code = (
        getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
    )
    return () if code is None else code.co_varnames[: code.co_argcount]


def compute_once(graph: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Have Inductor store a node's value, where it would compute it at each use.

    An operator that asks for a layout makes it store its input; the layout here is the
    value's own, so nothing else comes of it.

    Source: torch/_inductor/inductor_prims.py, force_stride_order; its lowering in
    torch/_inductor/lowering.py (2.11, 2.13).
    """
    example = node.meta["example_value"]
    with graph.graph.inserting_after(node):
        stored = graph.graph.call_function(
            force_stride_order, (node, list(example.stride()))
        )
    stored.meta = dict(node.meta)
    node.replace_all_uses_with(stored, lambda user: user is not stored)


# What a model's own operations raise where they can't run on the CPU.
_CANT_RUN = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)


class _NotConstant(RuntimeError):
    """An operator's result isn't the same each time, or not torch's to say."""


# Memory that holds whatever it held before.
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty")


class _ConstantOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that draw random numbers, and any that aren't torch's own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            func.namespace not in ("aten", "prims", "prim")
            or torch.Tag.nondeterministic_seeded in func.tags
            or func._opname in _UNINITIALISED
        ):
            raise _NotConstant(str(func))
        return func(*args, **(kwargs or {}))


def constant_value(node: torch.fx.Node, most: int) -> torch.Tensor | None:
    """What a node of a Dynamo graph computes, on the CPU, if no input has a part in it.

    Args:
        most: Elements of the largest tensor on the way that is worth computing.
    Returns:
        None if the value depends on an input, is random or a custom operator's, if
        anything may write into memory on the way, or if it can't be computed here.

    Source: torch/utils/_python_dispatch.py, TorchDispatchMode (2.11, 2.13).
    """
    needed = {node}
    for earlier in reversed(list(node.graph.nodes)):
        if earlier not in needed:
            continue
        if earlier.op not in ("call_function", "call_method"):
            return None
        example = _example(earlier)
        if example is not None and example.numel() > most:
            return None
        needed.update(earlier.all_input_nodes)
    # Views share their memory, of fake tensors too.
    memory = {storage_id(x) for x in map(_example, needed) if x is not None}
    for writer in filter(may_write, node.graph.nodes):
        touched = map(_example, (writer, *writer.all_input_nodes))
        if any(x is not None and storage_id(x) in memory for x in touched):
            return None
    values: dict[torch.fx.Node, Any] = {}

    def here(argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return values[argument]
        named = isinstance(argument, str) and argument.startswith("cuda")
        on_device = named or isinstance(argument, torch.device)
        return torch.device("cpu") if on_device else argument

    try:
        with torch.no_grad(), _ConstantOnly():  # type: ignore[no-untyped-call]
            for step in node.graph.nodes:
                if step in needed:
                    args = map_aggregate(step.args, here)
                    kwargs = map_aggregate(step.kwargs, here)
                    if step.op == "call_method":
                        values[step] = getattr(args[0], step.target)(
                            *args[1:], **kwargs
                        )
                    else:
                        values[step] = step.target(*args, **kwargs)
        value = values[node]
        return value.cpu() if isinstance(value, torch.Tensor) else None
    except _CANT_RUN:
        return None


def _example(node: torch.fx.Node) -> torch.Tensor | None:
    """The fake tensor that a node stands for."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    return example
