"""The assembler that makes cubins: found and asked before a build starts.

An assembler older than the GPU fails at the first kernel, minutes into a build and in
words about itself; a wrong TRITON_PTXAS_PATH is passed over by Triton without a word.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from compilekit.errors import ResourceError
from compilekit.targets import Target

# Every assembler since CUDA 11 reads this; it may be assembled for any newer GPU.
_NOTHING = ".version 7.0\n.target sm_75\n.address_size 64\n"


class Assembler(NamedTuple):
    """One ``ptxas``: where it lies, the CUDA that it belongs to, what names it."""

    path: str
    version: str
    variable: str


def find_assembler(target: Target) -> Assembler:
    """The assembler that Triton takes for a target.

    Source: triton/backends/nvidia/compiler.py, get_ptxas; triton/knobs.py,
    env_nvidia_tool (3.6): Blackwell has its own, each has a variable, and a path that
    doesn't answer is passed over for the one in the wheel.

    Raises:
        ResourceError: The variable names a file that doesn't answer, or there is none.
    """
    from triton.backends.nvidia import compiler

    capability = _capability(target)
    name = "PTXAS_BLACKWELL" if capability >= 100 else "PTXAS"
    variable = f"TRITON_{name}_PATH"
    asked = os.environ.get(variable, "")
    try:
        tool: Any = compiler.get_ptxas(capability)
    except (RuntimeError, OSError) as exc:
        raise ResourceError(
            f"target {target.name} needs an assembler (ptxas): {exc}",
            hint=f"Set {variable} to one that runs, or install triton's own wheel.",
        ) from exc
    if asked and tool.path != asked:
        raise ResourceError(
            f"{variable}: expected an assembler that answers --version, found {asked}",
            hint=f"Correct it, or unset it to use {tool.path} of CUDA {tool.version}.",
            path=asked,
        )
    return Assembler(str(tool.path), str(tool.version), variable)


def check_assembler(target: Target) -> None:
    """Have the assembler assemble nothing for a target's architecture.

    Raises:
        ResourceError: There is none that runs, or it doesn't know the architecture.
    """
    found = find_assembler(target)
    architecture = _architecture(_capability(target))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "nothing.ptx")
        source.write_text(_NOTHING, encoding="ascii")
        command = [found.path, f"--gpu-name={architecture}", str(source)]
        done = subprocess.run(
            [*command, "-o", str(Path(folder, "nothing.cubin"))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode("utf-8", errors="replace")
        raise ResourceError(
            f"target {target.name} needs an assembler that knows {architecture}, found"
            f" {found.path} of CUDA {found.version}: {' '.join(said.split())[:300]}",
            hint=f"Set {found.variable} to the ptxas of a newer CUDA toolkit.",
            path=found.path,
            architecture=architecture,
        )


def _capability(target: Target) -> int:
    return int(target.device["major"]) * 10 + int(target.device["minor"])


def _architecture(capability: int) -> str:
    """Source: triton/backends/nvidia/compiler.py, sm_arch_from_capability (3.6)."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"
