"""GPU targets against GPUs that are described, not there."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import ARTIFACT

from compilekit import doctor, targets
from compilekit.artifact import open_artifact
from compilekit.artifact.manifest import Manifest
from compilekit.cli import run
from compilekit.errors import MismatchError, NeedsDeviceError
from compilekit.runtime import check as checking
from compilekit.runtime import gpu
from compilekit.runtime.check import choose_target
from compilekit.runtime.gpu import Gpu, gpu_mismatches
from compilekit.targets import probe

H200 = Gpu("NVIDIA H200", 9, 0, 132, 232448, (13, 0))
FACTORS = {"cuda.ptxas": "12.8", "shared_memory": 114688, "torch.cuda": None}


@pytest.fixture(autouse=True)
def one_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch that built is the torch that runs, whichever is installed."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def found(here: Gpu | None, target: str = "nvidia-h200", **factors: Any) -> list[Any]:
    """Mismatches of a target with a GPU, as (factor, verdict)."""
    device = targets.load_target(target).device
    stated = {**FACTORS, "torch.cuda": "13.0", **factors}
    return gpu_mismatches(target, device, stated, here, (13, 0))


def verdicts(mismatches: list[Any]) -> list[tuple[str, str]]:
    """Factor and verdict of each."""
    return [(mismatch.factor, mismatch.verdict) for mismatch in mismatches]


def test_the_own_device_fits() -> None:
    """Nothing is said about the very device that code was built for."""
    assert found(H200) == []


def test_a_mig_slice_is_a_warning() -> None:
    """The same silicon under another name, with fewer multiprocessors, runs it."""
    mig = H200._replace(name="NVIDIA H200 MIG 3g.71gb", multi_processor_count=60)
    (mismatch,) = found(mig)
    assert (mismatch.factor, mismatch.verdict) == ("gpu.name", "warn")
    assert "NVIDIA H200 (sm_90), target nvidia-h200, 132" in mismatch.artifact
    assert "NVIDIA H200 MIG 3g.71gb (sm_90), 60 multiprocessors" in mismatch.here


def test_another_name_is_a_warning() -> None:
    """A renamed card of the same size is the same silicon."""
    assert verdicts(found(H200._replace(name="NVIDIA H200 NVL"))) == [
        ("gpu.name", "warn")
    ]


def test_another_architecture_names_both_sides() -> None:
    """Machine code for one architecture never runs on another."""
    a100 = Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, (13, 0))
    (mismatch,) = found(a100)
    assert (mismatch.factor, mismatch.verdict) == ("gpu.compute_capability", "refuse")
    assert "NVIDIA H200 (sm_90)" in mismatch.artifact
    assert mismatch.here == "NVIDIA A100-SXM4-80GB (sm_80)"


def test_an_old_driver_is_refused_with_both_versions() -> None:
    """A driver can't load what a newer major's assembler made."""
    (mismatch,) = found(H200._replace(driver=(12, 4)), **{"cuda.ptxas": "13.1"})
    assert (mismatch.factor, mismatch.verdict) == ("driver", "refuse")
    assert mismatch.artifact == "kernels assembled by CUDA 13.1"
    assert mismatch.here == "a driver that supports CUDA 12.4"


@pytest.mark.parametrize(("assembler", "driver"), [("12.8", (12, 4)), ("13.1", (0, 0))])
def test_a_driver_that_may_do_is_let_through(
    assembler: str, driver: tuple[int, int]
) -> None:
    """An older minor of one major loads it; an unknown driver is left to itself."""
    assert found(H200._replace(driver=driver), **{"cuda.ptxas": assembler}) == []


def test_too_little_shared_memory_is_refused() -> None:
    """A kernel that can't be launched is found before anything runs."""
    small = H200._replace(shared_memory=101376)
    (mismatch,) = found(small)
    assert (mismatch.factor, mismatch.verdict) == ("gpu.shared_memory", "refuse")
    assert mismatch.artifact.startswith("114688 bytes in one block")


def test_another_cuda_is_a_warning() -> None:
    """cuBLAS and cuDNN come from another CUDA."""
    assert verdicts(found(H200, **{"torch.cuda": "12.8"})) == [("torch.cuda", "warn")]


def test_no_device_is_refused() -> None:
    """Without a GPU there is nothing to run on."""
    (mismatch,) = found(None)
    assert (mismatch.factor, mismatch.here) == ("gpu", "no CUDA device")


def test_a_stub_is_refused_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start says that it met the library for linking, on its path or elsewhere."""
    stub = tmp_path / "stubs" / "libcuda.so"
    stub.parent.mkdir()
    stub.write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub.parent))
    (mismatch,) = found(None)
    assert (mismatch.factor, mismatch.verdict) == ("gpu", "refuse")
    assert str(stub) in mismatch.here
    assert str(stub.parent) in mismatch.hint


def test_a_stub_off_the_path_is_found_by_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real library that answers as the stub does, found by the system's search."""
    source, library = tmp_path / "stub.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuInit(unsigned flags) { return 34; }\n")
    command = ["cc", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda _: load(str(library)))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    (mismatch,) = found(None)
    assert (mismatch.verdict, str(library) in mismatch.here) == ("refuse", True)
    item = next(one for one in doctor.examine(cuda=True) if one.check == "driver")
    assert (item.verdict, str(library) in item.found) == ("failure", True)


def test_a_driver_too_old_for_torch_is_named() -> None:
    """torch sees no device then; the driver's version is the reason."""
    device = targets.load_target("nvidia-h200").device
    (mismatch,) = gpu_mismatches("nvidia-h200", device, FACTORS, None, (12, 4))
    assert "supports CUDA 12.4, too old for this torch (CUDA 13.0)" in mismatch.here


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU wheel sees no device, whatever the driver."""
    monkeypatch.setattr(torch.version, "cuda", None)
    device = targets.load_target("nvidia-h200").device
    (mismatch,) = gpu_mismatches("nvidia-h200", device, FACTORS, None, (13, 0))
    assert "which has no CUDA" in mismatch.here
    assert mismatch.hint == "Install torch's CUDA build."


# --- Several targets in one artifact ----------------------------------------------


class Holder:
    """What `choose_target` looks at, of an artifact with these targets."""

    def __init__(self, *names: str) -> None:
        golden = open_artifact(ARTIFACT).manifest
        described = {
            name: {
                "kind": target.kind,
                "machine": target.machine,
                "features": list(target.features),
                "device": dict(target.device),
                "factors": {"cuda.ptxas": "12.8", "torch.cuda": "13.0"},
            }
            for name in names
            for target in [targets.load_target(name)]
        }
        self.root = ARTIFACT
        fields = {**golden._asdict(), "targets": described}
        fields["factors"] = {
            "torch.version": torch.__version__.partition("+")[0],
            "python.version": f"{checking.sys.version_info[0]}."
            f"{checking.sys.version_info[1]}",
        }
        self.manifest = Manifest(**fields)


def chosen(monkeypatch: pytest.MonkeyPatch, here: Gpu, *names: str) -> str:
    """The target taken on a GPU."""
    monkeypatch.setattr(gpu, "gpu_here", lambda index=None: here)
    return choose_target(Holder(*names), "cuda")  # type: ignore[arg-type]


THREE = ("nvidia-a100", "nvidia-h100-sxm", "nvidia-h200")


def test_the_own_target_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that would run, the one that was built for this device."""
    assert chosen(monkeypatch, H200, *THREE) == "nvidia-h200"
    assert chosen(monkeypatch, H200, *reversed(THREE)) == "nvidia-h200"


def test_the_architecture_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the own target isn't there, another of the architecture is taken."""
    assert chosen(monkeypatch, H200, *THREE[:2]) == "nvidia-h100-sxm"


def test_none_fits_and_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of another architecture is told what the artifact holds, all of it."""
    ada = Gpu("NVIDIA L4", 8, 9, 58, 101376, (13, 0))
    with pytest.raises(MismatchError) as caught:
        chosen(monkeypatch, ada, *THREE)
    message = str(caught.value)
    for name in ("A100", "H100", "H200", "NVIDIA L4 (sm_89)"):
        assert name in message
    assert caught.value.exit_code == 6


def test_a_model_on_the_cpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine would do, but the model wasn't moved to the GPU."""
    monkeypatch.setattr(gpu, "gpu_here", lambda index=None: H200)
    with pytest.raises(MismatchError) as caught:
        choose_target(Holder("nvidia-h200"), "cpu")  # type: ignore[arg-type]
    assert "a model on cpu" in str(caught.value)


# --- Probing ------------------------------------------------------------------------


class Driver:
    """The driver's C interface, with one H200 behind it."""

    values = targets.load_target("nvidia-h200").device
    code = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.answer(name, args)

    def answer(self, name: str, args: tuple[Any, ...]) -> int:
        """Fill what the caller passed, as the driver does."""
        if name == "cuDeviceGetName":
            args[0].value = str(self.values["name"]).encode()
        elif name == "cuDeviceTotalMem_v2":
            pointer = ctypes.cast(args[0], ctypes.POINTER(ctypes.c_size_t))
            pointer[0] = int(self.values["total_memory"])
        elif name == "cuDriverGetVersion":
            ctypes.cast(args[0], ctypes.POINTER(ctypes.c_int))[0] = 13000
        elif name == "cuDeviceGetAttribute":
            (key,) = (k for k, v in probe.ATTRIBUTES.items() if v == args[1])
            value = int(self.values[key])
            ctypes.cast(args[0], ctypes.POINTER(ctypes.c_int))[0] = value
        return self.code


def test_a_probe_reads_what_the_target_says() -> None:
    """The shipped description and a probe of its device hold the same values."""
    described = probe.probe(Driver())
    assert described["name"] == "nvidia-h200"
    assert probe.differences(targets.load_target("nvidia-h200"), described) == {}
    assert {item["mark"] for item in described["device"].values()} == {"probed"}
    assert "CUDA 13.0" in described["comment"]


def test_a_contradiction_is_seen() -> None:
    """A value that the device here contradicts is listed."""
    driver = Driver()
    driver.values = {**Driver.values, "memory_clock_rate": 2619000}
    described = probe.probe(driver)
    h200 = targets.load_target("nvidia-h200")
    assert probe.differences(h200, described) == {"memory_clock_rate": 2619000}


def test_a_driver_that_refuses_is_an_error() -> None:
    """The driver's code is in the message."""
    driver = Driver()
    driver.code = 100
    with pytest.raises(NeedsDeviceError, match="refuses cuInit: error 100"):
        probe.probe(driver)


def test_a_probed_target_can_be_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`target probe --out` writes what COMPILEKIT_TARGETS finds by its file's name."""
    monkeypatch.setattr(probe, "driver_library", Driver)
    out = tmp_path / "my-gpu.json"
    assert run(["--json", "target", "probe", "--out", str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)["result"]
    assert answer["differences"] == {"nvidia-h200": {}}
    monkeypatch.setenv("COMPILEKIT_TARGETS", str(tmp_path))
    assert "my-gpu" in targets.list_targets()
    mine = targets.load_target("my-gpu")
    assert (mine.name, mine.device) == (
        "my-gpu",
        targets.load_target("nvidia-h200").device,
    )
