"""``compilekit bench startup``: how long a fresh process takes to its first outputs.

Lifecycle of one run:

- a fresh process saves eager's outputs, the reference that every start is held against;
- each row prepares what it ships (caches, packages, an artifact) once, timed apart;
- every (row, repetition) is one fresh process with its own cache and temporary
  directory, as in a new container; within a repetition the rows are shuffled by a seed
  that the result carries, so that a drifting machine hits no row more than another;
- the result is written after every process. A run that finds the result of an earlier
  one, of the same setting on the same machine, keeps its processes and adds what is
  missing.

A row whose process fails or takes too long stays in the result with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifact import open_artifact
from ..artifact.canonical import sha256
from ..artifact.manifest import MANIFEST
from ..config import Config
from ..errors import ConfigError, ResourceError
from ..runtime.check import check, refuse
from .process import (
    OnProcessEvent,
    Outcome,
    ProcessEvent,
    environment,
    machine,
    spawn,
)
from .records import (
    Row,
    Setting,
    StartupResult,
    read_result,
    sample_from,
    short_path,
    write_json,
)

ROWS: Mapping[str, str] = {
    "eager": "no compile at all",
    "cold": "torch.compile, empty cache",
    "moved": "torch.compile, its cache directory built elsewhere and moved here",
    "mega": "torch.compiler.load_cache_artifacts; C++ kernels are compiled again",
    "mega+kernels": "the same with the compiled C++ kernels restored; no compiler",
    "aot": "torch.compile(...).aot_compile, one saved function per bucket",
    "aoti": "AOTInductor, one package per bucket, weights outside, its C++ loader",
    "compilekit": "compilekit.attach, program route",
    "cache": "compilekit.restore and torch.compile, cache route; no compiler",
}
"""Row → what its process does before the first call."""

# What each row ships. The three cache rows come out of one and the same compile.
_SHIPS: Mapping[str, str] = {
    "moved": "caches",
    "mega": "caches",
    "mega+kernels": "caches",
    "aot": "functions",
    "aoti": "packages",
    "compilekit": "artifact",
    "cache": "cache-artifact",
}
# Rows that a route is compared with, by default.
ROUTES: Mapping[str, tuple[str, ...]] = {
    "program": tuple(row for row in ROWS if row != "cache"),
    "cache": ("eager", "cold", "moved", "mega", "mega+kernels", "cache"),
}
# Rows whose process gets an empty PATH: they claim to need no compiler.
_WITHOUT_COMPILER = frozenset({"eager", "mega+kernels", "aoti", "compilekit", "cache"})


def run(
    config: Config,
    *,
    artifact: Path | None,
    rows: tuple[str, ...],
    repeat: int,
    threads: int,
    weights: str,
    on_event: OnProcessEvent,
    out: Path | None,
    calls: int = 10,
    seed: int | None = None,
    timeout_seconds: float = 1800.0,
) -> StartupResult:
    """Measure every row in fresh processes.

    Args:
        config: The configuration; its entries and buckets are called in its order.
        artifact: A built artifact for the ``compilekit`` row; None builds one.
        rows: Names from `ROWS`.
        repeat: Processes per row.
        threads: Intra-op threads, the same in every process.
        weights: Directory of real weights; empty = random ones, the same everywhere.
        on_event: Called before and after every process.
        out: Where the result's JSON goes, after every process; None = nowhere. What a
            run of the same setting has left there is kept, and added to.
        calls: Steady calls per bucket and process.
        seed: Seed of the order of rows; None takes that of `out`, or draws one.
        timeout_seconds: Limit for one process; a slower one is a failed row.

    Raises:
        ConfigError: an unknown row, or a number that must be positive isn't; or `out`
            holds something else, or what another setting or machine gave.
        ResourceError: eager itself failed, so there is nothing to compare with.
    """
    _check_arguments(rows, repeat, threads, calls)
    if artifact is not None:
        # Before torch's rows take their minutes.
        opened = open_artifact(artifact)
        refuse(f"artifact {opened.root} doesn't fit this machine", check(opened))
    setting = _setting(config, artifact, weights, threads, calls)
    result = _planned(setting, rows, repeat, seed, out)
    todo = [
        (repetition, row)
        for repetition, order in enumerate(_orders(rows, repeat, result.seed), start=1)
        for row in order
        if not result.row(row).has(repetition)
    ]
    if kept := sum(len(row.samples) for row in result.rows):
        on_event(ProcessEvent("kept", message=f"{kept} processes of {out}"))
    if not todo:
        return result
    preparations = _preparations([row for _, row in todo], artifact)
    with tempfile.TemporaryDirectory(prefix="compilekit-bench-") as name:
        bench = _Bench(
            config=config,
            store=Path(name),
            artifact=artifact,
            threads=threads,
            weights=weights,
            calls=calls,
            timeout_seconds=timeout_seconds,
        )
        narrate = _Narrator(on_event, 1 + len(preparations) + len(todo))
        reference = narrate(bench, "reference", "reference")
        if reference.error:
            raise ResourceError(
                "bench startup: the eager reference failed: " + reference.error,
                hint="The end of its log:\n" + reference.log,
            )
        result = _placed(result, reference, out)
        prepared = {
            what: narrate(bench, "prepare", what, label=row)
            for what, row in preparations.items()
        }
        for row in dict.fromkeys(row for _, row in todo):
            made = prepared.get(_SHIPS.get(row, ""))
            result = result.with_row(_shipping(bench, result.row(row), made))
        for repetition, row in todo:
            made = prepared.get(_SHIPS.get(row, ""))
            if made is not None and made.error:
                narrate.skip()
            else:
                outcome = narrate(bench, "measure", row, repetition)
                result = _measured(result, row, repetition, outcome)
            if out is not None:
                write_json(out, result.as_json())
    return result


def _setting(
    config: Config, artifact: Path | None, weights: str, threads: int, calls: int
) -> Setting:
    return Setting(
        config=short_path(config),
        config_sha256=sha256(config.path.read_bytes()),
        model=config.model.source,
        weights="real" if weights else "random",
        artifact=_artifact_digest(artifact),
        threads=threads,
        calls=calls,
    )


def _artifact_digest(artifact: Path | None) -> str:
    """What an artifact says its digest is; its rows open it and hold it to that."""
    if artifact is None:
        return ""
    try:
        return str(json.loads((artifact / MANIFEST).read_bytes())["digest"])
    except (OSError, ValueError, TypeError, KeyError):
        # Its row fails, and says what is wrong with it.
        return ""


def _planned(
    setting: Setting,
    rows: tuple[str, ...],
    repeat: int,
    seed: int | None,
    out: Path | None,
) -> StartupResult:
    """What is there already, with a place for every row that is to be measured."""
    if out is None or not os.path.exists(out):
        return StartupResult(
            setting=setting,
            buckets=(),
            seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
            repeat=repeat,
            environment={},
            started_rows=((),) * repeat,
            rows=tuple(Row(row) for row in rows),
        )
    found = read_result(out)
    wanted = {**vars(setting), "seed": found.seed if seed is None else seed}
    _same_as_before(out, {**vars(found.setting), "seed": found.seed}, wanted)
    repeat = max(repeat, found.repeat)
    added = tuple(Row(row) for row in rows if row not in [r.name for r in found.rows])
    return dataclasses.replace(
        found,
        repeat=repeat,
        started_rows=found.started_rows + ((),) * (repeat - found.repeat),
        rows=found.rows + added,
    )


def _placed(
    result: StartupResult, reference: Outcome, out: Path | None
) -> StartupResult:
    """The result of a run that begins now, on this machine."""
    here = {
        "buckets": tuple(reference.data["buckets"]),
        "environment": reference.data["environment"] | machine(),
    }
    if not result.buckets:
        return dataclasses.replace(result, **here)
    before = {"buckets": result.buckets, "environment": result.environment}
    _same_as_before(out, before, here)
    return dataclasses.replace(result, runs=result.runs + 1)


def _same_as_before(
    out: Path | None, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    different = [
        f"{name}: expected {before[name]}, found {now[name]}"
        for name in before
        if before[name] != now[name]
    ]
    if different:
        raise ConfigError(
            f"bench startup can't add to {out}: {'; '.join(different)}",
            hint="Give --out another file, or move this one away.",
        )


def _shipping(bench: _Bench, row: Row, made: Outcome | None) -> Row:
    """A row before its first process: what it ships, and nothing failed yet."""
    if row.name not in _SHIPS:
        return dataclasses.replace(row, error="", log="")
    if made is None:
        return dataclasses.replace(
            row, error="", log="", shipped_bytes=_size_bytes(bench.shipped(row.name))
        )
    return dataclasses.replace(
        row,
        build_seconds=made.data.get("seconds", made.seconds),
        shipped_bytes=_size_bytes(bench.shipped(row.name)),
        error=made.error,
        log=made.log,
    )


def _measured(
    result: StartupResult, name: str, repetition: int, outcome: Outcome
) -> StartupResult:
    """The result with one more process."""
    started = list(result.started_rows)
    started[repetition - 1] += (name,)
    row = result.row(name)
    if outcome.error:
        failed = row.error or outcome.error, row.log or outcome.log
        row = dataclasses.replace(row, error=failed[0], log=failed[1])
    else:
        sample = sample_from(
            {
                **{key: outcome.data[key] for key in outcome.data if key != "ready_ms"},
                "repetition": repetition,
                "position": len(started[repetition - 1]),
                "wall_ms": outcome.seconds * 1e3,
                "run": result.runs,
            }
        )
        row = dataclasses.replace(row, samples=(*row.samples, sample))
    return dataclasses.replace(result.with_row(row), started_rows=tuple(started))


@dataclasses.dataclass(frozen=True)
class _Bench:
    """What every child of one run shares."""

    config: Config
    store: Path
    artifact: Path | None
    threads: int
    weights: str
    calls: int
    timeout_seconds: float

    def shipped(self, row: str) -> Path:
        """Where the things lie that a row ships."""
        if row in ("compilekit", "cache"):
            return self.artifact or self.store / _SHIPS[row]
        return self.store / {"aoti": "packages", "aot": "functions"}.get(row, row)


class _Narrator:
    """Runs child processes one by one and reports each."""

    def __init__(self, on_event: OnProcessEvent, count: int) -> None:
        self._on_event = on_event
        self._count = count
        self._index = 0

    def skip(self) -> None:
        """Count a process that can't run because its preparation failed."""
        self._index += 1

    def __call__(
        self,
        bench: _Bench,
        task: str,
        what: str,
        repetition: int = 0,
        *,
        label: str = "",
    ) -> Outcome:
        self._index += 1
        event = ProcessEvent(
            "started", label or what, repetition, self._index, self._count
        )
        self._on_event(event)
        outcome = _run_child(bench, task, what)
        self._on_event(
            dataclasses.replace(
                event,
                kind="failed" if outcome.error else "finished",
                seconds=outcome.seconds,
                ready_ms=outcome.data.get("ready_ms", 0.0),
                message=outcome.error,
            )
        )
        return outcome


def _run_child(bench: _Bench, task: str, what: str) -> Outcome:
    """One child process in an empty working directory of its own."""
    with tempfile.TemporaryDirectory(dir=bench.store, prefix="process-") as name:
        work = Path(name)
        cache = work / "cache"
        if task == "measure" and what == "moved":
            # A copy, because a start writes into its cache directory.
            shutil.copytree(bench.shipped("moved"), cache)
        spec = {
            "task": task,
            "what": what,
            "config": str(bench.config.path),
            "weights": bench.weights,
            "threads": bench.threads,
            "calls": bench.calls,
            "store": str(bench.store),
            "device": _device(bench.config),
            "shipped": str(bench.shipped(what)),
        }
        needs_no_compiler = task == "measure" and what in _WITHOUT_COMPILER
        return spawn(
            "compilekit.bench._startup_child",
            spec,
            environment(bench.threads, work, cache, compiler=not needs_no_compiler),
            bench.timeout_seconds,
        )


def _device(config: Config) -> str:
    """Where the rows run: on the kind of device that the first target names."""
    from ..targets import load_target

    return load_target(config.build.targets[0]).kind


def _check_arguments(
    rows: tuple[str, ...], repeat: int, threads: int, calls: int
) -> None:
    unknown = [row for row in rows if row not in ROWS]
    if unknown or not rows:
        named = f"unknown row {unknown[0]!r}" if unknown else "no row"
        raise ConfigError(f"bench startup: {named}", hint=f"Rows: {', '.join(ROWS)}")
    if len(set(rows)) != len(rows):
        raise ConfigError("bench startup: a row is named twice")
    for name, value in (("repeat", repeat), ("threads", threads), ("calls", calls)):
        if value < 1:
            raise ConfigError(f"bench startup: {name} must be at least 1, not {value}")


def _orders(
    rows: tuple[str, ...], repeat: int, seed: int
) -> tuple[tuple[str, ...], ...]:
    """The rows of each repetition, every one shuffled from the same seed."""
    source = random.Random(seed)
    return tuple(tuple(source.sample(rows, len(rows))) for _ in range(repeat))


def _preparations(rows: Sequence[str], artifact: Path | None) -> dict[str, str]:
    """What must be made first → the first row that asks for it."""
    needed: dict[str, str] = {}
    for row in rows:
        what = _SHIPS.get(row)
        given = artifact is not None and what in ("artifact", "cache-artifact")
        if what is not None and not given:
            needed.setdefault(what, row)
    return needed


def _size_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if os.path.isfile(p))
