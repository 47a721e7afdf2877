"""Compare one step of a language model with eager code, as `replay` does a method.

The cache is filled by eager code up to where the step is at the end of its bucket, so
that every place is used. Sequences are padded on the left by different amounts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compilekit.compiler.compare import Difference, compare
from compilekit.compiler.hugging_face import vocabulary_size
from compilekit.config import Config, EntryConfig
from compilekit.plan import Bucket
from compilekit.runtime.generate import Generation, Step
from compilekit.runtime.kvcache import Memory


def step_check(
    model: torch.nn.Module, twin: torch.nn.Module, config: Config, entry: EntryConfig
) -> Callable[[Bucket, int], Difference]:
    """A function that replays the step of a bucket with a seed, whole and padded.

    Args:
        model: The attached model.
        twin: Its equal, unattached.
    """
    generation: Any = model.forward
    words = vocabulary_size(config) or 2

    def check(bucket: Bucket, seed: int) -> Difference:
        step = _step(generation, entry.role, bucket)
        difference = _compare(generation, step, twin, words, seed, config)
        rows, count = max(1, step.batch - 1), max(1, step.length - 1)
        if difference.message or (rows, count) == (step.batch, step.length):
            return difference
        smaller = _compare(generation, step, twin, words, seed, config, rows, count)
        if smaller.message:
            message = f"padded from {rows} sequences, {count} tokens: {smaller.message}"
            return Difference(smaller.max_abs_error, message)
        return difference

    return check


def _step(generation: Generation, role: str, bucket: Bucket) -> Step:
    steps: list[Step] = getattr(generation, role)
    return next(step for step in steps if step.bound.bucket.name == bucket.name)


def _compare(
    generation: Generation,
    step: Step,
    twin: torch.nn.Module,
    words: int,
    seed: int,
    config: Config,
    rows: int = 0,
    count: int = 0,
) -> Difference:
    rows, count = rows or step.batch, count or step.length
    start = step.places - step.length
    total = start + count
    ids, mask, positions = _sample(rows, total, words, seed, generation.device)
    memory: Memory = generation.new_cache(rows, total).memory
    with torch.inference_mode():
        expected, seen = _eager(twin, ids, mask, positions, start)
        for name, layers in seen.items():
            wholes = getattr(memory.buffers, name)
            for whole, layer in zip(wholes, layers, strict=True):
                whole[:rows, :, :start] = layer[:, :, :start]
        logits = step.run(memory, ids[:, start:], mask, positions[:, start:], start)
        # What lies at a padded place is never looked at.
        real = mask[:, None, start:, None].bool()
        written = {
            name: [
                torch.where(real, whole[:rows, :, start:total], layer[:, :, start:])
                for whole, layer in zip(
                    getattr(memory.buffers, name), layers, strict=True
                )
            ]
            for name, layers in seen.items()
        }
    wanted = {name: [one[:, :, start:] for one in each] for name, each in seen.items()}
    return compare(
        {"logits": logits, **written},
        {"logits": expected, **wanted},
        config.verify.atol,
        config.verify.rtol,
    )


def _sample(
    rows: int, total: int, words: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, mask and positions; row i has up to i padded places on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, words, (rows, total), generator=generator)
    mask = torch.ones(rows, total, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, : min(row, total // 2)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return ids.to(device), mask.to(device), positions.to(device)


def _eager(
    twin: torch.nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Eager's logits of the last token, and the whole cache after it."""
    from transformers import DynamicCache

    from compilekit.compiler.generate import cache_name

    cache = DynamicCache()
    name = cache_name(twin)
    logits = torch.empty(0)
    for begin, end in ((0, start), (start, ids.shape[1])):
        if begin < end:
            logits = twin(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                use_cache=True,
                logits_to_keep=1,
                **{name: cache},
            ).logits
    layers = cache.layers
    return logits, {
        "keys": [layer.keys for layer in layers],
        "values": [layer.values for layer in layers],
    }
