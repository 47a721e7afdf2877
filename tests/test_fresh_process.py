"""A start in another process: nothing around it but the artifact and plain torch."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tower
from tower import FOLDER

ROOT = Path(__file__).parents[1]
STRANGER = 54321

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only copy of the tower's artifact; its build directory is long gone."""
    folder = tmp_path_factory.mktemp("serving")
    place = folder / "elsewhere" / "with a space é"
    shutil.copytree(tower.artifact(), place)
    for path in (place, *place.rglob("*")):
        path.chmod(
            stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH | path.stat().st_mode & 0o111
        )
    # pytest's folders are its user's alone.
    for parent in place.parents:
        if parent == Path("/tmp") or parent.stat().st_uid != os.getuid():
            break
        parent.chmod(parent.stat().st_mode | 0o055)
    return place


def start(artifact: Path, threads: int, *more: str, **env: str) -> dict[str, Any]:
    """Run the start with almost no environment; what it printed."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "start.py"), str(artifact), str(threads), *more],
        env={
            "PATH": "",
            "HOME": "/nonexistent",
            "TMPDIR": "/nonexistent",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check(result: dict[str, Any]) -> None:
    """Every bucket by program, equal to eager, nothing spawned, nothing compiled."""
    assert result["routes"] == ["program"] * 4
    assert result["worst"] <= 1e-3  # the total sums 16,384 terms
    assert result["spawned"] == []
    assert result["compiles"] == 0


def test_nothing_but_torch_is_needed(artifact: Path) -> None:
    """Empty PATH, other HOME, no TMPDIR, read-only artifact, build gone; no compiler.

    An import hook raises on Dynamo, Inductor, Triton, transformers, click and rich.
    """
    result = start(artifact, 1)
    check(result)
    torch_parts = [name for name in result["new"] if name.split(".")[0] == "torch"]
    assert torch_parts == []
    third_party = {name.split(".")[0] for name in result["new"]} - set(
        sys.stdlib_module_names
    )
    assert third_party <= {"tower_model"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_unknown_user_can_start(artifact: Path) -> None:
    """A uid without a passwd entry, as containers have it, needs nothing else."""
    check(start(artifact, 1, str(STRANGER)))


@pytest.mark.parametrize("factor", [1, "N", "4N"])
def test_any_thread_count(artifact: Path, factor: int | str) -> None:
    """Sums are right at thread counts that the build never saw.

    torch 2.13 itself, with default options, writes past its accumulators here.
    """
    cpus = os.cpu_count() or 1
    threads = {1: 1, "N": cpus, "4N": 4 * cpus}[factor]
    check(start(artifact, threads))
    check(start(artifact, threads, OMP_NUM_THREADS="3"))


def compiled_by_torch(cache: Path, **env: str) -> dict[str, Any]:
    """What tests/serving/isa_hit.py printed; a crash counts as an infinite error."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "isa_hit.py")],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return {"hits": 1, "error": float("inf"), "capability": "crashed"}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_lower_isa_at_run_time(artifact: Path, tmp_path: Path) -> None:
    """torch's cache hits across ISA levels; a program stays right.

    torch's cache key holds no ISA level: code generated for one is then rebuilt with
    the flags of another. Wrong numbers or a crash follow where the vector width differs
    (AVX-512 against AVX2), silently. Here the machine code itself is kept, and a CPU
    that lacks a feature is refused (tests/test_serving.py).
    """
    built = compiled_by_torch(tmp_path)
    assert built["hits"] == 0
    assert built["error"] <= 1e-5
    lower = "avx2" if built["capability"] == "AVX512" else "default"
    again = compiled_by_torch(tmp_path, ATEN_CPU_CAPABILITY=lower)
    assert again["hits"] >= 1
    if lower == "avx2":
        assert again["error"] > 1e-3
    check(start(artifact, 1, ATEN_CPU_CAPABILITY=lower))
