"""Calls that a program can't carry; docs/unsupported.md has a row for each.

`Refused` has a method per row, so that one build shows all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn

TABLE = torch.arange(8.0)
calls = 0


class Box:
    """An object of a class that only this module knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Subclass(torch.Tensor):
    """A tensor with behaviour of its own."""


def hidden_class() -> Any:
    """A class that can't be imported by its name."""

    @dataclasses.dataclass
    class Hidden:
        value: torch.Tensor

    return Hidden


Hidden = hidden_class()


def closure() -> Any:
    """A function that holds a tensor where a model doesn't look."""
    offset = torch.arange(8.0)
    return lambda x: x + offset


class Refused(nn.Module):
    """Every method takes x (4, 8) and is refused, by name."""

    def __init__(self) -> None:
        super().__init__()
        # Only a build of this model needs it, and importing it takes seconds.
        from transformers import DynamicCache

        self.cache_class = DynamicCache
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.seen: list[int] = []
        self.closure = closure()
        self.register_buffer("state", torch.zeros(8))

    # Side effects

    def attribute_written(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + 1

    def list_changed(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape[0])
        return x + 1

    def buffer_replaced(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + x.sum(0)
        return x + self.state

    def global_written(self, x: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        return x + 1

    def process_state(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return x + torch.ones(8)

    def grad_mode(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)
        return x + 1

    # Inputs

    def global_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x + TABLE

    def closure_tensor(self, x: torch.Tensor) -> Any:
        return self.closure(x)

    def other_device(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, torch.ones(8, device="cuda")

    def subclass_argument(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def sparse_argument(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_dense()

    def object_argument(self, x: Box) -> torch.Tensor:
        return x.value + 1

    def variadic(self, *x: torch.Tensor) -> torch.Tensor:
        return x[0] + 1

    def positional_only(self, x: torch.Tensor, /) -> torch.Tensor:
        return x + 1

    def misnamed(self, y: torch.Tensor) -> torch.Tensor:
        return y + 1

    def shared_memory(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y

    def reshaped_in_place(self, x: torch.Tensor) -> torch.Tensor:
        x.t_()
        return x + 1

    def storage_replaced(self, x: torch.Tensor) -> torch.Tensor:
        self.state.data = x[0]
        return x + self.state

    # Outputs

    def cache(self, x: torch.Tensor) -> tuple[Any, ...]:
        made = self.cache_class()
        made.update(x[None, None], x[None, None], 0)
        return x + 1, made

    def own_object(self, x: torch.Tensor) -> Box:
        return Box(x + 1)

    def size(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x + 1, x.shape

    def topk(self, x: torch.Tensor) -> Any:
        return torch.topk(x, 2)

    def integer_keys(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        return {0: x + 1}

    def numpy_array(self, x: torch.Tensor) -> numpy.ndarray:
        return (x + 1).numpy()

    def generator(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return (part for part in [x + 1])

    def unimportable_class(self, x: torch.Tensor) -> Any:
        return Hidden(x + 1)

    def other_dtype_view(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(torch.int32), x + 1

    def infinity(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x + 1, float("inf")

    # Values that decide what is computed

    def nonzero(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()

    def mask_index(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    def item(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1

    # Graph breaks

    def printing(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        print(x.shape)  # noqa: T201
        return x * 2

    def own_generator(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(8, generator=torch.Generator().manual_seed(0))

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear(x).sum().backward()
        return x + 1

    def sparse_inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(x.to_sparse(), self.linear.weight)

    def raises(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such mode")

    # The rest

    def gradients(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            return self.linear(x)

    def nothing(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def wrong_shape(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)


def sharing_call(axes: dict[str, int]) -> dict[str, Any]:
    """Two overlapping rows of one tensor."""
    base = torch.randn(axes["b"] + 2, 8)
    return {"x": base[: axes["b"]], "y": base[2:]}


def subclass_call(axes: dict[str, int]) -> dict[str, Any]:
    """A tensor subclass."""
    return {"x": torch.randn(axes["b"], 8).as_subclass(Subclass)}


def sparse_call(axes: dict[str, int]) -> dict[str, Any]:
    """A sparse tensor."""
    return {"x": torch.eye(axes["b"], 8).to_sparse()}


def object_call(axes: dict[str, int]) -> dict[str, Any]:
    """A tensor inside an object."""
    return {"x": Box(torch.randn(axes["b"], 8))}


class Linear(nn.Module):
    """One layer; the functions below make it unfit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


def hooked() -> nn.Module:
    """A submodule with a forward hook."""
    model = Linear()
    model.linear.register_forward_hook(lambda module, args, output: output * 2)
    return model


def forward_replaced() -> nn.Module:
    """A submodule whose forward isn't its class's."""
    model = Linear()
    model.linear.forward = torch.relu  # type: ignore[method-assign]
    return model


def subclass_parameter() -> nn.Module:
    """A parameter of a tensor subclass, as quantisation libraries make them."""
    model = Linear()
    weight = torch.randn(8, 8).as_subclass(Subclass)
    model.linear.weight = nn.Parameter(weight, requires_grad=False)
    return model


def sparse_buffer() -> nn.Module:
    """A sparse buffer."""
    model = Linear()
    model.register_buffer("mask", torch.eye(8, device="cpu").to_sparse())
    return model


class Doubled(nn.Module):
    """Returns twice as many rows as it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x + 1])


class NestedEncoder(nn.Module):
    """Eager packs a padded batch, so that padding comes back as zeros."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        encoded_BSD: torch.Tensor = self.encoder(x, src_key_padding_mask=padding)
        return encoded_BSD


class MeanPooled(nn.Module):
    """Averages over positions, padding included."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)
