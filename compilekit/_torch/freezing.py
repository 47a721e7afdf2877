"""Private Inductor names that fold weights into a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.compile_fx import fake_tensor_prop
from torch._inductor.constant_folding import constant_fold
from torch._inductor.freezing import convert_conv_weights_to_channels_last
from torch._inductor.fx_passes.freezing_patterns import freezing_passes
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import _disable_current_modes

from compilekit._torch.runtime import memory_order, storage_id


def fold_weights(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    weights: Mapping[int, torch.Tensor],
    metadata: Any,
) -> frozenset[int]:
    """Compute once, here, what of an AOTAutograd graph depends on nothing but weights.

    Inductor's own freezing, but for three things. A weight that is read as it is stays
    an input, so that no second copy of it is kept. So does every other input, though
    nothing may read it any more: inputs keep their places. And no weight is packed for
    oneDNN, whose packed tensors can't be stored.

    Args:
        graph: Changed in place.
        inputs: Its example inputs.
        weights: Input → its real value. Those that the graph writes or returns are
            left alone.
        metadata: AOTAutograd's ``fw_metadata``.
    Returns:
        The inputs whose values are the graph's now; none if nothing was computed.
    Source: torch/_inductor/freezing.py, _freeze and replace_params_with_constants;
    torch/_inductor/compile_fx.py, fw_compiler_freezing (2.11, 2.12, 2.13).
    """
    places = graph.graph.find_nodes(op="placeholder")
    frozen = {
        index: weight
        for index, weight in weights.items()
        if not _is_live(index, metadata)
    }
    with torch._inductor.config.patch({"cpp.weight_prepack": False}):
        view_to_reshape(graph)  # type: ignore[no-untyped-call]
        for index, weight in frozen.items():
            _insert(graph, places[index], weight)
        if GraphLowering.decide_layout_opt(graph, is_inference=True):
            fake_tensor_prop(graph, list(inputs), True)
            convert_conv_weights_to_channels_last(graph)
        graph.graph = fx_graph_cse(graph.graph)
        graph.recompile()
        freezing_passes(graph, list(inputs))
        constant_fold(graph)
    with _disable_current_modes():
        folded = _unfold(graph, frozen)
    fake_tensor_prop(graph, list(inputs), True)
    graph.graph.lint()
    graph.recompile()
    return frozenset(frozen) if folded else frozenset()


def _unfold(graph: torch.fx.GraphModule, frozen: Mapping[int, torch.Tensor]) -> bool:
    """Have inputs read again what is still a weight; whether anything else is left."""
    places = graph.graph.find_nodes(op="placeholder")
    own = {storage_id(weight): index for index, weight in frozen.items()}
    folded = False
    for node in graph.graph.find_nodes(op="get_attr"):
        # What looks into a weight lazily, or as another type, is no view of the input.
        value = getattr(graph, str(node.target)).resolve_conj().resolve_neg()
        source = own.get(storage_id(value))
        if source is not None and value.dtype == frozen[source].dtype:
            _restore(graph, node, places[source], frozen[source])
            continue
        folded = True
        if memory_order(value) is None:
            value = value.contiguous()
        setattr(graph, str(node.target), value)
    return folded


def _is_live(index: int, metadata: Any) -> bool:
    """Whether a graph writes an input, or returns it or a view of it."""
    info = metadata.input_info[index]
    returned = {each.base_idx for each in metadata.output_info}
    return bool(info.mutates_data or info.mutates_metadata or index in returned)


def _insert(
    graph: torch.fx.GraphModule, place: torch.fx.Node, weight: torch.Tensor
) -> None:
    """Have a graph read a weight's value in an input's place."""
    name = f"_weight_{place.name}"
    graph.register_buffer(name, weight)
    with graph.graph.inserting_after(place):
        node = graph.graph.create_node("get_attr", name)
    node.meta.update(place.meta)
    place.replace_all_uses_with(node)


def _restore(
    graph: torch.fx.GraphModule,
    node: torch.fx.Node,
    place: torch.fx.Node,
    weight: torch.Tensor,
) -> None:
    """Have it read the input again, through a view if the value is one."""
    value = getattr(graph, str(node.target))
    offset = value.storage_offset() - weight.storage_offset()
    same = (value.shape, value.stride(), offset) == (weight.shape, weight.stride(), 0)
    with graph.graph.inserting_before(node):
        new = place
        if not same:
            arguments = (place, list(value.shape), list(value.stride()), offset)
            new = graph.graph.call_function(
                torch.ops.aten.as_strided.default, arguments
            )
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)
