"""A model of torch's own modules alone, for the start that may import no compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    """A small encoder of torch's own modules: no transformers, no Dynamo at start."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.embedding = nn.Embedding(1000, 512)
        self.layers = nn.ModuleList([layer, nn.Linear(512, 512)])
        self.norm = nn.RMSNorm(512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        query = x.view(*x.shape[:2], 8, 64).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        result: torch.Tensor = self.norm(self.layers[1](F.gelu(x)))
        return result


class Ranked(Plain):
    """Its scores over many classes: reductions, whose configs Inductor measures."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(512, 8192)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.scores(super().forward(ids)), -1)
