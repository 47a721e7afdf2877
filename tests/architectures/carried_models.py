"""Calls that look as if a program couldn't carry them, and that it does carry."""

from __future__ import annotations

import math

import numpy
import torch
from torch import nn


class Carried(nn.Module):
    """A method per entry; each takes x (4, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 8)
        self.register_buffer("state", torch.zeros(8))
        self.fill = -math.inf

    def random(self, x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(x, 0.5, training=True)
        return dropped + torch.rand(8) + torch.randn_like(x)

    def cond(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return result

    def custom_operator(self, x: torch.Tensor) -> torch.Tensor:
        import lazy_operators

        doubled: torch.Tensor = lazy_operators.double(x)
        return doubled + 1

    def complex_numbers(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).conj() * 2j

    def constants(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = torch.tensor([[float(i * j) for i in range(40)] for j in range(40)])
        return x + table[:4, :8], table

    def asserted(self, x: torch.Tensor) -> torch.Tensor:
        assert (x == x).all(), "x holds NaN"
        return x + 1

    def numpy_inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numpy.sin(x.numpy()))

    def autocast(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = self.linear(x)
        return result

    def infinite_attribute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.masked_fill(x > 0.5, self.fill), -1)

    def recurrent(self, x: torch.Tensor) -> torch.Tensor:
        hidden_BSD, _ = self.lstm(x.unflatten(0, (2, 2)))
        result: torch.Tensor = self.gru(hidden_BSD)[0]
        return result

    def parameter_written(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.mul_(0.5)
        result: torch.Tensor = self.linear(x)
        return result

    def state_viewed(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.state.add_(x[0])
        return self.state.view(2, 4), self.linear.weight.t(), self.linear.weight
