"""On a GPU: what docs/gpu.md quotes, in one call; what is finished is kept.

    python scripts/device/everything.py OUT [--seconds 420] [--only NAMES]
        [--artifacts DIR]

What is built without a GPU is built here, where it can't be seen, but for what lies in
DIR already (``all/NAME`` of each configuration here, ``example``). The checks run side
by side, beside what the peers' table prepares; then its processes run alone, and after
them those of measure.py. A section that takes too long is ended, and the rest is still
run. OUT gets each section's own file and ``sections.json``: when each ran, how it ended,
its last lines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "qwen2.5-7b"


class Section(NamedTuple):
    """Commands that run one after the other, until one fails.

    Attributes:
        folder: Where they run.
        alone: Runs after everything else.
    """

    name: str
    commands: list[list[Any]]
    folder: Path = HERE
    alone: bool = False


def main() -> None:
    """Run the checks side by side, then the measurements one by one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--artifacts", type=Path)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    began = time.monotonic()
    done: dict[str, dict[str, Any]] = {}

    def run(section: Section) -> None:
        started = time.monotonic()
        code, lines = ended(section, began + arguments.seconds)
        done[section.name] = {
            "code": code,
            "started": round(started - began, 1),
            "ended": round(time.monotonic() - began, 1),
            "output": lines,
        }
        (out / "sections.json").write_text(json.dumps(done, indent=1), encoding="utf-8")
        print(f"== {section.name}: {code}", *lines[-30:], sep="\n", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        chosen = [
            section
            for section in sections(
                out, Path(folder), (arguments.artifacts or Path(folder)).resolve()
            )
            if not arguments.only or section.name in arguments.only.split(",")
        ]
        together = [section for section in chosen if not section.alone]
        with ThreadPoolExecutor(max_workers=len(chosen)) as pool:
            list(pool.map(run, together))
        for section in chosen:
            if section.alone:
                run(section)
    sys.exit(any(one["code"] for one in done.values()))


def sections(out: Path, folder: Path, artifacts: Path) -> list[Section]:
    """Everything that is run."""
    python, compilekit = sys.executable, [sys.executable, "-m", "compilekit"]
    plain, example, every = folder / "targets", artifacts / "example", artifacts / "all"
    several = [
        word
        for name in ("nvidia-a100", "nvidia-h200", "nvidia-b200")
        for word in ("--target", name)
    ]
    start = [HERE / "start.py", plain]
    hidden = ["env", "CUDA_VISIBLE_DEVICES="]
    build = [*hidden, *compilekit, "build", "--no-verify"]
    make_example = [*build, EXAMPLE / "compilekit.toml", "-o", example]
    compare = [python, HERE / "compare.py", every, "--jobs", "4"]
    compare += ["--out", out / "compare.json"]
    return [
        Section(
            "peers",
            [
                [
                    *(*compilekit, "bench", "startup", HERE / "qwen4.toml"),
                    *("--rows", "compilekit,eager,aoti,aot,mega,cold"),
                    *("--repeat", "1", "--out", out / "peers.json"),
                ]
            ],
        ),
        Section(
            "parity",
            [
                [python, HERE / "parity.py", every, "--out", out / "parity.json"],
                *([] if every.exists() else [compare]),
            ],
        ),
        *([Section("compare", [compare])] if every.exists() else []),
        Section(
            "targets",
            [
                [*build, HERE / "plain.toml", "-o", plain, *several],
                [python, HERE / "targets.py", plain],
                ["env", "PATH=", python, *start],
                [*compilekit, "load", plain, "--", python, *start],
            ],
        ),
        Section(
            "verify",
            [
                *([] if example.exists() else [make_example]),
                [*compilekit, "verify", example],
            ],
            EXAMPLE,
        ),
        Section(
            "tests",
            [
                [
                    *(*hidden, python, "-m", "pytest", "-q", "-m", "cuda", "-n", "5"),
                    *("-p", "no:cacheprovider", "-W", "ignore"),
                    *("tests/test_cuda_build.py", "tests/test_emulation.py"),
                    "tests/test_decode_kernels.py",
                ]
            ],
            HERE.parents[1],
        ),
        Section(
            "measure",
            [
                [
                    *(python, EXAMPLE / "measure.py", example, "--repeat", "1"),
                    *("--rows", "eager,compilekit,lazy", "--out", out / "start.json"),
                ]
            ],
            alone=True,
        ),
    ]


def ended(section: Section, deadline: float) -> tuple[int, list[str]]:
    """Run a section to its end or the deadline: exit code and last lines."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    output = ""
    for command in section.commands:
        process = subprocess.Popen(
            command,
            cwd=section.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        output += said
        if process.returncode:
            break
    return process.returncode, output.strip().splitlines()[-120:]


if __name__ == "__main__":
    main()
