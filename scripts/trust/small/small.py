"""A model that builds in seconds, for scripts that build and start it many times."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    """Two layers and a softmax: a matrix product and two kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x))).softmax(-1)


def model() -> Small:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Small().eval()


def call(b: int = 3) -> torch.Tensor:
    """The same input in every process."""
    return torch.randn(b, 16, generator=torch.Generator().manual_seed(b))
