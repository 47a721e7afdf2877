"""Tests of target descriptions and of this machine's features."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from compilekit import targets
from compilekit.errors import ConfigError, ResourceError
from compilekit.targets import (
    MARKS,
    cpu_flags,
    list_targets,
    load_target,
    missing_features,
    native_target,
    read_target,
)

FOLDER = Path(targets.__file__).parent
V3 = frozenset(load_target("cpu-x86_64-v3").features)
V4 = frozenset(load_target("cpu-x86_64-v4").features)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cpuinfo: str,
    machine: str = "x86_64",
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo, encoding="utf-8")
    monkeypatch.setattr(targets, "_CPUINFO", path)
    monkeypatch.setattr(platform, "machine", lambda: machine)


def cores(*flags: frozenset[str]) -> str:
    return "\n\n".join(
        f"processor\t: {number}\nflags\t\t: {' '.join(sorted(names))} fpu\nbugs\t\t: x"
        for number, names in enumerate(flags)
    )


def test_the_list() -> None:
    """The package ships these targets."""
    assert list_targets() == (
        "cpu-x86_64-v3",
        "cpu-x86_64-v4",
        "nvidia-a100",
        "nvidia-b200",
        "nvidia-h100-pcie",
        "nvidia-h100-sxm",
        "nvidia-h200",
        "nvidia-l4",
        "nvidia-l40s",
        "nvidia-rtx-4090",
        "nvidia-rtx-5090",
    )


CPUS = tuple(name for name in list_targets() if name.startswith("cpu-"))
GPUS = tuple(name for name in list_targets() if name.startswith("nvidia-"))


@pytest.mark.parametrize("name", GPUS)
def test_gpu_description(name: str) -> None:
    """A GPU's description answers everything that the emulation is asked, marked."""
    from compilekit._torch.emulation.stubs import REQUIRED

    target = load_target(name)
    assert (target.name, target.kind) == (name, "cuda")
    assert set(target.device) == set(REQUIRED)
    assert set(target.marks.values()) <= set(MARKS)
    marks = {target.marks[key] for key in target.device}
    assert (marks == {"probed"}) == (name == "nvidia-h200")


@pytest.mark.parametrize("name", CPUS)
def test_description(name: str) -> None:
    """A file's name is its target's, and every value carries a mark."""
    target = load_target(name)
    assert target.name == name
    assert target.kind == "cpu"
    assert target.machine == "x86_64"
    assert target.device == {}
    assert set(target.marks) == {
        "machine",
        "march",
        "simd_width",
        "features",
        "aten_capability",
    }
    assert set(target.marks.values()) <= set(MARKS)


def test_levels() -> None:
    """The levels differ in vectors, and the higher one contains the lower."""
    v3, v4 = load_target("cpu-x86_64-v3"), load_target("cpu-x86_64-v4")
    assert (v3.march, v3.simd_width, v3.aten_capability) == ("x86-64-v3", 256, "AVX2")
    assert (v4.march, v4.simd_width, v4.aten_capability) == (
        "x86-64-v4",
        512,
        "AVX512",
    )
    assert V3 < V4
    added = V4 - V3
    assert added == {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize("name", CPUS)
def test_features_cover_what_the_compiler_uses(name: str) -> None:
    """Every instruction set that g++ turns on for the level is among the features."""
    gcc = shutil.which("g++")
    if gcc is None:
        pytest.skip("no g++")
    target = load_target(name)
    done = subprocess.run(
        [gcc, f"-march={target.march}", "-dM", "-E", "-x", "c++", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Macro of the compiler → name in /proc/cpuinfo, where they aren't the same.
    names = {
        "sse3": "pni",
        "lzcnt": "abm",
        "bmi": "bmi1",
        "lahf_sahf": "lahf_lm",
        "gcc_have_sync_compare_and_swap_16": "cx16",
    }
    # Part of every x86-64 CPU, thus no feature of a level.
    base = {"mmx", "mmx_with_sse", "sse", "sse2", "sse_math", "sse2_math", "fxsr"}
    known = V4 | set(names) | base
    used = set()
    for line in done.stdout.splitlines():
        macro = line.split()[1].strip("_").lower()
        if macro in known - base:
            used.add(names.get(macro, macro))
    assert used <= set(target.features)
    # xsave is what the kernel needs to switch vector registers at all.
    assert set(target.features) - used <= {"xsave"}


def test_aten_capability_of_this_machine() -> None:
    """ATen agrees with the target that this machine gets."""
    import torch

    assert torch.backends.cpu.get_cpu_capability() == native_target().aten_capability


def test_native_is_the_highest_that_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The native target is the highest whose features are all here."""
    pretend(monkeypatch, tmp_path, cores(V4))
    assert native_target().name == "cpu-x86_64-v4"
    assert load_target("native").name == "cpu-x86_64-v4"
    pretend(monkeypatch, tmp_path, cores(V4 - {"avx512vl"}))
    assert native_target().name == "cpu-x86_64-v3"
    pretend(monkeypatch, tmp_path, cores(V3), machine="AMD64")
    assert native_target().name == "cpu-x86_64-v3"


def test_a_feature_of_some_cores_only_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine with unlike cores a program may run on any of them."""
    pretend(monkeypatch, tmp_path, cores(V4, V3))
    assert cpu_flags() == V3 | {"fpu"}
    assert native_target().name == "cpu-x86_64-v3"


def test_old_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU below the lowest target is refused with what it lacks."""
    pretend(monkeypatch, tmp_path, cores(V3 - {"avx2", "fma"}))
    with pytest.raises(
        ResourceError, match="needs avx2, fma, which it lacks"
    ) as caught:
        native_target()
    assert caught.value.exit_code == 13
    assert caught.value.fields["missing"] == ["avx2", "fma"]
    assert "AVX2" in caught.value.hint


def test_other_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of another architecture is refused by name."""
    pretend(monkeypatch, tmp_path, "Features\t: fp asimd\n", machine="aarch64")
    assert cpu_flags() == {"fp", "asimd"}
    with pytest.raises(ResourceError, match="expected x86_64, found aarch64"):
        native_target()


def test_no_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without /proc the features can't be known, and nothing is guessed."""
    monkeypatch.setattr(targets, "_CPUINFO", tmp_path / "absent")
    with pytest.raises(ResourceError, match="can't read the CPU's features") as caught:
        cpu_flags()
    assert "/proc" in caught.value.hint


def test_empty_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that lists no features has none."""
    pretend(monkeypatch, tmp_path, "processor\t: 0\n")
    assert cpu_flags() == frozenset()


def test_missing_features() -> None:
    """Missing features come in the target's order; extra ones are no matter."""
    v4 = load_target("cpu-x86_64-v4")
    assert missing_features(v4, V4 | {"amx_tile"}) == ()
    assert missing_features(v4, V3) == (
        "avx512f",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512vl",
    )


def test_unknown_target() -> None:
    """An unknown name is refused with the known ones and the nearest."""
    with pytest.raises(ConfigError, match="cpu-x86_64-v3, cpu-x86_64-v4") as caught:
        load_target("cpu-x86-64-v3")
    assert caught.value.hint == "Did you mean cpu-x86_64-v3?"
    assert caught.value.exit_code == 2


def test_unknown_schema(tmp_path: Path) -> None:
    """A description of a later schema is refused, not half understood."""
    data = json.loads((FOLDER / "cpu-x86_64-v3.json").read_text(encoding="utf-8"))
    data["schema"] = 2
    path = tmp_path / "new.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError, match="expected target schema 1, found 2"):
        read_target(path)


def test_gpu_fits_the_same_form(tmp_path: Path) -> None:
    """A GPU needs no other format: its host's CPU and its device's properties."""
    data = json.loads((FOLDER / "cpu-x86_64-v3.json").read_text(encoding="utf-8"))
    data |= {
        "name": "nvidia-test",
        "kind": "cuda",
        "device": {
            "arch": {"value": 90, "mark": "probed"},
            "multi_processor_count": {"value": 132, "mark": "datasheet"},
        },
    }
    path = tmp_path / "nvidia-test.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    target = read_target(path)
    assert (target.kind, target.march) == ("cuda", "x86-64-v3")
    assert target.device == {"arch": 90, "multi_processor_count": 132}
    assert target.marks["arch"] == "probed"
