"""Stored Triton kernels keep the config that was launched; all of it without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# What torch's compiler warns of when it's imported is torch's own affair.
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclasses.dataclass
class Result:
    """A compiled config, as Inductor keeps it."""

    config: Any
    kernel: Any


def result(block: int) -> Result:
    """One of so many elements a block, loaded into this process."""
    config = SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1)
    digest = f"{block:064x}"
    kernel = SimpleNamespace(hash=digest, function=1, module=2, cubin_path="/built")
    return Result(config, kernel)


def kernel(*results: Result, launched: Result | None = None) -> Any:
    """A kernel with its candidates, and the one that was launched."""
    launchers = [SimpleNamespace(config=launched.config)] if launched else []
    return SimpleNamespace(
        compile_results=list(results),
        launchers=launchers,
        inductor_meta={"kernel_name": "k"},
        filename="/gone/ab/cabcd.py",
    )


def stored(folder: Path, **kernels: Any) -> Path:
    """A stored graph with these kernels, by their keys."""
    from torch._inductor.triton_bundler import (
        StaticallyLaunchedAutotuner,
        TritonBundle,
    )

    bundle = TritonBundle(
        ["machine code"],  # type: ignore[list-item]
        [StaticallyLaunchedAutotuner(k, "k", one) for k, one in kernels.items()],
    )
    path = folder / "fxgraph" / "ab" / "fabc" / "1"
    path.parent.mkdir(parents=True)
    graph = SimpleNamespace(_triton_bundle=bundle, extern_libs_key="libdevice")
    path.write_bytes(pickle.dumps(graph))
    return path


def folder_of(one: Result) -> str:
    """A compiled config's folder in Triton's cache."""
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    return str(triton_hash_to_path_key(one.kernel.hash))


def test_a_stored_kernel_keeps_the_winner(tmp_path: Path) -> None:
    """Also one that was made after the graph was stored; one never run keeps all."""
    from compilekit._torch.caches.triton_configs import settle

    small, large, scaled = result(64), result(128), result(32)
    path = stored(
        tmp_path,
        measured=kernel(small, large),
        scaled=kernel(small, large),
        unused=kernel(small, large),
    )
    kept = {
        "measured": [kernel(small, large, launched=large)],
        "scaled": [kernel(small, large, scaled, launched=scaled)],
        "unused": [kernel(small, large)],
    }
    assert settle(tmp_path, kept) == []
    graph = pickle.loads(path.read_bytes())
    assert (graph._triton_bundle.kernel_artifacts, graph.extern_libs_key) == ([], None)
    found = {
        one.cache_key: [r.config.kwargs["XBLOCK"] for r in one.kernel.compile_results]
        for one in graph._triton_bundle.static_autotuners
    }
    assert found == {"measured": [128], "scaled": [32], "unused": [64, 128]}
    measured, late, _ = graph._triton_bundle.static_autotuners
    assert measured.kernel.inductor_meta["dynamic_scale_rblock"] is False
    # It was loaded here, which means nothing to another process.
    assert late.kernel.compile_results[0].kernel.function is None
    assert late.kernel.compile_results[0].kernel.cubin_path is None
    assert scaled.kernel.function == 1


def test_machine_code_of_losers_stays_behind(tmp_path: Path) -> None:
    """A folder that some other kernel needs is kept."""
    from compilekit._torch.caches.triton_configs import settle

    small, large, huge = result(64), result(128), result(256)
    stored(tmp_path, a=kernel(small, large, huge), b=kernel(small, huge))
    kept = {
        "a": [kernel(small, large, huge, launched=large)],
        "b": [kernel(small, huge, launched=small)],
    }
    assert settle(tmp_path, kept) == [folder_of(huge)]


def test_loaded_kernels_are_copies_that_know_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the graph can be stored again; records are looked for here."""
    from torch._inductor.triton_bundler import (
        StaticallyLaunchedAutotuner,
        TritonBundler,
    )

    from compilekit._torch.caches import triton_configs

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    given = [StaticallyLaunchedAutotuner("key", "k", kernel())]
    seen: list[Any] = []
    monkeypatch.setattr(TritonBundler, "load_autotuners", seen.append)
    with contextlib.ExitStack() as patches:
        triton_configs.serve(patches)
        TritonBundler.load_autotuners(given)
        TritonBundler.load_autotuners(None)
    (loaded,), nothing = seen
    assert nothing is None
    assert loaded.kernel is not given[0].kernel
    assert loaded.kernel.filename == str(tmp_path / "ab" / "cabcd.py")
    assert given[0].kernel.filename == "/gone/ab/cabcd.py"
