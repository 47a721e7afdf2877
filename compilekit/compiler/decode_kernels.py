"""Our own kernels in the steps of ``[generate]``: products of few rows, attention.

Only on a GPU in 16-bit floats. A decode step reads every weight once and computes next
to nothing, so what counts is how fast weights are read. For each product the tuning
file says what was the fastest on the device, torch's own way included; without one, it
is our kernel (docs/generate.md has what was measured).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from compilekit._torch.ops import may_write
from compilekit.compiler.generate import Attention, Window, step
from compilekit.compiler.tuning import Tuning
from compilekit.errors import ConfigError
from compilekit.kernels import attention as kernels
from compilekit.kernels import blocks, products
from compilekit.kernels.blocks import Blocks


class Product(NamedTuple):
    """Projections of the same rows, as the captured graph has them.

    Attributes:
        nodes: The ``linear`` calls, in order.
        rows: Rows of the input.
        inner: Their length.
        columns: Output columns of each call.
        biased: Whether each adds a bias.
        dtype: Of all tensors.
    """

    nodes: tuple[Node, ...]
    rows: int
    inner: int
    columns: tuple[int, ...]
    biased: tuple[bool, ...]
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """What the tuning file knows it by: ``bfloat16 1 x 3584 @ 3584b 512b 512b``."""
        name = str(self.dtype).removeprefix("torch.")
        sizes = zip(self.columns, self.biased, strict=True)
        weights = " ".join(f"{n}{'b' * biased}" for n, biased in sizes)
        return f"{name} {self.rows} x {self.inner} @ {weights}"


def find(graph: GraphModule) -> list[Product]:
    """Products of a captured graph that our kernels can compute.

    Those of one input are one product, unless something is written between them.
    """
    groups: list[list[Node]] = []
    growing: dict[Node, list[Node]] = {}
    for node in graph.graph.nodes:
        if may_write(node):
            growing.clear()
        if not _fits(node):
            continue
        group = growing.get(node.args[0])
        if group is None or len(group) == blocks.MOST_WEIGHTS:
            group = growing[node.args[0]] = []
            groups.append(group)
        group.append(node)
    return [product for group in groups if (product := _product(group))]


def _product(nodes: list[Node]) -> Product | None:
    """The product that calls of one input are; None if no block fits it."""
    x = _example(nodes[0].args[0])
    inner = x.shape[-1]
    product = Product(
        nodes=tuple(nodes),
        rows=x.numel() // inner,
        inner=inner,
        columns=tuple(_example(node.args[1]).shape[0] for node in nodes),
        biased=tuple(_bias(node) is not None for node in nodes),
        dtype=x.dtype,
    )
    found = blocks.candidates(product.rows, product.columns, product.inner)
    return product if found else None


def choose(product: Product, tuning: Tuning) -> Blocks | None:
    """How a product is computed; None = as torch would.

    Raises:
        ConfigError: the tuning file cuts it into blocks that don't fit.
    """
    choice = tuning.choices.get(product.key)
    if choice is None:
        processors = torch.cuda.get_device_properties().multi_processor_count
        return blocks.untuned(product.rows, product.columns, product.inner, processors)
    if not choice["blocks"]:
        return None
    chosen = Blocks(*choice["blocks"])
    known = blocks.candidates(product.rows, product.columns, product.inner)
    if chosen not in known:
        raise ConfigError(
            f"[autotune] from: {product.key} is to be cut into {list(chosen)}; expected"
            f" one of {', '.join(str(list(each)) for each in known)}",
            hint="Tune again: `compilekit tune` measures what this version knows.",
        )
    return chosen


def replace(graph: GraphModule, tuning: Tuning) -> frozenset[products.Launch]:
    """Have our kernels compute a captured graph's products, where they are faster.

    Returns:
        The launches that the tuning file chose, for all products that have them.
    """
    measured: dict[products.Launch, bool] = {}
    for product in find(graph):
        cut = choose(product, tuning)
        if cut is None:
            continue
        launch = products.launch(product.rows, product.columns, cut)
        chosen = product.key in tuning.choices
        measured[launch] = measured.get(launch, True) and chosen
        first = product.nodes[0]
        with graph.graph.inserting_before(first):
            flat = graph.graph.call_function(
                products.OPERATOR,
                (
                    first.args[0],
                    [node.args[1] for node in product.nodes],
                    [_bias(node) for node in product.nodes],
                    list(cut),
                ),
            )
            at = 0
            for node, columns in zip(product.nodes, product.columns, strict=True):
                shape = node.meta["example_value"].shape
                count = product.rows * columns
                part = graph.graph.call_method("narrow", (flat, 0, at, count))
                whole = graph.graph.call_method("view", (part, tuple(shape)))
                whole.meta = dict(node.meta)
                node.replace_all_uses_with(whole)
                at += count
        for node in product.nodes:
            graph.graph.erase_node(node)
    graph.recompile()
    return frozenset(launch for launch, chosen in measured.items() if chosen)


class TokenWindow(Window):
    """A layer of the cache that one token of each sequence is written into."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a key and value behind those that are there; all of them."""
        if not kernels.fits(self.keys, self.values):
            return super().update(key_states, value_states, *args, **kwargs)
        kernels.WRITE(self.keys, self.values, key_states, value_states, self.start)
        return self.keys, self.values


def decode(model: torch.nn.Module, kwargs: dict[str, Any]) -> torch.Tensor:
    """The step of the same name in generate.py, by our kernels."""
    return step(model, kwargs, 1, TokenWindow)


def token_attention(otherwise: Attention) -> Attention:
    """transformers' attention by our kernel, for one token of each sequence.

    Args:
        otherwise: For other calls, and caches that aren't for our kernels.
    """

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        ours = (
            query.shape[2] == 1
            and query.dtype == key.dtype
            and kernels.fits(key, value)
            and attention_mask is not None
            and attention_mask.dtype == torch.bool
            and tuple(attention_mask.shape) == (query.shape[0], 1, 1, key.shape[2])
            and not dropout
            and kwargs.get("position_bias") is None
        )
        if not ours:
            kwargs.update(dropout=dropout, scaling=scaling)
            return otherwise(module, query, key, value, attention_mask, **kwargs)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        output = kernels.ATTEND(query, key, value, attention_mask, scale)
        return output.transpose(1, 2), None

    return attention


def _example(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, Node) else None


def _bias(node: Node) -> Any:
    return node.args[2] if len(node.args) > 2 else None


def _fits(node: Node) -> bool:
    """Whether a node is a product of few rows with an input of the graph."""
    if node.target is not torch.nn.functional.linear or node.kwargs:
        return False
    x, result = _example(node.args[0]), _example(node)
    parts = [part for part in (node.args[1], _bias(node)) if part is not None]
    return (
        isinstance(x, torch.Tensor)
        and isinstance(result, torch.Tensor)
        and x.is_cuda
        and x.dtype in kernels.DTYPES
        # Autocast gives another dtype.
        and result.dtype == x.dtype
        and 0 < math.prod(x.shape[:-1]) <= blocks.MOST_ROWS
        and all(_is_given(part, x.dtype) for part in parts)
    )


def _is_given(argument: Any, dtype: torch.dtype) -> bool:
    """Whether it's an input of the graph, there before the first product, and dense."""
    tensor = _example(argument)
    return (
        isinstance(tensor, torch.Tensor)
        and argument.op == "placeholder"
        and tensor.dtype == dtype
        and tensor.is_contiguous()
    )
