"""Causal attention that says so.

Models build their causal mask out of ``arange`` and comparisons, and pass it to
attention as a tensor like any other. Flash attention takes no mask, and every kernel
that reads one does twice the work: but a mask that is made of constants can be looked
at while a bucket is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention

from compilekit._torch.ops import constant_value

# In the order of its signature.
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# A mask is looked at in memory: 16384 × 16384 booleans.
_MOST_ELEMENTS = 2**28


def pass_causality(graph: GraphModule) -> int:
    """Replace masks that hide nothing, or just the future, by ``is_causal``.

    Only boolean masks that depend on no input are looked at.

    Args:
        graph: As Dynamo captured it, with ``example_value`` of its nodes; changed.
    Returns:
        How many calls of attention pass no mask any more.
    """
    known: dict[Node, torch.Tensor | None] = {}
    changed = 0
    for node in graph.graph.nodes:
        if node.target is not scaled_dot_product_attention:
            continue
        given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        if not isinstance(mask, Node) or given.get("is_causal"):
            continue
        if mask not in known:
            known[mask] = constant_value(mask, _MOST_ELEMENTS)
        value = known[mask]
        queries, keys = _length(given["query"]), _length(given["key"])
        if value is None or value.dtype != torch.bool or not (queries and keys):
            continue
        causal = _is_causal(value, queries, keys)
        if not (causal or bool(value.all())):
            continue
        given.update(attn_mask=None, is_causal=causal)
        node.args, node.kwargs = (), given
        changed += 1
        _erase_unused(graph, mask)
    if changed:
        graph.recompile()
    return changed


def _erase_unused(graph: GraphModule, mask: Node) -> None:
    """Erase what only a mask was made of: constants, which write nothing.

    Nothing else: a call whose result isn't used may write into a tensor.
    """
    made_of = {mask}
    for node in reversed(list(graph.graph.nodes)):
        if node in made_of:
            made_of.update(node.all_input_nodes)
            if not node.users:
                graph.graph.erase_node(node)


def _length(node: Any) -> int:
    """The next to last size of a node's tensor, a query's or key's positions; or 0."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(example, torch.Tensor) or example.ndim < 2:
        return 0
    return example.shape[-2]


def _is_causal(mask: torch.Tensor, queries: int, keys: int) -> bool:
    """Whether each position sees itself and those before it, and there are several."""
    if not 1 < queries == keys or mask.shape[-2:] != (queries, keys):
        return False
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    return bool((mask == causal).all())
