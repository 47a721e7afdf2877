"""What ``bench startup`` measured, as frozen dataclasses, and their JSON.

Every number of every process is kept; medians are computed from them, never stored
alone. A result's JSON can be read back, so that a later run adds to it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import ConfigError
from ..output import write_text
from ..results import to_json

SCHEMA = 2


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
        run: The run of the command that measured it, counted from 1; only rows of one
            run are interleaved.
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
    run: int = 1

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


def spread(numbers: Sequence[float]) -> Spread | None:
    """Median and range; None of nothing."""
    if not numbers:
        return None
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


@dataclasses.dataclass(frozen=True)
class Row:
    """Every start of one way to start.

    Attributes:
        name: A key of `compilekit.bench.startup.ROWS`.
        samples: The processes that succeeded, in the order they ran.
        build_seconds: Wall time of the preparation; None for a row that ships nothing
            and for an artifact that was given ready-made.
        shipped_bytes: Size on disk of what the row ships.
        error: Why the first failed process failed; empty = none did.
        log: The end of that process's standard error.
    """

    name: str
    samples: tuple[Sample, ...] = ()
    build_seconds: float | None = None
    shipped_bytes: int = 0
    error: str = ""
    log: str = ""

    def has(self, repetition: int) -> bool:
        """True if its process of that repetition succeeded."""
        return any(sample.repetition == repetition for sample in self.samples)

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
class Setting:
    """What two runs must have in common for their numbers to stand in one table.

    Attributes:
        config: The configuration's folder and file; results are published, and a whole
            path says more about the machine than about the measurement.
        config_sha256: Digest of the configuration file's bytes.
        model: The model's source.
        weights: ``real`` or ``random``.
        artifact: Digest of the artifact that was given; empty = built by the run.
        threads: Intra-op threads in every process.
        calls: Steady calls per bucket and process.
    """

    config: str
    config_sha256: str
    model: str
    weights: str
    artifact: str
    threads: int
    calls: int


_SETTING = tuple(field.name for field in dataclasses.fields(Setting))


@dataclasses.dataclass(frozen=True)
class StartupResult:
    """What ``bench startup`` has measured so far.

    Attributes:
        setting: What all of it was measured with.
        buckets: ``entry/bucket`` in the order they were called.
        seed: Seed of the order of rows; give it again for the same order.
        repeat: Processes that every row is to have.
        environment: Versions, processor and compiler.
        started_rows: Rows of every repetition, in the order they ran.
        runs: Runs of the command that this result comes from.
    """

    setting: Setting
    buckets: tuple[str, ...]
    seed: int
    repeat: int
    environment: Mapping[str, str]
    started_rows: tuple[tuple[str, ...], ...]
    rows: tuple[Row, ...]
    runs: int = 1

    @property
    def missing(self) -> tuple[tuple[str, int], ...]:
        """(row, repetition) of every process that hasn't succeeded."""
        return tuple(
            (row.name, repetition)
            for repetition in range(1, self.repeat + 1)
            for row in self.rows
            if not row.has(repetition)
        )

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            ConfigError: it isn't part of the result.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise ConfigError(f"this run has no row {name!r}")

    def with_row(self, row: Row) -> StartupResult:
        """The same result with one row replaced."""
        rows = tuple(row if row.name == one.name else one for one in self.rows)
        return dataclasses.replace(self, rows=rows)

    def as_json(self) -> dict[str, Any]:
        """Medians with ranges and every raw number, as plain JSON values."""
        data = dataclasses.asdict(self)
        data["rows"] = [_row_json(row) for row in self.rows]
        return {
            "schema": SCHEMA,
            **data.pop("setting"),
            **data,
            "missing": self.missing,
        }


def read_result(path: Path) -> StartupResult:
    """The result that an earlier run wrote.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']} instead of {SCHEMA}")
        return StartupResult(
            setting=Setting(**{name: data[name] for name in _SETTING}),
            buckets=tuple(data["buckets"]),
            seed=data["seed"],
            repeat=data["repeat"],
            environment=data["environment"],
            started_rows=tuple(map(tuple, data["started_rows"])),
            rows=tuple(map(_row, data["rows"])),
            runs=data["runs"],
        )
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ConfigError(
            f"{path} isn't a result of `bench startup` that a run could add to: {exc}",
            hint="Give --out another file, or move this one away.",
        ) from exc


def short_path(config: Config) -> str:
    """The configuration's folder and file name."""
    return "/".join(config.path.resolve().parts[-2:])


def sample_from(data: Mapping[str, Any]) -> Sample:
    """A sample from the JSON of a process or of a result."""
    fields = dict(data)
    fields["buckets"] = tuple(
        BucketSample(
            **{
                **bucket,
                # As text where it's infinite: JSON has no such number.
                "max_abs_diff": float(bucket["max_abs_diff"]),
                "later_ms": tuple(bucket["later_ms"]),
            }
        )
        for bucket in data["buckets"]
    )
    fields["compiler_modules"] = tuple(data["compiler_modules"])
    return Sample(**fields)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a result: an interrupted run leaves the one before.

    Raises:
        ResourceError: The place can't be written.
    """
    write_text(path, json.dumps(to_json(data), indent=1) + "\n")


def _row(data: Mapping[str, Any]) -> Row:
    fields = {name: data[name] for name in data if name != "over_repetitions"}
    fields["samples"] = tuple(map(sample_from, data["samples"]))
    return Row(**fields)


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
