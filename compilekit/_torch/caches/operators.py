"""Custom operators in compiled graphs: their schemas and functions.

No cache key of torch holds them, and a graph that was compiled for another schema (an
operator that now writes its input) is wrong without a word.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from compilekit._torch.runtime import operator_schema
from compilekit.runtime.code import function_digest

# Operators that belong to torch itself: their schemas come with torch's version.
_OWN = frozenset(
    {
        *("", "aten", "prims", "prim", "inductor", "inductor_prims", "higher_order"),
        *("quantized", "_quantized", "mkldnn", "mkl", "onednn", "rngprims"),
        *("c10d", "_c10d_functional", "_dtensor", "fsdp", "streams", "profiler"),
    }
)

# Every custom operator that `custom_operators` met in this process.
seen: dict[str, str] = {}


def custom_operators(graph: Any) -> dict[str, str]:
    """Operators outside torch that a graph calls → digest of schema and functions."""
    if graph is None:
        return {}
    names = set()
    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            name = _operator_name(node.target)
            if name.partition("::")[0] not in _OWN:
                names.add(name)
    found = {name: describe_operator(name) for name in sorted(names)}
    seen.update(found)
    return found


def _operator_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return ""


def describe_operator(name: str) -> str:
    """Schema of ``namespace::name``, and a digest of its Python functions.

    Source: torch/_library/custom_ops.py, OPDEFS and CustomOpDef (2.11, 2.13).
    """
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        return "not registered"
    text = operator_schema(packet)
    definition = OPDEFS.get(name)
    if definition is None:
        return text
    functions = [definition._init_fn, getattr(definition, "_abstract_fn", None)]
    digests = [function_digest(f) for f in functions if hasattr(f, "__code__")]
    return f"{text} {hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]}"
