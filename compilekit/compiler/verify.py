"""`verify`: replay every bucket in a fresh process and compare it with eager.

Each bucket gets a process of its own, so that none profits from what another loaded.
In it, PATH is empty, an audit hook sees every started process, and torch's counters
every compiled frame; the result is compared with eager, on a CPU at 1, N and 4N
threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from compilekit.artifact import (
    Artifact,
    TargetVerified,
    open_artifact,
    write_verification,
)
from compilekit.artifact.verification import CONFIG_REPORT
from compilekit.compiler.child import error_of
from compilekit.compiler.workers import death
from compilekit.config import Config
from compilekit.errors import (
    ConfigError,
    MismatchError,
    NeedsDeviceError,
    ResourceError,
)
from compilekit.events import (
    OnVerifyEvent,
    ProcessError,
    VerifyEvent,
    from_line,
    ignore,
)
from compilekit.plan import Bucket
from compilekit.results import BucketVerified, VerifyResult
from compilekit.runtime.check import (
    check,
    choose_target,
    describe_machine,
    fitting_targets,
    refuse,
)

# Route → the process that replays a bucket of it.
_REPLAYS = {"program": "replay", "cache": "cache_replay"}


def verify(
    path: Path,
    *,
    config: Config | None = None,
    weights: str | None = None,
    threads: tuple[int, ...] = (),
    jobs: int = 0,
    on_event: OnVerifyEvent = ignore,
) -> VerifyResult:
    """Replay every bucket that this machine can run, and write the record.

    Args:
        path: The artifact.
        config, weights, threads, jobs, on_event: See `replay_all`.
    Raises:
        MismatchError: the artifact doesn't fit this machine.
        ConfigError: the model can't be built here.
    """
    began = time.perf_counter()
    artifact = open_artifact(path)
    found = replay_all(
        artifact,
        config=config,
        weights=weights,
        threads=threads,
        jobs=jobs,
        on_event=on_event,
    )
    record = write_verification(artifact, found)
    rows = tuple(row for one in found.values() for row in one.buckets)
    return VerifyResult(rows, record, artifact.digest, time.perf_counter() - began)


def replay_all(
    artifact: Artifact,
    *,
    config: Config | None = None,
    weights: str | None = None,
    threads: tuple[int, ...] = (),
    jobs: int = 0,
    on_event: OnVerifyEvent = ignore,
) -> dict[str, TargetVerified]:
    """Replay every bucket that this machine can run.

    Args:
        config: The configuration it was built from; by default the copy in its
            reports, with relative paths taken from the current directory.
        weights: As in ``[verify] weights``; None = what the configuration says.
        threads: Thread counts; 1, N and 4N by default, N being this machine's CPUs.
        jobs: Replays at once; 0 = half the CPUs.
    Returns:
        Target → what its replays found.
    Raises:
        MismatchError: the artifact doesn't fit this machine.
        ConfigError: the model can't be built here.
        NeedsDeviceError: there is nothing to replay here.
    """
    refuse(f"artifact {artifact.root} can't be verified here", check(artifact))
    here = _targets_here(artifact)
    cpus = os.cpu_count() or 1
    rows: dict[str, list[BucketVerified]] = {}
    with tempfile.TemporaryDirectory(prefix="compilekit-verify-") as folder:
        base: dict[str, Any] = {
            "artifact": str(artifact.root),
            "work_dir": str(Path(folder) / "work"),
            **_configuration(artifact, config, weights, Path(folder)),
        }
        work = [
            _Work(target, _REPLAYS[route], name, bucket)
            for target, kind in here.items()
            for route in artifact.manifest.routes
            # A start takes the caches of the best target, and no others.
            if route == "program" or target == choose_target(artifact, kind)
            for name, entry in artifact.manifest.entries.items()
            for bucket in entry.buckets
        ]
        for target, kind in here.items():
            # On a GPU the number of CPU threads changes nothing, and two models at once
            # might not fit.
            on_gpu = kind == "cuda"
            counts = threads or ((1,) if on_gpu else tuple(sorted({1, cpus, 4 * cpus})))
            at_once = 1 if on_gpu else jobs or max(1, cpus // 2)
            spec = {**base, "threads": counts, "device": kind, "target": target}

            def replay(
                item: tuple[int, _Work], spec: dict[str, Any] = spec
            ) -> list[BucketVerified]:
                return _replay(spec, *item, len(work), on_event)

            mine = [item for item in enumerate(work, 1) if item[1].target == target]
            with ThreadPoolExecutor(max_workers=at_once) as pool:
                rows[target] = [row for done in pool.map(replay, mine) for row in done]
    if not any(rows.values()):
        raise NeedsDeviceError(f"artifact {artifact.root} has nothing to verify here")
    return {
        target: TargetVerified(describe_machine(kind), tuple(rows[target]))
        for target, kind in here.items()
    }


class _Work(NamedTuple):
    """One bucket to replay, and the module that does it."""

    target: str
    module: str
    entry: str
    bucket: Bucket


def _targets_here(artifact: Artifact) -> dict[str, str]:
    """Target → device type, of all that are replayed here: CPU levels, the GPU's own.

    Raises:
        MismatchError: none runs here.
    """
    kinds = {one["kind"]: None for one in artifact.manifest.targets.values()}
    here: dict[str, str] = {}
    for kind in kinds:
        try:
            fitting = fitting_targets(artifact, kind)
        except MismatchError:
            if len(kinds) == 1:
                raise
            continue
        here |= dict.fromkeys(fitting if kind == "cpu" else fitting[:1], kind)
    return here


def _configuration(
    artifact: Artifact, config: Config | None, weights: str | None, folder: Path
) -> dict[str, Any]:
    """Where the replay finds its configuration, and what paths in it start from."""
    if config is not None:
        place, base = config.path, config.path.parent
    elif CONFIG_REPORT in artifact.reports:
        place, base = folder / "compilekit.toml", Path.cwd()
        place.write_bytes(artifact.read(CONFIG_REPORT))
    else:
        raise ConfigError(
            f"artifact {artifact.root} carries no copy of its configuration",
            hint="Pass it: compilekit verify ARTIFACT --config CONFIG.",
        )
    if weights is None:
        from compilekit import config as configuration

        weights = configuration.load(place).verify.weights
    return {"config": str(place), "base": str(base), "weights": weights}


def _replay(
    spec: dict[str, Any],
    index: int,
    work: _Work,
    count: int,
    on_event: OnVerifyEvent,
) -> list[BucketVerified]:
    began = time.perf_counter()
    target, module, entry, bucket = work
    about: dict[str, Any] = {
        "target": target,
        "entry": entry,
        "bucket": bucket.name,
        "index": index,
        "count": count,
    }
    on_event(VerifyEvent("started", **about))
    job = {**spec, "entry": entry, "bucket": bucket.name, "axes": dict(bucket.axes)}
    done = subprocess.run(
        [sys.executable, "-m", f"compilekit.compiler.{module}"],
        input=json.dumps(job).encode(),
        capture_output=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    lines = done.stdout.decode().splitlines()
    rows = [
        BucketVerified(
            entry=entry,
            bucket=bucket.name,
            target=target,
            **{**row, "max_abs_error": float(row["max_abs_error"])},
        )
        for row in map(json.loads, lines)
        if "event" not in row
    ]
    if done.returncode != 0 or not rows:
        message = _why_it_ended(lines, done)
        rows.append(
            BucketVerified(
                entry, bucket.name, 0, float("inf"), 0, 0, 0, 0, False, message, target
            )
        )
        on_event(VerifyEvent("failed", seconds=seconds, message=message, **about))
        return rows
    for row in rows:
        on_event(
            VerifyEvent(
                "finished", threads=row.threads, seconds=seconds, result=row, **about
            )
        )
    return rows


def _why_it_ended(lines: list[str], done: subprocess.CompletedProcess[bytes]) -> str:
    """Why a replay has no result.

    Raises:
        ConfigError, ResourceError, NeedsDeviceError: it couldn't begin, which says
            nothing of the bucket.
    """
    said = from_line(lines[-1]) if lines and "event" in json.loads(lines[-1]) else None
    if isinstance(said, ProcessError):
        error = error_of(said)
        if isinstance(error, (ConfigError, ResourceError, NeedsDeviceError)):
            raise error
        return error.message
    words = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
    return f"the replay ended with {death(done.returncode)}: {words[-1]}"
