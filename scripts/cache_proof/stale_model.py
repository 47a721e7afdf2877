"""What the staleness table builds and then changes, one thing at a time."""

import torch
from stale_helper import scale
from torch import nn

OFFSET = 0.25


@torch.library.custom_op("stale::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda context, gradient: gradient * 2)


class Net(nn.Module):
    """Layers, a configuration value, a function as an attribute, a custom operator."""

    def __init__(self, layers: int = 2, eps: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.drop = nn.Dropout(0.0)
        self.eps = eps
        self.act = torch.nn.functional.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Some of everything."""
        for layer in self.layers:
            x = self.drop(self.act(layer(x))) + self.eps
        return scale(double(x)) + OFFSET


def make(layers: int = 2, eps: float = 0.1) -> Net:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    return Net(layers, eps).eval()


def sample(size: int) -> torch.Tensor:
    """An input, the same each time."""
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(1))


def warmup(axes: dict[str, int]) -> torch.Tensor:
    """One bucket."""
    model = torch.compile(make())
    with torch.no_grad():
        return model(sample(axes["b"]))
