"""The cache route of a build: run every bucket, keep all that torch's caches hold.

Lifecycle, for one target::

    caches     a process calls every bucket; Inductor, AOTAutograd and Triton fill
               their caches, each C++ kernel is kept by what it was compiled from
    harvest    the caches' files are taken before anything else touches them
    packages   a second process calls every bucket again, with everything cached, and
               records Dynamo's packages
    describe   cache.json and its blobs

For a GPU that isn't here the first process compiles on fake tensors under emulation
and runs nothing; there is no second one, so a start traces again. Nothing is kept
unless every bucket succeeded in each process.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from compilekit import config as configuration
from compilekit import plan, targets
from compilekit.artifact import canonical
from compilekit.artifact.cache import (
    Cache,
    CacheKey,
    StoredPackage,
    blob_path,
    cache_path,
    cache_to_json,
)
from compilekit.compiler import cache_harvest, workers
from compilekit.compiler.child import error_of
from compilekit.compiler.device import cuda_environment
from compilekit.errors import (
    CompilekitError,
    ConfigError,
    HarvestError,
    NeedsDeviceError,
    WorkerCrashedError,
)
from compilekit.events import BuildEvent, OnBuildEvent, ProcessError, bucket_result
from compilekit.results import BucketResult

_VARIANTS = 8


class Harvest(NamedTuple):
    """One target's caches.

    Attributes:
        results: One per bucket.
        files: Path below the artifact → bytes; empty if a bucket failed.
        model: What the worker said about the model; None for warm-ups.
        report: For ``reports/<target>/compiled.json``: bucket → frames that Dynamo
            traced, graph breaks, cache keys that no bucket before it looked up.
    """

    results: tuple[BucketResult, ...]
    files: Mapping[str, bytes]
    model: Mapping[str, Any] | None
    report: bytes = b""


class _Place(NamedTuple):
    """Where a target's buckets are compiled: a device, or its emulation."""

    device: str
    emulated: bool = False


def _place(target: targets.Target, config: configuration.Config) -> _Place:
    """The device to compile a target's buckets on; they run there, unless emulated.

    Raises:
        NeedsDeviceError: it isn't here, and can't be done without.
        ConfigError: a CPU level that isn't this machine's.
    """
    if target.kind == "cuda":
        import torch

        wanted = (target.device["major"], target.device["minor"])
        if torch.cuda.is_available() and torch.cuda.get_device_capability() == wanted:
            return _Place("cuda:0")
        running = [one.name for one in config.entries.values() if one.warmup]
        if running:
            raise NeedsDeviceError(
                f"target {target.name}: the warm-up of {', '.join(running)} runs the"
                " model, and no such GPU is here",
                hint="Build there, or declare the entry's inputs instead of a warm-up.",
            )
        return _Place("cuda:0", emulated=True)
    native = targets.native_target().name
    if target.name != native:
        raise ConfigError(
            f'target {target.name}: routes = ["cache"] keeps what torch compiles for'
            f" the machine it runs on, which is {native}",
            hint='Set targets = ["native"], or use routes = ["program"].',
        )
    return _Place("cpu")


def build_caches(
    config: configuration.Config,
    jobs: list[tuple[int, plan.Job]],
    count: int,
    threads: int,
    scratch: Path,
    on_event: OnBuildEvent,
) -> Harvest:
    """Compile one target's buckets and take what the caches hold."""
    target = targets.load_target(jobs[0][1].target)
    place = _place(target, config)
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "tmp").mkdir(exist_ok=True)
    # Triton compiles in the process in which the GPU is emulated.
    environment = _environment(scratch, 1 if place.emulated else threads)
    if place.emulated:
        environment = cuda_environment(target, scratch, environment)
        # Part of Triton's keys, and set at no start.
        del environment["TRITON_DISABLE_LINE_INFO"]
    spec = {
        "config": str(config.path),
        "target": target.name,
        **place._asdict(),
        "jobs": [(i, j.entry, j.bucket.name, dict(j.bucket.axes)) for i, j in jobs],
        "count": count,
        "folder": str(scratch),
        "recompile_limit": max(_VARIANTS, 2 * len(jobs)),
    }
    first = {**spec, "phase": "caches"}
    results = _run(first, jobs, scratch, environment, on_event)
    if any(result.status == "failed" for result in results):
        return Harvest(results, {}, None)
    files = cache_harvest.inductor_files(scratch / "inductor")
    unused = frozenset(json.loads((scratch / "unused.json").read_bytes()))
    triton, relocated = cache_harvest.triton_files(scratch / "triton", unused)
    if not place.emulated:
        # Packages hold guards on the real tensors of a device.
        again = _run(
            {**spec, "phase": "packages"},
            jobs,
            scratch,
            environment,
            lambda event: (
                on_event(dataclasses.replace(event, kind="stage", stage="package"))
                if event.kind in ("finished", "failed")
                else None
            ),
        )
        if any(result.status == "failed" for result in again):
            return Harvest(again, {}, None)
    model = scratch / "model.json"
    return Harvest(
        results,
        _described(spec, scratch, {**files, **triton}, relocated),
        json.loads(model.read_bytes()) if os.path.exists(model) else None,
        (scratch / "compiled.json").read_bytes(),
    )


def _described(
    spec: Mapping[str, Any],
    scratch: Path,
    files: Mapping[str, bytes],
    relocated: tuple[str, ...],
) -> dict[str, bytes]:
    """Files of the artifact: cache.json, its blobs, the C++ kernels."""
    target = spec["target"]
    made: dict[str, bytes] = {}

    def blob(data: bytes) -> str:
        digest = canonical.sha256(data)
        made[blob_path(target, digest)] = data
        return digest

    kernels = {}
    for path in sorted((scratch / "kernels").glob("*.so")):
        data = path.read_bytes()
        kernels[path.stem] = canonical.sha256(data)
        made[f"kernels/{kernels[path.stem]}.so"] = data
    keys = json.loads((scratch / "keys.json").read_bytes())
    if not keys:
        raise HarvestError(
            "nothing was compiled: no bucket looked up a graph in torch's caches",
            hint="Does the warm-up call the function that torch.compile returned?",
        )
    recorded = scratch / "packages.pickle"
    packages = pickle.loads(recorded.read_bytes()) if os.path.exists(recorded) else ()
    cache = Cache(
        target=target,
        files={name: blob(data) for name, data in sorted(files.items())},
        relocated=relocated,
        kernels=kernels,
        keys=tuple(
            CacheKey(
                key["kind"],
                key["key"],
                key["bucket"],
                blob(canonical.encode(key["components"])),
            )
            for key in sorted(keys, key=lambda key: (key["kind"], key["key"]))
        ),
        packages=tuple(
            StoredPackage(
                one["function"],
                blob(one["content"]),
                blob(canonical.encode(_facts(one))),
            )
            for one in packages
        ),
        traced=json.loads((scratch / "traced.json").read_bytes()),
        factors=json.loads((scratch / "factors.json").read_bytes()),
        recompile_limit=spec["recompile_limit"],
        layout=json.loads((scratch / "layout.json").read_bytes()),
    )
    made[cache_path(target)] = canonical.encode(cache_to_json(cache))
    return made


def _facts(package: Mapping[str, Any]) -> dict[str, Any]:
    """A package's own part as JSON values."""
    return {
        "schema": 1,
        "function": package["function"],
        "settings": package["settings"],
        "sources": package["sources"],
        "codes": package["codes"],
        "operators": package["operators"],
        "extra_guards": {
            digest: [list(pair) for pair in pairs]
            for digest, pairs in package["extra_guards"].items()
        },
        "globals": {
            module: {n: base64.b64encode(data).decode() for n, data in values.items()}
            for module, values in package["globals"].items()
        },
    }


def _run(
    spec: Mapping[str, Any],
    jobs: list[tuple[int, plan.Job]],
    scratch: Path,
    environment: Mapping[str, str],
    on_event: Callable[[BuildEvent], None],
) -> tuple[BucketResult, ...]:
    """One worker process from start to end; its results in the order of the jobs."""
    found: dict[int, BucketResult] = {}
    log = scratch / f"{spec['phase']}.log"
    module = "compilekit.compiler.cache_worker"
    ended: CompilekitError | None = None
    with workers.at_work(module, spec, environment, log) as worker:
        for event in workers.events(worker):
            if isinstance(event, ProcessError):
                ended = error_of(event)
                continue
            if event.kind in ("finished", "failed"):
                event = dataclasses.replace(event, log=str(log))
                found[event.index] = bucket_result(event)
            on_event(event)
        code = worker.wait()
    error = ended or WorkerCrashedError(f"the worker ended with {workers.death(code)}")
    for index, job in jobs:
        if index not in found or (code != 0 and found[index].status != "failed"):
            found[index] = BucketResult(
                job.target,
                job.entry,
                job.bucket.name,
                "failed",
                error=str(error),
                error_type=type(error).__name__,
                log=str(log),
            )
    return tuple(found[index] for index, _ in jobs)


def _environment(scratch: Path, threads: int) -> dict[str, str]:
    """The worker's environment: caches in the scratch folder, and nothing inherited
    that would switch one off or send it elsewhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHINDUCTOR_CACHE", "TRITON_CACHE", "COMPILEKIT_"))
    }
    return {
        **kept,
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "TMPDIR": str(scratch / "tmp"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONHASHSEED": "0",
    }
