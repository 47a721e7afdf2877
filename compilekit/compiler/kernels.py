"""Compile CPU kernels: one shared object per C++ source, the same bytes every time.

Lifecycle:
    1. `find_toolchain` looks for the compiler and asks its version.
    2. `prepare` compiles torch's kernel header, once for many builds (`headers`).
    3. `compile_kernel` turns one source into a stripped shared object.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from compilekit._torch.cpp import PREFIX_HEADER, CppFlags, kernel_flags
from compilekit.compiler.headers import HEADER, find_header, keep_header
from compilekit.errors import KernelBuildError, ResourceError
from compilekit.targets import Target

# What compiler and linker say, in the words of the C library that they share with us.
_NO_SPACE = os.strerror(errno.ENOSPC)


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """A C++ compiler and the flags for one target.

    Attributes:
        compiler: Absolute path.
        version: First line of ``--version``.
        flags: torch's flags for the target.
        folder: Scratch folder of this build.
    """

    compiler: str
    version: str
    flags: CppFlags
    folder: Path


def find_toolchain(target: Target, folder: Path) -> Toolchain:
    """Look for a C++ compiler, an assembler and Python's headers.

    Raises:
        ResourceError: one is missing; the message names the package.
    """
    missing = []
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        missing.append("a C++ compiler (package g++)")
    if shutil.which("as") is None or shutil.which("ld") is None:
        missing.append("an assembler and linker (package binutils)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not os.path.isfile(header):
        missing.append(f"Python's headers ({header}; package python3-dev)")
    if missing or compiler is None:
        raise ResourceError(
            f"a CPU build needs {' and '.join(missing)}, not found on this machine",
            hint="Install what is missing; only the build needs it, not the load.",
            missing=missing,
        )
    # The banner may be in any encoding; only its ASCII part matters.
    banner = subprocess.run(
        [compiler, "--version"], capture_output=True, check=False, timeout=60
    ).stdout.decode("utf-8", errors="replace")
    version = banner.splitlines()[0] if banner else "unknown"
    folder.mkdir(parents=True, exist_ok=True)
    return Toolchain(
        compiler, version, kernel_flags(target.simd_width, target.march), folder
    )


def prepare(toolchain: Toolchain) -> Path:
    """Precompile the header that every kernel includes, or find one that was kept."""
    key = _key(toolchain)
    kept = find_header(key)
    if kept is not None:
        return kept
    header = toolchain.folder / HEADER
    header.write_text(f"#include <{PREFIX_HEADER}>\n")
    output = [HEADER, "-o", f"{HEADER}.gch", "-MD", "-MF", "files.d"]
    _run(
        toolchain,
        ["-x", "c++-header", *output],
        toolchain.folder,
        "torch's kernel header",
    )
    files = (toolchain.folder / "files.d").read_text(errors="surrogateescape")
    keep_header(key, toolchain.folder, files)
    return header


def _key(toolchain: Toolchain) -> str:
    command = [toolchain.compiler, toolchain.version, *_flags(toolchain)]
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


def compile_kernel(toolchain: Toolchain, header: Path, code: str, label: str) -> bytes:
    """Compile one kernel to a stripped shared object.

    The file name, every path and the build id are kept out of the result, so that the
    same source gives the same bytes wherever it is built.

    Args:
        header: From `prepare`.
        label: Name of the kernel for messages.
    Raises:
        KernelBuildError: the compiler refused it.
        ResourceError: the disk is full.
    """
    folder = toolchain.folder / label
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cpp").write_text(code, encoding="utf-8")
    _run(
        toolchain,
        [
            *("-include", str(header), "kernel.cpp", "-shared", "-o", "kernel.so"),
            *toolchain.flags.link,
            "-Wl,--as-needed,--build-id=none,--no-undefined-version",
            "-s",
        ],
        folder,
        label,
    )
    library = (folder / "kernel.so").read_bytes()
    shutil.rmtree(folder)
    return library


def _flags(toolchain: Toolchain) -> list[str]:
    # Macros such as TORCH_CHECK write the header's path into the kernel.
    maps = [f"-ffile-prefix-map={d}=include" for d in toolchain.flags.include_dirs]
    return [*toolchain.flags.compile, *maps, "-w"]


def _run(toolchain: Toolchain, arguments: list[str], cwd: Path, what: str) -> None:
    command = [toolchain.compiler, *_flags(toolchain), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=False, env=None)
    if done.returncode != 0:
        output = (done.stderr + done.stdout).decode("utf-8", errors="replace")
        full = [line for line in output.splitlines() if _NO_SPACE in line]
        if full:
            # The linker says so before its error, the compiler before it aborts.
            raise ResourceError(
                f"{toolchain.compiler} can't write {what}: {full[0].strip()}",
                hint="Free some space, or set TMPDIR to another place.",
                kernel=what,
            )
        raise KernelBuildError(
            f"{toolchain.compiler} refused {what} (exit {done.returncode}):"
            f" {_first_error(output)}",
            hint="The whole output is in the bucket's log.",
            kernel=what,
            output=output,
        )


def _first_error(output: str) -> str:
    for line in output.splitlines():
        if "error" in line.lower():
            return line.strip()
    return output.strip()[:300] or "no message"
