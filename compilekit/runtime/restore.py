"""`restore`: give torch.compile in this process the caches of an artifact.

Lifecycle of one start::

    open      every byte verified against the manifest
    check     machine and versions, all mismatches at once
    stage     the caches are copied to a private directory, once for many processes
    bind      torch is pointed at it, its packages and kernels are served from it
    watch     every step that complete caches spare is noted, with its reason

docs/cache-route.md describes requirements, reasons and environment variables.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from compilekit._torch.runtime import compiled_frames
from compilekit.artifact import Artifact
from compilekit.artifact.cache import Cache, blob_path, cache_from_json, cache_path
from compilekit.errors import ArtifactError, AttachError, Mismatch
from compilekit.runtime.attach import carry_exit_codes
from compilekit.runtime.cache_check import cache_mismatches
from compilekit.runtime.cache_receipt import CacheReceipt
from compilekit.runtime.check import check, choose_target, refuse
from compilekit.runtime.garbage import uncollected
from compilekit.runtime.reasons import Stored, explain_miss, explain_settings
from compilekit.runtime.receipt import Route
from compilekit.runtime.requirements import (
    check_requirements,
    open_required,
    requirements,
)
from compilekit.runtime.stage import bind, stage, work_directory

# Programs that compile; torch's own worker processes are Python's.
_COMPILERS = ("g++", "gcc", "c++", "cc", "cpp", "clang", "clang++", "as", "ld", "ptxas")
_COMPILE_WORKER = "compile_worker"
_SPAWNS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")

# The one restore of this process: torch has one cache directory.
_active: list[CacheReceipt] = []


def restore(
    artifact: Artifact | str | os.PathLike[str] | None = None,
    *,
    work_dir: str | os.PathLike[str] | None = None,
    require: str | Iterable[str] | None = None,
) -> CacheReceipt:
    """Make ``torch.compile`` in this process start from an artifact's caches.

    Call it before the first ``torch.compile``. Code that the caches don't cover is
    compiled as usual, and the receipt says why.

    Args:
        artifact: Its directory (or an open one); ``COMPILEKIT_ARTIFACT`` by default.
        work_dir: Private directory that the caches are copied to;
            ``COMPILEKIT_WORK_DIR``, then one below the temporary directory by default.
        require: ``"cache"`` (whatever would be compiled or traced anew is an error),
            ``"verified"``, or both; ``COMPILEKIT_REQUIRE`` by default.
    Returns:
        The receipt; ``receipt.finish()`` adds the end state once everything ran, and
        ``receipt.detach()`` gives torch back as it was.
    Raises:
        ArtifactError: the artifact is damaged, or holds no caches.
        MismatchError: the machine doesn't fit; all mismatches at once.
        PolicyError: a requirement isn't met.
        AttachError: torch has compiled already, or uses another cache directory.
        ResourceError: the caches can't be copied.

    Example:
        >>> receipt = compilekit.restore("artifact", require="cache")
        >>> model = torch.compile(model, dynamic=False)
        >>> model(ids)
        >>> receipt.finish()
    """
    began = time.perf_counter()
    if artifact is None and "COMPILEKIT_ARTIFACT" in os.environ:
        carry_exit_codes()
    required = requirements(require)
    opened = open_required(artifact)
    if _active and _active[0].artifact == opened.digest:
        return _active[0]
    _refuse_bound(opened)
    milliseconds = {"open": _lap(began)}
    began = time.perf_counter()
    target, cache = read_cache(opened)
    found = (*check(opened, libraries=False), *cache_mismatches(cache))
    warnings = refuse(f"artifact {opened.root} doesn't fit this machine", found)
    check_requirements(required, opened, target)
    milliseconds["check"] = _lap(began)
    began = time.perf_counter()
    place, _ = stage(opened, cache, work_directory(work_dir))
    milliseconds["stage"] = _lap(began)
    patches = contextlib.ExitStack()
    receipt = CacheReceipt(
        artifact=opened.digest,
        path=opened.root,
        target=target,
        routes=_routes(opened, cache),
        milliseconds=milliseconds,
        warnings=warnings,
        serialised=(),
        require=required,
        undo=patches.close,
        staged=str(place),
    )
    with contextlib.ExitStack() as failing:
        failing.enter_context(patches)
        bind(patches, place)
        with uncollected():
            _serve(patches, opened, cache, place, receipt)
        receipt.write()
        failing.pop_all()
    _active.append(receipt)
    patches.callback(_active.clear)
    return receipt


def mismatches_here(
    artifact: Artifact, *, needed: bool = False
) -> tuple[Mismatch, ...]:
    """How an artifact's caches don't fit this machine.

    Args:
        artifact: One that fits otherwise, and holds caches.
        needed: They were required. If not, and if there are programs too, a cache that
            doesn't fit forbids nothing.
    """
    found = cache_mismatches(read_cache(artifact)[1])
    if needed or "program" not in artifact.manifest.routes:
        return tuple(found)
    return tuple(mismatch._replace(verdict="warn") for mismatch in found)


def stage_ahead(artifact: Artifact) -> Path:
    """Restore the caches before the process that uses them; `restore` finds them.

    Returns:
        The directory.
    Raises:
        ResourceError: they can't be copied.
    """
    return stage(artifact, read_cache(artifact)[1], work_directory(None))[0]


def _lap(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


def read_cache(artifact: Artifact) -> tuple[str, Cache]:
    """The target that fits this machine, and its caches.

    Raises:
        ArtifactError: the artifact holds none.
        MismatchError: no target fits.
    """
    if "cache" not in artifact.manifest.routes:
        raise ArtifactError(
            f"artifact {artifact.root} holds no caches: it was built with routes ="
            f" {list(artifact.manifest.routes)}",
            hint='Build it with routes = ["cache"], or use compilekit.attach.',
        )
    kinds = {item["kind"] for item in artifact.manifest.targets.values()}
    on_gpu = "cuda" in kinds and torch.cuda.is_available()
    target = choose_target(artifact, "cuda" if on_gpu else "cpu")
    path = cache_path(target)
    if path not in artifact.manifest.files:
        raise ArtifactError(f"artifact {artifact.root} has no {path}")
    files = artifact.manifest.files
    return target, cache_from_json(artifact.read(path), target, files)


def _refuse_bound(artifact: Artifact) -> None:
    """Refuse a process whose torch already compiled, or was given another directory."""
    bound = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    hint = "Call compilekit.restore() before the first torch.compile, in a new process."
    if _active:
        raise AttachError(
            f"this process has restored artifact {_active[0].artifact[:12]} already;"
            f" torch has one cache directory, so {artifact.digest[:12]} can't be added",
            hint="Build both into one artifact, or use a process for each.",
        )
    if compiled_frames():
        raise AttachError(
            f"torch has compiled {compiled_frames()} frames in this process already,"
            f" with cache directory {bound or '(its default)'}",
            hint=hint,
        )
    if not bound:
        return
    from compilekit._torch.caches import settings

    with contextlib.ExitStack() as patches:
        settings.name_user(patches)
        from compilekit._torch.caches.factors import default_directory

        default = default_directory()
    if bound != default:
        raise AttachError(
            f"TORCHINDUCTOR_CACHE_DIR is {bound}: torch is bound to a cache directory"
            " that isn't this artifact's",
            hint="Unset it; compilekit.restore sets it, below work_dir.",
        )


def _routes(artifact: Artifact, cache: Cache) -> tuple[Route, ...]:
    kernels = len(set(cache.kernels.values()))
    return tuple(
        Route(name, bucket.name, "cache", kernels)
        for name, entry in artifact.manifest.entries.items()
        for bucket in entry.buckets
    )


def _serve(
    patches: contextlib.ExitStack,
    artifact: Artifact,
    cache: Cache,
    place: Path,
    receipt: CacheReceipt,
) -> None:
    """Install everything into this process's torch, and watch it."""
    began = time.perf_counter()
    from compilekit._torch.caches import settings

    settings.name_user(patches)
    from compilekit._torch.caches import (
        events,
        kernels,
        keys,
        package_install,
        packages,
    )

    receipt.milliseconds["torch"] = _lap(began)
    began = time.perf_counter()
    settings.compile_all_buckets_once(patches, cache.recompile_limit)
    settings.pin_options(patches, cache.factors["cache.options"])
    let_workers_start = settings.compile_in_process(patches)
    # Caches without C++ kernels need no compiler, whichever is set here.
    if "CXX" not in os.environ or not cache.kernels:
        settings.pin_compiler(patches, cache.factors["cache.compiler"])
    served = {
        key: place / "kernels" / f"{digest}.so" for key, digest in cache.kernels.items()
    }
    kernels.serve(
        patches,
        served,
        lambda key: receipt.note_miss(
            "kernel",
            f"a C++ kernel that isn't in the artifact is compiled ({key[:16]})",
        ),
    )
    known = {(key.kind, key.key) for key in cache.keys}

    def unknown(kind: str, key: str) -> bool:
        return (kind, key) not in known

    def on_missed(key: Any) -> None:
        receipt.note_miss("key", _why_missed(artifact, cache, key))

    keys.watch(patches, unknown, on_missed)
    if cache.factors["cache.gpu"]:
        from compilekit._torch.caches import triton_configs, triton_keys

        triton_configs.serve(patches)
        triton_keys.assume_assembler(patches, cache.factors["cache.assembler"])
        folders = {name.split("/")[1] for name in cache.files if name[:7] == "triton/"}
        known |= {(triton_keys.KIND, folder) for folder in folders}
        triton_keys.watch(patches, unknown, on_missed)
    refused: dict[str, str] = {}
    find = _finder(artifact, cache, receipt, refused)
    installed = package_install.install_with(patches, find, receipt.milliseconds)

    def on_frame(code: Any, frame_locals: Mapping[str, Any]) -> None:
        name = packages.code_id(code)
        if name in cache.traced:
            receipt.traced.append(name)
            return
        variants = installed.get(code)
        if variants:
            reasons = package_install.why_not(variants, frame_locals)
            # Guards on torch's state say what changed, and not from what to what.
            others = [
                f"; {one.factor} was {one.artifact}, is {one.here}"
                for one in cache_mismatches(cache)
            ]
            found = " | ".join(dict.fromkeys(reasons))
            why = f"no stored variant fits: {found}{''.join(others)}"
        else:
            why = "; ".join(refused.values()) or (
                "no package holds it (was torch.compile called before restore?)"
            )
        receipt.note_miss("frame", f"frame {name} is traced anew: {why}")

    def on_event(kind: str, detail: str) -> None:
        receipt.note_miss(kind, detail)
        if kind == "compile":
            let_workers_start()

    events.watch(patches, on_frame, on_event, receipt.hold)
    _watch_processes(patches, receipt)
    receipt.milliseconds["bind"] = _lap(began)


def _finder(
    artifact: Artifact,
    cache: Cache,
    receipt: CacheReceipt,
    refused: dict[str, str],
) -> Any:
    """What torch.compile asks for a function's package.

    Args:
        refused: Filled with function → why its package wasn't installed.
    """
    from compilekit._torch.caches import package_install, packages

    stored = {package.function: package for package in cache.packages}

    def find(name: str, set_to: Mapping[str, str], function: Any) -> Any:
        if name not in stored:
            return None
        target = cache.target
        facts = artifact.json(blob_path(target, stored[name].facts))
        differing = [
            *explain_settings(facts["settings"], set_to),
            *package_install.changed_operators(facts["operators"]),
            *package_install.changed_sources(facts["sources"]),
            *_other_build(cache),
        ]
        if differing:
            refused[name] = f"package of {name}: {'; '.join(differing)}"
            return None
        receipt.packages.append(name)
        return packages.Package(
            function=name,
            settings=facts["settings"],
            content=artifact.read(blob_path(target, stored[name].content)),
            extra_guards=facts["extra_guards"],
            sources=facts["sources"],
            codes=facts["codes"],
            operators=facts["operators"],
            globals={
                module: {n: base64.b64decode(data) for n, data in values.items()}
                for module, values in facts["globals"].items()
            },
        )

    return find


def _other_build(cache: Cache) -> list[str]:
    """Versions that torch's packages insist on."""
    return [
        f"{item.factor} was {item.artifact}, is {item.here}"
        for item in cache_mismatches(cache)
        if item.factor in ("cache.torch", "cache.python")
    ]


def _why_missed(artifact: Artifact, cache: Cache, key: Any) -> str:
    stored = [
        Stored(
            one.key,
            one.bucket,
            lambda one=one: artifact.json(  # type: ignore[misc]
                blob_path(cache.target, one.components)
            ),
        )
        for one in cache.keys
        if one.kind == key.kind
    ]
    return explain_miss(key.kind, key.components, stored)


def _watch_processes(patches: contextlib.ExitStack, receipt: CacheReceipt) -> None:
    """Note every compiler process from now on."""
    watching = threading.Event()
    watching.set()
    # Python can't take an audit hook out again.
    patches.callback(watching.clear)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _SPAWNS or not arguments or not watching.is_set():
            return
        words = [arguments[0], *_words(arguments)]
        program = os.path.basename(os.fsdecode(words[0] or ""))
        if program in _COMPILERS or any(_COMPILE_WORKER in str(w) for w in words):
            receipt.note_miss("process", f"a compiler process is started: {program}")

    sys.addaudithook(hook)


def _words(arguments: tuple[Any, ...]) -> list[Any]:
    rest = arguments[1] if len(arguments) > 1 else ()
    return list(rest) if isinstance(rest, (list, tuple)) else []
