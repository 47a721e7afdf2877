"""Which torch and Python versions compilekit supports; versions compare as tuples."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

from compilekit.errors import Mismatch, MismatchError, ResourceError

# torch minor -> what was done with it: on a CPU, and for NVIDIA targets.
SUPPORTED: dict[tuple[int, int], str] = {
    (2, 11): "CPU: built and ran; NVIDIA: built, ran on an H200",
    (2, 12): "CPU: one small model built and ran; NVIDIA: built, not run",
    (2, 13): "CPU: built and ran; NVIDIA: built, not run",
}
PYTHON: tuple[tuple[int, int], ...] = ((3, 11), (3, 12))


class Installed(NamedTuple):
    """The torch that is installed.

    Attributes:
        version: As ``torch.__version__`` has it.
        cuda: The CUDA it was built with; None = it's a CPU build.
    """

    version: str
    cuda: str | None


def installed_torch() -> Installed:
    """Ask torch's version file, without the two seconds that importing torch takes.

    Raises:
        ResourceError: torch isn't installed.
    Source: torch/version.py (2.11, 2.13), which the wheel's build writes.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ResourceError(
            "torch isn't installed in this Python environment",
            hint="Install it: compilekit doesn't choose between its builds.",
        )
    stated = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return Installed(stated["__version__"], stated["cuda"])


def minor(version: str) -> tuple[int, int]:
    """``"2.13.0+cpu"`` → ``(2, 13)``; (0, 0) if it doesn't start with two numbers."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def refuse_unsupported(torch_version: str, *, allow_untested: bool = False) -> None:
    """Refuse a torch minor or Python minor that nobody tried.

    Raises:
        MismatchError: torch or Python is outside the tables above.
    """
    mismatches = []
    if minor(torch_version) not in SUPPORTED and not allow_untested:
        known = ", ".join(f"{major}.{minor_}" for major, minor_ in SUPPORTED)
        mismatches.append(
            Mismatch(
                "torch.version",
                f"support for {known}",
                torch_version,
                "refuse",
                "The compiler's internals change between minors.",
                "Install a supported torch, or pass --allow-untested-torch.",
            )
        )
    if sys.version_info[:2] not in PYTHON:
        known = ", ".join(f"{major}.{minor_}" for major, minor_ in PYTHON)
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        mismatches.append(
            Mismatch(
                "python.version",
                f"support for {known}",
                here,
                "refuse",
                "Kernels are extension modules of one Python minor.",
                "Use a supported Python.",
            )
        )
    if mismatches:
        raise MismatchError("this installation isn't supported", tuple(mismatches))
