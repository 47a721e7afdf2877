"""Time fresh processes on a GPU: eager, cold torch.compile and compilekit.

    python examples/qwen2.5-7b/measure.py ARTIFACT [--repeat 2] [--out FILE]

The model has Qwen2.5-7B's real configuration and random weights, made on the GPU. Each
row is a fresh process; rows are interleaved; ``lazy`` is compilekit with each bucket
loaded by its first call, and ``load`` what that call takes beyond a steady one.
``ready`` is from imports and weights done to the first output of every bucket (for
compilekit: attach included). Everything that a process measured is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROWS = ("eager", "cold", "compilekit", "lazy")
SIZES = (1, 128, 512, 1024)


def main() -> None:
    """Run every row, print medians, keep the raw numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out", default="")
    parser.add_argument("--child", default="")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.artifact)))
        return
    runs = []
    for _ in range(arguments.repeat):
        for row in arguments.rows.split(","):
            done = subprocess.run(
                [sys.executable, __file__, arguments.artifact, "--child", row],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                runs.append(json.loads(done.stdout.splitlines()[-1]))
            else:
                runs.append({"row": row, "error": done.stderr.strip()[-2000:]})
    for row in arguments.rows.split(","):
        mine = [run for run in runs if run["row"] == row]
        good = [run for run in mine if "error" not in run]
        if not good:
            print(f"{row:12} failed: {mine[0]['error'].splitlines()[-1]}")
            continue
        ready = statistics.median(run["ready_s"] for run in good)
        print(f"{row:12} ready {ready:8.3f} s", end="")
        for size in map(str, SIZES):
            first = statistics.median(run["first_s"][size] for run in good)
            steady = statistics.median(run["steady_ms"][size] for run in good)
            host = statistics.median(run["host_ms"][size] for run in good)
            load = first * 1e3 - steady
            print(
                f" | {size}: {first:.3f} s {steady:.2f} ms host {host:.2f} load"
                f" {load:.0f}",
                end="",
            )
        print()
    if "eager" in arguments.rows:
        compare(runs)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(runs, indent=1), encoding="utf-8")


def compare(runs: list[dict[str, Any]]) -> None:
    """Digests of outputs that are bitwise equal between rows."""
    digests: dict[str, dict[str, str]] = {}
    for run in runs:
        if "error" not in run:
            digests.setdefault(run["row"], run["digests"])
    for size in map(str, SIZES):
        seen = {row: digest[size][:12] for row, digest in digests.items()}
        print(f"output digests at {size}: {seen}")


def build_model() -> Any:
    """The model with random weights on the GPU, as from_pretrained would leave it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config.from_pretrained(HERE)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    with torch.device("cuda"):
        rotary = type(model.model.rotary_emb)(config)
    model = model.to_empty(device="cuda").requires_grad_(False)
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.02, generator=generator)
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.zero_()
    # Its float32 table is computed, not loaded.
    model.model.rotary_emb = rotary
    return model.eval()


def measure(row: str, artifact: str) -> dict[str, Any]:
    """What one process does: make the model, get ready, time steady calls."""
    import hashlib

    began = time.perf_counter()
    import torch

    model = build_model()
    generator = torch.Generator(device="cuda").manual_seed(1)
    inputs = {
        size: torch.randint(0, 1000, (1, size), device="cuda", generator=generator)
        for size in SIZES
    }
    torch.cuda.synchronize()
    weights = time.perf_counter()
    result: dict[str, Any] = {"row": row, "imports_and_weights_s": weights - began}
    with torch.inference_mode():
        began = time.perf_counter()
        if row in ("compilekit", "lazy"):
            import compilekit

            loading = "lazy" if row == "lazy" else "eager"
            receipt = compilekit.attach(model, artifact, loading=loading)
            result["attach_ms"] = receipt.milliseconds
        elif row == "cold":
            model.forward = torch.compile(model.forward, dynamic=False, fullgraph=True)
        result["first_s"], result["digests"] = {}, {}
        outputs = {}
        for size, ids in inputs.items():
            start = time.perf_counter()
            outputs[size] = model(input_ids=ids, use_cache=False).logits
            torch.cuda.synchronize()
            result["first_s"][str(size)] = time.perf_counter() - start
        result["ready_s"] = time.perf_counter() - began
        for size, logits in outputs.items():
            raw = logits.view(torch.int16).cpu().numpy().tobytes()
            result["digests"][str(size)] = hashlib.sha256(raw).hexdigest()
        result["steady_ms"], result["host_ms"] = {}, {}
        for size, ids in inputs.items():
            times, hosts = [], []
            for _ in range(25):
                start = time.perf_counter()
                model(input_ids=ids, use_cache=False)
                hosts.append((time.perf_counter() - start) * 1e3)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) * 1e3)
            result["steady_ms"][str(size)] = statistics.median(times[5:])
            result["host_ms"][str(size)] = statistics.median(hosts[5:])
    result["modules"] = sorted(
        name
        for name in sys.modules
        if name in ("torch._dynamo", "torch._inductor", "triton")
    )
    return result


if __name__ == "__main__":
    main()
