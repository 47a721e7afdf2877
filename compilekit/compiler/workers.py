"""Worker processes: start them, follow their events, survive their deaths.

A worker (`compilekit.compiler.worker`) compiles buckets one after the other and prints
an event per line. Whatever ends it costs the bucket that it was at, and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compilekit import config as configuration
from compilekit import errors, plan, targets
from compilekit.compiler.child import error_of
from compilekit.compiler.device import cuda_environment
from compilekit.events import (
    BuildEvent,
    OnBuildEvent,
    ProcessError,
    bucket_result,
    from_line,
)
from compilekit.results import BucketResult


def compile_jobs(
    config: configuration.Config,
    jobs: list[tuple[int, plan.Job]],
    count: int,
    threads: int,
    scratch: Path,
    logs: Path,
    on_event: OnBuildEvent,
) -> list[BucketResult]:
    """Run workers until every job has a result.

    A CPU target's time goes into the C++ compiler, which its worker runs in threads. A
    GPU target's goes into Python, so its buckets are shared out among workers.
    """
    target = targets.load_target(jobs[0][1].target)
    environment = worker_environment(scratch, target)
    workers = min(threads, len(jobs)) if target.kind == "cuda" else 1
    results: dict[int, BucketResult] = {}
    running: list[subprocess.Popen[str]] = []
    stopped = threading.Event()
    one_at_a_time = threading.Lock()

    def report(event: BuildEvent) -> None:
        with one_at_a_time:
            on_event(event)

    def run(number: int) -> None:
        # Large and small buckets take turns, so that no worker gets all the large ones.
        waiting = jobs[number::workers]
        while waiting and not stopped.is_set():
            _run_worker(
                config,
                waiting,
                count,
                max(1, threads // workers),
                scratch,
                environment,
                logs,
                results,
                running,
                report,
            )
            waiting = [item for item in waiting if item[0] not in results]

    if workers == 1:
        run(0)
    else:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            try:
                list(pool.map(run, range(workers)))
            finally:
                # Ctrl-C comes to this thread, and the others wait for their workers.
                stopped.set()
                for worker in running:
                    if worker.poll() is None:
                        _kill(worker)
    return [results[index] for index, _ in jobs]


def _run_worker(
    config: configuration.Config,
    waiting: list[tuple[int, plan.Job]],
    count: int,
    threads: int,
    scratch: Path,
    environment: Mapping[str, str],
    logs: Path,
    results: dict[int, BucketResult],
    running: list[subprocess.Popen[str]],
    on_event: OnBuildEvent,
) -> None:
    """Start one worker on the waiting jobs and read its events until it ends."""
    (scratch / "logs").mkdir(parents=True, exist_ok=True)
    spec = {
        "config": str(config.path),
        "target": waiting[0][1].target,
        "jobs": [(i, j.entry, j.bucket.name, dict(j.bucket.axes)) for i, j in waiting],
        "count": count,
        "threads": threads,
        "scratch": str(scratch),
        "parent": os.getpid(),
    }
    log = scratch / "logs" / "worker.log"
    started: list[tuple[int, plan.Job]] = []
    by_index = dict(waiting)
    module = "compilekit.compiler.worker"
    ended: errors.CompilekitError | None = None
    with at_work(module, spec, environment, log, running) as worker:
        for event in events(worker):
            if isinstance(event, ProcessError):
                ended = error_of(event)
                continue
            if event.kind == "started" and not event.stage:
                started.append((event.index, by_index[event.index]))
            if event.kind in ("finished", "failed"):
                event = _keep_log(event, scratch, logs)
                results[event.index] = bucket_result(event)
            on_event(event)
        code = worker.wait()
    if code == 0:
        return
    # The bucket it was at, and those whose kernels were still compiling, are not done;
    # only the one it was at is to blame.
    index, job = started[-1] if started else waiting[0]
    if index in results:
        raise errors.WorkerCrashedError(
            f"the build's worker process ended between buckets: {ended or death(code)}",
            hint=f"Its log is {keep(log, logs)}.",
        )
    event = _blame(job, index, count, _why_it_ended(ended, code, scratch))
    event = _keep_log(
        event if started else dataclasses.replace(event, log=log.name), scratch, logs
    )
    results[index] = bucket_result(event)
    on_event(event)
    if not started:
        # It never came to a bucket: the next worker wouldn't either.
        for other, job in waiting:
            if other not in results:
                results[other] = BucketResult(
                    job.target, job.entry, job.bucket.name, "skipped"
                )


def _why_it_ended(
    ended: errors.CompilekitError | None, code: int, scratch: Path
) -> errors.CompilekitError:
    """What ended a worker, as far as it said it."""
    if ended is not None:
        return ended
    if _is_full(scratch):
        # It couldn't write why it ended, either.
        return errors.ResourceError(f"{os.strerror(errno.ENOSPC)}: {scratch}")
    return errors.WorkerCrashedError(f"the worker ended with {death(code)}")


def _blame(
    job: plan.Job, index: int, count: int, error: errors.CompilekitError
) -> BuildEvent:
    """A bucket failed because its worker ended."""
    return BuildEvent(
        "failed",
        job.target,
        job.entry,
        job.bucket.name,
        index=index,
        count=count,
        message=str(error),
        log=f"{job.entry}-{job.bucket.name}.log",
        error_type=type(error).__name__,
        exit_code=error.exit_code,
    )


def _is_full(folder: Path) -> bool:
    """Whether a file system has no bytes or no inodes left; some count no inodes."""
    found = os.statvfs(folder)
    return found.f_bavail == 0 or (found.f_files > 0 and found.f_favail == 0)


@contextlib.contextmanager
def at_work(
    module: str,
    spec: Mapping[str, Any],
    environment: Mapping[str, str],
    log: Path,
    running: list[subprocess.Popen[str]] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A worker process that was given its work; it ends with the block.

    Args:
        module: What it runs, with `spec` as JSON on its standard input.
        log: Its standard error is added there.
        running: It is noted there as soon as it exists.
    """
    with log.open("ab") as stream:
        worker = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            env=environment,
            text=True,
            encoding="utf-8",
            # Ctrl-C goes to this process, which ends the worker and its compilers.
            start_new_session=True,
        )
        if running is not None:
            running.append(worker)
        try:
            if worker.stdin is None:
                raise errors.ResourceError("the worker process has no pipes")
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(spec))
                worker.stdin.close()
            yield worker
        finally:
            _end(worker)


def events(worker: subprocess.Popen[str]) -> Iterator[BuildEvent | ProcessError]:
    """What a worker says, until it ends."""
    yield from map(from_line, worker.stdout or ())


def worker_environment(scratch: Path, target: targets.Target) -> dict[str, str]:
    """The worker's environment: its caches lie in the scratch folder.

    For a GPU that isn't here, a stub CUDA runtime is preloaded.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TMPDIR": str(scratch),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONHASHSEED": "0",
    }
    if target.kind != "cuda":
        return environment
    return cuda_environment(target, scratch, environment)


def _end(worker: subprocess.Popen[str]) -> None:
    """End a worker and every compiler it started."""
    _kill(worker)
    worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def _kill(worker: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def death(code: int) -> str:
    """How a process ended, by its exit code or signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _keep_log(event: BuildEvent, scratch: Path, logs: Path) -> BuildEvent:
    """Copy a failed bucket's log beside the artifact, out of the scratch folder."""
    if not event.log:
        return event
    kept = keep(scratch / "logs" / event.log, logs)
    return dataclasses.replace(event, log=str(kept))


def keep(log: Path, logs: Path) -> Path:
    """Copy a log to where it outlives the scratch folder; its new place."""
    logs.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(log, logs / log.name))
