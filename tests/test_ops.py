"""What a graph's node may write."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph

from compilekit._torch.ops import may_write

X = torch.ones(2)


@pytest.mark.parametrize(
    ("kind", "target", "kwargs"),
    [
        ("call_method", "add_", {}),
        ("call_method", "__iadd__", {}),
        ("call_function", operator.iadd, {}),
        ("call_function", operator.setitem, {}),
        ("call_function", torch.relu_, {}),
        ("call_function", torch.add, {"out": X}),
        ("call_function", torch.ops.aten.copy_.default, {}),
        ("call_function", torch.ops.aten.add.out, {}),
        ("call_function", torch.ops.aten.copy_, {}),
        ("call_function", torch.nn.functional.relu, {"inplace": True}),
        ("call_function", torch.ops.higher_order.cond, {}),
    ],
)
def test_writers(kind: str, target: object, kwargs: dict[str, object]) -> None:
    """In-place methods, operators, ``out=``, mutable schemas, whole subgraphs."""
    node = Graph().create_node(kind, target, (), kwargs)  # type: ignore[arg-type]
    assert may_write(node)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("placeholder", "add_"),
        ("call_method", "view"),
        ("call_method", "contiguous"),
        ("call_function", operator.getitem),
        ("call_function", operator.add),
        ("call_function", operator.and_),
        ("call_function", operator.invert),
        ("call_method", "__eq__"),
        ("call_function", torch.nn.functional.relu),
        ("call_function", torch.nn.functional.linear),
        ("call_function", torch.nn.functional.silu),
        ("call_function", torch.ops.aten.add.Tensor),
    ],
)
def test_readers(kind: str, target: object) -> None:
    """What lies between a layer's projections writes nothing."""
    assert not may_write(Graph().create_node(kind, target))  # type: ignore[arg-type]
