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
