"""One module with many methods: each is an entry with something to get right."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    """A named tuple as output."""

    left: torch.Tensor
    right: torch.Tensor | None


@dataclasses.dataclass
class State:
    """A dataclass as argument and output."""

    hidden: torch.Tensor
    history: list[torch.Tensor]
    scale: float = 1.0


class Settings:
    """A configuration object that graphs read."""

    def __init__(self) -> None:
        self.bias = 0.25


class Mode(enum.Enum):
    """What a model may be set to."""

    FAST = "fast"
    SLOW = "slow"


class Slotted:
    """A configuration object without a dict."""

    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 2.0


class Gains:
    """Values that a class has for all its objects, as registries do."""

    table: ClassVar[dict[str, Any]] = {"kinds": torch.neg}


class Base(nn.Module):
    """What a subclass reads through super()."""

    offset = 0.5


relu = torch.relu


def halved(x: torch.Tensor) -> torch.Tensor:
    """A function that a model holds."""
    return x / 2


def tripled(x: torch.Tensor) -> torch.Tensor:
    """A third one, by the name of the first, as lambdas have one name."""
    return x * 3


tripled.__qualname__ = halved.__qualname__


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Another one."""
    return x * 2


class Step(nn.Module):
    """One layer; its default argument is part of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, gain: float = 2.0) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * gain


class Zoo(Base):
    """Methods that are built as entries, by tests/runtime_zoo.toml."""

    factor = 2.0

    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.settings = Settings()
        self.options = {"factor": 3.0}
        self.steps = nn.ModuleList(Step() for _ in range(steps))
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(16.0).reshape(4, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.plain = torch.full((8,), 0.5)
        self.listed = [torch.full((8,), 0.125)]
        self.mode = Mode.FAST
        self.kind = torch.float64
        self.tags = frozenset({"a", "b"})
        self.key = b"k"
        self.act = torch.tanh
        self.second = halved
        self.slotted = Slotted()
        self.gains = Gains()
        self.by_mode = {Mode.FAST: 2.0}
        self.layer_class = nn.ReLU
        self.loose = {"gate": nn.Dropout(0.0)}
        self.conv = nn.Conv1d(1, 1, 1)

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        gain: float = 1.0,
        flags: tuple[int, ...] = (),
        *,
        verbose: bool = False,
        **more: Any,
    ) -> dict[str, torch.Tensor | None]:
        """Tied weights, a stack, attributes, a mask that calls may leave out."""
        x = self.embedding(ids) * gain + self.settings.bias
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        for step in self.steps:
            x = step(x)
        if hasattr(self, "extra"):
            x = x + self.extra
        x = x * self.options["factor"]
        return {"logits": self.head(x), "mask": mask}

    def rows(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Axes in an order that isn't the alphabet's; a softmax over rows."""
        return torch.softmax(x + y[:, None], -1)

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """Tensors that no registry holds."""
        return x * self.plain + self.listed[0]

    def aliases(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Writes an argument; returns it, views of both, and a view of a result."""
        y.mul_(2)
        total = x + y + self.table
        return x, x[:, 1:], x.t(), y, y.view(-1), total, total[0]

    def views(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """A padded axis, and a view of the argument among the outputs."""
        return {"same": x, "tail": x[:, 1:], "more": x + 1}

    def tables(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A buffer itself and a view of it as outputs."""
        return x + self.table, self.table, self.table[1:]

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        """Writes a buffer at each call."""
        self.calls += 1
        return x * self.calls

    def spread(
        self, batch: dict[str, Any], state: State
    ) -> OrderedDict[str, torch.Tensor | Pair | State]:
        """Nested arguments in, several classes out."""
        hidden = batch["x"] * batch["weights"][0] + state.hidden * state.scale
        return OrderedDict(
            hidden=hidden,
            pair=Pair(hidden.sum(-1), None),
            state=State(hidden + 1, [*state.history, hidden], state.scale),
        )

    def kinds(self, x: torch.Tensor) -> torch.Tensor:
        """Values of many kinds, on the instance and in its class."""
        if self.mode is Mode.FAST:
            x = x * 2
        if self.key == b"k":
            x = x + 1
        if "a" in self.tags:
            x = x + 1
        if "late" in self.options:
            x = x * self.options["late"]
        if self.layer_class is nn.ReLU:
            x = x + 1
        x = relu(x) * self.by_mode[Mode.FAST] + super().offset
        x = self.gains.table["kinds"](self.loose["gate"](x))
        x = self.conv(x[:, None]).squeeze(1)
        x = self.helper(self.second(self.act(x)))
        return (x * self.factor * self.slotted.gain).to(self.kind)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        """A method that isn't an entry."""
        return x + 1

    def waves(self, z: torch.Tensor) -> torch.Tensor:
        """A complex argument, which may be lazily conjugated."""
        return torch.view_as_real(z * 2).sum(-1)


def spread_call(axes: dict[str, int]) -> dict[str, Any]:
    """Arguments of `Zoo.spread` at one bucket."""
    b = axes["b"]
    state = State(torch.randn(b, 8), [torch.randn(b, 8)], 0.5)
    return {
        "batch": {"x": torch.randn(b, 8), "weights": [torch.rand(b, 1)]},
        "state": state,
    }
