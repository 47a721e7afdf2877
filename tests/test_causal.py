"""Masks made of constants: said to be causal where they are, else left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention as attention

import compilekit
from compilekit import config as configuration
from compilekit.artifact import open_artifact
from compilekit.compiler import causal
from compilekit.compiler.build import build
from compilekit.compiler.causal import pass_causality
from compilekit.results import BuildResult

S = 6


def captured(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """The graph that Dynamo makes of a function."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


def query(seed: int = 0) -> torch.Tensor:
    """``[2, 3, S, 8]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, S, 8, generator=generator)


def future(device: torch.device) -> torch.Tensor:
    """As transformers makes it: True where a key isn't in the future."""
    places = torch.arange(S, device=device)
    mask = places.new_ones((), dtype=torch.bool) & (places[None] <= places[:, None])
    return mask[None, None].expand(2, -1, S, S)


def by_position(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, future(q.device), 0.0)


def by_keyword(q: torch.Tensor) -> torch.Tensor:
    return attention(q, value=q, key=q, attn_mask=~(future(q.device).logical_not()))


@pytest.mark.parametrize("function", [by_position, by_keyword])
def test_a_causal_mask_becomes_is_causal(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """However the mask is passed; nothing of it is left in the graph."""
    graph = captured(function, query())
    assert pass_causality(graph) == 1
    (node,) = (n for n in graph.graph.nodes if n.target is attention)
    assert (node.kwargs["attn_mask"], node.kwargs["is_causal"]) == (None, True)
    assert not [n for n in graph.graph.nodes if n.target is torch.arange]
    q = query(1)
    torch.testing.assert_close(graph(q)[0], function(q))


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    """Also for one query, which is-causal would let see the first key only."""
    q = query()

    def all_keys(q: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, S, dtype=torch.bool, device=q.device)
        return attention(q[:, :, -1:], q, q, attn_mask=mask)

    graph = captured(all_keys, q)
    assert pass_causality(graph) == 1
    (node,) = (n for n in graph.graph.nodes if n.target is attention)
    assert (node.kwargs["attn_mask"], node.kwargs["is_causal"]) == (None, False)
    torch.testing.assert_close(graph(query(1))[0], all_keys(query(1)))


def test_what_a_mask_shares_is_erased_once(recwarn: pytest.WarningsRecorder) -> None:
    """And what something else uses stays."""

    def shared(q: torch.Tensor) -> torch.Tensor:
        places = torch.arange(S)
        later = places[None] <= places[:, None]
        mask = later & (places[None] >= 0) & later
        return attention(q, q, q, mask) + places[:, None]

    graph = captured(shared, query())
    assert pass_causality(graph) == 1
    assert [n.target for n in graph.graph.nodes].count(torch.arange) == 1
    assert not [w for w in recwarn if "erase" in str(w.message)]
    torch.testing.assert_close(graph(query(1))[0], shared(query(1)))


def from_input(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, future(q.device) & (q[:1, :1, :, :1] > -100))


def sliding(q: torch.Tensor) -> torch.Tensor:
    places = torch.arange(S)
    near = places[:, None] - places[None] < 2
    return attention(q, q, q, future(q.device) & near)


def anti_causal(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, future(q.device).mT)


def floats(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, torch.zeros(S, S).masked_fill(~future(q.device), -1e9))


def random(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, (torch.rand(S, S) >= 0) & future(q.device))


def written(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[:, 0] = False
    return attention(q, q, q, mask.clone())


def written_later(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    out = attention(q, q, q, mask)
    mask.fill_(True)
    return out + mask.sum()


def prefix(q: torch.Tensor) -> torch.Tensor:
    mask = future(q.device)[0, 0].clone()
    mask[:, :3].fill_(True)
    return attention(q, q, q, mask)


def row_of_a_row(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[0][1:] = True
    return attention(q, q, q, mask)


def diagonal(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask.diagonal(1).fill_(True)
    return attention(q, q, q, mask)


def sibling(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    one, other = mask[None], mask.view(1, S, S)
    other[0].fill_(True)
    return attention(q, q, q, one)


def in_place_function(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(S, S).tril() - 1.0
    torch.nn.functional.relu(mask, inplace=True)
    return attention(q, q, q, mask >= 0)


def packet(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    torch.ops.compilekit_tests.open_all(mask)
    return attention(q, q, q, mask)


def strangers(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, torch.ops.compilekit_tests.mask(S))


def uninitialised(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, torch.empty(S, S, dtype=torch.bool).tril())


@torch.library.custom_op("compilekit_tests::open_all", mutates_args=("mask",))
def open_all(mask: torch.Tensor) -> None:
    mask.fill_(True)


@torch.library.custom_op("compilekit_tests::mask", mutates_args=())
def mask(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@mask.register_fake
def _(size: int) -> torch.Tensor:
    return torch.empty(size, size, dtype=torch.bool)


def longer_keys(q: torch.Tensor) -> torch.Tensor:
    """Aligned to the last key, where is_causal is aligned to the first."""
    mask = torch.ones(S - 2, S, dtype=torch.bool).tril(2)
    return attention(q[:, :, 2:], q, q, mask)


def already(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, is_causal=True)


@pytest.mark.parametrize(
    "function",
    [
        *(from_input, sliding, anti_causal, floats, random, written, written_later),
        *(longer_keys, already, prefix, row_of_a_row, diagonal, sibling),
        *(in_place_function, packet, strangers, uninitialised),
    ],
)
def test_every_other_mask_stays(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Whatever isn't plainly causal, or not known before the call."""
    graph = captured(function, query())
    before = str(graph.graph)
    assert pass_causality(graph) == 0
    assert str(graph.graph) == before


def test_a_huge_mask_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for it is bounded."""
    monkeypatch.setattr(causal, "_MOST_ELEMENTS", S * S)
    assert pass_causality(captured(by_position, query())) == 0
    monkeypatch.setattr(causal, "_MOST_ELEMENTS", 2 * S * S)
    assert pass_causality(captured(by_position, query())) == 1


MODEL = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x)[:, None].chunk(3, -1)
        places = torch.arange(x.shape[1], device=x.device)
        mask = places[None] <= places[:, None]
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


class Writing(Layer):
    # Results of these calls aren't used; what they write is.
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 16, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        h = x + 1
        h.mul_(3.0)
        nn.functional.relu(h, inplace=True)
        h[:, 0].zero_()
        self.cache.index_copy_(1, torch.arange(x.shape[1]), h)
        torch.add(self.calls, 1, out=self.calls)
        return super().forward(h)
"""

CONFIG = """
[model]
source = "causal_layer:{model}"
[axes]
s = [4, 16]
[entries.forward.inputs.x]
shape = [2, "s", 8]
dtype = "float32"
[compile]
attention = {attention}
"""


@pytest.fixture
def layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., BuildResult]:
    """Builds the layer with a list of backends."""
    (tmp_path / "causal_layer.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)

    def make(backends: str, model: str = "Layer") -> BuildResult:
        path = tmp_path / "compilekit.toml"
        path.write_text(CONFIG.format(attention=backends, model=model))
        return build(configuration.load(path), tmp_path / "out", verify=False)

    return make


@pytest.mark.parametrize(
    ("backends", "operator"),
    [
        ('["flash"]', "_scaled_dot_product_flash_attention_for_cpu"),
        ('["math"]', ""),
    ],
)
def test_the_programs_take_the_backends_named(
    layer: Callable[..., BuildResult], backends: str, operator: str
) -> None:
    """By the report, in the host code, and with eager's results."""
    import importlib

    result = layer(backends)
    expected = "flash 1" if operator else "math 1"
    assert [bucket.attention for bucket in result.buckets] == [expected] * 2
    path = result.artifact
    assert path is not None
    for host_code in path.glob("programs/*/forward/*/call.py"):
        text = host_code.read_text()
        assert ("scaled_dot_product" in text) == bool(operator)
        assert "0.0, True" in text or not operator
    model = importlib.import_module("causal_layer").Layer().eval()
    x = torch.randn(2, 16, 8)
    with torch.inference_mode():
        eager = model(x)
        compilekit.attach(model, open_artifact(path), require="program")
        torch.testing.assert_close(model(x), eager)


def test_a_call_that_no_backend_takes_fails_its_bucket(
    layer: Callable[..., BuildResult],
) -> None:
    """Naming the operation; the CPU has no cuDNN."""
    result = layer('["cudnn"]')
    assert result.artifact is None
    for bucket in result.buckets:
        assert bucket.error.startswith("scaled_dot_product_attention (")
        assert '[compile] attention rules out too much: "math"' in bucket.error


def test_what_a_model_writes_stays(layer: Callable[..., BuildResult]) -> None:
    """Calls for their effect alone aren't taken for dead code."""
    import importlib

    path = layer('["flash"]', "Writing").artifact
    assert path is not None
    model = importlib.import_module("causal_layer").Writing().eval()
    eager = copy.deepcopy(model)
    compilekit.attach(model, open_artifact(path), require="program")
    x = torch.randn(2, 16, 8)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(model(x), eager(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    assert eager.calls.item() == 2
