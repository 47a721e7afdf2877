"""A plain module, as a server would define it: no transformers, padded axes, a sum."""

from __future__ import annotations

import torch
from torch import nn

SCALE = 0.5


class Tower(nn.Module):
    """Two layers over (B, S, 16) with a mask (B, S); returns a dict."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(layers)])
        self.norm = nn.LayerNorm(16)
        self.gain = 1.5
        self.register_buffer("shift", torch.zeros(16))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + nn.functional.gelu(block(self.norm(x))) * self.gain
        x = x * SCALE * scale + self.shift
        weight = mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * weight).sum(1) / weight.sum(1).clamp(min=1)
        # Over everything at once: the reduction that is split among threads.
        return {"hidden": x, "pooled": pooled, "total": (x * weight).sum()}
