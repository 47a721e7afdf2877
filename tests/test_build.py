"""What a build does about its place, its tools and the replays of its buckets."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compilekit import config as configuration
from compilekit.artifact import open_artifact
from compilekit.artifact.verification import why_unverified
from compilekit.compiler.build import build
from compilekit.compiler.verify import verify
from compilekit.config import Config
from compilekit.errors import ConfigError, ResourceError

TARGET = "cpu-x86_64-v3"
TOML = f"""
[model]
source = "small:FACTORY"
[axes]
b = [2]
[entries.forward.inputs.x]
shape = ["b", 4]
dtype = "float32"
[build]
targets = ["{TARGET}"]
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a configuration, the model's module beside it."""
    source = Path(__file__).parent / "modules" / "small.py"
    (tmp_path / "small.py").write_bytes(source.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, factory: str = "small", more: str = "") -> Config:
    """A configuration of one small bucket."""
    path = folder / f"{factory}.toml"
    path.write_text(TOML.replace("FACTORY", factory) + more)
    return configuration.load(path)


@pytest.mark.slow
def test_a_good_artifact_stays_where_a_worse_one_was_built(written: Path) -> None:
    """What doesn't equal eager doesn't take a verified artifact's place, or its record.

    The worse one's model is hooked when it is replayed.
    """
    out = written / "artifact"
    good = build(config(written), out)
    assert [bucket.status for bucket in good.buckets] == ["verified"]
    worse = build(config(written, "changing"), out)
    assert (worse.artifact, worse.digest, worse.exit_code) == (None, "", 8)
    assert "hook" in worse.buckets[0].error
    artifact = open_artifact(out)
    assert artifact.digest == good.digest
    assert why_unverified(artifact, TARGET) == ""
    assert not [name for name in os.listdir(written) if name.startswith(".")]


@pytest.mark.slow
def test_a_replay_that_cannot_begin_says_nothing_of_the_bucket(written: Path) -> None:
    """The configuration is refused, and the record that there is stays as it is."""
    out = written / "artifact"
    build(config(written), out)
    with pytest.raises(ConfigError, match="expected a safetensors file"):
        verify(out, weights="missing")
    assert why_unverified(open_artifact(out), TARGET) == ""


@pytest.mark.slow
def test_a_replay_that_dies_is_a_failure_in_the_record(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record can be read, and names how the process ended."""
    out = written / "artifact"
    build(config(written), out)
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda args, **given: run(killed, **given))
    assert not verify(out).passed
    monkeypatch.undo()
    reason = why_unverified(open_artifact(out), TARGET)
    assert reason == (
        "forward b2 didn't pass: the replay ended with signal SIGKILL: no message"
    )


def test_a_missing_compiler_is_named(written: Path) -> None:
    """What is missing, and the next step, as the worker said it."""
    folder = written / "empty"
    folder.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "compilekit",
            "--json",
            "build",
            "small.toml",
            "-o",
            "a",
        ],
        env={**os.environ, "PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        cwd=config(written).path.parent,
    )
    (bucket,) = json.loads(done.stdout)["result"]["buckets"]
    assert bucket["error"].startswith("a CPU build needs a C++ compiler (package g++)")
    assert done.returncode == 13


@pytest.mark.parametrize("place", ["file", "folder", "closed/new"])
def test_a_place_is_refused_before_anything_is_compiled(
    place: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of compiling would be lost otherwise."""
    (written / "file").touch()
    (written / "folder").mkdir()
    (written / "folder" / "mine").touch()
    (written / "closed").mkdir()
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: access(path, mode) and "closed" not in str(path),
    )
    events: list[object] = []
    with pytest.raises(ResourceError, match=place.partition("/")[0]):
        build(config(written), written / place, on_event=events.append)
    assert not events


@pytest.mark.parametrize("table", ["verify", "freeze"])
def test_weights_are_looked_for_before_anything_is_compiled(
    table: str, written: Path
) -> None:
    """Before the first worker starts."""
    given = config(written)
    missing = dataclasses.replace(getattr(given, table), weights="./missing")
    events: list[object] = []
    with pytest.raises(ConfigError, match="missing can't be read"):
        build(
            dataclasses.replace(given, **{table: missing}),
            written / "artifact",
            on_event=events.append,
        )
    assert not events
