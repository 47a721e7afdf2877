"""What Python asks about a GPU that isn't here: one function per question.

PyTorch's C++ asks the stub runtime. What is left are questions that Triton asks its
driver, and work that Inductor would do on the device. Each function below answers one
of them; `EMULATED` is all of it, `MEASURED` what a build leaves out on a host that has
the device too, because its answer would depend on a measurement.

Lifecycle: once per worker process, before anything is compiled. Nothing is undone.
"""

from __future__ import annotations

import inspect
import subprocess
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from compilekit.errors import HarvestError
from compilekit.targets import Target

Hook = Callable[[Target], None]


def replace(owner: Any, name: str, parameters: tuple[str, ...], new: Any) -> Any:
    """Replace a function of torch that must still be the one that is known.

    Args:
        parameters: The names of its first parameters.
    Returns:
        The original.
    Raises:
        HarvestError: torch has no such function, or it takes something else.
    """
    original = getattr(owner, name, None)
    found = tuple(inspect.signature(original).parameters) if original else None
    if found is None or found[: len(parameters)] != parameters:
        here = "nothing of that name" if found is None else f"({', '.join(found)})"
        raise HarvestError(
            f"torch {torch.__version__} has another {owner.__name__}.{name} than the"
            f" one that is emulated: expected ({', '.join(parameters)}), found {here}",
            hint="Use a torch that this compilekit supports: see `compilekit doctor`.",
        )
    setattr(owner, name, new)
    return original


def answer_triton(target: Target) -> None:
    """Give Triton a driver that names the target's limits.

    Its own would compile a helper with gcc and ask libcuda. Which device it is, and its
    architecture, it asks torch, which asks the stub runtime.

    Source: triton/backends/nvidia/driver.py, CudaDriver and CudaUtils (3.6);
    triton/backends/driver.py, GPUDriver.
    """
    import triton
    from triton.backends.driver import GPUDriver
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

    class EmulatedDriver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            GPUDriver.__init__(self)
            self.utils = SimpleNamespace(get_device_properties=lambda index: properties)

    triton.runtime.driver.set_active(EmulatedDriver())


def read_registers(target: Target) -> None:
    """Take a kernel's registers from its cubin, and load nothing.

    Inductor scales reductions by them, and drops configs that need more shared memory
    than there is, as it does on the device.

    Source: torch/_inductor/runtime/static_triton_launcher.py, load_kernel (2.11, 2.13);
    torch/_inductor/runtime/triton_heuristics.py, _dynamic_scale_rblock (2.11),
    _iter_rblock_scale_candidates (2.13).
    """
    from torch._inductor.runtime import static_triton_launcher
    from torch._inductor.runtime.triton_compat import OutOfResources

    limit = int(target.device["shared_memory_per_block_optin"])

    def load_kernel(self: Any, device: int) -> None:
        if self.shared > limit:
            raise OutOfResources(self.shared, limit, "shared memory")
        if getattr(self, "n_regs", None) is None:
            self.n_regs = register_count(self.cubin_raw)
            self.n_spills = 0

    kernel = static_triton_launcher.StaticallyLaunchedTritonKernel
    replace(kernel, "load_kernel", ("self", "device"), load_kernel)


def leave_unloaded(target: Target) -> None:
    """Load nothing that only Triton's own launcher can launch.

    A program refuses such a kernel (`compilekit._torch.triton_kernels`); restored
    caches hold it, and Triton loads it on the device.

    Source: torch/_inductor/runtime/triton_heuristics.py, TritonCompileResult
    .make_launcher (2.11, 2.13).
    """
    from torch._inductor.runtime.triton_heuristics import TritonCompileResult

    def make_launcher(self: Any) -> Any:
        return SimpleNamespace(config=self.config, n_regs=0, n_spills=0, shared=0)

    replace(TritonCompileResult, "make_launcher", ("self",), make_launcher)


def fold_on_cpu(target: Target) -> None:
    """Inductor folds uniform constants by running them: run them on the CPU.

    Source: torch/_inductor/fx_passes/joint_graph.py, UniformValueConstantFolder
    (2.11, 2.13).
    """
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

    def deduce(self: Any, node: Any) -> Any:
        with OnCpu():  # type: ignore[no-untyped-call]
            return original(self, node)

    folder = joint_graph.UniformValueConstantFolder
    original = replace(folder, "_deduce_value", ("self", "node"), deduce)


def print_no_values(target: Target) -> None:
    """Write no repro script: Inductor prints a graph's small constants into it.

    Source: torch/_dynamo/repro/after_aot.py, save_graph_repro (2.11, 2.13).
    """
    from torch._dynamo.repro import after_aot

    replace(
        after_aot,
        "save_graph_repro",
        ("fd", "gm", "args", "compiler_name"),
        lambda *args, **kwargs: None,
    )


def never_pad(target: Target) -> None:
    """Pad no matrix product: whether it pays is a measurement.

    Source: torch/_inductor/fx_passes/pad_mm.py, get_cached_should_pad (2.11, 2.13).
    """
    from torch._inductor.fx_passes import pad_mm

    replace(pad_mm, "get_cached_should_pad", ("key",), lambda key: False)


MEASURED: tuple[Hook, ...] = (never_pad,)
EMULATED: tuple[Hook, ...] = (
    answer_triton,
    read_registers,
    leave_unloaded,
    fold_on_cpu,
    print_no_values,
    *MEASURED,
)


def register_count(cubin: bytes) -> int:
    """Registers per thread that a cubin's kernel uses.

    Source: the CUDA toolkit's ``cuobjdump -res-usage``, which comes with Triton.
    """
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
    _, found, rest = done.stdout.partition("REG:")
    if not found:
        raise HarvestError(f"cuobjdump says nothing about registers: {done.stdout}")
    return int(rest.split(maxsplit=1)[0])
