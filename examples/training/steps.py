"""A training step that compiles itself, for the cache route."""

from __future__ import annotations

import sys

import torch
from torch import nn


class Classifier(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, x_BF: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.body(x_BF), labels_B)


def warmup(axes: dict[str, int]) -> list[torch.Tensor]:
    """Two optimiser steps at one batch size; the parameters are compared with eager."""
    torch.manual_seed(0)
    model = Classifier()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model)
    for _ in range(2):
        x = torch.randn(axes["batch"], 64)
        labels = torch.randint(0, 10, (axes["batch"],))
        compiled(x, labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    """Train from restored caches: `python steps.py ARTIFACT`."""
    import compilekit

    receipt = compilekit.restore(sys.argv[1], require="cache")
    for size in (32, 16):
        print(f"batch {size}: {sum(p.sum() for p in warmup({'batch': size})):.4f}")
    print(receipt.finish())


if __name__ == "__main__":
    # The functions of a script are __main__'s; those of a module are found again.
    import steps

    steps.main()
