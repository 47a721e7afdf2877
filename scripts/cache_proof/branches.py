"""A model that no single graph holds: it prints, and goes where its data says."""

import torch
from torch import nn


class Branches(nn.Module):
    """A print and a branch on a tensor's value, with layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three graphs on the one way, three on the other."""
        x = torch.tanh(self.first(x))
        print("rows:", len(x))
        if x.sum() > 0:
            return torch.sigmoid(self.second(x))
        return torch.relu(self.second(-x)) + 1


def warmup(axes: dict[str, int]) -> list[torch.Tensor]:
    """Both ways through the model, at one batch size."""
    torch.manual_seed(0)
    model = Branches().eval()
    with torch.no_grad():
        model.first.weight.abs_()
        compiled = torch.compile(model)
        x = torch.rand(axes["b"], 16) + 1
        return [compiled(x), compiled(-x)]
