"""A custom operator in a module that nothing imports before the call that needs it."""

from __future__ import annotations

import torch


@torch.library.custom_op("compilekit_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice x, out of the compiler's sight."""
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
