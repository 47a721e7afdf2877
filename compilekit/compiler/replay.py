"""The process that replays one bucket: compares with eager, watches for compiles.

Reads one JSON document from standard input, prints one JSON line per thread count. It
counts processes with an audit hook, hides every compiler (empty PATH) while programs
run, and asks torch's own counters whether anything was traced.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

_SPAWNS = (
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
)


def main() -> int:
    """Replay the bucket named on standard input at every thread count."""
    spec = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever the model prints must not mix with the results.
    os.dup2(2, 1)
    for result in _replay(spec):
        print(json.dumps(result), file=results, flush=True)
    return 0


def _replay(spec: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    from compilekit import config as configuration
    from compilekit.artifact import open_artifact
    from compilekit.compiler.compare import compare, tolerance
    from compilekit.compiler.models import build_real, example_kwargs
    from compilekit.plan import Bucket
    from compilekit.runtime.attach import attach

    config = configuration.load(Path(spec["config"]))
    config = dataclasses.replace(config, path=Path(spec["base"]) / "compilekit.toml")
    entry = config.entries[spec["entry"]]
    bucket = Bucket(spec["bucket"], spec["axes"])
    model = build_real(config, weights=spec["weights"], seed=0)
    twin = copy.deepcopy(model)
    artifact = open_artifact(spec["artifact"])
    spawned: list[str] = []
    sys.addaudithook(
        lambda name, args: spawned.append(name) if name in _SPAWNS else None
    )
    os.environ["PATH"] = ""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    atol, rtol = tolerance(dtype, config.verify.atol, config.verify.rtol)
    rows = []
    spawned.clear()
    frames = _frames()
    receipt = attach(
        model, artifact, entry=entry.name, require="program", on_uncovered="error"
    )
    for seed, threads in enumerate(spec["threads"]):
        torch.set_num_threads(threads)
        kwargs = example_kwargs(config, entry, bucket, seed=seed)
        twin_kwargs = copy.deepcopy(kwargs)
        with torch.inference_mode():
            torch.manual_seed(seed)
            expected = getattr(twin, entry.method)(**twin_kwargs)
            torch.manual_seed(seed)
            found = getattr(model, entry.method)(**kwargs)
        difference = compare(found, expected, config.verify.atol, config.verify.rtol)
        message = difference.message
        for what, have, want in (
            ("arguments", kwargs, twin_kwargs),
            ("buffers", dict(model.named_buffers()), dict(twin.named_buffers())),
        ):
            written = compare(have, want, config.verify.atol, config.verify.rtol)
            if written.message and not message:
                message = f"{what} after the call: {written.message}"
        compiles = receipt.compiles + _frames() - frames
        if compiles and not message:
            message = f"{compiles} frames were compiled"
        if spawned and not message:
            message = f"processes were started: {', '.join(sorted(set(spawned)))}"
        rows.append(
            {
                "threads": threads,
                "max_abs_error": str(difference.max_abs_error),
                "atol": atol,
                "rtol": rtol,
                "compiles": compiles,
                "spawned": len(spawned),
                "passed": not message,
                "message": message,
            }
        )
    return rows


def _frames() -> int:
    """Frames Dynamo compiled so far; 0 while Dynamo isn't even imported."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from compilekit._torch.capture import dynamo_frames

    return dynamo_frames()


if __name__ == "__main__":
    sys.exit(main())
