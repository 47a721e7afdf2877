"""Restore from many processes at once, kill one at random, and look what is left.

    python scripts/cache_proof/concurrency.py ARTIFACT [ROUNDS]

Each round forks eight processes on an empty work directory and kills one of them
(SIGKILL) after a random moment. Every survivor must have restored the same directory
with every file whole, and one more restore must leave nothing but that directory.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from compilekit.artifact import open_artifact
from compilekit.runtime.restore import read_cache
from compilekit.runtime.stage import stage, work_directory

PROCESSES = 8


def tree(folder: Path) -> dict[str, str]:
    """Path → digest of everything below a directory."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def restored(artifact: str, work: Path) -> str:
    """What one start does: open, stage; the directory's name and its digest."""
    opened = open_artifact(artifact)
    _, cache = read_cache(opened)
    place, made = stage(opened, cache, work_directory(work))
    whole = hashlib.sha256(repr(tree(place)).encode()).hexdigest()
    return f"{place.name} {whole} {made}"


def start(artifact: str, work: Path, gate: int) -> tuple[int, int]:
    """Fork a process that waits at the gate; its number and its answer's pipe."""
    answer, its_end = os.pipe()
    number = os.fork()
    if number:
        os.close(its_end)
        return number, answer
    code = 1
    try:
        os.read(gate, 1)
        os.write(its_end, restored(artifact, work).encode())
        code = 0
    finally:
        os._exit(code)


def one_round(
    artifact: str, work: Path, seed: int, span: float
) -> tuple[int, bool, str]:
    """How many staged, whether one was killed in time, and what is wrong."""
    draw = random.Random(seed)
    gate, key = os.pipe()
    children = [start(artifact, work, gate) for _ in range(PROCESSES)]
    os.write(key, b"x" * PROCESSES)
    victim = draw.randrange(PROCESSES)
    time.sleep(draw.random() * span)
    os.kill(children[victim][0], signal.SIGKILL)
    answers, killed = set(), False
    makers = 0
    wrong = ""
    for index, (number, answer) in enumerate(children):
        _, status = os.waitpid(number, 0)
        text = os.read(answer, 1000).decode()
        os.close(answer)
        if index == victim and os.WIFSIGNALED(status):
            killed = True
            continue
        if status:
            wrong = f"a survivor ended with status {status}"
            continue
        where, _, made = text.rpartition(" ")
        answers.add(where)
        makers += made == "True"
    os.close(gate)
    os.close(key)
    if len(answers) != 1:
        wrong = wrong or f"survivors restored {answers}"
    return makers, killed, wrong


def main(arguments: list[str]) -> int:
    """Print one line per round; 1 if a round isn't as it must be."""
    artifact = arguments[0]
    rounds = int(arguments[1]) if len(arguments) > 1 else 20
    failures = kills = 0
    with tempfile.TemporaryDirectory(prefix="compilekit-many-") as name:
        began = time.perf_counter()
        wanted = restored(artifact, Path(name) / "alone").rpartition(" ")[0]
        span = 2 * (time.perf_counter() - began)
        for seed in range(rounds):
            work = Path(name) / f"work{seed}"
            makers, killed, wrong = one_round(artifact, work, seed, span)
            kills += killed
            # What a killed process left goes with the next start.
            found = restored(artifact, work).rpartition(" ")[0]
            left = sorted(os.listdir(work))
            if not wrong and (len(left) != 1 or found != wanted):
                wrong = f"left {left}"
            failures += bool(wrong)
            print(
                f"round {seed + 1}: staged by {makers}, killed {killed}, {wrong or 'ok'}"
            )
    print(
        f"{rounds} rounds of {PROCESSES} processes, {kills} killed, {failures} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
