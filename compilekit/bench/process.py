"""Child processes of the measurements: what they inherit, and what they answer."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# A variable left over in the caller's shell would favour one row or miss a cache.
_DROPPED_VARIABLES = ("AOTI", "COMPILEKIT_", "CXX", "MKL_", "OMP_", "TORCH", "TRITON")


@dataclasses.dataclass(frozen=True)
class ProcessEvent:
    """One step of a measurement.

    Attributes:
        kind: ``started`` (of a preparation or a process), ``finished``, ``failed``, or
            ``kept`` (what an earlier run measured; `message` says how much).
        row: The row; ``reference`` for the eager outputs everything is held against.
        repetition: Counted from 1; 0 for a preparation.
        index: The process's place in the run, counted from 1.
        count: Processes in the run.
        seconds: Wall time of the process, for ``finished`` and ``failed``.
        ready_ms: The measured time to all first outputs, for a finished start.
        message: Why a process failed.
    """

    kind: str
    row: str = ""
    repetition: int = 0
    index: int = 0
    count: int = 0
    seconds: float = 0.0
    ready_ms: float = 0.0
    message: str = ""


OnProcessEvent = Callable[[ProcessEvent], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one child process gave: its JSON line, or why there is none."""

    data: Mapping[str, Any]
    seconds: float
    error: str = ""
    log: str = ""


def environment(
    threads: int, work: Path, cache: Path, *, compiler: bool
) -> dict[str, str]:
    """The variables of a child: nothing of the caller's that steers torch."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_DROPPED_VARIABLES)
    }
    for folder in ("tmp", "empty"):
        (work / folder).mkdir()
    cache.mkdir(exist_ok=True)
    variables["OMP_NUM_THREADS"] = str(threads)
    # Inductor keeps precompiled headers under TMPDIR and AOTInductor unpacks there.
    variables["TMPDIR"] = str(work / "tmp")
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [variables.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    if not compiler:
        variables["PATH"] = str(work / "empty")
    return variables


def spawn(
    module: str,
    spec: Mapping[str, Any],
    variables: Mapping[str, str],
    timeout_seconds: float,
) -> Outcome:
    """Run ``python -m module`` with a JSON spec on stdin and read its JSON line."""
    started = time.perf_counter()
    output, timed_out = b"", False
    command = [sys.executable, "-m", module]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(variables),
            start_new_session=True,
        ) as child,
    ):
        try:
            output, _ = child.communicate(json.dumps(spec).encode(), timeout_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # Its compile workers too: the child leads a process group of its own.
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        seconds = time.perf_counter() - started
        log.seek(0)
        text = log.read().decode(errors="replace")
    tail = "\n".join(text.splitlines()[-60:])
    if timed_out:
        message = f"no result within {timeout_seconds:g} s"
        return Outcome({}, seconds, message, tail)
    if child.returncode != 0:
        return Outcome({}, seconds, _reason(text, child.returncode), tail)
    return Outcome(json.loads(output), seconds)


def machine() -> dict[str, str]:
    """Processor and compiler, as a reader of the numbers needs them."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if os.path.exists(cpuinfo):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    compiler = shutil.which("g++")
    version = "none"
    if compiler:
        shown = subprocess.run(
            [compiler, "--version"], capture_output=True, check=False
        ).stdout.decode(errors="replace")
        version = shown.splitlines()[0] if shown else "unknown"
    return {"cpu": model, "cpus": str(os.cpu_count()), "compiler": version}


def _reason(text: str, returncode: int) -> str:
    """Why a child failed: its signal, its exception or its last line."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    lines = [line for line in text.splitlines() if line.strip()]
    traceback = "Traceback (most recent call last):"
    if traceback in lines:
        last = len(lines) - lines[::-1].index(traceback)
        # A message may have more lines after its first, which names the exception.
        for line in lines[last:]:
            if not line.startswith(" "):
                return line
    if lines:
        return lines[-1].strip()
    return f"exit code {returncode}, nothing on stderr"
