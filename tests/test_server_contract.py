"""docs/serving.md: what a server may count on, each line in processes of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tower
from test_signature import make_keys
from tower import FOLDER

from compilekit.artifact import open_artifact, write_artifact
from compilekit.trust import signature

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tower's artifact where every user can read it."""
    folder = tmp_path_factory.mktemp("contract")
    place = folder / "artifact"
    shutil.copytree(tower.artifact(), place)
    open_up(folder)
    return place


def open_up(folder: Path) -> None:
    """Let every user into one of pytest's folders, which are its user's alone."""
    for place in (folder, *folder.parents):
        if place == Path("/tmp") or place.stat().st_uid != os.getuid():
            break
        place.chmod(place.stat().st_mode | 0o055)


def ask(what: str, *words: object, **environment: str) -> dict[str, Any]:
    """What one process of tests/serving/contract.py answers."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEKIT_")}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "contract.py"), what, *map(str, words)],
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_fork_after_attach(artifact: Path) -> None:
    """Workers forked from a process that attached and made no call answer right."""
    found = ask("forked", artifact)
    assert found["codes"] == [0] * 4
    assert found["worst"] <= 1e-5


def test_memory_after_attach(artifact: Path) -> None:
    """An attach takes little, and what is detached isn't kept."""
    found = ask("memory", artifact)
    assert found["first"] < 32 << 20
    assert found["more"] < 2 << 20


def test_several_models_and_artifacts(artifact: Path, tmp_path: Path) -> None:
    """Each runs its own weights; a model that is detached leaves the others alone."""
    opened = open_artifact(artifact)
    files = {path: opened.read(path) for path in opened.manifest.files}
    serve = opened.manifest.serve._replace(over_length="eager")
    other = write_artifact(
        tmp_path / "other", opened.manifest._replace(serve=serve), files
    )
    found = ask("two", artifact, other.root)
    assert max(*found["before"], *found["after"]) <= 1e-5
    assert found["apart"] > 1e-2
    assert found["attached"] == [False, True, True]
    assert found["artifacts"] == [opened.digest, opened.digest, other.digest]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_tenants_share_kernels_and_nothing_else(artifact: Path, tmp_path: Path) -> None:
    """Two users map one file of root's, may not change it, and demand its signature."""
    private, public = make_keys(tmp_path)
    open_up(tmp_path)
    signature.sign(open_artifact(artifact), private, 3)
    demand = {"COMPILEKIT_REQUIRE_SIGNATURE": str(public)}
    first, second = (ask("shared", artifact, user, **demand) for user in (54321, 54322))
    assert max(first["worst"], second["worst"]) <= 1e-5
    assert (first["can_write"], second["can_write"]) == (False, False)
    assert first["places"] == second["places"]
    kernels = {str(path) for path in (artifact / "kernels").iterdir()}
    assert set(first["places"]) == kernels


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_tenants_artifact_is_private_memory_to_others(
    artifact: Path, tmp_path: Path
) -> None:
    """What another user could change after it was verified isn't mapped in place."""
    mine = tmp_path / "mine"
    shutil.copytree(artifact, mine)
    for path in (mine, *mine.rglob("*")):
        os.chown(path, 54321, 54321)
    open_up(tmp_path)
    digest = open_artifact(mine).digest
    found = ask("shared", mine, 54322, COMPILEKIT_EXPECT_DIGEST=digest)
    assert found["worst"] <= 1e-5
    assert all("memfd:" in place for place in found["places"])
    assert not found["can_write"]


def test_sigterm_while_loading(artifact: Path, tmp_path: Path) -> None:
    """It ends a load at once, whatever it is at, and reaches the command after it."""
    receipt, ready = tmp_path / "receipt.json", tmp_path / "ready"
    code = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    load = [sys.executable, "-m", "compilekit", "load", str(artifact)]
    command = [*load, "--receipt", str(receipt), "--", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for delay in (0.1, 0.3, None):
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        )
        if delay is None:
            until = time.monotonic() + 60
            while not ready.exists() and time.monotonic() < until:
                time.sleep(0.02)
            assert ready.exists()
        else:
            time.sleep(delay)
        process.terminate()
        said = process.communicate(timeout=10)[1]
        assert process.returncode in (-signal.SIGTERM, 143)
        assert "Traceback" not in said
    assert not receipt.exists()
    open_artifact(artifact).parse_all()
