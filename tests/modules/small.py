"""A model that builds in seconds, and one that doesn't equal itself."""

import itertools

import torch
from torch import nn

_calls = itertools.count(1)


class Small(nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) → (batch, 4)."""
        return self.linear(x)  # type: ignore[no-any-return]


def small() -> nn.Module:
    """With any weights."""
    return Small()


def changing() -> nn.Module:
    """Another kind of model each time: what is built differs from what is replayed."""
    model = Small()
    model.linear.weight.requires_grad_(False)
    if model.linear.weight.device.type != "meta":
        model.linear.register_forward_hook(lambda module, given, out: out + 1)
    return model
