"""Steady state: an attached program against ``torch.compile``, and what dispatch adds.

Lifecycle of one run:

- every repetition is a fresh process that holds two equal models, one compiled by
  ``torch.compile``, one attached to the artifact;
- for each bucket the two are called in turn, the first of each pair alternating, so
  that a slow moment of the machine hits both; the fastest call of many counts;
- within each call of the attached model the program's own time is taken too; what is
  left of the call is what dispatch costs.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import ConfigError, ResourceError
from .process import OnProcessEvent, ProcessEvent, environment, machine, spawn
from .records import short_path, write_json

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class PairSample:
    """One bucket in one process; the fastest and the median call of each side.

    Attributes:
        compiled_ms: Fastest call through ``torch.compile``.
        program_ms: Fastest call of the attached model.
        dispatch_us: Time that a call spends in the dispatcher outside the program, the
            smallest of all calls. The program before it has filled the processor's
            caches with its own data.
        dispatch_alone_us: The same when the program is replaced by one that returns at
            once, so that the dispatcher's own data stay in the caches.
        module_us: Time that a call spends outside the dispatcher, the median: in
            ``torch.nn.Module.__call__``, which any model's call goes through.
        max_abs_diff: Between the two outputs; inf when they aren't comparable.
    """

    entry: str
    bucket: str
    compiled_ms: float
    compiled_median_ms: float
    program_ms: float
    program_median_ms: float
    dispatch_us: float
    dispatch_median_us: float
    dispatch_alone_us: float
    module_us: float
    max_abs_diff: float


@dataclasses.dataclass(frozen=True)
class SteadyBucket:
    """One bucket over all processes.

    Attributes:
        samples: One per process, in the order they ran.
    """

    entry: str
    bucket: str
    samples: tuple[PairSample, ...]

    @property
    def compiled_ms(self) -> float:
        """Fastest call through ``torch.compile`` in any process."""
        return min(sample.compiled_ms for sample in self.samples)

    @property
    def program_ms(self) -> float:
        """Fastest call of the attached model in any process."""
        return min(sample.program_ms for sample in self.samples)

    @property
    def ratio(self) -> float:
        """Attached over ``torch.compile``; the median of the processes' own ratios.

        Where a process's memory lies makes it faster or slower as a whole, for both
        sides alike, so sides are compared within a process.
        """
        return statistics.median(s.program_ms / s.compiled_ms for s in self.samples)

    @property
    def dispatch_us(self) -> float:
        """What the dispatcher adds to a call: the median call of the median process."""
        return statistics.median(sample.dispatch_median_us for sample in self.samples)

    @property
    def dispatch_alone_us(self) -> float:
        """The same without a program between calls: the smallest of all processes."""
        return min(sample.dispatch_alone_us for sample in self.samples)

    @property
    def module_us(self) -> float:
        """What torch's own ``__call__`` of a module takes: the median process's."""
        return statistics.median(sample.module_us for sample in self.samples)


@dataclasses.dataclass(frozen=True)
class SteadyResult:
    """One run."""

    config: str
    model: str
    threads: int
    processes: int
    pairs: int
    environment: Mapping[str, str]
    buckets: tuple[SteadyBucket, ...]

    def as_json(self) -> dict[str, Any]:
        """Ratios, dispatch cost and every process's numbers, as plain JSON values."""
        data = dataclasses.asdict(self)
        data["buckets"] = [
            {
                **dataclasses.asdict(bucket),
                "compiled_ms": bucket.compiled_ms,
                "program_ms": bucket.program_ms,
                "ratio": bucket.ratio,
                "dispatch_us": bucket.dispatch_us,
                "dispatch_alone_us": bucket.dispatch_alone_us,
                "module_us": bucket.module_us,
            }
            for bucket in self.buckets
        ]
        return {"schema": SCHEMA, **data}


def run(
    config: Config,
    *,
    artifact: Path,
    threads: int,
    weights: str,
    on_event: OnProcessEvent,
    out: Path | None,
    processes: int = 3,
    pairs: int = 200,
    buckets: tuple[str, ...] = (),
    work: Path | None = None,
    timeout_seconds: float = 1800.0,
) -> SteadyResult:
    """Compare an artifact with ``torch.compile``, call by call.

    Args:
        config: The configuration that the artifact was built from.
        artifact: The artifact.
        threads: Intra-op threads.
        weights: Directory of real weights; empty = random ones.
        on_event: Called before and after every process.
        out: Where the result's JSON goes; None = nowhere.
        processes: Fresh processes.
        pairs: Pairs of calls per bucket and process.
        buckets: Names of the buckets to measure; empty = all.
        work: Where ``torch.compile``'s cache is kept, and found by a later run; None =
            nowhere.
        timeout_seconds: Limit for one process.

    Raises:
        ConfigError: a number that must be positive isn't.
        ResourceError: a process failed; the message ends with its log.
    """
    for name, value in (("processes", processes), ("pairs", pairs)):
        if value < 1:
            raise ConfigError(f"bench steady: {name} must be at least 1, not {value}")
    found: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="compilekit-bench-") as name:
        # One cache for all processes: only the first one compiles.
        cache = (work or Path(name)) / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        spec = {
            "config": str(config.path),
            "artifact": str(artifact),
            "weights": weights,
            "threads": threads,
            "pairs": pairs,
            "buckets": buckets,
        }
        for index in range(1, processes + 1):
            event = ProcessEvent("started", "steady", index, index, processes)
            on_event(event)
            with tempfile.TemporaryDirectory(dir=name) as scratch:
                outcome = spawn(
                    "compilekit.bench._steady_child",
                    spec,
                    environment(threads, Path(scratch), cache, compiler=True),
                    timeout_seconds,
                )
            on_event(
                dataclasses.replace(
                    event,
                    kind="failed" if outcome.error else "finished",
                    seconds=outcome.seconds,
                    message=outcome.error,
                )
            )
            if outcome.error:
                raise ResourceError(
                    "bench steady: a process failed: " + outcome.error,
                    hint="The end of its log:\n" + outcome.log,
                )
            found.append(outcome.data)
    result = SteadyResult(
        config=short_path(config),
        model=config.model.source,
        threads=threads,
        processes=processes,
        pairs=pairs,
        environment=found[0]["environment"] | machine(),
        buckets=_by_bucket([_samples(data) for data in found]),
    )
    if out is not None:
        write_json(out, result.as_json())
    return result


def interleave(
    functions: Mapping[str, Callable[[], object]], pairs: int
) -> dict[str, list[float]]:
    """Time several functions in turn; each round starts with another one.

    Returns:
        Name → milliseconds of each call, in the order they were made.
    """
    import time

    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(pairs):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            function = functions[name]
            started = time.perf_counter()
            output = function()
            times[name].append((time.perf_counter() - started) * 1e3)
            # Giving its memory back isn't part of the call.
            del output
    return times


def _samples(data: Mapping[str, Any]) -> list[PairSample]:
    return [
        PairSample(**{**bucket, "max_abs_diff": float(bucket["max_abs_diff"])})
        for bucket in data["buckets"]
    ]


def _by_bucket(processes: list[list[PairSample]]) -> tuple[SteadyBucket, ...]:
    return tuple(
        SteadyBucket(samples[0].entry, samples[0].bucket, samples)
        for samples in zip(*processes, strict=True)
    )
