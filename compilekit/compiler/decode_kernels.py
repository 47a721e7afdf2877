"""Our own kernels in the steps of ``[generate]``: products of few rows, attention.

Only on a GPU in 16-bit floats. A decode step reads every weight once and computes next
to nothing, so what counts is how fast weights are read. For each product the tuning
file says what was the fastest on the device, torch's own way included; without one, it
is our kernel (docs/generate.md has what was measured).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from compilekit.compiler.generate import Attention, Window, step
from compilekit.compiler.tuning import Tuning
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
    """Products of a captured graph that our kernels can compute."""
    found: dict[Node, list[tuple[Node, torch.Tensor, torch.Tensor, bool]]] = {}
    for node in graph.graph.nodes:
        if node.target is not torch.nn.functional.linear or node.kwargs:
            continue
        row, weight, bias = (*node.args, None, None)[:3]
        x, w = _example(row), _example(weight)
        if _fits(x, w) and _given(weight) and (bias is None or _given(bias)):
            found.setdefault(row, []).append((node, x, w, bias is not None))
    result = []
    for calls in found.values():
        for some in _pieces(calls, blocks.MOST_WEIGHTS):
            nodes, inputs, weights, biased = zip(*some, strict=True)
            inner = inputs[0].shape[-1]
            product = Product(
                nodes=nodes,
                rows=inputs[0].numel() // inner,
                inner=inner,
                columns=tuple(weight.shape[0] for weight in weights),
                biased=biased,
                dtype=inputs[0].dtype,
            )
            if blocks.candidates(product.rows, product.columns, product.inner):
                result.append(product)
    return result


def choose(product: Product, tuning: Tuning) -> Blocks | None:
    """How a product is computed; None = as torch would."""
    choice = tuning.choices.get(product.key)
    if choice is not None:
        return Blocks(*choice["blocks"]) if choice["blocks"] else None
    processors = torch.cuda.get_device_properties().multi_processor_count
    return blocks.untuned(product.rows, product.columns, product.inner, processors)


def replace(graph: GraphModule, tuning: Tuning) -> None:
    """Have our kernels compute a captured graph's products, where they are faster."""
    for product in find(graph):
        cut = choose(product, tuning)
        if cut is None:
            continue
        first = product.nodes[0]
        arguments = [(*node.args, None)[:3] for node in product.nodes]
        with graph.graph.inserting_before(first):
            flat = graph.graph.call_function(
                products.OPERATOR,
                (
                    first.args[0],
                    [weight for _, weight, _ in arguments],
                    [bias for _, _, bias in arguments],
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
            return otherwise(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        output = kernels.ATTEND(query, key, value, attention_mask, scale)
        return output.transpose(1, 2), None

    return attention


def _example(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, Node) else None


def _given(argument: Any) -> bool:
    """True for a graph's own input, which is there before the first product."""
    return isinstance(argument, Node) and argument.op == "placeholder"


def _fits(x: Any, weight: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and x.is_cuda
        and x.dtype in kernels.DTYPES
        and weight.dtype == x.dtype
        and weight.ndim == 2
        and weight.is_contiguous()
        and math.prod(x.shape[:-1]) <= blocks.MOST_ROWS
    )


def _pieces(items: list[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
