"""Private names about operators: where one comes from, what it writes, is it stored."""

from __future__ import annotations

import operator

import torch
from torch._inductor.inductor_prims import force_stride_order
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload

from compilekit._torch.runtime import operator_schema


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


# Python's in-place operators (iadd, …); inv and index are among them and do no harm.
_WRITING = {name for name in vars(operator) if name.startswith("i")}
_WRITING |= {"setitem", "delitem"}


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
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = name.endswith("_") or name.strip("_") in _WRITING
    return in_place or "out" in node.kwargs


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
