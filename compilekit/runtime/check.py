"""Compare an artifact with this machine: every mismatch at once.

The table of factors and verdicts is in docs/factors.md.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from compilekit import targets
from compilekit._torch.versions import minor
from compilekit.artifact import Artifact, open_artifact
from compilekit.errors import Mismatch, MismatchError


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
    found = [*_versions(artifact), *_machine(artifact, libraries)]
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
    built, here = str(factors["torch.version"]), torch.__version__.partition("+")[0]
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
                "CPU kernels are extension modules of one Python minor.",
                f"Run Python {factors['python.version']}, or build with {python}.",
            )
        )
    known = factors.get("transformers.version")
    if known is not None and (installed := _installed("transformers")) != known:
        found.append(
            Mismatch(
                "transformers.version",
                str(known),
                installed,
                "warn",
                "Functions that were compiled are compared one by one at attach.",
                f"Install transformers {known} to be sure.",
            )
        )
    return found


def _installed(package: str) -> str:
    module = sys.modules.get(package)
    if module is not None:
        # Reading the package's metadata takes 3 ms.
        return str(module.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine(artifact: Artifact, libraries: bool) -> list[Mismatch]:
    """What keeps the closest target's code from running here; empty if one fits."""
    here, flags = targets.machine(), targets.cpu_flags()
    found = [
        _target(artifact, name, here, flags, libraries)
        for name in artifact.manifest.targets
    ]
    return min(found, key=len, default=[])


def _target(
    artifact: Artifact, name: str, here: str, flags: frozenset[str], libraries: bool
) -> list[Mismatch]:
    """What keeps one target's code from running on this machine."""
    description = artifact.manifest.targets[name]
    if description["kind"] == "cuda":
        return _gpu(name, description["device"])
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


def _gpu(name: str, device: Mapping[str, Any]) -> list[Mismatch]:
    """What keeps a GPU target's code from running on this process's GPU."""
    built = f"{device['name']} (sm_{device['major']}{device['minor']}, target {name})"
    if not torch.cuda.is_available():
        return [
            Mismatch(
                "gpu",
                built,
                "no CUDA device",
                "refuse",
                "Its kernels are machine code for that GPU.",
                "Run it where the GPU and its driver are visible.",
            )
        ]
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (here.major, here.minor) == (device["major"], device["minor"]):
        return []
    return [
        Mismatch(
            "gpu.compute_capability",
            built,
            f"{here.name} (sm_{here.major}{here.minor})",
            "refuse",
            "Its kernels are machine code for another architecture.",
            "Build for this GPU; one artifact holds several targets.",
        )
    ]


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


def choose_target(artifact: Artifact, kind: str = "cpu") -> str:
    """The target whose code this machine runs, the one with the most features first.

    Raises:
        MismatchError: none fits.
    """
    here, flags = targets.machine(), targets.cpu_flags()
    fitting = [
        name
        for name, description in artifact.manifest.targets.items()
        if description["kind"] == kind
        and not _target(artifact, name, here, flags, libraries=False)
    ]
    if not fitting:
        raise MismatchError(
            f"artifact {artifact.root} has no code for this machine", check(artifact)
        )
    descriptions = artifact.manifest.targets
    return max(fitting, key=lambda name: len(descriptions[name]["features"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _offered_symbols(library: str) -> str:
    """Highest symbol version that a runtime library here offers; "" = unknown."""
    if library == "glibc":
        name, number = platform.libc_ver()
        return number if name == "glibc" else ""
    pattern = re.compile(rf"{library.upper()}_(\d+(?:\.\d+)+)\0".encode())
    path = _loaded_library("libstdc++.so")
    if path is None:
        return ""
    versions = {
        _numbers(match.decode()) for match in pattern.findall(path.read_bytes())
    }
    return ".".join(map(str, max(versions))) if versions else ""


def _loaded_library(name: str) -> Path | None:
    """Path of a shared library that this process has mapped."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if name in path and path.startswith("/"):
            return Path(path)
    return None


def describe_machine() -> dict[str, Any]:
    """What this machine is, in the words of the factor table."""
    return {
        "torch.version": torch.__version__,
        "python.version": platform.python_version(),
        "machine": targets.machine(),
        "threads": torch.get_num_threads(),
    }
