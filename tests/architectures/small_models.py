"""Small models, each with one thing about its calls that a program has to get right."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn


class MutatedBuffers(nn.Module):
    """Writes two buffers at every call, and returns one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_BD = self.linear(x) + self.mean
        self.mean.lerp_(hidden_BD.mean(0), 0.5)
        self.calls += 1
        return hidden_BD * self.calls, self.mean


class TiedWeights(nn.Module):
    """Embeds and projects with one matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits_BSV: torch.Tensor = self.head(torch.tanh(self.embedding(ids)))
        return logits_BSV


@dataclasses.dataclass
class State:
    """What a recurrent step takes and gives back."""

    hidden: torch.Tensor
    history: list[torch.Tensor]
    scale: float = 1.0


class NestedArguments(nn.Module):
    """Takes and returns dicts, lists, tuples and a dataclass, inside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(
        self, batch: dict[str, dict[str, torch.Tensor]], state: State
    ) -> dict[str, object]:
        x_BD = batch["features"]["dense"] * batch["features"]["weight"]
        hidden_BD = torch.tanh(self.linear(x_BD) + state.hidden * state.scale)
        return {
            "state": State(hidden_BD, [*state.history, hidden_BD], state.scale),
            "scores": {"sum": hidden_BD.sum(-1), "parts": (x_BD, None, "ready")},
            "batch": batch,
        }


def nested_call(axes: dict[str, int]) -> dict[str, object]:
    """The arguments of `NestedArguments` at one bucket."""
    b = axes["b"]
    features = {"dense": torch.randn(b, 16), "weight": torch.rand(b, 1)}
    state = State(torch.randn(b, 16), [torch.randn(b, 16)], 0.5)
    return {"batch": {"features": features}, "state": state}


class Views(nn.Module):
    """Returns its input, views of it, a view of a result, and writes it in place."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y.mul_(2)
        total = x + y
        return x, x[:, 1:], x.t(), y.view(-1), total, total[0]
