"""Hold a language model's steps on a GPU against a float32 reference.

    python scripts/device/steps.py CONFIG ARTIFACT [--out FILE] [--layers N]

Three models of equal weights take the same tokens, step by step: float32 eager,
eager in the configuration's dtype, and the same under ``compilekit.attach``. What
counts is the distance of both from float32. Where their best tokens differ, the float32
margin between the two is printed beside the error of that step. Then ``generate()``
runs as users call it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

import compilekit
from compilekit import config as configuration
from compilekit.compiler.generate import cache_name
from compilekit.compiler.hugging_face import vocabulary_size
from compilekit.compiler.models import build_real

STEPS = 16


def main() -> None:
    """Compare each batch, print a line for it, keep the raw numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("artifact")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    config = configuration.load(options.config)
    if options.layers:
        model_config = {**config.model.config, "num_hidden_layers": options.layers}
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, config=model_config)
        )
    eager = build_real(config, device=options.device).requires_grad_(False)
    exact = copy.deepcopy(eager).float()
    ours = copy.deepcopy(eager)
    began = time.perf_counter()
    receipt = compilekit.attach(ours, options.artifact, require="program")
    result: dict[str, Any] = {
        "attach_s": time.perf_counter() - began,
        "attach_ms": receipt.milliseconds,
        "graphs_mb": receipt.graphs,
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "batches": [],
    }
    print(
        f"attach {result['attach_s']:.3f} s, graphs {sum(receipt.graphs.values())} MB"
    )
    vocabulary = vocabulary_size(config) or 2
    longest = max(config.axes["s"])
    for lengths in ([longest], [longest // 2, 3, longest - 3], [longest - 9] * 8):
        if len(lengths) > max(config.axes["b"]):
            continue
        row = compare(exact, eager, ours, lengths, vocabulary, options.device)
        result["batches"].append(row)
        print(json.dumps(row))
    new = min(64, max(config.axes["c"]) - longest)
    result["generate"] = unmodified(
        eager, ours, longest, new, vocabulary, options.device
    )
    print(json.dumps(result["generate"]))
    result["calls"] = receipt.calls
    result["compiles"] = receipt.compiles
    receipt.finish()
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def prompts(
    lengths: list[int], vocabulary: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(len(lengths))
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        words = torch.randint(0, vocabulary, (length,), generator=generator)
        ids[row, longest - length :] = words
        mask[row, longest - length :] = 1
    return ids.to(device), mask.to(device)


@torch.inference_mode()
def compare(
    exact: Any,
    eager: Any,
    ours: Any,
    lengths: list[int],
    vocabulary: int,
    device: str,
) -> dict[str, Any]:
    """Errors of both against float32, over a prompt and steps with the same tokens."""
    from transformers import DynamicCache

    ids, mask = prompts(lengths, vocabulary, device)
    longest = ids.shape[1] + STEPS
    caches = [DynamicCache(), DynamicCache(), ours.forward.new_cache(len(ids), longest)]
    token, errors, differing = ids, [], []
    for step in range(STEPS):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token.shape[1] :]
        logits = [
            model(
                input_ids=token,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{cache_name(model): cache},
            )
            .logits[:, -1]
            .float()
            for model, cache in zip((exact, eager, ours), caches, strict=True)
        ]
        wanted, theirs, found = logits
        mine = (found - wanted).abs()
        other = (theirs - wanted).abs()
        errors.append(
            [f().item() for f in (mine.mean, other.mean, mine.max, other.max)]
        )
        best = found.argmax(-1) != theirs.argmax(-1)
        for row in best.nonzero().flatten().tolist():
            a, b = found[row].argmax(), theirs[row].argmax()
            margin = (wanted[row, a] - wanted[row, b]).abs().item()
            differing.append([step, row, margin, max(mine.max(), other.max()).item()])
        token = theirs.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
    columns = list(zip(*errors, strict=True))
    return {
        "lengths": lengths,
        "mean_error": sum(columns[0]) / STEPS,
        "eager_mean_error": sum(columns[1]) / STEPS,
        "max_error": max(columns[2]),
        "eager_max_error": max(columns[3]),
        "differing_tokens": differing,
    }


def unmodified(
    eager: Any, ours: Any, longest: int, new: int, vocabulary: int, device: str
) -> list[dict[str, Any]]:
    """The call that users write, twice: seconds, and tokens equal to eager's."""
    rows = []
    for lengths in ([longest // 4], [longest // 2, longest // 8, 3, longest]):
        ids, mask = prompts(lengths, vocabulary, device)
        settings = {
            "input_ids": ids,
            "attention_mask": mask,
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": False,
            "pad_token_id": 0,
        }
        expected = eager.generate(**settings)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            found = ours.generate(**settings, cache_implementation="static")
            if device != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        same = (found == expected).float().mean().item()
        rows.append({"lengths": lengths, "seconds": seconds, "equal_tokens": same})
    return rows


if __name__ == "__main__":
    main()
