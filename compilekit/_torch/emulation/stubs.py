"""The stub CUDA runtime: a library that answers PyTorch from a target description.

Compiled once per target and CUDA version with the host's C compiler, into the scratch
folder of one build.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from compilekit.errors import ResourceError
from compilekit.targets import Target

_FOLDER = Path(__file__).parent
RUNTIME = "libcudart_stub.so"
# What the stub runtime and Triton's driver are asked; memory in bytes, clocks in kHz.
REQUIRED = (
    "name",
    "major",
    "minor",
    "multi_processor_count",
    "total_memory",
    "regs_per_multiprocessor",
    "max_threads_per_multi_processor",
    "max_threads_per_block",
    "warp_size",
    "shared_memory_per_block",
    "shared_memory_per_block_optin",
    "shared_memory_per_multiprocessor",
    "l2_cache_size",
    "memory_bus_width",
    "clock_rate",
    "memory_clock_rate",
)


def make_stubs(target: Target, cuda_version: str, folder: Path) -> Path:
    """Compile the stub libraries for a target.

    Args:
        cuda_version: The CUDA that torch was built with, e.g. ``13.0``.
        folder: Where they go.
    Returns:
        `folder`, holding ``libcudart_stub.so`` and ``libcuda.so.1``.
    Raises:
        ResourceError: there is no C compiler, or no CUDA headers of that major.
    """
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        raise ResourceError(
            f"building for {target.name} on a host without it needs a C compiler",
            hint="Install gcc; only the build needs it.",
        )
    major = cuda_version.partition(".")[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device.h").write_text(_device_header(target, major), encoding="utf-8")
    includes = [f"-I{folder}", *(f"-I{path}" for path in _headers(major))]
    for source, library in (
        ("cudart.c", RUNTIME),
        ("libcuda.c", "libcuda.so.1"),
    ):
        done = subprocess.run(
            [
                compiler,
                *("-x", "c", "-std=gnu11", "-shared", "-fPIC", "-O1", "-w"),
                *includes,
                str(_FOLDER / source),
                "-o",
                str(folder / library),
            ],
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            output = done.stderr.decode("utf-8", errors="replace")
            raise ResourceError(
                f"the stub CUDA runtime doesn't compile: {output.strip()[:500]}",
                hint=f"Are these the headers of CUDA {major}?",
            )
    return folder


def _device_header(target: Target, cuda_major: str) -> str:
    missing = [name for name in REQUIRED if name not in target.device]
    if missing:
        raise ResourceError(
            f"target {target.name} doesn't say {', '.join(missing)}",
            hint="Run `compilekit target probe` on a machine that has the device.",
        )
    lines = [f"#define CK_CUDA_MAJOR {cuda_major}"]
    for name in REQUIRED:
        value = target.device[name]
        text = f'"{value}"' if isinstance(value, str) else f"{value}L"
        lines.append(f"#define CK_{name.upper()} {text}")
    return "\n".join(lines) + "\n"


def _headers(cuda_major: str) -> list[Path]:
    """CUDA's headers from the wheels that torch's CUDA build depends on.

    Triton's own headers can be of another major and lay out cudaDeviceProp
    differently; only their ``crt`` folder, which NVIDIA's wheel lacks, is used.
    """
    import importlib.util

    found = []
    nvidia = importlib.util.find_spec("nvidia")
    for root in nvidia.submodule_search_locations or () if nvidia else ():
        for name in (f"cu{cuda_major}", "cuda_runtime"):
            folder = Path(root) / name / "include"
            if os.path.isfile(folder / "cuda_runtime_api.h"):
                found.append(folder)
    if not found:
        raise ResourceError(
            f"the headers of CUDA {cuda_major} aren't here (cuda_runtime_api.h)",
            hint="Install torch's CUDA build with its dependencies.",
        )
    triton = importlib.util.find_spec("triton")
    for root in triton.submodule_search_locations or () if triton else ():
        folder = Path(root) / "backends" / "nvidia" / "include"
        if os.path.isdir(folder / "crt"):
            found.append(folder)
    return found
