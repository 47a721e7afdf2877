"""``compilekit bench startup``: how long a fresh process takes to its first outputs.

Lifecycle of one run:

- a fresh process saves eager's outputs, the reference that every start is held against;
- each row prepares what it ships (caches, packages, an artifact) once, timed apart;
- every (row, repetition) is one fresh process with its own cache and temporary
  directory, as in a new container; within a repetition the rows are shuffled by a seed
  that the result carries, so that a drifting machine hits no row more than another;
- the result keeps every number, and medians are computed from them, never stored alone.

A row whose process fails or takes too long stays in the result with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import ConfigError, ResourceError

SCHEMA = 1

ROWS: Mapping[str, str] = {
    "eager": "no compile at all",
    "cold": "torch.compile, empty cache",
    "moved": "torch.compile, its cache directory built elsewhere and moved here",
    "mega": "torch.compiler.load_cache_artifacts; C++ kernels are compiled again",
    "mega+kernels": "the same with the compiled C++ kernels restored; no compiler",
    "aot": "torch.compile(...).aot_compile, one saved function per bucket",
    "aoti": "AOTInductor, one package per bucket, weights outside, its C++ loader",
    "compilekit": "compilekit.attach, program route",
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
}
# Rows whose process gets an empty PATH: they claim to need no compiler.
_WITHOUT_COMPILER = frozenset({"eager", "mega+kernels", "aoti", "compilekit"})
# A variable left over in the caller's shell would favour one row or miss a cache.
_DROPPED_VARIABLES = ("AOTI", "COMPILEKIT_", "CXX", "MKL_", "OMP_", "TORCH", "TRITON")


@dataclasses.dataclass(frozen=True)
class StartupEvent:
    """One step of a run.

    Attributes:
        kind: ``started`` (of a preparation or a process), ``finished`` or ``failed``.
        row: The row; ``reference`` for the eager outputs everything is held against.
        repetition: Counted from 1; 0 for a preparation.
        index: The process's place in the run, counted from 1.
        count: Processes in the run.
        seconds: Wall time of the process, for ``finished`` and ``failed``.
        ready_ms: The measured time to all first outputs, for a finished start.
        message: Why a process failed.
    """

    kind: str
    row: str
    repetition: int = 0
    index: int = 0
    count: int = 0
    seconds: float = 0.0
    ready_ms: float = 0.0
    message: str = ""


OnStartupEvent = Callable[[StartupEvent], None]


@dataclasses.dataclass(frozen=True)
class BucketSample:
    """One bucket in one process.

    Attributes:
        first_ms: Its first call.
        steady_ms: The median of its later calls.
        later_ms: Those calls, in order.
        max_abs_diff: Largest absolute difference of the first output from eager; inf
            when the outputs aren't comparable (count, shape, dtype, NaN).
    """

    entry: str
    bucket: str
    first_ms: float
    steady_ms: float
    max_abs_diff: float
    later_ms: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sample:
    """One fresh process.

    Attributes:
        repetition: Counted from 1.
        position: The row's place within the repetition, counted from 1.
        import_torch_ms: ``import torch``.
        import_code_ms: The model's own code, transformers included.
        model_ms: Construction and weights.
        attach_ms: What the row does before its first call, its imports included.
        attach_phases_ms: Its parts; only compilekit's receipt tells them.
        peak_rss_bytes: The process's high-water mark right after all first calls.
        weights_rss_bytes: Resident size right before attach.
        maxrss_bytes: ``getrusage`` at the same moment; inherits the parent's mark.
        spawned: Program → processes started between attach and the last first call.
        counters: Inductor's own cache counters at the same moment.
        compiler_modules: Compiler packages that attach and the first calls imported.
        wall_ms: The whole process as its parent saw it, steady calls included.
    """

    repetition: int
    position: int
    import_torch_ms: float
    import_code_ms: float
    model_ms: float
    attach_ms: float
    attach_phases_ms: Mapping[str, float]
    buckets: tuple[BucketSample, ...]
    peak_rss_bytes: int
    weights_rss_bytes: int
    maxrss_bytes: int
    spawned: Mapping[str, int]
    counters: Mapping[str, int]
    compiler_modules: tuple[str, ...]
    wall_ms: float

    @property
    def ready_ms(self) -> float:
        """From weights done to the first output of every bucket."""
        return self.attach_ms + sum(bucket.first_ms for bucket in self.buckets)

    @property
    def steady_ms(self) -> float:
        """One steady call of every bucket."""
        return sum(bucket.steady_ms for bucket in self.buckets)

    @property
    def overhead_ms(self) -> float:
        """What starting cost beyond the calls themselves."""
        return self.ready_ms - self.steady_ms

    @property
    def max_abs_diff(self) -> float:
        """Largest difference from eager over all buckets."""
        return max((bucket.max_abs_diff for bucket in self.buckets), default=0.0)

    @property
    def processes(self) -> int:
        """Processes started between attach and the last first call."""
        return sum(self.spawned.values())


@dataclasses.dataclass(frozen=True)
class Spread:
    """A number over all repetitions."""

    median: float
    minimum: float
    maximum: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Every start of one way to start.

    Attributes:
        name: A key of `ROWS`.
        samples: The processes that succeeded, in the order they ran.
        build_seconds: Wall time of the preparation; None for a row that ships nothing
            and for an artifact that was given ready-made.
        shipped_bytes: Size on disk of what the row ships.
        error: Why the first failed process failed; empty = none did.
        log: The end of that process's standard error.
    """

    name: str
    samples: tuple[Sample, ...]
    build_seconds: float | None = None
    shipped_bytes: int = 0
    error: str = ""
    log: str = ""

    def spread(self, number: Callable[[Sample], float]) -> Spread | None:
        """A number's median and range over the samples; None without a sample."""
        return spread([number(sample) for sample in self.samples])

    @property
    def ready_ms(self) -> Spread | None:
        """See `Sample.ready_ms`."""
        return self.spread(lambda sample: sample.ready_ms)

    @property
    def overhead_ms(self) -> Spread | None:
        """See `Sample.overhead_ms`."""
        return self.spread(lambda sample: sample.overhead_ms)


@dataclasses.dataclass(frozen=True)
class StartupResult:
    """One run of ``bench startup``.

    Attributes:
        config: The configuration's folder and file; results are published, and a whole
            path says more about the machine than about the measurement.
        model: The model's source.
        buckets: ``entry/bucket`` in the order they were called.
        seed: Seed of the order of rows; give it again for the same order.
        threads: Intra-op threads in every process.
        repeat: Processes per row.
        calls: Steady calls per bucket and process.
        environment: Versions, processor and compiler.
        started_rows: Rows of every repetition, in the order they ran.
    """

    config: str
    model: str
    buckets: tuple[str, ...]
    seed: int
    threads: int
    repeat: int
    calls: int
    environment: Mapping[str, str]
    started_rows: tuple[tuple[str, ...], ...]
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            ConfigError: it wasn't part of the run.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise ConfigError(f"this run has no row {name!r}")

    def as_json(self) -> dict[str, Any]:
        """Medians with ranges and every raw number, as plain JSON values."""
        data = dataclasses.asdict(self)
        data["rows"] = [_row_json(row) for row in self.rows]
        return {"schema": SCHEMA, **data}


def spread(numbers: Sequence[float]) -> Spread | None:
    """Median and range; None of nothing."""
    if not numbers:
        return None
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def run(
    config: Config,
    *,
    artifact: Path | None,
    rows: tuple[str, ...],
    repeat: int,
    threads: int,
    weights: str,
    on_event: OnStartupEvent,
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
        out: Where the result's JSON goes; None = nowhere.
        calls: Steady calls per bucket and process.
        seed: Seed of the order of rows; None draws one.
        timeout_seconds: Limit for one process; a slower one is a failed row.

    Raises:
        ConfigError: an unknown row, or a number that must be positive isn't.
        ResourceError: eager itself failed, so there is nothing to compare with.
    """
    _check_arguments(rows, repeat, threads, calls)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    orders = _orders(rows, repeat, seed)
    preparations = _preparations(rows, artifact)
    count = 1 + len(preparations) + len(rows) * repeat
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
        narrate = _Narrator(on_event, count)
        reference = narrate(bench, "reference", "reference", 0)
        if reference.error:
            raise ResourceError(
                "bench startup: the eager reference failed: " + reference.error,
                hint="The end of its log:\n" + reference.log,
            )
        prepared = {
            what: narrate(bench, "prepare", what, 0, label=row)
            for what, row in preparations.items()
        }
        measured: dict[str, list[_Outcome]] = {row: [] for row in rows}
        for repetition, order in enumerate(orders, start=1):
            for position, row in enumerate(order, start=1):
                failed = prepared.get(_SHIPS.get(row, ""))
                if failed is not None and failed.error:
                    narrate.skip()
                    continue
                outcome = narrate(bench, "measure", row, repetition, position=position)
                measured[row].append(outcome)
        result = StartupResult(
            config=short_path(config),
            model=config.model.source,
            buckets=tuple(reference.data["buckets"]),
            seed=seed,
            threads=threads,
            repeat=repeat,
            calls=calls,
            environment=reference.data["environment"] | machine(),
            started_rows=orders,
            rows=tuple(
                _row(bench, row, prepared.get(_SHIPS.get(row, "")), measured[row])
                for row in rows
            ),
        )
    if out is not None:
        write_json(out, result.as_json())
    return result


def short_path(config: Config) -> str:
    """The configuration's folder and file name."""
    return "/".join(config.path.resolve().parts[-2:])


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a result by rename, so that an interrupted run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(json_safe(data), indent=1) + "\n")
    os.replace(partial, path)


def json_safe(value: Any) -> Any:
    """Infinity and NaN as strings: JSON has no numbers for them."""
    from ..results import to_json

    return to_json(value)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What one child process gave: its JSON line, or why there is none."""

    data: Mapping[str, Any]
    seconds: float
    error: str = ""
    log: str = ""
    repetition: int = 0
    position: int = 0


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
        if row == "compilekit":
            return self.artifact or self.store / "artifact"
        return self.store / {"aoti": "packages", "aot": "functions"}.get(row, row)


class _Narrator:
    """Runs child processes one by one and reports each."""

    def __init__(self, on_event: OnStartupEvent, count: int) -> None:
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
        repetition: int,
        *,
        position: int = 0,
        label: str = "",
    ) -> _Outcome:
        self._index += 1
        event = StartupEvent(
            "started", label or what, repetition, self._index, self._count
        )
        self._on_event(event)
        outcome = _run_child(bench, task, what)
        outcome = dataclasses.replace(outcome, repetition=repetition, position=position)
        ready = outcome.data.get("ready_ms", 0.0)
        self._on_event(
            dataclasses.replace(
                event,
                kind="failed" if outcome.error else "finished",
                seconds=outcome.seconds,
                ready_ms=ready,
                message=outcome.error,
            )
        )
        return outcome


def _run_child(bench: _Bench, task: str, what: str) -> _Outcome:
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
) -> _Outcome:
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
        return _Outcome({}, seconds, message, tail)
    if child.returncode != 0:
        return _Outcome({}, seconds, _reason(text, child.returncode), tail)
    return _Outcome(json.loads(output), seconds)


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


def _row(
    bench: _Bench, row: str, prepared: _Outcome | None, outcomes: list[_Outcome]
) -> Row:
    failed = [o for o in (prepared, *outcomes) if o is not None and o.error]
    samples = tuple(_sample(o) for o in outcomes if not o.error)
    return Row(
        name=row,
        samples=samples,
        build_seconds=(
            prepared.data.get("seconds", prepared.seconds) if prepared else None
        ),
        shipped_bytes=_size_bytes(bench.shipped(row)) if row in _SHIPS else 0,
        error=failed[0].error if failed else "",
        log=failed[0].log if failed else "",
    )


def _sample(outcome: _Outcome) -> Sample:
    fields = dict(outcome.data)
    fields.pop("ready_ms")
    fields["buckets"] = tuple(
        BucketSample(**{**b, "max_abs_diff": float(b["max_abs_diff"])})
        for b in fields["buckets"]
    )
    fields["compiler_modules"] = tuple(fields["compiler_modules"])
    return Sample(
        repetition=outcome.repetition,
        position=outcome.position,
        wall_ms=outcome.seconds * 1e3,
        **fields,
    )


def _row_json(row: Row) -> dict[str, Any]:
    numbers: dict[str, Callable[[Sample], float]] = {
        "ready_ms": lambda s: s.ready_ms,
        "overhead_ms": lambda s: s.overhead_ms,
        "steady_ms": lambda s: s.steady_ms,
        "attach_ms": lambda s: s.attach_ms,
        "import_torch_ms": lambda s: s.import_torch_ms,
        "import_code_ms": lambda s: s.import_code_ms,
        "model_ms": lambda s: s.model_ms,
        "peak_rss_bytes": lambda s: s.peak_rss_bytes,
        "processes": lambda s: s.processes,
        "max_abs_diff": lambda s: s.max_abs_diff,
    }
    data = dataclasses.asdict(row)
    spreads = {name: row.spread(number) for name, number in numbers.items()}
    data["over_repetitions"] = {
        name: dataclasses.asdict(value) if value else None
        for name, value in spreads.items()
    }
    return data


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


def _preparations(rows: tuple[str, ...], artifact: Path | None) -> dict[str, str]:
    """What must be made first → the first row that asks for it."""
    needed: dict[str, str] = {}
    for row in rows:
        what = _SHIPS.get(row)
        if what is not None and not (what == "artifact" and artifact is not None):
            needed.setdefault(what, row)
    return needed


def _size_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def machine() -> dict[str, str]:
    """Processor and compiler, as a reader of the numbers needs them."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
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
