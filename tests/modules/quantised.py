"""A model whose weight is a tensor subclass: int8 values and a scale for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing


class Int8(torch.Tensor):
    """Looks like float32; a product reads its parts."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Int8:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Int8 = make(cls, values.shape, dtype=scale.dtype, device=values.device)
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_, self.scale = values, scale

    def dense(self) -> torch.Tensor:
        """What it stands for."""
        return self.values_.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Int8:
        return cls(inner["values_"], inner["scale"])

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.linear:
            return functional.linear(args[0], args[1].dense(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            copy = cls(args[0].values_, args[0].scale)
            return return_and_correct_aliasing(function, args, kwargs or {}, copy)
        dense = [one.dense() if isinstance(one, Int8) else one for one in args]
        return function(*dense, **(kwargs or {}))


class Quantised(nn.Module):
    """One product."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        values = torch.arange(256, dtype=torch.int32).reshape(16, 16) - 128
        weight = Int8(values.to(torch.int8), torch.full((16, 1), 0.01))
        self.fc.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))
