"""A start that demands a signature, with real programs, in a fresh process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_signature import make_keys

from compilekit.artifact import archive, open_artifact
from compilekit.trust import signature

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

START = """
import torch, compilekit
from runtime_models import Zoo
torch.manual_seed(0)
model = Zoo(2).eval()
torch.manual_seed(0)
twin = Zoo(2).eval()
receipt = compilekit.attach(model)
ids, mask = torch.arange(32).reshape(4, 8) % 7, torch.ones(4, 8)
with torch.inference_mode():
    torch.testing.assert_close(model(ids, mask), twin(ids, mask))
mapped = open("/proc/self/maps").read()
place = str(receipt.path)
print(receipt.compiles, place in mapped, "memfd:" in mapped)
"""

Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def signed(zoo_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the zoo, signed with serial 3."""
    root = tmp_path / "zoo"
    shutil.copytree(zoo_artifact, root)
    private, _ = make_keys(tmp_path)
    signature.sign(open_artifact(root), private, 3)
    return root


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Attaches in a fresh process that demands the release key's signature."""

    def run(artifact: Path, serial: int = 3) -> subprocess.CompletedProcess[str]:
        tests = Path(__file__).parent
        demands = {
            "COMPILEKIT_ARTIFACT": str(artifact),
            "COMPILEKIT_REQUIRE_SIGNATURE": str(tmp_path / "release.pub"),
            "COMPILEKIT_MIN_SERIAL": str(serial),
            "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}",
        }
        return subprocess.run(
            [sys.executable, "-c", START],
            env={**os.environ, **demands},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_signed_artifact_starts(signed: Path, start: Start) -> None:
    """Kernels are mapped where they lie; the outputs are eager's."""
    done = start(signed)
    assert done.stdout.split() == ["0", "True", "False"], done.stderr


def test_kernels_that_others_could_change(signed: Path, start: Start) -> None:
    """The same outputs from kernels in private memory; no file of it is mapped."""
    os.chmod(signed / "kernels", 0o777)
    done = start(signed)
    assert done.stdout.split() == ["0", "False", "True"], done.stderr


def test_a_start_that_is_refused(signed: Path, start: Start) -> None:
    """An older serial and a missing record end the server with exit code 11."""
    done = start(signed, serial=4)
    assert (done.returncode, done.stdout) == (11, "")
    assert "expected serial 4 or newer, found 3" in done.stderr
    signature.record_path(signed).unlink()
    assert start(signed).returncode == 11


def test_packed_and_unpacked(signed: Path, start: Start, tmp_path: Path) -> None:
    """The signature goes along in one file, and the start believes it there."""
    packed = archive.pack(open_artifact(signed), tmp_path / "zoo.tar")
    out = archive.unpack(packed.file, tmp_path / "elsewhere" / "zoo")
    assert start(out.root).stdout.split() == ["0", "True", "False"]
