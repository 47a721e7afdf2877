"""The same inputs give the same artifact, byte for byte outside reports/."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tower

from compilekit import config as configuration
from compilekit.artifact import Artifact, canonical, open_artifact
from compilekit.artifact.compare import times_path
from compilekit.compiler.build import build

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def contents(artifact: Artifact) -> dict[str, bytes]:
    """Every listed file."""
    return {path: artifact.read(path) for path in artifact.manifest.files}


def test_another_build_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another place, temporary folder, HOME and hash seed: the same digest."""
    first = open_artifact(tower.artifact())
    source = tmp_path / "another place"
    shutil.copytree(tower.FOLDER, source)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = build(
        configuration.load(source / "compilekit.toml"),
        tmp_path / "out",
        jobs=1,
        verify=False,
    )
    assert result.artifact is not None
    second = open_artifact(result.artifact)
    ours, theirs = contents(first), contents(second)
    assert sorted(ours) == sorted(theirs)
    assert [path for path in ours if ours[path] != theirs[path]] == []
    assert first.digest == second.digest


def test_a_report_says_how_long_each_bucket_took() -> None:
    """For `diff`: seconds of every bucket, outside of the digest."""
    artifact = open_artifact(tower.artifact())
    for target in artifact.manifest.targets:
        path = times_path(target)
        assert path not in artifact.manifest.files
        times = canonical.decode(artifact.read(path), path)
        built = {(e, b) for t, e, b in artifact.programs if t == target}
        assert times.keys() == {f"{entry} {bucket}" for entry, bucket in built}
        assert min(times.values()) > 0


def test_no_path_of_the_build_host_is_inside(tmp_path: Path) -> None:
    """No file outside reports/ names a folder of this machine."""
    artifact = open_artifact(tower.artifact())
    places = [str(Path.home()), str(tower.FOLDER), "/tmp/", "site-packages"]
    for path, data in contents(artifact).items():
        found = [place for place in places if place.encode() in data]
        assert found == [], path
