"""Hold a live model's values against those that a program was built for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compilekit.errors import Mismatch

# Words in a row; rows taken at a time, so that what is in flight stays in a processor's
# caches, and a GPU has enough to do. Neither number changes a digest but the first.
_ROW = 1 << 12
_ROWS = {"cpu": 1 << 4, "cuda": 1 << 13}
_STEP, _SEED = 6364136223846793005, 1442695040888963407
_MODULUS = 1 << 64


def value_digest(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits over a tensor's bytes, the same on every device.

    A sum of its words, each times odd numbers of its place: any one changed word
    changes it. It tells weights apart, and is no protection against an adversary.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    row_bytes = _ROW * torch.int64.itemsize
    whole = data.numel() // row_bytes * row_bytes
    last = torch.zeros(row_bytes, dtype=torch.uint8, device=data.device)
    last[: data.numel() - whole] = data[whole:]
    factors = _odd(0, _ROW, data.device)
    total, first = data.numel(), 0
    rows = _ROWS.get(data.device.type, 1)
    for part in (data[:whole], last):
        words = part.view(torch.int64).view(-1, _ROW)
        for block in torch.split(words, rows):
            sums = (block * factors).sum(1)
            total += int((sums * _odd(first, len(block), data.device)).sum())
            first += len(block)
    return f"{total % _MODULUS:016x}"


def _odd(first: int, count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return (places * _STEP + _SEED) * 2 + 1


def frozen_mismatches(
    tensors: Mapping[str, Any], frozen: Mapping[str, str]
) -> Iterator[Mismatch]:
    """One mismatch for all weights that have other values than those folded in."""
    others = [
        path
        for path, digest in frozen.items()
        if isinstance(tensors[path], torch.Tensor)
        and value_digest(tensors[path]) != digest
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        yield Mismatch(
            f"values of {others[0]}{more}",
            f"those of the weights that were folded in ({len(frozen)} tensors)",
            f"{len(others)} tensors with others",
            "refuse",
            "The programs hold what was computed from the weights of [freeze].",
            "Load those weights, or build again with these, or without [freeze].",
        )
