"""Read a GPU's description from its driver; standard library only.

The driver's C interface answers without torch, Triton or a compiler, so a description
can be made on any machine that has the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from compilekit.errors import NeedsDeviceError
from compilekit.targets import SCHEMA, Target

# Source: the CUDA toolkit's cuda.h, CUdevice_attribute (12.8, 13.0). Clocks in kHz.
ATTRIBUTES: Mapping[str, int] = {
    "major": 75,
    "minor": 76,
    "multi_processor_count": 16,
    "l2_cache_size": 38,
    "warp_size": 10,
    "regs_per_multiprocessor": 82,
    "max_threads_per_multi_processor": 39,
    "max_threads_per_block": 1,
    "shared_memory_per_block": 8,
    "shared_memory_per_block_optin": 97,
    "shared_memory_per_multiprocessor": 81,
    "clock_rate": 13,
    "memory_clock_rate": 36,
    "memory_bus_width": 37,
}
# Host code isn't compiled for a GPU target, so nothing depends on the host's CPU.
_HOST: Mapping[str, Any] = {
    "machine": "x86_64",
    "march": "x86-64",
    "simd_width": 0,
    "features": [],
    "aten_capability": "DEFAULT",
}


def driver_library() -> Any:
    """The driver's library.

    Raises:
        NeedsDeviceError: it isn't installed.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise NeedsDeviceError(
            f"no NVIDIA driver here: {exc}",
            hint="Probe on a machine that has the device; `compilekit target list`"
            " shows the descriptions that are there already.",
        ) from exc


def probe(library: Any, index: int = 0, name: str = "") -> dict[str, Any]:
    """A target description of one GPU, as its file holds it.

    Args:
        library: The driver's, from `driver_library`.
        index: Which of the visible devices.
        name: The target's name; made of the device's by default.
    Raises:
        NeedsDeviceError: there is no such device, or the driver refuses.
    """
    device = ctypes.c_int()
    _check(library.cuInit(0), "cuInit")
    _check(library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    title = ctypes.create_string_buffer(256)
    _check(library.cuDeviceGetName(title, len(title), device), "cuDeviceGetName")
    memory = ctypes.c_size_t()
    _check(
        library.cuDeviceTotalMem_v2(ctypes.byref(memory), device), "cuDeviceTotalMem"
    )
    device_name = title.value.decode()
    values: dict[str, Any] = {"name": device_name, "total_memory": memory.value}
    for key, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        code = library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        _check(code, f"cuDeviceGetAttribute {key}")
        values[key] = value.value
    version = ctypes.c_int()
    _check(library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    return {
        "schema": SCHEMA,
        "name": name or target_name(device_name),
        "kind": "cuda",
        "comment": f"Probed; the driver supports CUDA {cuda_version(version.value)}.",
        "values": _marked(_HOST, "assumed"),
        "device": _marked(values, "probed"),
    }


def target_name(device: str) -> str:
    """``NVIDIA H100 80GB HBM3`` → ``nvidia-h100-80gb-hbm3``."""
    return "-".join(device.lower().replace("/", " ").split())


def cuda_version(number: int) -> str:
    """``13000`` → ``13.0``, as the driver counts."""
    return f"{number // 1000}.{number % 1000 // 10}"


def differences(target: Target, probed: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a description that the device here contradicts: name → its value."""
    here = {name: item["value"] for name, item in probed["device"].items()}
    return {
        name: here[name]
        for name, value in target.device.items()
        if name in here and here[name] != value
    }


def _marked(values: Mapping[str, Any], mark: str) -> dict[str, Any]:
    return {name: {"value": value, "mark": mark} for name, value in values.items()}


def _check(code: int, what: str) -> None:
    if code != 0:
        raise NeedsDeviceError(
            f"the NVIDIA driver refuses {what}: error {code}",
            hint="Is a device visible? See nvidia-smi and CUDA_VISIBLE_DEVICES.",
        )
