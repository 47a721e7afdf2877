"""Models for the checks on a GPU: architectures with real dimensions and few layers.

Each function is the factory of one configuration in this folder. Weights are random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)


def qwen2(layers: int = 2) -> nn.Module:
    """Qwen2.5-7B's dimensions, two layers."""
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        rope_theta=1000000.0,
    )
    return Qwen2ForCausalLM(config)


def qwen2_four() -> nn.Module:
    """Qwen2.5-7B's dimensions, four layers."""
    return qwen2(4)


def llama() -> nn.Module:
    """Llama 3 8B's dimensions, two layers, its rotary scaling."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        max_position_embeddings=131072,
    )
    return LlamaForCausalLM(config)


def gemma() -> nn.Module:
    """Gemma 2 9B's dimensions: soft caps, one sliding-window and one full layer."""
    config = Gemma2Config(
        vocab_size=32000,
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=64,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def mixtral() -> nn.Module:
    """A mixture of eight experts, two of them per token."""
    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return MixtralForCausalLM(config)


def vit() -> nn.Module:
    """ViT-B/16's dimensions, four layers."""
    return ViTForImageClassification(ViTConfig(num_hidden_layers=4))


def whisper() -> nn.Module:
    """Whisper small's dimensions, two layers each side."""
    config = WhisperConfig(
        d_model=768,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    return WhisperForConditionalGeneration(config)


class Flex(nn.Module):
    """FlexAttention with a causal sliding window and a bias by head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(1024, 3 * 1024, bias=False)
        self.slopes = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, 16, 64).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )

        def window(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (i - j <= 128)

        def bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score - self.slopes[h] * (i - j)

        mask = create_block_mask(window, None, None, length, length, device=x.device)
        return flex_attention(query, key, value, score_mod=bias, block_mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_add(x, y, out, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    left = tl.load(x + index, mask=inside)
    right = tl.load(y + index, mask=inside)
    tl.store(out + index, left + scale * right, mask=inside)


@triton.autotune(
    configs=[triton.Config({"BLOCK": size}) for size in (128, 512)], key=["n"]
)
@triton.jit  # type: ignore[untyped-decorator]
def _square(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    value = tl.load(x + index, mask=inside)
    tl.store(out + index, value * value, mask=inside)


class UserTriton(nn.Module):
    """Two kernels of the user's own, one of them autotuned, among compiled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x))
        out = torch.empty_like(y)
        n = y.numel()
        _scaled_add[(triton.cdiv(n, 256),)](x, y, out, n, 0.5, BLOCK=256)
        squared = torch.empty_like(out)
        _square[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](out, squared, n)
        return squared.sum(-1) + x.sum(-1)


class Dropout(nn.Module):
    """Random numbers in a forward that serves: Monte Carlo dropout and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.second = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.relu(self.first(x)), 0.3, training=True)
        return self.second(x) + 0.1 * torch.randn_like(x)


class Reductions(nn.Module):
    """One kernel of each reduction kind: persistent, looped, split, scan, var, arg."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8192)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "persistent": torch.softmax(x[:, :512], -1),
            "looped": torch.softmax(x, -1),
            "layer_norm": self.norm(x),
            "split": x.sum(),
            "split_var": x.var(),
            "scan": torch.cumsum(x, 1),
            "split_scan": torch.cumsum(x.flatten()[: 1 << 20], 0),
            "argmax": x.argmax(-1),
            "sorted": torch.sort(x[:, :256], -1).values,
            "outer": x.sum(0),
        }


class Foreach(nn.Module):
    """One kernel for many tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        rows = [x[index] * scale for index, scale in enumerate(self.scales)]
        added = torch._foreach_add(rows, 1.0)
        return list(torch._foreach_mul(added, list(rows)))


class Combined(nn.Module):
    """Independent kernels of several shapes, which Inductor can launch as one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(
            nn.Parameter(torch.ones(64 * (index + 1), 256)) for index in range(4)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scaled = [torch.relu(table * 2.0 + 1.0) for table in self.tables]
        return [*scaled, x.softmax(-1), x.sin() * x]


class Updates(nn.Module):
    """State that a call writes in place, and a tensor it returns a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 8, 256, 64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(2, at, x)
        self.filled += 1
        return (self.keys * self.filled).sum(2)


class Convolutions(nn.Module):
    """Convolutions, batch normalisation, pooling and a 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(64, 128, 1),
            nn.GELU(),
            nn.Conv2d(128, 128, 3, 1, 1, groups=4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result
