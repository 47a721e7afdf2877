"""``compilekit bench throughput``: how fast a language model is served, by strategy.

Each strategy is one fresh process with a deadline; its result is appended to the JSON
file as soon as it is there, and a file that has a strategy's result already isn't
measured again. What a device can do at best is measured on it first, so that every
figure can be read as a part of that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compilekit.bench._throughput_child import MODES, TUNED
from compilekit.config import Config
from compilekit.errors import ConfigError, ResourceError
from compilekit.output import write_text

SCHEMA = 1
STRATEGIES = tuple(MODES)
LIMITS = "limits"

Result = dict[str, Any]


def run(
    config: Config,
    *,
    artifact: Path,
    out: Path,
    tuned: Path | None = None,
    strategies: Sequence[str] = (),
    device: str = "",
    deadline: float = 600.0,
    calls: int = 5,
    new_tokens: int = 128,
    weights: str = "",
    on_event: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure strategies that `out` doesn't have yet, one process each.

    Args:
        config: It must have ``[generate]``: its batches, its longest prompt and its
            largest cache are what is measured.
        artifact: Built from it.
        out: JSON file; results are added to it.
        tuned: Built with a tuning file, for ``compilekit-tuned``.
        strategies: Some of `STRATEGIES`; empty = all, ``compilekit-tuned`` if there is
            an artifact for it.
        device: ``cuda`` or ``cpu``; empty = a GPU if there is one.
        deadline: Seconds that a strategy may take, imports and weights included.
        calls: Timed prefills, and rounds of decode steps.
        new_tokens: Tokens of the ``generate`` call; 0 = none is made.
        weights: Real weights; empty = random.
        on_event: Told in a line what was measured.
    Raises:
        ConfigError: the configuration has no ``[generate]``, a strategy is unknown, or
            `out` holds results of something else.
        ResourceError: `out` can't be written.
    """
    if not any(entry.role for entry in config.entries.values()):
        raise ConfigError(
            f"{config.path}: has no [generate], and throughput is a language model's"
        )
    strategies = strategies or [name for name in STRATEGIES if tuned or name != TUNED]
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        known = ", ".join(STRATEGIES)
        raise ConfigError(f"strategies: expected {known}, found {', '.join(unknown)}")
    if TUNED in strategies and tuned is None:
        raise ConfigError(
            f"strategies: {TUNED} needs an artifact that was built with a tuning file",
            hint="Name it with --tuned.",
        )
    about: Result = {
        "schema": SCHEMA,
        "model": config.model.source,
        "dtype": config.model.dtype,
        "batches": list(config.axes["b"]),
        "prompt": max(config.axes["s"]),
        "cache": max(config.axes["c"]),
        "new_tokens": new_tokens,
        "calls": calls,
    }
    result = _resumed(out, about)
    spec = {
        **about,
        "config": str(config.path),
        "artifact": str(artifact.absolute()),
        "tuned": str(tuned.absolute()) if tuned else "",
        "device": device or _device(),
        "weights": weights,
    }
    for name in (LIMITS, *strategies):
        if any(
            row["strategy"] == name and "error" not in row for row in result["rows"]
        ):
            on_event(f"{name}: measured already")
            continue
        row = _measure({**spec, "strategy": name}, deadline)
        result["rows"] = [r for r in result["rows"] if r["strategy"] != name] + [row]
        write_text(out, json.dumps(result, indent=1) + "\n")
        on_event(f"{name}: {row.get('error') or 'measured'}")
    return result


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _resumed(out: Path, about: Result) -> Result:
    if not os.path.exists(out):
        return {**about, "rows": []}
    try:
        found: Result = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{out}: isn't a result of bench throughput: {exc}") from exc
    other = {k: found.get(k) for k, value in about.items() if found.get(k) != value}
    if other:
        raise ConfigError(
            f"{out}: holds results of another measurement: {other}, and this one is"
            f" { {k: about[k] for k in other} }",
            hint="Name another file.",
        )
    return found


def _measure(spec: Mapping[str, Any], deadline: float) -> Result:
    """One strategy's process; a row with ``error`` if it failed or took too long."""
    began = time.perf_counter()
    name = spec["strategy"]
    with tempfile.TemporaryDirectory(prefix="compilekit-throughput-") as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
        }
        # Compile workers are its children: they end with it.
        child = subprocess.Popen(
            [sys.executable, "-m", "compilekit.bench._throughput_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(_end, child)
            try:
                stdout, stderr = child.communicate(json.dumps(spec).encode(), deadline)
            except subprocess.TimeoutExpired:
                error = f"not finished after {deadline:.0f} s"
                return {"strategy": name, "error": error}
            stack.pop_all()
    if child.returncode != 0:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return {"strategy": name, "error": lines[-1], "stderr": lines[-40:]}
    row: Result = json.loads(stdout)
    row["wall_s"] = time.perf_counter() - began
    return row


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and the compile workers it started."""
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def figures(result: Result, row: Result) -> dict[tuple[str, int], dict[str, float]]:
    """(kind, batch) → ms, tokens per second and the part of the device's limit.

    Decode is held against reading every weight once, prefill against two operations
    per weight and token.
    """
    limits: Result = next((r for r in result["rows"] if r["strategy"] == LIMITS), {})
    found = {}
    for step in row.get("steps", ()):
        ms = statistics.median(step["ms"])
        tokens = step["batch"] * (row["prompt"] if step["kind"] == "prefill" else 1)
        figure = {"ms": ms, "tokens_per_s": tokens / ms * 1e3}
        if "copy_bytes_per_s" in limits:
            reads = max(limits["copy_bytes_per_s"], limits["read_bytes_per_s"])
            operations = 2 * row["prefill_products"] * tokens
            best = (
                operations / limits["matmul_flop_per_s"]
                if step["kind"] == "prefill"
                else row["decode_bytes"] / reads
            )
            figure["of_limit"] = best * 1e3 / ms
        found[step["kind"], step["batch"]] = figure
    return found


class Claim(NamedTuple):
    """What a document claims, beside what was measured.

    Attributes:
        claim: What it's about.
        claimed: As it was claimed.
        measured: (what was compared, percent) for each measurement that bears on it.
    """

    claim: str
    claimed: str
    measured: tuple[tuple[str, float], ...]


_GRAPHS = (
    ("compilekit-no-graphs", "compilekit"),
    ("default", "reduce-overhead"),
    ("max-autotune-no-cudagraphs", "max-autotune"),
)


def claims(result: Result) -> tuple[Claim, ...]:
    """What is often claimed about these strategies, held against a result.

    Percent of the time that CUDA graphs save, and of a device's limit that the best
    strategy reaches.
    """
    found = {
        row["strategy"]: figures(result, row)
        for row in result["rows"]
        if row.get("steps")
    }
    steps = [(kind, b) for kind in ("prefill", "decode") for b in result["batches"]]
    saved = [
        (
            f"{graphs} against {without}, {kind} {batch}",
            100 * (1 - found[graphs][kind, batch]["ms"] / slow["ms"]),
        )
        for without, graphs in _GRAPHS
        if without in found and graphs in found
        for (kind, batch), slow in found[without].items()
    ]
    used = []
    for step in steps:
        parts = {name: f[step].get("of_limit", 0.0) for name, f in found.items()}
        best = max(parts, key=parts.__getitem__, default="")
        if parts.get(best):
            used.append((f"{best}, {step[0]} {step[1]}", 100 * parts[best]))
    return (
        Claim("time that CUDA graphs save", "10–15 %", tuple(saved)),
        Claim("part of the device's limit", "85–90 %", tuple(used)),
    )


def plot(result: Result, path: Path) -> None:
    """Draw tokens per second by strategy, with the device's limit as a line.

    Args:
        path: Its suffix decides the format (``.svg``, ``.png``).
    Raises:
        ConfigError: matplotlib isn't there.
        ResourceError: the file can't be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError(
            f"--plot needs matplotlib: {exc}",
            hint='Install it: pip install "compilekit[report]"',
        ) from exc
    rows = [row for row in result["rows"] if row.get("steps")]
    kinds = [(k, b) for k in ("prefill", "decode") for b in result["batches"]]
    figure = Figure(figsize=(4 * len(kinds), 4), layout="constrained")
    for place, (kind, batch) in enumerate(kinds, 1):
        axes = figure.add_subplot(1, len(kinds), place)
        found = [figures(result, row)[kind, batch] for row in rows]
        axes.bar(range(len(rows)), [each["tokens_per_s"] for each in found])
        limits = [e["tokens_per_s"] / e["of_limit"] for e in found if "of_limit" in e]
        if limits:
            axes.axhline(limits[0], linestyle="--", label="device's limit")
            axes.legend()
        names = [row["strategy"] for row in rows]
        axes.set_xticks(range(len(rows)), names, rotation=45, ha="right")
        axes.set_title(f"{kind}, batch {batch}")
        axes.set_ylabel("tokens per second")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise ResourceError(f"{path}: the plot can't be written: {exc}") from exc
