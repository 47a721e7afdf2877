"""Compare an artifact with this machine: every mismatch at once.

The table of factors and verdicts is in docs/factors.md.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilekit import targets
from compilekit._torch.versions import minor
from compilekit.artifact import Artifact, open_artifact
from compilekit.errors import ConfigError, Mismatch, MismatchError

if TYPE_CHECKING:
    import torch


def check(
    artifact: Artifact | str | os.PathLike[str], *, libraries: bool = True
) -> tuple[Mismatch, ...]:
    """Every factor on which an artifact and this machine differ.

    Args:
        artifact: An open artifact, or the path of one.
        libraries: Compare symbol versions of the C and C++ runtime too, which reads
            libstdc++ (5 ms). `attach` leaves it out: it loads every kernel anyway.
    Returns:
        Mismatches, those that refuse first; empty if everything fits.
    Raises:
        ArtifactError: the artifact is damaged.
    """
    if not isinstance(artifact, Artifact):
        artifact = open_artifact(artifact).parse_all()
    return check_device(artifact, None, libraries=libraries)


def check_device(
    artifact: Artifact, device: torch.device | None, *, libraries: bool = True
) -> tuple[Mismatch, ...]:
    """As `check`, for a GPU other than the current one."""
    found = [*_versions(artifact), *_machine(artifact, libraries, device)]
    return tuple(sorted(found, key=lambda mismatch: mismatch.verdict != "refuse"))


def refuse(what: str, mismatches: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
    """Raise if any mismatch refuses; the warnings otherwise.

    Raises:
        MismatchError: carries all of them.
    """
    if any(mismatch.verdict == "refuse" for mismatch in mismatches):
        raise MismatchError(what, mismatches)
    return mismatches


def _versions(artifact: Artifact) -> list[Mismatch]:
    found = []
    factors = artifact.manifest.factors
    built, here = str(factors["torch.version"]), installed("torch").partition("+")[0]
    if built != here:
        same_minor = minor(built) == minor(here)
        found.append(
            Mismatch(
                "torch.version",
                built,
                here,
                "warn" if same_minor else "refuse",
                "Another patch release can differ in the last bits."
                if same_minor
                else "The operators that programs call may take other arguments.",
                f"Install torch {built}, or build again with torch {here}.",
            )
        )
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if factors["python.version"] != python:
        found.append(
            Mismatch(
                "python.version",
                str(factors["python.version"]),
                python,
                "refuse",
                "CPU kernels and digests of the model's code are of one Python minor.",
                f"Run Python {factors['python.version']}, or build with {python}.",
            )
        )
    known = factors.get("transformers.version")
    if known is not None and (there := installed("transformers")) != known:
        found.append(
            Mismatch(
                "transformers.version",
                str(known),
                there,
                "warn",
                "Functions that were compiled are compared one by one at attach.",
                f"Install transformers {known} to be sure.",
            )
        )
    return found


def installed(package: str) -> str:
    """Its version, without an import: torch's takes a second."""
    module = sys.modules.get(package)
    if module is not None:
        # Reading the package's metadata takes 3 ms.
        return str(module.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine(
    artifact: Artifact, libraries: bool, device: torch.device | None
) -> list[Mismatch]:
    """What keeps the closest target's code from running here; empty if one fits.

    Where none fits, every GPU target has its say: each names both sides.
    """
    found = _by_target(artifact, libraries, device)
    best = min(found.values(), key=_badness, default=[])
    if not _refuses(best):
        return best
    gpus = [
        one
        for name, one in found.items()
        if artifact.manifest.targets[name]["kind"] == "cuda" and one is not best
    ]
    return [*best, *(mismatch for one in gpus for mismatch in one)]


def _by_target(
    artifact: Artifact, libraries: bool, device: torch.device | None
) -> dict[str, list[Mismatch]]:
    """Target → how this machine differs from it."""
    described = artifact.manifest.targets
    here, flags = targets.machine(), targets.cpu_flags()
    on_gpu = [name for name, one in described.items() if one["kind"] == "cuda"]
    found = {
        name: _cpu(artifact, name, here, flags, libraries)
        for name in described
        if name not in on_gpu
    }
    if on_gpu:
        # Imported for GPU targets only: a CPU start pays for nothing it doesn't use.
        from compilekit.runtime.gpu import gpu_here, gpu_mismatches

        gpu = gpu_here(None if device is None else device.index)
        for name in on_gpu:
            factors = artifact.manifest.factors_for(name)
            found[name] = gpu_mismatches(name, described[name]["device"], factors, gpu)
    return found


def _refuses(mismatches: list[Mismatch]) -> bool:
    return any(mismatch.verdict == "refuse" for mismatch in mismatches)


def _badness(mismatches: list[Mismatch]) -> tuple[bool, int]:
    return _refuses(mismatches), len(mismatches)


def _cpu(
    artifact: Artifact, name: str, here: str, flags: frozenset[str], libraries: bool
) -> list[Mismatch]:
    """What keeps a CPU target's code from running on this machine."""
    description = artifact.manifest.targets[name]
    if description["machine"] != here:
        return [
            Mismatch(
                "machine",
                f"{description['machine']} (target {name})",
                here,
                "refuse",
                "Its machine code can't run here.",
                f"Build for {here}.",
            )
        ]
    found = []
    missing = [feature for feature in description["features"] if feature not in flags]
    if missing:
        found.append(
            Mismatch(
                "isa",
                f"{name}, which needs {' '.join(description['features'])}",
                f"a CPU without {' '.join(missing)}",
                "refuse",
                "The process would die of an illegal instruction.",
                "Build for a lower level, e.g. cpu-x86_64-v3.",
            )
        )
    if libraries:
        found += _symbols(artifact.manifest.factors_for(name))
    return found


def _symbols(factors: dict[str, Any]) -> list[Mismatch]:
    """Symbol versions that kernels need and this system's libraries lack."""
    found = []
    for factor, needed in factors.items():
        if not factor.endswith(".symbols"):
            continue
        offered = _offered_symbols(factor.removesuffix(".symbols"))
        if offered and _numbers(offered) < _numbers(str(needed)):
            found.append(
                Mismatch(
                    factor,
                    f"at least {needed}",
                    offered,
                    "refuse",
                    "Its kernels wouldn't link.",
                    "Build on a system that is no newer than this one.",
                )
            )
    return found


def choose_target(
    artifact: Artifact, kind: str = "", device: torch.device | None = None
) -> str:
    """The target whose code runs here: the CPU's best level, or the GPU's own.

    Another GPU's of the same architecture is taken where the own isn't in the artifact.

    Args:
        kind: ``cpu`` or ``cuda``; both by default, the GPU first.
        device: The GPU; the current one by default.
    Raises:
        MismatchError: none fits.
    """
    return fitting_targets(artifact, kind, device)[0]


def fitting_targets(
    artifact: Artifact, kind: str = "", device: torch.device | None = None
) -> list[str]:
    """Every target whose code runs here, the best first; see `choose_target`."""
    found = _by_target(artifact, False, device)
    described = artifact.manifest.targets
    fitting = [
        name
        for name, mismatches in found.items()
        if kind in ("", described[name]["kind"]) and not _refuses(mismatches)
    ]
    if not fitting:
        mismatches = check_device(artifact, device)
        if not _refuses(list(mismatches)):
            mismatches = (_wrong_kind(artifact, kind or "another device"),)
        raise MismatchError(
            f"artifact {artifact.root} has no code for this machine", mismatches
        )
    return sorted(
        fitting,
        key=lambda name: (
            described[name]["kind"] == "cpu",
            len(found[name]),
            -len(described[name]["features"]),
        ),
    )


def demand_target(
    artifact: Artifact, name: str, kind: str, device: torch.device | None
) -> str:
    """A target that was asked for by name.

    Raises:
        ConfigError: the artifact has no such target.
        MismatchError: its code doesn't run here, or not where the model is.
    """
    described = artifact.manifest.targets
    if name not in described:
        known = ", ".join(described)
        raise ConfigError(f"target: expected one of {known}, found {name}")
    mismatches = tuple(_by_target(artifact, False, device)[name])
    if described[name]["kind"] != kind:
        mismatches = (_wrong_kind(artifact, kind),)
    refuse(f"target {name} of artifact {artifact.root} doesn't run here", mismatches)
    return name


def _wrong_kind(artifact: Artifact, kind: str) -> Mismatch:
    """The machine would do, but the model lies on the other kind of device."""
    return Mismatch(
        "device",
        f"code for {', '.join(artifact.manifest.targets)}",
        f"a model on {kind}",
        "refuse",
        "A program runs where the model's tensors are.",
        'Move the model, e.g. model.to("cuda"), or build for a target of this kind.',
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _offered_symbols(library: str) -> str:
    """Highest symbol version that a runtime library here offers; "" = unknown."""
    if library == "glibc":
        name, number = platform.libc_ver()
        return number if name == "glibc" else ""
    pattern = re.compile(rf"{library.upper()}_(\d+(?:\.\d+)+)\0".encode())
    path = _loaded_library("libstdc++.so") or _load_libstdcxx()
    if path is None:
        return ""
    versions = {
        _numbers(match.decode()) for match in pattern.findall(path.read_bytes())
    }
    return ".".join(map(str, max(versions))) if versions else ""


def _load_libstdcxx() -> Path | None:
    """As torch will find it, in a process that hasn't loaded torch."""
    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    return _loaded_library("libstdc++.so")


def _loaded_library(name: str) -> Path | None:
    """Path of a shared library that this process has mapped."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if name in path and path.startswith("/"):
            return Path(path)
    return None


def describe_machine(kind: str = "cpu") -> dict[str, Any]:
    """What this machine is, in the words of the factor table."""
    import torch

    described = {
        "torch.version": installed("torch"),
        "python.version": platform.python_version(),
        "machine": targets.machine(),
        "threads": torch.get_num_threads(),
    }
    if kind == "cuda":
        from compilekit.runtime.gpu import describe_gpu

        described.update(describe_gpu())
    return described
