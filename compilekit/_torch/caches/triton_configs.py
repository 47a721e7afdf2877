"""One config for each stored Triton kernel: the one that it was launched with.

torch stores a graph before its kernels ran: with every candidate config, of which each
process then measures the fastest again. What a process measured lies beside generated
code whose path the stored kernel holds, so caches that moved don't find it.

Lifecycle, build::

    kept = record(patches)      before the first torch.compile
    …                           every bucket is called, each kernel has its winner
    settle(folder, kept)        stored graphs keep the winners

A second process that stores what it loaded, and a start, use `serve`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from torch._inductor.runtime import autotune_cache
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.runtime_utils import (
    triton_config_to_hashable,
    triton_hash_to_path_key,
)
from torch._inductor.triton_bundler import TritonBundler

Kept = Mapping[str, list[Any]]


def record(patches: contextlib.ExitStack) -> Kept:
    """From now on, keep every kernel that goes into a stored graph.

    Returns:
        Its key there → the process's own kernels, one per graph; filled as it grows.
    Source: torch/_inductor/triton_bundler.py, TritonBundler.put_static_autotuner, which
    is called before a kernel is loaded (2.11, 2.13).
    """
    kept: dict[str, list[Any]] = {}
    original: Any = TritonBundler.put_static_autotuner

    def put(cls: Any, key: str, kernel: Any) -> None:
        kept.setdefault(key, []).append(kernel)
        original(key, kernel)

    patches.enter_context(
        mock.patch.object(TritonBundler, "put_static_autotuner", classmethod(put))
    )
    return kept


def settle(folder: Path, kept: Kept) -> list[str]:
    """Leave the winner alone in each stored kernel, and nothing that's stored twice.

    A kernel that wasn't launched keeps its candidates.

    Args:
        folder: Inductor's cache directory.
        kept: From `record`.
    Returns:
        Folders of Triton's cache that hold losers only.
    Source: torch/_inductor/output_code.py, CompiledFxGraph._triton_bundle;
    runtime/triton_heuristics.py, CachingAutotuner.compile_results and
    _dynamic_scale_rblock, which would add one more candidate (2.11, 2.13).
    """
    chosen = {key: winner for key in kept if (winner := _winner(kept[key])) is not None}
    every = {
        _folder(result)
        for kernels in kept.values()
        for kernel in kernels
        for result in kernel.compile_results
    }
    wanted = set()
    for path in sorted(folder.glob("fxgraph/*/*/*")):
        graph = pickle.loads(path.read_bytes())
        bundle = graph._triton_bundle
        if bundle is None:
            continue
        for stored in bundle.static_autotuners:
            if stored.cache_key in chosen:
                _keep(stored.kernel, chosen[stored.cache_key])
            wanted |= {_folder(result) for result in stored.kernel.compile_results}
        # Triton's own cache travels as well, and holds these files.
        graph._triton_bundle = dataclasses.replace(bundle, kernel_artifacts=[])
        # Libraries that kernels were compiled with: these are compiled (2.13).
        graph.extern_libs_key = None
        path.write_bytes(pickle.dumps(graph))
    return sorted(every - wanted)


def _winner(kernels: list[Any]) -> Any:
    """The compiled config that was launched, of the first kernel that was."""
    for kernel in kernels:
        if len(kernel.launchers) == 1:
            config = kernel.launchers[0].config
            for result in kernel.compile_results:
                if result.config is config:
                    return result
    return None


def _keep(kernel: Any, winner: Any) -> None:
    hashed = triton_config_to_hashable(winner.config)
    same = [
        result
        for result in kernel.compile_results
        if triton_config_to_hashable(result.config) == hashed
    ]
    kernel.compile_results = same[:1] or [_unloaded(winner)]
    kernel.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}


def _unloaded(result: Any) -> Any:
    """A copy of a compiled config without what it is in this process.

    Source: torch/_inductor/runtime/static_triton_launcher.py,
    StaticallyLaunchedTritonKernel (2.11; 2.13 adds ``module``).
    """
    kernel = copy.copy(result.kernel)
    kernel.function = kernel.module = kernel.cubin_path = kernel.cubin_raw = None
    return dataclasses.replace(result, kernel=kernel)


def _folder(result: Any) -> str:
    return str(triton_hash_to_path_key(result.kernel.hash))


def serve(patches: contextlib.ExitStack) -> None:
    """From now on, load stored kernels as copies that know this process's directory.

    A loaded kernel can't be stored again, and its graph may be. The records of what
    was measured are looked for beside a kernel's generated code. Triton isn't asked for
    its backend's hash, which counts for remote caches only: it would compile a helper
    with gcc and start its assembler.

    Source: torch/_inductor/triton_bundler.py, TritonBundler.load_autotuners;
    runtime/autotune_cache.py, AutotuneCache.create and inductor_meta_from_config;
    codecache.py, get_path and FxGraphCache.cache_hit_post_compile (2.11, 2.13).
    """
    original: Any = TritonBundler.load_autotuners

    def load(cls: Any, stored: Any) -> Any:
        copies = copy.deepcopy(stored)
        for one in copies or ():
            if one.kernel.filename:
                name = Path(one.kernel.filename).name
                one.kernel.filename = str(Path(cache_dir()) / name[1:3] / name)
        return original(copies)

    for owner, name, new in (
        (TritonBundler, "load_autotuners", classmethod(load)),
        (autotune_cache, "has_triton", lambda: False),
    ):
        patches.enter_context(mock.patch.object(owner, name, new))
