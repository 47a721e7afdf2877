"""Serve buckets from an artifact's caches, and say what torch did meanwhile.

`serve(spec)` does it in this process; as a program it reads the spec as JSON from
stdin and prints the answer as one JSON line.

    spec      artifact, config, buckets: [entry, name, axes] in the order of use,
              device (``cpu``)
    answer    max_abs_diff from eager, misses, and what was counted: graphs traced,
              graphs compiled and found, kernels built and timed, processes started

Without an artifact nothing is restored: torch compiles, for comparison.

Nothing that is counted comes from compilekit's own watching but the misses.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork")
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
processes: list[str] = []


def main() -> None:
    """Do what the spec on stdin says."""
    spec = json.load(sys.stdin)
    sys.addaudithook(_note_process)
    # What a model prints must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(serve(spec)), file=answer, flush=True)


def _note_process(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS:
        processes.append(f"{event} {arguments[:1]}")


def serve(spec: dict[str, Any]) -> dict[str, Any]:
    """Restore, call every bucket, compare with eager."""
    import torch

    import compilekit
    from compilekit import config as configuration

    config = configuration.load(Path(spec["config"]))
    if config.compile.threads:
        torch.set_num_threads(config.compile.threads)
    device = spec.get("device", "cpu")
    began = time.perf_counter()
    receipt = None
    if "artifact" in spec:
        receipt = compilekit.restore(spec["artifact"], require="cache")
    restored = time.perf_counter()
    folders = [Path(os.environ[name]) for name in _FOLDERS if name in os.environ]
    there = _built(folders)
    calls = _calls(config, spec["buckets"], device)
    found = [call() for call in calls]
    if device != "cpu":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    if receipt is not None:
        receipt.finish()
    counted = count(folders, there)
    torch.compiler.set_stance("force_eager")
    differences = [
        largest_difference(one, call()) for one, call in zip(found, calls, strict=True)
    ]
    return {
        "user": os.getuid(),
        "path": os.environ.get("PATH"),
        "max_abs_diff": max(differences),
        "misses": [miss.reason for miss in receipt.misses] if receipt else [],
        "traced": receipt.traced if receipt else [],
        "packages": receipt.packages if receipt else [],
        "counted": counted,
        "processes": list(processes),
        "seconds": {"restore": restored - began, "model and calls": ended - restored},
    }


def _calls(config: Any, buckets: list[Any], device: str) -> list[Any]:
    """Functions that make each bucket's call, with the same numbers every time."""
    import torch

    from compilekit.compiler.calls import caller
    from compilekit.plan import Bucket

    run = caller(config, device)

    def call(name: str, bucket: Bucket) -> Any:
        torch.manual_seed(0)
        return run(name, bucket)

    sys.path.insert(0, str(config.path.parent))
    return [
        functools.partial(call, name, Bucket(bucket, axes))
        for name, bucket, axes in buckets
    ]


def _built(folders: list[Path]) -> set[Path]:
    """Compiled kernels, C++ and Triton, where torch and Triton write them."""
    return {
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".so", ".cubin")
    }


def count(folders: list[Path], there: set[Path]) -> dict[str, int]:
    """What torch counted, and the kernels that weren't `there` when calls began."""
    from torch._dynamo.utils import counters

    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        "traced": counters["stats"]["unique_graphs"],
        "graphs": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        "missed": autograd["autograd_cache_miss"] + autograd["autograd_cache_bypass"],
        "found": inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
        "kernels": len(_built(folders) - there),
        "benchmarks": sum(
            times
            for name, times in inductor.items()
            if name.startswith("benchmarking.")
        ),
    }


def largest_difference(found: Any, expected: Any) -> float:
    """Over every tensor of two outputs; inf if they can't be compared."""
    import torch
    from torch.utils._pytree import tree_leaves

    ours, theirs = (
        [leaf.detach().double() for leaf in tree_leaves(x) if torch.is_tensor(leaf)]
        for x in (found, expected)
    )
    if not ours or [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    pairs = zip(ours, theirs, strict=True)
    worst = (float((a - b).abs().nan_to_num(nan=float("inf")).max()) for a, b in pairs)
    return max(worst)


if __name__ == "__main__":
    main()
