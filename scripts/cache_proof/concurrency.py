"""Restore from many processes at once, kill one at random, and look what is left.

    python scripts/cache_proof/concurrency.py [ARTIFACT] [--rounds N]

The artifact is one of stale.toml, which is built if none is given. Each round forks
eight processes on an empty work directory and kills one of them (SIGKILL) at a random
moment. Every survivor restores with ``require = cache``, runs the model through the
caches and must get eager's numbers; all must have restored the same directory with
every file whole; and one more restore must leave nothing but that directory.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import forked  # noqa: E402
import staleness  # noqa: E402

PROCESSES = 8
ATOL = 1e-5


def tree(folder: Path) -> dict[str, str]:
    """Path → digest of everything below a directory that a restore wrote."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".lock", ".py")
    }


def staged(artifact: Path, work: Path) -> str:
    """Restore as `compilekit load` does, without a model; name and digest of it."""
    from compilekit.artifact import open_artifact
    from compilekit.runtime.restore import read_cache
    from compilekit.runtime.stage import stage, work_directory

    opened = open_artifact(artifact)
    place, _ = stage(opened, read_cache(opened)[1], work_directory(work))
    return f"{place.name} {hashlib.sha256(repr(tree(place)).encode()).hexdigest()}"


def one_start(artifact: Path, work: Path, gate: int) -> dict[str, Any]:
    """What a serving process does: restore, run every bucket; and eager's numbers."""
    import torch

    sys.path.insert(0, str(HERE))
    os.read(gate, 1)
    torch.set_num_threads(2)
    import stale_model

    import compilekit

    receipt = compilekit.restore(artifact, work_dir=work, require="cache")
    found = [stale_model.warmup({"b": size}) for size in (6, 4)]
    receipt.finish()
    torch.compiler.set_stance("force_eager")
    expected = [stale_model.warmup({"b": size}) for size in (6, 4)]
    pairs = zip(found, expected, strict=True)
    return {
        "place": Path(receipt.staged).name,
        "frames": receipt.compiles,
        "error": max(float((a - b).abs().max()) for a, b in pairs),
    }


def one_round(
    artifact: Path, work: Path, seed: int, span: float
) -> tuple[bool, float, str]:
    """Whether one was killed in time, the largest difference, and what is wrong."""
    draw = random.Random(seed)
    gate, key = os.pipe()
    children = [
        forked.start(lambda: one_start(artifact, work, gate)) for _ in range(PROCESSES)
    ]
    os.write(key, b"x" * PROCESSES)
    victim = draw.randrange(PROCESSES)
    time.sleep(draw.random() * span)
    os.kill(children[victim].number, signal.SIGKILL)
    killed, wrong, places, worst = False, "", set(), 0.0
    for index, child in enumerate(children):
        status, answer = forked.wait(child)
        if index == victim and os.WIFSIGNALED(status):
            killed = True
            continue
        if status or answer is None:
            wrong = f"a survivor ended with status {status}"
            continue
        places.add(answer["place"])
        worst = max(worst, answer["error"])
        if answer["frames"] or not answer["error"] <= ATOL:
            wrong = f"a survivor answered {answer}"
    os.close(gate)
    os.close(key)
    if len(places) != 1:
        wrong = wrong or f"survivors restored {places}"
    return killed, worst, wrong


def main() -> int:
    """Print one line per round; 1 if a round isn't as it must be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    failures = kills = 0
    largest = 0.0
    forked.prepare()
    with tempfile.TemporaryDirectory(prefix="compilekit-many-") as name:
        folder = Path(name)
        artifact = given.artifact or staleness.build(folder)
        wanted = staged(artifact, folder / "alone")
        # How long eight starts at once take, so that the kill falls anywhere in it.
        began = time.perf_counter()
        one_round(artifact, folder / "warm", 0, 0.0)
        span = time.perf_counter() - began
        for seed in range(given.rounds):
            work = folder / f"work{seed}"
            killed, worst, wrong = one_round(artifact, work, seed, span)
            kills += killed
            largest = max(largest, worst)
            # What a killed process left goes with the next start.
            found = staged(artifact, work)
            left = sorted(os.listdir(work))
            if not wrong and (len(left) != 1 or found != wanted):
                wrong = f"left {left}, {found} instead of {wanted}"
            failures += bool(wrong)
            print(f"round {seed + 1}: killed {killed}, {wrong or 'ok'}", flush=True)
    print(
        f"{given.rounds} rounds of {PROCESSES} processes, {kills} killed, {failures}"
        f" failed; survivors differ from eager by at most {largest:.1e}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
