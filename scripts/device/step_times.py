"""Where the time of a language model's step goes, kernel by kernel.

    python scripts/device/step_times.py CONFIG ARTIFACT [--out FILE]

Runs a decode step of each batch and a prefill of the largest on the GPU under torch's
profiler, without CUDA graphs, and sums what the device did by kernel and grid.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["COMPILEKIT_CUDA_GRAPHS"] = "0"

import torch

import compilekit
from compilekit import config as configuration
from compilekit.compiler.generate import cache_name
from compilekit.compiler.models import build_real

REPEAT = 5


def main() -> None:
    """Profile each step, print its largest parts, keep all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("artifact")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = configuration.load(options.config)
    model: Any = build_real(config, device="cuda").requires_grad_(False)
    compilekit.attach(model, options.artifact, require="program")
    prompt, batches = max(config.axes["s"]), config.axes["b"]
    steps = [(f"decode {batch}", batch, 1, prompt) for batch in batches]
    steps.append((f"prefill {max(batches)}", max(batches), prompt, 0))
    result = {}
    for step, batch, count, start in steps:
        result[step] = rows = profile(model, batch, count, start)
        total = sum(row["us"] for row in rows)
        print(f"{step}: {total / 1e3:.3f} ms on the device")
        for row in rows[:14]:
            print(f"  {row['us']:9.1f} us {row['calls']:5} x {row['kernel'][:90]}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


@torch.inference_mode()
def profile(model: Any, batch: int, count: int, start: int) -> list[dict[str, Any]]:
    """Microseconds per step by kernel and grid, the largest first."""
    cache = model.forward.new_cache(batch, start + count)
    ids = torch.zeros(batch, count, dtype=torch.int64, device="cuda")

    def step() -> None:
        cache.reset()
        cache.advance(start)
        model(
            input_ids=ids,
            use_cache=True,
            logits_to_keep=1,
            **{cache_name(model): cache},
        )

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(REPEAT):
            step()
        torch.cuda.synchronize()
    path = Path(f"/tmp/trace-{os.getpid()}.json")
    trace.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            facts = event.get("args", {})
            name = (
                f"{event['name']} grid {facts.get('grid')} block {facts.get('block')}"
            )
            times[name].append(event["dur"])
    rows = [
        {
            "kernel": name,
            "us": sum(each) / REPEAT,
            "calls": len(each) // REPEAT,
        }
        for name, each in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


if __name__ == "__main__":
    main()
