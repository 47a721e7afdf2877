"""On a GPU: do restored caches spare every compile?

    python scripts/device/caches.py [--artifact DIR] [--config CONFIG] [--rows NAMES]
        [--out FILE]

Rows, each in a process of its own that starts with nothing but its artifact; one that
crashes is a row that says so:

    gpu-less   DIR's caches of CONFIG, built where there is no GPU
    build      CONFIG built here, into a folder that is moved then
    native     what was built, with the build's folder gone
    verify     `compilekit verify` of it
    cold       nothing restored

PATH is empty in the restored rows. Ends with 1 if one of them compiled or timed
anything, or a row failed. A GPU-less build of scripts/device/caches.toml and a native
one of scripts/device/ranked.toml (`--rows build,native,verify`) are what docs/gpu.md
quotes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compilekit import config as configuration
from compilekit.plan import make_plan

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SERVE = ROOT / "scripts" / "cache_proof" / "serve.py"
# What a complete start counts none of.
NONE = ("graphs", "missed", "kernels", "benchmarks")
# After which a process is killed; none takes half of it.
SECONDS = 170


def main() -> None:
    """Run every row; one line and one record each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--rows", default="gpu-less,build,native,verify,cold")
    parser.add_argument("--config", type=Path, default=HERE / "caches.toml")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = arguments.config.resolve()
    rows: list[dict[str, Any]] = []

    def keep(name: str, row: dict[str, Any]) -> None:
        rows.append({"row": name, **row, "problem": problem(name, row)})
        print(shown(rows[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built, moved = folder / "build" / "artifact", folder / "moved"
        chosen = arguments.rows.split(",")
        if "gpu-less" in chosen:
            given = arguments.artifact.resolve()
            keep("gpu-less", served(config, folder / "1", given))
        if "build" in chosen:
            built.parent.mkdir()
            keep("build", compilekit(built.parent, "build", config, "-o", built))
        if built.is_dir():
            built.rename(moved)
            shutil.rmtree(built.parent)
        if "native" in chosen and moved.is_dir():
            keep("native", served(config, folder / "2", moved))
        if "verify" in chosen and moved.is_dir():
            keep("verify", compilekit(folder, "verify", moved))
        if "cold" in chosen:
            keep("cold", served(config, folder / "3", None))
    sys.exit(any(row["problem"] for row in rows))


def served(config: Path, folder: Path, artifact: Path | None) -> dict[str, Any]:
    """What a fresh process answers; ``error`` with its last words if it died."""
    folder.mkdir()
    jobs = make_plan(configuration.load(config)).jobs
    spec: dict[str, Any] = {
        "config": str(config),
        "buckets": [(j.entry, j.bucket.name, dict(j.bucket.axes)) for j in jobs],
        "device": "cuda:0",
    }
    variables = {"TMPDIR": str(folder)}
    if artifact is None:
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        variables["TRITON_CACHE_DIR"] = str(folder / "triton")
    else:
        spec["artifact"] = str(artifact)
        variables["PATH"] = ""
    done = started([SERVE], variables, json.dumps(spec))
    if done.returncode:
        return failed(done)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compilekit(folder: Path, command: str, *words: Any) -> dict[str, Any]:
    """Run a command of compilekit's; how long that took."""
    began = time.perf_counter()
    words = (*words, *(["--no-verify"] if command == "build" else []))
    variables = {"TMPDIR": str(folder)}
    done = started(["-m", "compilekit", "--plain", command, *words], variables, "")
    if done.returncode:
        return failed(done)
    took = {command: time.perf_counter() - began}
    rows = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("bucket\t", "replay\t"))
    ]
    return {"seconds": took, "printed": rows}


def started(
    command: list[Any], variables: dict[str, str], given: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout, and nothing of a cache from this environment."""
    kept = {k: v for k, v in os.environ.items() if not k.endswith("_CACHE_DIR")}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**kept, "PYTHONPATH": str(ROOT), **variables},
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(given, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, *output)


def failed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """A process that died, in its own words."""
    words = f"{done.stdout}\n{done.stderr}".strip().splitlines()
    return {"error": f"ended with code {done.returncode}", "output": words[-60:]}


def problem(name: str, row: dict[str, Any]) -> str:
    """Why a row doesn't show what it should; "" if it does."""
    if "error" in row:
        return str(row["error"])
    if name in ("build", "verify", "cold"):
        return ""
    counted = {key: row["counted"][key] for key in NONE if row["counted"][key]}
    return ", ".join(
        filter(
            None,
            [
                f"counted {counted}" if counted else "",
                f"misses {row['misses']}" if row["misses"] else "",
                f"processes {row['processes']}" if row["processes"] else "",
            ],
        )
    )


def shown(row: dict[str, Any]) -> str:
    """One line for people; a failed row with the end of what it printed."""
    said = [f"{row['row']}\t{row['problem'] or 'ok'}"]
    if "seconds" in row:
        said += [f"{what} {took:.2f} s" for what, took in row["seconds"].items()]
    if "counted" in row:
        said += [f"differs from eager by {row['max_abs_diff']:.3g}"]
        said += [f"{value} {what}" for what, value in row["counted"].items()]
        said += [f"{len(row['packages'])} packages", f"{len(row['traced'])} traced"]
    return "\t".join(said) + "".join(f"\n  {line}" for line in row.get("output", ()))


if __name__ == "__main__":
    main()
