"""Programs replayed as CUDA graphs, on an emulated device."""

from __future__ import annotations

from typing import NamedTuple

import emulated_graphs
import pytest
import torch

from compilekit.errors import AttachError
from compilekit.runtime.graphs import GraphedCall, GraphPool


class Captured(NamedTuple):
    """A program behind its graph.

    Attributes:
        call: The graphed program ``y = x @ w; seen += 1``.
        device: Where it runs.
        sizes: Bytes of each capture.
    """

    call: GraphedCall
    device: emulated_graphs.Device
    sizes: list[int]


def program(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A product, and a count in place; as host code does, it empties the list."""
    x, w, seen = inputs
    inputs.clear()
    seen += 1
    return x @ w, seen.clone()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """Nothing is captured yet."""
    device, sizes = emulated_graphs.Device(), list[int]()
    device.install(monkeypatch)
    pool = GraphPool(torch.device("cuda", 0))
    call = GraphedCall("decode/b8", device.program(program), pool, sizes.append)
    return Captured(call, device, sizes)


def tensors() -> list[torch.Tensor]:
    """An input with room for 8 rows, weights, a count."""
    return [torch.zeros(8, 4), torch.randn(4, 4), torch.zeros(1)]


def test_one_graph_for_all_lengths(captured: Captured) -> None:
    """Calls of ten lengths, each padded to the bucket, replay one graph."""
    x, w, seen = tensors()
    for length in (3, 8, 1, 5, 2, 7, 4, 6, 8, 1):
        x.zero_()
        x[:length] = torch.randn(length, 4)
        found, _ = captured.call([x, w, seen])
        assert torch.equal(found, x @ w)
    assert (captured.device.captured, captured.device.replayed) == (1, 9)
    assert captured.sizes == [1_000_000]


def test_what_a_program_writes_is_written_once(captured: Captured) -> None:
    """The call that is captured runs once, and so does every replay."""
    x, w, seen = tensors()
    counts = [captured.call([x, w, seen])[1].item() for _ in range(4)]
    assert counts == [1, 2, 3, 4]
    assert seen.item() == 4


def test_outputs_stay(captured: Captured) -> None:
    """What a call returned isn't overwritten by later ones."""
    x, w, seen = tensors()
    kept = []
    for number in range(4):
        x.fill_(number)
        kept.append(captured.call([x, w, seen])[0])
    for number, found in enumerate(kept):
        assert torch.equal(found, torch.full_like(x, number) @ w)


@pytest.mark.parametrize("way", ["another tensor", "other data", "in place"])
def test_replaced_weights(captured: Captured, way: str) -> None:
    """Weights at another address are captured anew; new values in place are read."""
    x, w, seen = tensors()
    x.normal_()
    captured.call([x, w, seen])
    other = torch.randn(4, 4)
    if way == "another tensor":
        w = other
    elif way == "other data":
        w.data = other
    else:
        w.copy_(other)
    for _ in range(3):
        assert torch.equal(captured.call([x, w, seen])[0], x @ other)
    expected = (1, 3) if way == "in place" else (2, 2)
    assert (captured.device.captured, captured.device.replayed) == expected


def test_a_failed_capture(captured: Captured) -> None:
    """A program that can't be captured says so; nothing half captured is replayed."""
    x, w, seen = tensors()
    x.normal_()
    captured.device.refuses = RuntimeError("not permitted while capturing")
    with pytest.raises(AttachError, match="not permitted while") as raised:
        captured.call([x, w, seen])
    assert raised.value.message.startswith("what decode/b8 launches")
    assert "COMPILEKIT_CUDA_GRAPHS=0" in raised.value.hint
    captured.device.refuses = None
    for _ in range(2):
        assert torch.equal(captured.call([x, w, seen])[0], x @ w)
    assert captured.device.replayed == 1
