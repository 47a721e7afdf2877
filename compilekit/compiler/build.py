"""`build`: from a configuration to an artifact on disk.

Lifecycle:
    1. `plan.make_plan` lists the jobs (target × entry × bucket).
    2. Worker processes compile them (`compilekit.compiler.workers`); a bucket that
       kills its worker is reported and the rest gets a new one.
    3. `_gather` merges what the buckets say about their entries, and the artifact is
       written beside its place, only when every bucket is there.
    4. `replay_all` replays every bucket in fresh processes, where the target is here.
    5. The artifact goes to its place in one step, only if every replay equals eager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compilekit import config as configuration
from compilekit import errors, plan, targets
from compilekit.artifact import (
    Artifact,
    Manifest,
    ManifestEntry,
    Model,
    Serve,
    TargetVerified,
    canonical,
    write,
    write_verification,
)
from compilekit.artifact.compare import times_path
from compilekit.artifact.manifest import seal_manifest
from compilekit.artifact.program import entry_from_json, to_json
from compilekit.artifact.verification import CONFIG_REPORT
from compilekit.compiler import attest as attestation
from compilekit.compiler import workers
from compilekit.compiler.cache import Harvest, build_caches
from compilekit.errors import ConfigError
from compilekit.events import (
    BuildEvent,
    OnBuildEvent,
    ignore,
)
from compilekit.results import BucketResult, BucketStatus, BuildResult


def build(
    config: configuration.Config,
    out: Path,
    *,
    targets: tuple[str, ...] | None = None,
    jobs: int = 0,
    verify: bool = True,
    allow_untested_torch: bool = False,
    attest: str = "",
    on_event: OnBuildEvent = ignore,
) -> BuildResult:
    """Compile every bucket and write the artifact.

    Args:
        out: The artifact's directory; an artifact there is replaced in one step.
        targets: Instead of the configuration's.
        jobs: Kernels compiled at once; 0 = one per CPU.
        verify: Replay every bucket before the artifact goes to its place.
        attest: URI of who builds; provenance and a bill of materials are then among
            the artifact's reports. Empty = neither.
        on_event: Called with every step.
    Returns:
        What became of every bucket. If one failed, an artifact in this place stays.
    Raises:
        ConfigError: the configuration can't be built.
        MismatchError: this torch or Python isn't supported.
        ResourceError: a tool is missing, or the place can't be written.
    """
    began, began_at = time.perf_counter(), datetime.now(UTC)
    if targets:
        config = dataclasses.replace(
            config, build=dataclasses.replace(config.build, targets=targets)
        )
    _refuse_early(config, out, allow_untested_torch)
    if attest:
        attestation.require_libraries()
    planned = plan.make_plan(config)
    threads = jobs or config.build.jobs or os.cpu_count() or 1
    logs = Path(f"{out}.logs")
    with _scratch() as scratch:
        results: list[BucketResult] = []
        caches: dict[str, Harvest] = {}
        for target in dict.fromkeys(job.target for job in planned.jobs):
            numbered = [
                (index, job)
                for index, job in enumerate(planned.jobs, 1)
                if job.target == target
            ]
            folder = scratch / target
            made: list[BucketResult] = []
            if "program" in config.build.routes:
                made = workers.compile_jobs(
                    config, numbered, len(planned.jobs), threads, folder, logs, on_event
                )
            if "cache" in config.build.routes:
                caches[target] = build_caches(
                    config,
                    numbered,
                    len(planned.jobs),
                    threads,
                    scratch / f"{target}-caches",
                    on_event,
                )
                made = _both(made, caches[target].results, logs)
            results += made
        if any(result.status == "failed" for result in results):
            return _without_artifact(results, began)
        parts, files, reports = _gather(config, planned, scratch, caches)
        reports |= _times(results)
        if attest:
            data, sealed = seal_manifest(parts, files)
            toml, now = reports[CONFIG_REPORT], datetime.now(UTC)
            reports.update(
                attestation.attestations(sealed, data, toml, attest, began_at, now)
            )
        with write.staged_artifact(out, parts, files, reports) as staged:
            found: dict[str, TargetVerified] = {}
            if verify:
                found = _replays(staged, config, results, on_event)
                results = _judged(results, found)
            if any(result.status == "failed" for result in results):
                return _without_artifact(results, began)
            artifact = write.publish(staged, out)
        if found:
            write_verification(artifact, found)
    shutil.rmtree(logs, ignore_errors=True)
    return BuildResult(
        artifact=artifact.root,
        digest=artifact.digest,
        buckets=tuple(results),
        seconds=time.perf_counter() - began,
        size_bytes=artifact.size_bytes,
        kernels=sum(path.startswith("kernels/") for path in artifact.manifest.files),
        configs=_config_counts(artifact),
    )


def _without_artifact(results: list[BucketResult], began: float) -> BuildResult:
    """A build that leaves what was there before; the first failure is its exit code."""
    failed = next(result for result in results if result.status == "failed")
    kind = getattr(errors, failed.error_type, errors.CaptureError)
    return BuildResult(
        artifact=None,
        digest="",
        buckets=tuple(results),
        seconds=time.perf_counter() - began,
        exit_code=int(kind.exit_code),
    )


def _config_counts(artifact: Artifact) -> dict[str, int]:
    """How many GPU kernels have a tuned, an inherited and a default config."""
    origins: dict[str, str] = {}
    for (target, _, _), program in artifact.programs.items():
        for kernel in program.kernels.values():
            if "tuned" in kernel.launch:
                measured_on = kernel.launch["tuned"]
                own = "tuned" if measured_on == target else "inherited"
                origins[kernel.digest] = own if measured_on else "default"
    found = list(origins.values())
    return {name: found.count(name) for name in dict.fromkeys(found)}


def _refuse_early(
    config: configuration.Config, out: Path, allow_untested_torch: bool
) -> None:
    """Refuse what no worker could do, before any process starts."""
    write.check_place(out)
    from compilekit._torch.versions import installed_torch, refuse_unsupported

    installed = installed_torch().version
    refuse_unsupported(installed, allow_untested=allow_untested_torch)
    if config.compile.options:
        from compilekit._torch.options import inductor_options

        configuration.check_options(config, inductor_options())
    for weights in filter(None, (config.verify.weights, config.freeze.weights)):
        location = weights.removeprefix("hf:")
        found = configuration.model_directory(config.path.parent, location)
        if found is None and not config.model.source.startswith("hf:"):
            raise ConfigError(f"weights {weights!r}: there is no such file")
    if "program" not in config.build.routes:
        return
    if config.compile.options.get("max_autotune"):
        raise ConfigError(
            "[compile] options max_autotune measures kernels on the target's device"
            " while it compiles, which a build doesn't",
            hint="Leave it out; [autotune] from = a file of `compilekit tune` takes"
            " what won.",
        )


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A private folder that is gone afterwards, also after Ctrl-C.

    Raises:
        ResourceError: It can't be made, or what the build does in it fails.
    """
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="compilekit-build-"))
        yield folder
    except OSError as exc:
        raise errors.ResourceError(
            f"the build can't go on: {exc.strerror} ({exc.filename or 'a file'})",
            hint="Free some space, or set TMPDIR to a place that can be written.",
        ) from exc
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _both(
    programs: list[BucketResult], caches: tuple[BucketResult, ...], logs: Path
) -> list[BucketResult]:
    """One result per bucket from those of the two routes; a failure wins."""
    kept = [
        dataclasses.replace(
            one, log=str(workers.keep(Path(one.log), logs)) if one.log else ""
        )
        if one.status == "failed"
        else dataclasses.replace(one, log="")
        for one in caches
    ]
    if not programs:
        return kept
    return [
        dataclasses.replace(
            program
            if program.status == "failed" or cache.status != "failed"
            else cache,
            seconds=program.seconds + cache.seconds,
        )
        for program, cache in zip(programs, kept, strict=True)
    ]


def _gather(
    config: configuration.Config,
    planned: plan.Plan,
    scratch: Path,
    caches: Mapping[str, Harvest],
) -> tuple[Manifest, dict[str, bytes], dict[str, bytes]]:
    """Everything the workers left: manifest, files and reports of one artifact."""
    from compilekit.compiler import factors
    from compilekit.compiler.merge import merge_entries

    files: dict[str, bytes] = {}
    # The configuration may hold paths of this machine, so it's kept as a report.
    reports = {CONFIG_REPORT: config.path.read_bytes()}
    entries: dict[str, ManifestEntry] = {}
    described: dict[str, Mapping[str, Any]] = {}
    model: Model | None = None
    for target in dict.fromkeys(job.target for job in planned.jobs):
        folder = scratch / target
        if target in caches:
            files.update(caches[target].files)
            reports[f"reports/{target}/compiled.json"] = caches[target].report
            model = model or factors.model(config, caches[target].model)
        for kind in ("kernels", "sources", "constants"):
            for path in sorted((folder / kind).glob("[!.]*")):
                files[f"{kind}/{path.name}"] = path.read_bytes()
        attention: dict[str, dict[str, Any]] = {}
        for entry in config.entries.values():
            jobs = [
                j for j in planned.jobs if (j.target, j.entry) == (target, entry.name)
            ]
            if "program" not in config.build.routes:
                axes = tuple(jobs[0].bucket.axes) if jobs else ()
                buckets = tuple(job.bucket for job in jobs)
                entries[entry.name] = ManifestEntry(axes, buckets)
                continue
            parts = []
            for job in jobs:
                source = folder / "buckets" / entry.name / job.bucket.name
                place = f"programs/{target}/{entry.name}/{job.bucket.name}"
                for name in ("program.json", "call.py", "call.pyc"):
                    files[f"{place}/{name}"] = (source / name).read_bytes()
                attention.setdefault(entry.name, {})[job.bucket.name] = json.loads(
                    (source / "attention.json").read_bytes()
                )
                data = json.loads((source / "entry.json").read_bytes())
                parts.append(entry_from_json(data))
            merged = merge_entries(parts)
            files[f"programs/{target}/{entry.name}/entry.json"] = canonical.encode(
                to_json(merged)
            )
            entries[entry.name] = ManifestEntry(
                merged.axes, tuple(job.bucket for job in jobs)
            )
        reports[f"reports/{target}/attention.json"] = canonical.encode(attention)
        described[target] = {
            **_described(target),
            "factors": factors.target_factors(folder),
        }
        for path in sorted((folder / "logs").glob("*.log")):
            if path.stat().st_size:
                reports[f"reports/{target}/{path.name}"] = path.read_bytes()
        if "program" in config.build.routes:
            model = factors.model(
                config, json.loads((folder / "model.json").read_bytes())
            )
    if model is None:
        raise ConfigError("there is nothing to build: no target or no bucket")
    parts_of_manifest = Manifest(
        model=model,
        targets=described,
        entries=entries,
        factors=factors.common_factors(config),
        routes=tuple(r for r in configuration.ROUTES if r in config.build.routes),
        serve=Serve(*dataclasses.astuple(config.serve)),
    )
    return parts_of_manifest, files, reports


def _times(results: list[BucketResult]) -> dict[str, bytes]:
    """A report for each target: how long its buckets took."""
    return {
        times_path(target): canonical.encode(
            {
                f"{one.entry} {one.bucket}": round(one.seconds, 3)
                for one in results
                if one.target == target
            }
        )
        for target in {one.target for one in results}
    }


def _described(name: str) -> dict[str, Any]:
    """A target's description as the manifest holds it."""
    fields = targets.load_target(name)._asdict()
    del fields["name"], fields["marks"]
    return fields


def _replays(
    staged: Artifact,
    config: configuration.Config,
    results: list[BucketResult],
    on_event: OnBuildEvent,
) -> dict[str, TargetVerified]:
    """Target → what replays of its buckets found, if any target is this machine's."""
    flags = targets.cpu_flags()
    names = dict.fromkeys(result.target for result in results)
    if not any(_runs_here(targets.load_target(name), flags) for name in names):
        return {}
    from compilekit.compiler.verify import replay_all

    shown = _as_build_event(on_event, results)
    return replay_all(staged, config=config, on_event=shown)


def _judged(
    results: list[BucketResult], found: Mapping[str, TargetVerified]
) -> list[BucketResult]:
    """What became of the buckets, now that they were replayed."""
    judged = []
    for result in results:
        rows = found[result.target].buckets if result.target in found else ()
        name = result.entry, result.bucket
        replays = [row for row in rows if (row.entry, row.bucket) == name]
        wrong = next((replay for replay in replays if not replay.passed), None)
        if wrong is not None:
            result = dataclasses.replace(
                result, status="failed", error=wrong.message, error_type="VerifyError"
            )
        else:
            status: BucketStatus = "verified" if replays else "unverified"
            result = dataclasses.replace(result, status=status)
        judged.append(result)
    return judged


def _runs_here(target: targets.Target, flags: frozenset[str]) -> bool:
    """True if the target is this machine's own CPU level or GPU."""
    if target.kind == "cpu":
        return not targets.missing_features(target, flags)
    from compilekit._torch import emulation

    return emulation.is_here(target)


def _as_build_event(on_event: OnBuildEvent, buckets: list[BucketResult]) -> Any:
    """Show a verify inside a build: one `verify` stage per bucket."""
    order = {(b.target, b.entry, b.bucket): i for i, b in enumerate(buckets, 1)}

    def forward(event: Any) -> None:
        index = order.get((event.target, event.entry, event.bucket), 0)
        kind = {"started": "started", "finished": "stage"}.get(event.kind)
        if kind is None or not index:
            return
        on_event(
            BuildEvent(
                kind,  # type: ignore[arg-type]
                event.target,
                event.entry,
                event.bucket,
                stage="verify",
                index=index,
                count=len(buckets),
                seconds=event.seconds,
                message=event.message,
            )
        )

    return forward
