"""Hold a GPU target against the GPU of this process.

Machine code for a GPU runs on its compute capability and on no other, under whatever
name the device goes: a MIG slice, or a card with other clocks, runs it as well, sized
for the one it was built for. docs/factors.md has the verdicts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from compilekit.errors import Mismatch


class Gpu(NamedTuple):
    """What decides whether code runs on a device.

    Attributes:
        driver: The CUDA version that the driver supports; (0, 0) = unknown.
        shared_memory: Bytes that one block may have.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory: int
    driver: tuple[int, int]


def gpu_here(index: int | None = None) -> Gpu | None:
    """The device with that index (the current one by default); None without one."""
    if not torch.cuda.is_available():
        return None
    # torch's own stub lacks some of the properties.
    found: Any = torch.cuda.get_device_properties(
        torch.cuda.current_device() if index is None else index
    )
    return Gpu(
        found.name,
        found.major,
        found.minor,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        driver_version(),
    )


def driver_version() -> tuple[int, int]:
    """The CUDA version that the installed driver supports; (0, 0) without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


def describe_gpu() -> dict[str, Any]:
    """The current GPU in the words of the factor table; empty without one."""
    here = gpu_here()
    if here is None:
        return {}
    cudnn: Any = torch.backends.cudnn
    return {
        "gpu.name": here.name,
        "gpu.compute_capability": f"{here.major}.{here.minor}",
        "gpu.multi_processor_count": here.multi_processor_count,
        "driver": _dotted(here.driver),
        "torch.cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
    }


def gpu_mismatches(
    name: str,
    device: Mapping[str, Any],
    factors: Mapping[str, Any],
    here: Gpu | None,
    driver: tuple[int, int] | None = None,
) -> list[Mismatch]:
    """How a GPU differs from the one that a target was built for.

    Args:
        name: The target.
        device: The target's device values.
        factors: The target's own factors.
        here: The GPU; None = there is none.
        driver: The driver's CUDA version, for a machine whose GPU torch doesn't see.
    """
    built = _described(device["name"], device["major"], device["minor"])
    built = f"{built}, target {name}"
    if here is None:
        return [_no_device(built, driver_version() if driver is None else driver)]
    found = _described(here.name, here.major, here.minor)
    if (here.major, here.minor) != (device["major"], device["minor"]):
        return [
            Mismatch(
                "gpu.compute_capability",
                built,
                found,
                "refuse",
                "Its kernels are machine code for another architecture.",
                "Build for this GPU; one artifact holds several targets.",
            )
        ]
    mismatches = []
    assembler = _version(factors.get("cuda.ptxas", ""))
    if here.driver != (0, 0) and here.driver[0] < assembler[0]:
        mismatches.append(
            Mismatch(
                "driver",
                f"kernels assembled by CUDA {_dotted(assembler)}",
                f"a driver that supports CUDA {_dotted(here.driver)}",
                "refuse",
                "The driver can't load what a newer major version assembled.",
                f"Install a driver for CUDA {assembler[0]}, or build with a torch whose"
                f" Triton assembles for CUDA {here.driver[0]}.",
            )
        )
    needed = int(factors.get("shared_memory", 0))
    if needed > here.shared_memory:
        mismatches.append(
            Mismatch(
                "gpu.shared_memory",
                f"{needed} bytes in one block ({built})",
                f"{here.shared_memory} bytes ({found})",
                "refuse",
                "A kernel couldn't be launched.",
                "Build for this GPU: `compilekit target probe` describes it.",
            )
        )
    runtime = str(factors.get("torch.cuda", torch.version.cuda))
    if runtime != torch.version.cuda:
        mismatches.append(
            Mismatch(
                "torch.cuda",
                f"torch for CUDA {runtime}",
                f"torch for CUDA {torch.version.cuda}",
                "warn",
                "cuBLAS and cuDNN may choose other algorithms; kernels are the same.",
                f"Install torch for CUDA {runtime} to be sure.",
            )
        )
    if here.name != device["name"] or (
        here.multi_processor_count != device["multi_processor_count"]
    ):
        mismatches.append(
            Mismatch(
                "gpu.name",
                f"{built}, {device['multi_processor_count']} multiprocessors",
                f"{found}, {here.multi_processor_count} multiprocessors",
                "warn",
                "The same architecture, so results are right; grids and kernel choices"
                " were made for the other, so it may be slower.",
                "Build for this GPU too: `compilekit target probe` describes it.",
            )
        )
    return mismatches


def _no_device(built: str, driver: tuple[int, int]) -> Mismatch:
    # Only a start that is refused asks.
    from compilekit.doctor import stub_here

    needed = _version(torch.version.cuda or "")
    if torch.version.cuda is None:
        here, step = (
            f"torch {torch.__version__}, which has no CUDA",
            ("Install torch's CUDA build."),
        )
    elif driver != (0, 0) and driver[0] < needed[0]:
        here = (
            f"a driver that supports CUDA {_dotted(driver)}, too old for this torch"
            f" (CUDA {torch.version.cuda})"
        )
        step = f"Install a driver for CUDA {needed[0]}."
    elif (stub := stub_here()) is not None:
        here = f"a stub in the driver's place: {stub}"
        step = f"Take it out of the library path ({stub.parent}): it is for linking."
    else:
        here = "no CUDA device"
        step = "Run it where the GPU and its driver are visible."
    return Mismatch(
        "gpu",
        built,
        here,
        "refuse",
        "Its kernels are machine code for that GPU.",
        step,
    )


def _described(name: str, major: int, minor: int) -> str:
    return f"{name} (sm_{major}{minor})"


def _version(text: str) -> tuple[int, int]:
    """``"12.8"`` → (12, 8); (0, 0) of anything else."""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
