"""The process that compiles a target's buckets, one after the other.

It reads one JSON document from standard input, writes events as JSON lines to what was
standard output, and leaves its results in a scratch folder:

    kernels/<digest>.so  sources/<digest>.cpp  constants/<digest>.safetensors
    buckets/<entry>/<bucket>/{program,entry,attention}.json, call.py, call.pyc
    logs/<entry>-<bucket>.log     everything that was printed meanwhile

Kernels compile in threads (the C++ compiler is a process of its own) while the next
bucket is captured. A bucket that fails is reported and the next one starts clean.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compilekit import config as configuration
from compilekit import plan
from compilekit.artifact import canonical
from compilekit.artifact.program import KernelRef, Program, to_json
from compilekit.compiler import child
from compilekit.compiler.attention import shown
from compilekit.compiler.attention import to_json as attention_json
from compilekit.errors import CompilekitError, HarvestError, ResourceError
from compilekit.events import BuildEvent, to_line
from compilekit.targets import Target, load_target

# What a call on a CPU does besides its program; compiled with the kernels.
NATIVE = Path(__file__).parents[1] / "runtime" / "calls.cpp"


@dataclass(frozen=True)
class Pending:
    """A bucket whose kernels are being compiled.

    Attributes:
        compiled: The `CompiledBucket`.
        kernels: Name in the host code → (source digest, shared object to come).
        native: The shared object of `Entry.native` to come; None = the target has no
            C++.
        tuned_on: The target that the tuning file's configs were measured on.
    """

    job: plan.Job
    index: int
    began: float
    compiled: Any
    kernels: dict[str, tuple[str, Future[bytes]]]
    native: Future[bytes] | None
    tuned_on: str


def main() -> int:
    """Compile the jobs named on standard input; 0 even if some of them failed."""
    return child.run(_work)


def _work(spec: dict[str, Any], say: child.Say) -> None:
    _end_with(spec["parent"])
    scratch = Path(spec["scratch"])
    config = configuration.load(Path(spec["config"]))
    target = load_target(spec["target"])
    jobs = [
        (index, plan.Job(target.name, entry, plan.Bucket(bucket, axes)))
        for index, entry, bucket, axes in spec["jobs"]
    ]
    count, threads = spec["count"], spec["threads"]
    _compile_all(
        config, target, jobs, count, threads, scratch, lambda event: say(to_line(event))
    )


def _end_with(parent: int) -> None:
    """Have the kernel end this process when the build is killed.

    Source: prctl(2), PR_SET_PDEATHSIG = 1.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the build was killed")


def _log_to(path: Path) -> None:
    """Send this process's output (and its children's) to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _compile_all(
    config: configuration.Config,
    target: Target,
    jobs: list[tuple[int, plan.Job]],
    count: int,
    threads: int,
    scratch: Path,
    emit: Callable[[BuildEvent], None],
) -> None:
    from compilekit._torch import emulation
    from compilekit.compiler import kernels as cpp
    from compilekit.compiler.compile import CompiledBucket, compile_bucket
    from compilekit.compiler.cuts import check_cuts
    from compilekit.compiler.freezing import read_weights
    from compilekit.compiler.models import build_fake
    from compilekit.compiler.traced_call import fake_device
    from compilekit.compiler.tuning import read_tuning

    pool = ThreadPoolExecutor(max_workers=threads)
    tuning = read_tuning(config)
    if target.kind == "cuda":
        if emulation.is_emulated(os.environ):
            emulation.install(target)
        else:
            emulation.install_native(target)
        versions = emulation.cuda_versions(target)
        _write_once(scratch / "factors.json", canonical.encode(versions))
        toolchain, header = None, None
    else:
        toolchain = cpp.find_toolchain(target, scratch / "cpp")
        header = pool.submit(cpp.prepare, toolchain)
    known: dict[str, Future[bytes]] = {}
    pending: list[Pending] = []
    programs: dict[str, list[Program]] = {}
    model, weights = None, None

    def compile_source(code: str, label: str) -> bytes:
        if toolchain is None or header is None:
            raise HarvestError(
                f"the program has C++ code ({label}); {target.name} has no ISA level",
                hint="Keep CPU tensors out of the compiled method.",
            )
        return cpp.compile_kernel(toolchain, header.result(), code, label)

    native = None
    if toolchain is not None:
        native = pool.submit(compile_source, NATIVE.read_text("utf-8"), "native")
    for index, job in jobs:
        began = time.perf_counter()
        about = BuildEvent(
            "started", job.target, job.entry, job.bucket.name, index=index, count=count
        )
        _log_to(scratch / "logs" / f"{job.entry}-{job.bucket.name}.log")
        emit(about)
        try:
            if model is None:
                emit(replace(about, stage="model"))
                model = build_fake(config, fake_device(target))
                weights = weights or read_weights(config, target, fake_device(target))
                describe_model(model, scratch / "model.json")
                seconds = time.perf_counter() - began
                emit(replace(about, kind="stage", stage="model", seconds=seconds))

            def on_stage(stage: str, seconds: float, about: BuildEvent = about) -> None:
                emit(replace(about, kind="stage", stage=stage, seconds=seconds))

            # The heap only grows while a bucket compiles; collecting takes 5 % of it.
            gc.disable()
            entry = config.entries[job.entry]
            compiled: CompiledBucket = compile_bucket(
                model, config, entry, job.bucket, target, on_stage, tuning, weights
            )
            earlier = programs.setdefault(job.entry, [])
            if not entry.role:
                check_cuts(model, config, entry, compiled.program, earlier)
            earlier.append(compiled.program)
        except Exception as exc:  # noqa: BLE001 - reported, then the next bucket runs
            emit(_failed(about, exc, began))
            model = None
            continue
        finally:
            gc.enable()
        futures = {}
        for name, source in compiled.kernels.items():
            digest = canonical.sha256(source.code.encode())
            if digest not in known:
                known[digest] = pool.submit(compile_source, source.code, digest[:16])
            futures[name] = (digest, known[digest])
        pending.append(
            Pending(job, index, began, compiled, futures, native, tuning.target)
        )
        pending = [
            item for item in pending if not _finished(item, scratch, count, emit, False)
        ]
    for item in pending:
        _finished(item, scratch, count, emit, True)
    pool.shutdown()


def describe_model(model: Any, path: Path) -> None:
    """Class, parameter dtype and configuration values, for the manifest."""
    from compilekit.runtime.result import class_name

    dtypes = [parameter.dtype for parameter in model.parameters()]
    as_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    values: dict[str, Any] = as_dict()
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    text = json.dumps(
        {
            "class": class_name(type(model)),
            "dtype": str(dtypes[0]).removeprefix("torch.") if dtypes else "",
            "config": values,
        },
        default=str,
    )
    _write_once(path, text.encode())


def _failed(about: BuildEvent, exc: Exception, began: float) -> BuildEvent:
    """Report a failed bucket; the traceback stays in its log."""
    traceback.print_exception(exc)
    sys.stderr.flush()
    lack = _lack_of_space(exc)
    if lack is not None and not isinstance(exc, CompilekitError):
        exc = ResourceError(
            f"the build's temporary folder can't take more: {lack.strerror}"
            f" ({lack.filename or 'a file'})",
            hint="Free some space, or set TMPDIR to a place that has it.",
        )
    message = str(exc)
    if not isinstance(exc, CompilekitError):
        message = (
            f"unexpected {type(exc).__name__}: {message}\n"
            "The bucket's log holds the traceback; please report it."
        )
    return replace(
        about,
        kind="failed",
        seconds=time.perf_counter() - began,
        message=message,
        log=f"{about.entry}-{about.bucket}.log",
        error_type=type(exc).__name__,
        exit_code=exc.exit_code if isinstance(exc, CompilekitError) else 3,
    )


def _lack_of_space(exc: BaseException | None) -> OSError | None:
    """The full disk behind an error, however often it was wrapped on the way."""
    while exc is not None:
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            return exc
        exc = exc.__cause__ or exc.__context__
    return None


def _finished(item: Pending, scratch: Path, count: int, emit: Any, wait: bool) -> bool:
    """Write a bucket whose kernels are all there; False if some aren't yet."""
    job = item.job
    about = BuildEvent(
        "progress",
        job.target,
        job.entry,
        job.bucket.name,
        stage="compile",
        index=item.index,
        count=count,
        total_kernels=len(item.kernels),
    )
    futures = [future for _, future in item.kernels.values()]
    done = sum(future.done() for future in futures)
    if done < len(futures) and not wait:
        emit(replace(about, kernels=done))
        return False
    try:
        references = {}
        began = time.perf_counter()
        for number, (name, (_, future)) in enumerate(item.kernels.items(), 1):
            code = item.compiled.kernels[name]
            types = {"argtypes": list(code.argtypes)}
            references[name] = _kernel(scratch, code.code, future.result(), types)
            emit(replace(about, kernels=number))
        emit(
            replace(
                about,
                kind="stage",
                kernels=len(futures),
                seconds=time.perf_counter() - began,
            )
        )
        for name, (kernel, grid) in item.compiled.triton.items():
            launch = (kernel.symbol, grid[0], kernel.num_warps)
            tuned = kernel.tuned or launch in item.compiled.tuned
            tuned_on = item.tuned_on if tuned else ""
            references[name] = _cubin(scratch, kernel, grid, tuned_on)
        size = _write(item, scratch, references)
    except Exception as exc:  # noqa: BLE001 - reported, then the next bucket runs
        emit(_failed(replace(about, stage=""), exc, item.began))
        return True
    emit(
        replace(
            about,
            kind="finished",
            stage="",
            kernels=len(references),
            seconds=time.perf_counter() - item.began,
            size_bytes=size,
            attention=shown(item.compiled.attention),
            warning=item.compiled.warning,
        )
    )
    return True


def _kernel(
    scratch: Path, code: str, library: bytes, launch: Mapping[str, Any]
) -> KernelRef:
    """Put a C++ kernel and its source into the scratch folder."""
    digest, source = canonical.sha256(library), canonical.sha256(code.encode())
    _write_once(scratch / "kernels" / f"{digest}.so", library)
    _write_once(scratch / "sources" / f"{source}.cpp", code.encode())
    return KernelRef(digest, source, launch)


def _cubin(
    scratch: Path, kernel: Any, grid: tuple[int, int, int], tuned_on: str
) -> KernelRef:
    """Put a Triton kernel and its source into the scratch folder."""
    digest, source = canonical.sha256(kernel.cubin), kernel.source.encode()
    _write_once(scratch / "kernels" / f"{digest}.cubin", kernel.cubin)
    _write_once(scratch / "sources" / f"{canonical.sha256(source)}.py", source)
    launch = {
        "arg_types": kernel.arg_types,
        "candidates": kernel.candidates,
        "config": kernel.config,
        "grid": list(grid),
        "num_warps": kernel.num_warps,
        "registers": kernel.registers,
        "scratch": kernel.scratch,
        "shared": kernel.shared,
        "symbol": kernel.symbol,
        "tuned": tuned_on,
    }
    return KernelRef(digest, canonical.sha256(source), launch)


def _write(item: Pending, scratch: Path, kernels: dict[str, KernelRef]) -> int:
    """Put a bucket's files into the scratch folder; their size with its kernels."""
    compiled = item.compiled
    for name, data in compiled.constants.items():
        _write_once(scratch / "constants" / name, data)
    program = compiled.program._replace(kernels=kernels)
    entry = compiled.entry
    if item.native is not None:
        library = item.native.result()
        native = _kernel(scratch, NATIVE.read_text("utf-8"), library, {})
        entry = entry._replace(native=native)
    files = {
        "program.json": canonical.encode(to_json(program)),
        "call.py": compiled.code.encode(),
        "call.pyc": compiled.bytecode,
        "attention.json": canonical.encode(attention_json(compiled.attention)),
        # Last: its presence says that the bucket is complete.
        "entry.json": canonical.encode(to_json(entry)),
    }
    folder = scratch / "buckets" / item.job.entry / item.job.bucket.name
    for name, data in files.items():
        _write_once(folder / name, data)
    digests = {kernel.digest for kernel in kernels.values()}
    used = [p for p in (scratch / "kernels").glob("*") if p.stem in digests]
    del files["attention.json"], files["entry.json"]
    return sum(map(len, files.values())) + sum(p.stat().st_size for p in used)


def _write_once(path: Path, data: bytes) -> None:
    """Write a file in one step: workers that share a scratch folder write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
