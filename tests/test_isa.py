"""Instruction sets: what a target's machine code holds, and where it may run."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest
import torch
from tower import FOLDER, call, live_model

import compilekit
from compilekit import config as configuration
from compilekit import targets
from compilekit.artifact import Artifact, open_artifact
from compilekit.compiler.build import build
from compilekit.errors import ConfigError, MismatchError
from compilekit.results import BuildResult
from compilekit.runtime.check import check, choose_target

V3, V4 = "cpu-x86_64-v3", "cpu-x86_64-v4"
LEVEL_3 = frozenset(targets.load_target(V3).features)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """One bucket for two levels, of which this machine may have only the lower."""
    config = configuration.load(FOLDER / "compilekit.toml")
    config = dataclasses.replace(config, axes={"b": (4,), "s": (64,)})
    result = build(
        config, tmp_path_factory.mktemp("isa") / "both", targets=(V3, V4), verify=True
    )
    assert result.artifact is not None, result.buckets
    return result


@pytest.fixture(scope="module")
def artifact(built: BuildResult) -> Artifact:
    """What was built."""
    assert built.artifact is not None
    return open_artifact(built.artifact)


@pytest.fixture
def has_v4() -> bool:
    """True on a machine with AVX-512."""
    return not targets.missing_features(targets.load_target(V4), targets.cpu_flags())


def registers(artifact: Artifact, target: str) -> set[str]:
    """Kinds of vector registers in a target's kernels: xmm, ymm, zmm."""
    objdump = shutil.which("objdump")
    assert objdump is not None
    found: set[str] = set()
    for (name, _, _), program in artifact.programs.items():
        for kernel in program.kernels.values() if name == target else ():
            path = artifact.path(f"kernels/{kernel.digest}.so")
            code = subprocess.run(
                [objdump, "-d", str(path)], capture_output=True, text=True, check=True
            )
            found |= set(re.findall(r"%([xyz]mm)\d", code.stdout))
    return found


def test_machine_code_is_of_its_target(artifact: Artifact) -> None:
    """No AVX-512 register in code for AVX2, on whatever machine it was built."""
    assert registers(artifact, V3) == {"xmm", "ymm"}
    assert "zmm" in registers(artifact, V4)


def test_what_cannot_run_here_is_unverified(built: BuildResult, has_v4: bool) -> None:
    """A build for a CPU that isn't here succeeds, and says that nothing replayed it."""
    status = {bucket.target: bucket.status for bucket in built.buckets}
    assert status == {V3: "verified", V4: "verified" if has_v4 else "unverified"}
    assert built.exit_code == 0


def test_the_best_level_that_fits_is_chosen(
    artifact: Artifact, has_v4: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same artifact serves both kinds of machine."""
    assert choose_target(artifact) == (V4 if has_v4 else V3)
    level_4 = frozenset(targets.load_target(V4).features)
    for flags, target in ((level_4, V4), (LEVEL_3, V3), (LEVEL_3 | {"amx"}, V3)):
        monkeypatch.setattr(targets, "cpu_flags", lambda flags=flags: flags)
        assert choose_target(artifact) == target
        assert check(artifact) == ()


def test_a_target_that_is_asked_for_runs(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lower level wherever it fits; never one whose code doesn't run here."""
    model = live_model()
    with torch.inference_mode():
        expected = model(**call(4, 64))
        receipt = compilekit.attach(model, artifact, target=V3)
        found = model(**call(4, 64))
    assert receipt.target == V3
    receipt.detach()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=1e-4)
    with pytest.raises(ConfigError, match=f"expected one of {V3}, {V4}, found v3"):
        compilekit.attach(model, artifact, target="v3")
    monkeypatch.setattr(targets, "cpu_flags", lambda: LEVEL_3)
    with pytest.raises(MismatchError, match=f"target {V4} .* doesn't run here"):
        compilekit.attach(model, artifact, target=V4)


def test_it_runs_where_its_lower_level_fits(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without AVX-512 the AVX2 code answers, and equals eager."""
    monkeypatch.setattr(targets, "cpu_flags", lambda: LEVEL_3)
    model = live_model()
    with torch.inference_mode():
        expected = model(**call(4, 64))
        receipt = compilekit.attach(model, artifact)
        found = model(**call(4, 64))
    assert receipt.target == V3
    receipt.detach()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "machine", "factor", "here"),
    [
        (LEVEL_3 - {"avx2", "fma"}, "x86_64", "isa", "a CPU without avx2 fma"),
        (frozenset({"asimd"}), "aarch64", "machine", "aarch64"),
    ],
)
def test_a_machine_that_no_level_fits(
    artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str],
    machine: str,
    factor: str,
    here: str,
) -> None:
    """It is refused with what it lacks (exit 6) and the model left alone."""
    monkeypatch.setattr(targets, "cpu_flags", lambda: flags)
    monkeypatch.setattr(targets, "machine", lambda: machine)
    model = live_model()
    with pytest.raises(MismatchError) as caught:
        compilekit.attach(model, artifact)
    assert caught.value.exit_code == 6
    (mismatch,) = caught.value.fields["mismatches"]
    assert mismatch["factor"] == factor
    assert here in mismatch["here"]
    assert mismatch["verdict"] == "refuse"
    assert "forward" not in vars(model)
    with pytest.raises(MismatchError, match="no code for this machine"):
        choose_target(artifact)
