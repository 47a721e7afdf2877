"""Emulation of a GPU that isn't here, for the compiler's worker process only.

Two halves, because PyTorch's C++ asks the CUDA runtime, and Triton and Inductor ask in
Python:

* `stubs` compiles a stub CUDA runtime that answers from the target description;
  `environment` preloads it. PyTorch's own C++ then decides everything that depends on
  the device (attention backend, architecture checks) as it would there.
* `hooks` answers what is left.

On a host that has the very device (`is_here`) nothing is emulated: `install_native`
leaves out what would make the result depend on a measurement, and the artifact is the
same.

Nothing runs on the emulated device: what would have to (benchmarks, constant kernels)
is computed on the CPU, answered, or refused.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from compilekit._torch.emulation.assembler import find_assembler
from compilekit._torch.emulation.stubs import RUNTIME, make_stubs
from compilekit.errors import NeedsDeviceError
from compilekit.targets import Target

__all__ = [
    "cuda_versions",
    "environment",
    "install",
    "install_native",
    "is_emulated",
    "is_here",
    "make_stubs",
    "native_environment",
]

# A MIG slice has another name and fewer multiprocessors, another card another memory.
_IDENTITY = ("name", "major", "minor", "multi_processor_count")


def environment(stubs: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: the stubs come before the real libraries."""
    paths = [str(stubs), base.get("LD_LIBRARY_PATH", "")]
    preload = [str(stubs / RUNTIME), base.get("LD_PRELOAD", "")]
    return {
        **native_environment(base),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "LD_PRELOAD": " ".join(filter(None, preload)),
        "CUDA_VISIBLE_DEVICES": "0",
    }


def native_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment on a host that has the device."""
    # Line information holds the path of the build folder.
    return {**base, "TRITON_DISABLE_LINE_INFO": "1"}


def is_emulated(environment: Mapping[str, str]) -> bool:
    """True in a worker whose environment came from `environment`."""
    return RUNTIME in environment.get("LD_PRELOAD", "")


def is_here(target: Target) -> bool:
    """True if this process's GPU is the target's own, name and size included."""
    if target.kind != "cuda" or not _has_driver():
        return False
    import torch

    if not torch.cuda.is_available():
        return False
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    return all(getattr(here, name) == target.device.get(name) for name in _IDENTITY)


def _has_driver() -> bool:
    """True if there is a CUDA driver; without one, torch needn't be asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def install(target: Target) -> None:
    """Answer the questions that Python asks about the device; once per process.

    Raises:
        NeedsDeviceError: PyTorch doesn't see the stub runtime.
        HarvestError: this torch asks in another way.
    """
    import torch

    from compilekit._torch.emulation import hooks

    if not torch.cuda.is_available():
        raise NeedsDeviceError(
            f"PyTorch doesn't see the emulated {target.name}",
            hint="Is this torch a CUDA build? A CPU-only wheel can't build for a GPU.",
        )
    for hook in hooks.EMULATED:
        hook(target)


def install_native(target: Target) -> None:
    """Keep what a build may not measure from being measured; once per process."""
    from compilekit._torch.emulation import hooks

    for hook in hooks.MEASURED:
        hook(target)


def cuda_versions(target: Target) -> dict[str, str]:
    """CUDA versions that a target's code depends on, as factors.

    ``cuda.ptxas`` is that of the assembler that makes the cubins, which a driver must
    know.
    """
    import torch

    assembler = find_assembler(target)
    return {"cuda.ptxas": assembler.version, "torch.cuda": str(torch.version.cuda)}
