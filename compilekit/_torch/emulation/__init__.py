"""Emulation of a GPU that isn't here, for the compiler's worker process only.

Two halves, because PyTorch's C++ asks the CUDA runtime and Triton asks its driver:

* `make_stubs` compiles a stub CUDA runtime that answers from the target description;
  `environment` preloads it. PyTorch's own C++ then decides everything that depends on
  the device (attention backend, architecture checks) as it would there.
* `install` gives Triton a driver that names the target, and reads register counts from
  cubins instead of loading them.

On a host that has the very device (`is_here`) nothing is emulated: `install_native`
leaves out what would make the result depend on a measurement, and the artifact is the
same.

Nothing runs on the emulated device: what would have to (benchmarks, constant kernels)
is computed on the CPU, answered from a table, or refused.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compilekit._torch.emulation.assembler import find_assembler
from compilekit.errors import NeedsDeviceError, ResourceError
from compilekit.targets import Target

_FOLDER = Path(__file__).parent
_RUNTIME = "libcudart_stub.so"
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
        ("cudart.c", _RUNTIME),
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
            if (folder / "cuda_runtime_api.h").is_file():
                found.append(folder)
    if not found:
        raise ResourceError(
            f"the headers of CUDA {cuda_major} aren't here (cuda_runtime_api.h)",
            hint="Install torch's CUDA build with its dependencies.",
        )
    triton = importlib.util.find_spec("triton")
    for root in triton.submodule_search_locations or () if triton else ():
        folder = Path(root) / "backends" / "nvidia" / "include"
        if (folder / "crt").is_dir():
            found.append(folder)
    return found


def environment(stubs: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: the stubs come before the real libraries."""
    paths = [str(stubs), base.get("LD_LIBRARY_PATH", "")]
    preload = [str(stubs / _RUNTIME), base.get("LD_PRELOAD", "")]
    return {
        **base,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "LD_PRELOAD": " ".join(filter(None, preload)),
        # Line information holds the path of the build folder.
        "TRITON_DISABLE_LINE_INFO": "1",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def is_here(target: Target) -> bool:
    """True if this process's GPU is the target's own, name and size included."""
    import torch

    if target.kind != "cuda" or not torch.cuda.is_available():
        return False
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    return all(getattr(here, name) == target.device.get(name) for name in _IDENTITY)


# A MIG slice has another name and fewer multiprocessors, another card another memory.
_IDENTITY = ("name", "major", "minor", "multi_processor_count")


def is_emulated(environment: Mapping[str, str]) -> bool:
    """True in a worker whose environment came from `environment`."""
    return _RUNTIME in environment.get("LD_PRELOAD", "")


def native_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment on a host that has the device."""
    return {**base, "TRITON_DISABLE_LINE_INFO": "1"}


def install_native() -> None:
    """Keep what a build may not measure from being measured; once per process."""
    _install_padding_answers()
    _install_no_repro()
    _install_kept_cubins()


def cuda_versions(target: Target) -> dict[str, str]:
    """CUDA versions that a target's code depends on, as factors.

    ``cuda.ptxas`` is that of the assembler that makes the cubins, which a driver must
    know.
    """
    import torch

    assembler = find_assembler(target)
    return {"cuda.ptxas": assembler.version, "torch.cuda": str(torch.version.cuda)}


def install(target: Target) -> None:
    """Answer the questions that Python asks about the device; once per process.

    Raises:
        NeedsDeviceError: PyTorch doesn't see the stub runtime.
    """
    import torch

    if not torch.cuda.is_available():
        raise NeedsDeviceError(
            f"PyTorch doesn't see the emulated {target.name}",
            hint="Is this torch a CUDA build? A CPU-only wheel can't build for a GPU.",
        )
    _install_driver(target)
    _install_loader(target)
    _install_constant_folder()
    _install_padding_answers()
    _install_no_repro()


def _install_driver(target: Target) -> None:
    """A Triton driver that names the target.

    Source: triton/backends/nvidia/driver.py, CudaDriver and CudaUtils (3.6).
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    device = target.device
    properties = {
        "max_shared_mem": device["shared_memory_per_block_optin"],
        "max_num_regs": device["regs_per_multiprocessor"],
        "multiprocessor_count": device["multi_processor_count"],
        "warpSize": device["warp_size"],
        "sm_clock_rate": device["clock_rate"],
        "mem_clock_rate": device["memory_clock_rate"],
        "mem_bus_width": device["memory_bus_width"],
    }
    capability = int(device["major"]) * 10 + int(device["minor"])

    class EmulatedDriver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = SimpleNamespace(get_device_properties=lambda index: properties)
            self.get_current_device = lambda: 0
            self.set_current_device = lambda index: None
            self.get_current_stream = lambda index: 0
            self.get_device_capability = lambda index: divmod(capability, 10)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, int(device["warp_size"]))

        @staticmethod
        def is_active() -> bool:
            return True

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    triton.runtime.driver.set_active(EmulatedDriver())


_USAGE = re.compile(r"REG:(\d+).*?SHARED:(\d+)")


def _install_loader(target: Target) -> None:
    """Register counts from the cubin, limits from the target, nothing loaded.

    Inductor scales reductions by register count and drops configs that don't fit, as
    it does on the device.

    Source: torch/_inductor/runtime/static_triton_launcher.py, load_kernel (2.11);
    torch/_inductor/runtime/triton_heuristics.py, _dynamic_scale_rblock (2.11, 2.13).
    """
    from torch._inductor.runtime import static_triton_launcher, triton_heuristics
    from torch._inductor.runtime.triton_compat import OutOfResources

    limit = int(target.device["shared_memory_per_block_optin"])

    def load_kernel(self: Any, device: int) -> None:
        if self.shared > limit:
            raise OutOfResources(self.shared, limit, "shared memory")
        if getattr(self, "n_regs", None) is None:
            self.n_regs = register_count(self.cubin_raw)
            self.n_spills = 0

    kernel: Any = static_triton_launcher.StaticallyLaunchedTritonKernel
    kernel.load_kernel = load_kernel
    loaded: Any = triton_heuristics.TritonCompileResult
    loaded.make_launcher = _unloaded


def _unloaded(result: Any) -> Any:
    """A launcher for a kernel that only Triton's own code can load; never called.

    `compilekit._torch.triton_kernels.kernel_facts` refuses such a kernel by name.
    Source: torch/_inductor/runtime/triton_heuristics.py, TritonCompileResult
    .make_launcher (2.11, 2.13).
    """
    return SimpleNamespace(config=result.config, n_regs=0, n_spills=0, shared=0)


def _install_kept_cubins() -> None:
    """Keep a cubin's bytes after it was loaded: the artifact needs them.

    Source: torch/_inductor/runtime/static_triton_launcher.py, load_kernel, which drops
    them (2.11, 2.13).
    """
    from torch._inductor.runtime import static_triton_launcher

    kernel: Any = static_triton_launcher.StaticallyLaunchedTritonKernel
    original = kernel.load_kernel

    def load_kernel(self: Any, device: int) -> None:
        cubin = self.cubin_raw
        original(self, device)
        self.cubin_raw = cubin

    kernel.load_kernel = load_kernel


def register_count(cubin: bytes) -> int:
    """Registers per thread that a cubin's kernel uses, as its ELF header says.

    Source: the CUDA toolkit's ``cuobjdump -res-usage``, which comes with Triton.
    """
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            check=True,
            text=True,
        )
    match = _USAGE.search(done.stdout)
    if match is None:
        raise NeedsDeviceError(f"cuobjdump says nothing about registers: {done.stdout}")
    return int(match[1])


def _install_constant_folder() -> None:
    """Inductor folds uniform constants by running them; run them on the CPU.

    Source: torch/_inductor/fx_passes/joint_graph.py, UniformValueConstantFolder
    (2.11, 2.13).
    """
    import torch
    from torch._inductor.fx_passes import joint_graph
    from torch.utils._python_dispatch import TorchDispatchMode

    def on_cpu(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    class OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
            return func(*map(on_cpu, args), **named)

    folder: Any = joint_graph.UniformValueConstantFolder
    original = folder._deduce_value

    def deduce(self: Any, node: Any) -> Any:
        with OnCpu():  # type: ignore[no-untyped-call]
            return original(self, node)

    folder._deduce_value = deduce


@dataclasses.dataclass
class PaddingQuestions:
    """Matrix products that Inductor would have benchmarked to pad or not."""

    asked: list[str] = dataclasses.field(default_factory=list)


padding_questions = PaddingQuestions()


def _install_padding_answers() -> None:
    """Don't pad, instead of benchmarking on a device that isn't here.

    Source: torch/_inductor/fx_passes/pad_mm.py, get_cached_should_pad (2.11, 2.13).
    """
    from torch._inductor.fx_passes import pad_mm

    def answer(key: str) -> bool:
        padding_questions.asked.append(str(key))
        return False

    pad_mm.get_cached_should_pad = answer


def _install_no_repro() -> None:
    """Inductor prints small constants into a repro script, which reads the device.

    Source: torch/_dynamo/repro/after_aot.py, save_graph_repro (2.11, 2.13).
    """
    from torch._dynamo.repro import after_aot

    after_aot.save_graph_repro = lambda *args, **kwargs: None
