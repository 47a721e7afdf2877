"""The layout of a Hub repository: what is written where, and what a machine takes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import golden
import pytest
from test_combine import V4, retargeted
from test_signature import make_keys

from compilekit import targets
from compilekit.artifact import (
    Artifact,
    edit,
    open_artifact,
    parts,
    read_verification,
    write_artifact,
)
from compilekit.cli import run
from compilekit.errors import CompilekitError, ManifestError, MismatchError
from compilekit.runtime import check, gpu
from compilekit.runtime.gpu import Gpu
from compilekit.runtime.requirements import open_required
from compilekit.trust import signature

V3 = golden.TARGET


@pytest.fixture
def both(tmp_path: Path) -> Artifact:
    """An artifact for two CPU levels, verified for one of them."""
    one, two = golden.write(tmp_path / "one"), retargeted(tmp_path / "two")
    made = write_artifact(tmp_path / "both", *edit.merge([one, two]))
    golden.write_verification(made, {V3: golden.verified()})
    return made


@pytest.fixture
def hub(both: Artifact, tmp_path: Path) -> Path:
    """It, in the layout of a Hub repository."""
    parts.write_hub(both, tmp_path / "hub")
    return tmp_path / "hub"


def machine(
    monkeypatch: pytest.MonkeyPatch, *flags: str, torch: str = "2.13.4"
) -> None:
    """A machine with these CPU features and this torch."""
    known = frozenset(targets.load_target(V3).features)
    monkeypatch.setattr(targets, "machine", lambda: "x86_64")
    monkeypatch.setattr(targets, "cpu_flags", lambda: known | set(flags))
    monkeypatch.setattr(check, "version", lambda _: torch)
    monkeypatch.setattr(
        "compilekit.runtime.requirements.installed", lambda _: f"{torch}+cpu"
    )


def test_one_folder_for_each_architecture(hub: Path, both: Artifact) -> None:
    """Plain files, an artifact each, equal to what prune makes; records beside."""
    found = sorted(path.relative_to(hub).as_posix() for path in hub.glob("*/*"))
    assert found == [
        f"torch2.13/{V3}",
        f"torch2.13/{V3}.verified.json",
        f"torch2.13/{V4}",
    ]
    for target in (V3, V4):
        part = open_artifact(hub / "torch2.13" / target).parse_all()
        assert list(part.manifest.targets) == [target]
    record, _ = read_verification(open_artifact(hub / "torch2.13" / V3))
    assert record is not None
    assert list(record.targets) == [V3]
    assert all(path.is_file() or path.is_dir() for path in hub.rglob("*"))
    assert not any(path.is_symlink() for path in hub.rglob("*"))


def test_a_machine_takes_its_own(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The level with the most features that are there, for this torch's minor."""
    level_4 = targets.load_target(V4).features
    for flags, target in (((), V3), (level_4, V4)):
        machine(monkeypatch, *flags)
        assert list(open_required(hub).manifest.targets) == [target]
        assert list(open_required(str(hub)).manifest.targets) == [target]


def test_what_is_not_there_is_named(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, another machine: the error says what there is."""
    machine(monkeypatch, torch="2.12.0")
    with pytest.raises(MismatchError, match=f"torch2.13/{V3}.*torch2.12, x86_64"):
        open_required(hub)
    machine(monkeypatch)
    monkeypatch.setattr(targets, "machine", lambda: "aarch64")
    with pytest.raises(MismatchError, match="aarch64"):
        open_required(hub)


def test_a_folder_that_is_no_hub(tmp_path: Path) -> None:
    """It is refused as no artifact, as ever."""
    (tmp_path / "torches").mkdir()
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ManifestError):
            open_required(place)


def described(artifact: Artifact, *names: str) -> Artifact:
    """The same artifact as if it were for these GPUs."""
    described = {
        name: {"kind": "cuda", "device": dict(targets.load_target(name).device)}
        for name in names
    }
    artifact.manifest = artifact.manifest._replace(targets=described)
    return artifact


def test_gpus_of_one_capability_share_a_folder(both: Artifact) -> None:
    """smNN is the compute capability, whatever the card is called."""
    gpus = ("nvidia-h200", "nvidia-h100-sxm", "nvidia-a100")
    artifact = described(both, *gpus)
    found = {name: parts.hub_place(artifact, name) for name in gpus}
    assert found == {
        "nvidia-h200": "torch2.13/sm90",
        "nvidia-h100-sxm": "torch2.13/sm90",
        "nvidia-a100": "torch2.13/sm80",
    }


def test_a_gpu_comes_first(
    hub: Path, both: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with the GPU takes its folder, one without it the CPU's."""
    shutil.copytree(both.root, hub / "torch2.13" / "sm90")
    machine(monkeypatch)
    h200 = Gpu("NVIDIA H200", 9, 0, 132, 232_448, (13, 0))
    here: list[Any] = [h200]
    monkeypatch.setattr(gpu, "gpu_here", lambda: here[0])
    assert open_required(hub).root.name == "sm90"
    here[0] = h200._replace(major=8)
    assert open_required(hub).root.name == V3
    here[0] = None
    assert open_required(hub).root.name == V3


def test_demands_hold_in_a_hub(
    hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signature lies beside the folder it is about, and is demanded there."""
    machine(monkeypatch)
    private, public = make_keys(tmp_path)
    os.chmod(tmp_path, 0o700)
    monkeypatch.setenv("COMPILEKIT_REQUIRE_SIGNATURE", str(public))
    with pytest.raises(CompilekitError) as caught:
        open_required(hub)
    assert caught.value.exit_code == 11
    signature.sign(open_artifact(hub / "torch2.13" / V3), private, 1)
    assert open_required(hub).root.name == V3


def test_command_line(
    both: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``pack --hub`` writes it and lists each place."""
    out = tmp_path / "repository"
    assert run(["pack", str(both.root), "-o", str(out), "--hub", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert [one["targets"] for one in result] == [[V3], [V4]]
    assert result[0]["artifact"] == str(out / "torch2.13" / V3)
