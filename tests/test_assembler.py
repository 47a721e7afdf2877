"""The assembler is asked about the GPU before a build starts; with stand-ins for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from compilekit import targets
from compilekit._torch import emulation, versions
from compilekit._torch.emulation import assembler
from compilekit.compiler import workers
from compilekit.errors import ResourceError

# As ptxas answers: it knows sm_90a, and says of anything else what ptxas says.
PTXAS = """\
#!/bin/sh
case "$1" in
--gpu-name=sm_90a) grep -q '^.target' "$2" ;;
*) echo "ptxas fatal   : Value '${1#*=}' is not defined for option 'gpu-name'" >&2
   exit 1 ;;
esac
"""


@pytest.fixture
def ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that Triton would take."""
    path = tmp_path / "ptxas"
    path.write_text(PTXAS)
    path.chmod(0o755)
    tool = SimpleNamespace(path=str(path), version="12.8")
    for name in ("triton", "triton.backends", "triton.backends.nvidia"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    nvidia = sys.modules["triton.backends.nvidia"]
    nvidia.compiler = SimpleNamespace(get_ptxas=lambda _: tool)  # type: ignore[attr-defined]
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)
    return path


def test_an_assembler_that_knows_the_gpu(ptxas: Path) -> None:
    """Nothing is said."""
    assembler.check_assembler(targets.load_target("nvidia-h200"))


@pytest.mark.parametrize(
    ("name", "architecture", "variable"),
    [
        ("nvidia-a100", "sm_80", "TRITON_PTXAS_PATH"),
        ("nvidia-b200", "sm_100a", "TRITON_PTXAS_BLACKWELL_PATH"),
    ],
)
def test_an_assembler_that_does_not(
    name: str, architecture: str, variable: str, ptxas: Path
) -> None:
    """The error names target, architecture, path, version, its words and the fix."""
    with pytest.raises(ResourceError) as caught:
        assembler.check_assembler(targets.load_target(name))
    for part in (name, architecture, str(ptxas), "CUDA 12.8", "is not defined"):
        assert part in caught.value.message
    assert variable in caught.value.hint


def test_a_path_that_triton_passes_over(
    ptxas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user asked for is used, or the build ends: never another one unsaid."""
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nonexistent/ptxas")
    with pytest.raises(ResourceError, match=r"TRITON_PTXAS_PATH: .* /nonexistent/"):
        assembler.find_assembler(targets.load_target("nvidia-h200"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    assert assembler.find_assembler(targets.load_target("nvidia-h200")).path


def test_no_assembler(ptxas: Path) -> None:
    """Triton finds none: its own words, and the variable to set."""

    def none(_: int) -> None:
        raise RuntimeError("Cannot find ptxas")

    sys.modules["triton.backends.nvidia"].compiler.get_ptxas = none  # type: ignore[attr-defined]
    with pytest.raises(ResourceError, match="Cannot find ptxas") as caught:
        assembler.check_assembler(targets.load_target("nvidia-h200"))
    assert "TRITON_PTXAS_PATH" in caught.value.hint


def test_a_build_asks_first(
    ptxas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stub is compiled and no worker started for what can't be assembled."""
    installed = versions.Installed("2.11.0", "12.8")
    monkeypatch.setattr(versions, "installed_torch", lambda: installed)
    monkeypatch.setattr(emulation, "is_here", lambda _: False)
    monkeypatch.setattr(emulation, "make_stubs", None)
    with pytest.raises(ResourceError, match="sm_80"):
        workers.worker_environment(tmp_path, targets.load_target("nvidia-a100"))
