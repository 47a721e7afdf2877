"""Load a program: host code from bytecode, kernels as extension modules."""

from __future__ import annotations

import importlib.util
import marshal
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch

from compilekit._torch.runtime import (
    POINTER_VARIABLE,
    output_code_names,
    tensor_pointer_address,
)
from compilekit.artifact import Artifact
from compilekit.artifact.program import Constant, Entry, Program
from compilekit.errors import AttachError
from compilekit.runtime.cuda import kernel_launcher
from compilekit.runtime.kernelfile import kernel_file

Call = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
Kernel = Callable[..., Any]


class Native(NamedTuple):
    """C++ for what a call does besides its program (calls.cpp).

    Attributes:
        changed: Takes the address of a table of words; True if one isn't what it says.
        call: Takes a table, what it refers to and the arguments of a call: runs it.
    """

    changed: Callable[[int], bool]
    call: Callable[[bytes, tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any]


# How runtime/words.py and exact.py write tables; calls.cpp says what it reads.
_TABLES = 2
_CPU = torch.device("cpu")

# By digest, constants by device too: programs, buckets and artifacts share them. An
# extension module can't be unloaded, so kernels stay; constants go with the last
# program that uses them.
_kernels: dict[str, Kernel] = {}
_natives: dict[str, Native | None] = {}
_constants: weakref.WeakValueDictionary[str, torch.Tensor] = (
    weakref.WeakValueDictionary()
)
_lock = threading.Lock()


def load_kernels(artifact: Artifact, program: Program, device: torch.device) -> None:
    """Load a program's kernels, for whoever loads the program later.

    Raises:
        AttachError: a kernel can't be loaded.
    """
    with _lock:
        _kernel_names(artifact, program, device)


def load_program(
    artifact: Artifact, program: Program, device: torch.device = _CPU
) -> Call:
    """The ``call`` function of a program, its kernels loaded on a device.

    Raises:
        AttachError: a kernel can't be loaded.
        DigestError: a constant's file has changed since the artifact was opened.
    """
    names = output_code_names(device.type)
    if device.type == "cuda":
        names["device_index"] = device.index
    with _lock:
        names.update(_kernel_names(artifact, program, device))
        for name, constant in program.constants.items():
            names[name] = _constant(artifact, constant, device)
    place = f"programs/{program.target}/{program.entry}/{program.bucket}"
    exec(_host_code(artifact, place), names)
    call: Call = names["call"]
    return call


def load_native(artifact: Artifact, entry: Entry) -> Native | None:
    """What an entry brings for its calls; None = nothing that reads our tables.

    Raises:
        AttachError: it can't be loaded.
    """
    if entry.native is None:
        return None
    digest = entry.native.digest
    with _lock:
        if digest not in _natives:
            module = _load(artifact, digest, "tables", "changed", "call")
            native = Native(module.changed, module.call)
            _natives[digest] = native if module.tables == _TABLES else None
    return _natives[digest]


def _kernel_names(
    artifact: Artifact, program: Program, device: torch.device
) -> dict[str, Kernel]:
    """Name in the host code → loaded kernel."""
    if device.type == "cuda":
        return {
            name: kernel_launcher(artifact, kernel, device.index)
            for name, kernel in program.kernels.items()
        }
    kernels = {name: kernel.digest for name, kernel in program.kernels.items()}
    _load_kernels(artifact, kernels.values())
    return {name: _kernels[digest] for name, digest in kernels.items()}


def lazy_program(
    artifact: Artifact, program: Program, device: torch.device = _CPU
) -> Call:
    """The same, loaded by its first call, which raises what loading raises.

    Two threads that come at once may both load it: kernels are shared, and the second
    result is dropped.
    """
    loaded: list[Call] = []

    def call(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if not loaded:
            loaded.append(load_program(artifact, program, device))
        return loaded[0](inputs)

    return call


def _host_code(artifact: Artifact, place: str) -> CodeType:
    """Bytecode from ``call.pyc`` if it belongs to this Python and to ``call.py``.

    Parsing takes 16 ms for 24 layers, bytecode 0.2 ms.
    """
    source = artifact.read(f"{place}/call.py")
    compiled = artifact.read(f"{place}/call.pyc")
    header = importlib.util.MAGIC_NUMBER + (0b11).to_bytes(4, "little")
    if compiled[:16] == header + importlib.util.source_hash(source):
        code: CodeType = marshal.loads(compiled[16:])
        return code
    return compile(source, f"{place}/call.py", "exec", dont_inherit=True)


def _load_kernels(artifact: Artifact, digests: Iterable[str]) -> None:
    """Load what isn't loaded yet; each digest is loaded once per process."""
    missing = [digest for digest in dict.fromkeys(digests) if digest not in _kernels]
    if missing:
        with _pointer_variable():
            for digest in missing:
                _kernels[digest] = _load(artifact, digest, "kernel").kernel


@contextmanager
def _pointer_variable() -> Iterator[None]:
    """Set what a kernel's module init reads; it isn't needed afterwards."""
    previous = os.environ.get(POINTER_VARIABLE)
    os.environ[POINTER_VARIABLE] = str(tensor_pointer_address())
    try:
        yield
    finally:
        if previous is None:
            del os.environ[POINTER_VARIABLE]
        else:
            os.environ[POINTER_VARIABLE] = previous


def _load(artifact: Artifact, digest: str, *names: str) -> ModuleType:
    """A kernel's module, in which there are some names."""
    # The part after the last dot picks the init function, PyInit_kernel.
    name = f"compilekit.kernels.{digest}.kernel"
    with kernel_file(artifact, f"kernels/{digest}.so") as path:
        loader = ExtensionFileLoader(name, path)
        spec = ModuleSpec(name, loader, origin=path)
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            for each in names:
                getattr(module, each)
        except (ImportError, AttributeError) as exc:
            raise AttachError(
                f"kernel {artifact.path(f'kernels/{digest}.so')} can't be loaded:"
                f" {exc}",
                hint="`compilekit doctor` looks for what this machine lacks.",
                kernel=digest,
            ) from exc
    return module


def _constant(
    artifact: Artifact, constant: Constant, device: torch.device
) -> torch.Tensor:
    place = f"{constant} {device}"
    tensor: torch.Tensor | None = _constants.get(place)
    if tensor is None:
        from safetensors.torch import load

        data = artifact.read(f"constants/{constant.digest}.safetensors")
        tensor = load(data)[constant.key].to(device)
        order = constant.order
        if order:
            tensor = tensor.permute([order.index(d) for d in range(len(order))])
        _constants[place] = tensor
    return tensor
