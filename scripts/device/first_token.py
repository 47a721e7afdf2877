"""From process start to the first generated token, by phase, weights from disk.

    python scripts/device/first_token.py CONFIG ARTIFACT FOLDER [--repeat 2] [--out FILE]

Writes the configuration's model with random weights to FOLDER as safetensors, once.
Then each row is a fresh process: transformers imported, weights read onto the GPU,
compilekit attached (its graphs captured) or not, and one unmodified ``generate`` of one
token from a prompt of 128. ``prepared`` has compilekit load the artifact while weights
are read. With --cold, the files of torch's libraries are put out of the page cache
before each row, as on a machine that has just started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROWS = ("prepared", "compilekit", "lazy", "eager")


def main() -> None:
    """Run every row, print its phases, keep the raw numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("artifact")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.artifact, options.folder)))
        return
    if not (options.folder / "config.json").exists():
        write(options.config, options.folder)
    runs = []
    for _ in range(options.repeat):
        for row in options.rows.split(","):
            if options.cold:
                forget_libraries()
            started = time.time()
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:4], "--child", row],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                runs.append({"row": row, "error": done.stderr[-2000:]})
                print(row, "failed:", done.stderr.strip().splitlines()[-1])
                continue
            run = json.loads(done.stdout.splitlines()[-1])
            run["cold"] = options.cold
            run["process_start_to_first_token"] = run.pop("token_at") - started
            runs.append(run)
            print(json.dumps(run))
            if options.out:
                options.out.write_text(json.dumps(runs, indent=1) + "\n")


def forget_libraries() -> None:
    """Put what lies below torch's and NVIDIA's packages out of the page cache."""
    import importlib.util

    for package in ("torch", "nvidia"):
        spec = importlib.util.find_spec(package)
        for place in (spec and spec.submodule_search_locations) or []:
            for path in Path(place).rglob("*.so*"):
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def write(config: Path, folder: Path) -> None:
    """Random weights in the configuration's dtype, as ``from_pretrained`` reads them."""
    from compilekit import config as configuration
    from compilekit.compiler.models import build_real

    model: Any = build_real(configuration.load(config), device="cuda")
    model.save_pretrained(folder)


def measure(row: str, artifact: str, folder: Path) -> dict[str, Any]:
    """Seconds of each phase of one process."""
    phases = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        phases[name], clock = now - clock, now

    import torch
    from transformers import AutoModelForCausalLM

    lap("imports")
    if row == "prepared":
        import compilekit

        opened: Any = compilekit.prepare(artifact, device="cuda")
        lap("prepare")
    else:
        opened = artifact
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map="cuda"
    ).eval()
    torch.cuda.synchronize()
    lap("weights")
    options: dict[str, Any] = {"disable_compile": True}
    if row != "eager":
        import compilekit

        loading = "lazy" if row == "lazy" else "eager"
        receipt = compilekit.attach(model, opened, require="program", loading=loading)
        options = {}
    lap("attach")
    ids = torch.arange(128, device="cuda")[None]
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
            **options,
        )
    torch.cuda.synchronize()
    lap("first token")
    result: dict[str, Any] = {
        "row": row,
        "phases": phases,
        "token_at": time.time(),
        "reserved_mb": torch.cuda.memory_reserved() / 2**20,
    }
    if row != "eager":
        result["attach_ms"] = receipt.milliseconds
    return result


if __name__ == "__main__":
    main()
