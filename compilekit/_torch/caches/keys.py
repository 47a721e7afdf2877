"""Cache keys with everything that went into them, for FX graphs and AOTAutograd.

torch looks a graph up by one hash, and a miss says nothing. Here each key comes with its
components, so that two can be compared; and what torch leaves out of the hash although
the compiled code depends on it (the CPU's vector instructions, the schemas and fake
implementations of custom operators) is put in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
from torch._inductor import codecache
from torch._library.custom_ops import OPDEFS

from compilekit._torch.caches.kernels import capability
from compilekit._torch.runtime import operator_schema
from compilekit.runtime.code import function_digest

# Operators that belong to torch itself: their schemas come with torch's version.
_OWN = frozenset(
    "aten prims prim inductor quantized _quantized mkldnn mkl onednn higher_order"
    " c10d _c10d_functional _dtensor rngprims fsdp export profiler debugprims"
    " inductor_prims streams".split()
)
_LINE = re.compile(r"\[([0-9a-z]+)\] (.*?): (.*)", re.DOTALL)


class Component(NamedTuple):
    """One part of a key: the hash that counts, and a text for people."""

    hash: str
    text: str


class Key(NamedTuple):
    """A cache key and its components.

    Attributes:
        kind: ``FX graph`` or ``AOTAutograd``.
        key: What torch looks up; also the name of the entry's folder.
    """

    kind: str
    key: str
    components: dict[str, Component]


def watch(wanted: Callable[[str, str], bool], on_key: Callable[[Key], None]) -> None:
    """From now on, pass every cache key that is `wanted` to `on_key`.

    Args:
        wanted: Called with kind and key; components are worked out only if it's true.
    Source: torch/_inductor/codecache.py, FxGraphCachePickler.get_hash, called with the
    details of a graph by compiled_fx_graph_hash; torch/_functorch/_aot_autograd/
    autograd_cache.py, autograd_cache_key (2.11, 2.13).
    """
    original = codecache.FxGraphCachePickler.get_hash

    def get_hash(self: Any, value: Any) -> str:
        if not isinstance(value, codecache.FxGraphHashDetails):
            return original(self, value)
        value.cpu_capability = capability()  # type: ignore[attr-defined]
        value.custom_operators = _custom_operators(value.gm)  # type: ignore[attr-defined]
        hashed = original(self, value)
        autograd = isinstance(value, AOTAutogradCacheDetails)
        kind = "AOTAutograd" if autograd else "FX graph"
        key = ("a" if autograd else "f") + hashed
        if wanted(kind, key):
            on_key(Key(kind, key, _components(self, value)))
        return hashed

    codecache.FxGraphCachePickler.get_hash = get_hash  # type: ignore[method-assign]


def _components(pickler: Any, details: Any) -> dict[str, Component]:
    """Each attribute of a key's details; lists and dicts item by item.

    Source: torch/_inductor/codecache.py, FxGraphCachePickler.debug_lines (2.11, 2.13):
    lines of the form ``[HASH] NAME: VALUE``.
    """
    found = {}
    for line in pickler.debug_lines(details):
        match = _LINE.fullmatch(line)
        if match is not None:
            hashed, name, text = match.groups()
            found[name] = Component(hashed[:16], text)
    return found


def _custom_operators(graph: Any) -> dict[str, str]:
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
    return {name: describe_operator(name) for name in sorted(names) if name}


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
