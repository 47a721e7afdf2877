"""Private torch names that running a program needs.

Everything here exists after plain ``import torch``: importing this module adds nothing
to ``sys.modules``. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

T = TypeVar("T")

# Its type stubs lack most of what output code uses.
_guards: Any = torch._C._dynamo.guards


def tensor_pointer_address() -> int:
    """Address of the C function that a CPU kernel calls to get a tensor's data.

    Source: torch/_inductor/codecache.py, CppPythonBindingsCodeCache (2.11, 2.13); the
    kernel's module init reads it from an environment variable.
    """
    return int(_guards._torchinductor_pyobject_tensor_data_ptr)


POINTER_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


def output_code_names(device: str = "cpu") -> dict[str, Any]:
    """The host-side names that Inductor's output code uses, from bare torch.

    Source: torch/_inductor/codegen/wrapper.py, PythonWrapperCodegen.write_header
    (2.11, 2.13), less what imports Inductor.
    """
    on_device = {}
    if device == "cuda":
        on_device = {
            "empty_strided_cuda": _guards._empty_strided_cuda,
            "get_raw_stream": torch._C._cuda_getCurrentRawStream,
        }
    return {
        **on_device,
        "torch": torch,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "_quantized": torch.ops._quantized,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "inf": float("inf"),
        "nan": float("nan"),
        "nanj": complex(0, float("nan")),
        "assert_size_stride": _guards.assert_size_stride,
        "assert_alignment": _guards.assert_alignment,
        "empty_strided_cpu": _guards._empty_strided_cpu,
        "reinterpret_tensor": _guards._reinterpret_tensor,
        "alloc_from_pool": torch.ops.inductor._alloc_from_pool,
        "extern_kernels": _extern_kernels(),
    }


@functools.cache
def _extern_kernels() -> SimpleNamespace:
    """The members of Inductor's ``extern_kernels`` that aren't Python inside Inductor.

    Source: every ExternKernelChoice in torch/_inductor (2.11, 2.12, 2.13).
    ``bias_addmm`` and ``conv1x1_via_mm`` are Python there (kernel/mm_common.py,
    kernel/conv.py), so the runtime brings its own.
    """
    return SimpleNamespace(
        mm=torch.mm,
        addmm=torch.addmm,
        bmm=torch.bmm,
        baddbmm=torch.baddbmm,
        convolution=torch.convolution,
        mm_dtype=torch.mm,
        bmm_dtype=torch.bmm,
        _int_mm=torch._int_mm,
        _scaled_mm=torch._scaled_mm,
        _grouped_mm=torch._grouped_mm,
        _scaled_grouped_mm=torch._scaled_grouped_mm,
        _sparse_semi_structured_mm=torch._sparse_semi_structured_mm,
        _weight_int8pack_mm=torch._weight_int8pack_mm,
        _mm_plus_mm=torch.ops.inductor._mm_plus_mm,
        bias_addmm=_bias_addmm,
        conv1x1_via_mm=_conv1x1_via_mm,
    )


def extern_kernel_names() -> frozenset[str]:
    """Names that `output_code_names` offers below ``extern_kernels``."""
    return frozenset(vars(_extern_kernels()))


def _bias_addmm(
    inp: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> torch.Tensor:
    # A bias expanded over rows is passed as the row itself, which lets cuBLAS fuse it.
    if inp.stride(0) == 0 and inp.size(0) != 1:
        inp = inp[0]
    return torch.addmm(inp, mat1, mat2, out=out, alpha=alpha, beta=beta)


def _conv1x1_via_mm(
    x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    w = torch.squeeze(torch.squeeze(w, -1), -1)
    return torch.matmul(
        x.permute(0, 2, 3, 1), w.permute(1, 0), out=out.permute(0, 2, 3, 1)
    )


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """One C++ check of many tensors: type, dtype, device, shape, stride, dispatch keys.

    Dispatch keys depend on inference mode, so a guard holds for the mode it was made
    in. About 0.08 µs per tensor.

    Source: torch/csrc/dynamo/guards.cpp, TensorGuards (2.11, 2.13): None stands for
    every size and stride as it is now (a list of None would leave them all open).
    """
    guard = _guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    check: Callable[..., bool] = guard.check
    return check


_keys = torch._C.DispatchKey
_PLAIN = {
    device: functools.reduce(operator.or_, map(torch._C.DispatchKeySet, keys))
    for device, keys in {
        "cpu": (_keys.CPU, _keys.ADInplaceOrView, _keys.AutogradCPU, _keys.AutocastCPU),
        "cuda": (
            *(_keys.CUDA, _keys.ADInplaceOrView, _keys.AutogradCUDA),
            _keys.AutocastCUDA,
        ),
    }.items()
}
_PLAIN_BITS = {device: keys.raw_repr() for device, keys in _PLAIN.items()}
_dispatch_keys = torch._C._dispatch_keys


def is_plain(tensor: torch.Tensor, device: str = "cpu") -> bool:
    """True for a dense tensor on a device whose memory holds what it stands for.

    False for a lazy conjugate or negative, a functorch wrapper, a nested, sparse or
    fake tensor, a subclass with behaviour: a kernel would read their memory as it is.
    About 0.5 µs.

    Source: c10/core/DispatchKeySet.h (2.11, 2.13): another backend, functionality or
    wrapper adds a bit.
    """
    keys = _dispatch_keys(tensor) | _PLAIN[device]
    return bool(keys.raw_repr() == _PLAIN_BITS[device])


def dispatch_keys(tensor: torch.Tensor) -> int:
    """A tensor's dispatch keys as torch keeps them, whatever mode it is asked in.

    Source: torch/csrc/utils/python_dispatch.cpp, _dispatch_keys (2.11, 2.13).
    """
    return int(_dispatch_keys(tensor).raw_repr())


# torch.are_deterministic_algorithms_enabled, less a call: each is asked at every call.
# Source: torch/__init__.py, are_deterministic_algorithms_enabled (2.11, 2.13).
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


def is_tracing() -> bool:
    """True where operators are recorded or made up: a kernel would go unseen.

    That is inside ``torch.jit.trace``, ``make_fx``, ``torch.export`` and
    ``FakeTensorMode``.

    Source: torch/jit/_trace.py, is_tracing; torch/utils/_python_dispatch.py,
    TorchDispatchMode.__enter__, and torch/_C/__init__.pyi.in, _TorchDispatchModeKey
    (2.11, 2.13).
    """
    return torch._C._get_tracing_state() is not None or any(
        torch._C._get_dispatch_mode(key) is not None for key in _RECORDING
    )


# How many modes look at every operator of this thread; most such calls have none.
# Source: torch/utils/_python_dispatch.py, _len_torch_dispatch_stack (2.11, 2.13).
count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

_RECORDING = torch._C._TorchDispatchModeKey.__members__.values()


# Where torch keeps forward-mode AD's level, its name there, and what it is while none
# is open. A dual tensor has the class, keys and flags of any other.
# Source: torch/autograd/forward_ad.py, enter_dual_level (2.11, 2.12, 2.13).
DUAL_LEVEL: tuple[dict[str, Any], str, int] = (vars(forward_ad), "_current_level", -1)


def in_dual_level() -> bool:
    """True while some thread is inside ``torch.autograd.forward_ad.dual_level``."""
    levels, name, none = DUAL_LEVEL
    return bool(levels[name] != none)


def has_tangent(tensor: torch.Tensor) -> bool:
    """True if forward-mode AD follows a tensor; only inside a dual level."""
    unpack: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual
    return unpack(tensor).tangent is not None


def in_plain_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, where no mode of the caller's is on."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@functools.cache
def thread_keys() -> tuple[tuple[int, int], tuple[int, int]]:
    """Dispatch keys that a thread adds and leaves out, if nothing special is on.

    Autocast, a trace, a mode or a transform of torch.func each change them; gradients
    don't.

    Returns:
        (added, left out) outside and inside inference mode, as words.
    Source: c10/core/impl/LocalDispatchKeySet.h, PODLocalDispatchKeySet;
    torch/csrc/utils/python_dispatch.cpp, _dispatch_tls_local_include_set (2.11, 2.12,
    2.13).
    """

    def inside(inference: bool) -> tuple[int, int]:
        with torch.inference_mode(inference):
            return (
                _signed(torch._C._dispatch_tls_local_include_set().raw_repr()),
                _signed(torch._C._dispatch_tls_local_exclude_set().raw_repr()),
            )

    return in_plain_thread(lambda: (inside(False), inside(True)))


def _signed(word: int) -> int:
    """The 64 bits of an unsigned number as a signed one."""
    return word - (1 << 64) if word >> 63 else word


def registries(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps its parameters, buffers and submodules.

    Source: torch/nn/modules/module.py, Module.__init__ (2.11, 2.13).
    """
    return module._parameters, module._buffers, module._modules


def forward_hooks(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """A module's hooks around its forward.

    Source: torch/nn/modules/module.py, Module._call_impl (2.11, 2.13).
    """
    return module._forward_hooks, module._forward_pre_hooks


def global_forward_hooks() -> tuple[dict[int, Any], ...]:
    """Hooks around the forward of every module of the process.

    Source: torch/nn/modules/module.py, Module._call_impl (2.11, 2.13).
    """
    nn = torch.nn.modules.module
    return nn._global_forward_hooks, nn._global_forward_pre_hooks


# Every hook has one, and each that is made writes a number into this class.
# Source: torch/utils/hooks.py, RemovableHandle.__init__ (2.11, 2.12, 2.13).
HookHandle: type = torch.utils.hooks.RemovableHandle


def compiled_frames() -> int:
    """Frames that torch.compile took up in this process so far.

    Source: torch/_dynamo/utils.py, counters (2.11, 2.13). A process that never imported
    it took up none.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["total"]) if dynamo is not None else 0


def untraceable(function: Callable[..., Any], why: str) -> None:
    """Make Dynamo call a function as it is instead of looking into it.

    ``torch.compiler.disable`` would do it too, and imports Dynamo.

    Source: torch/_dynamo/decorators.py, disable (what a traced caller looks at), and
    eval_frame.py, skip_code (what holds for the function's own frame) (2.11, 2.13).
    """
    if isinstance(function, FunctionType):
        function.__dict__.update(
            _torchdynamo_disable=True, _torchdynamo_disable_msg=why
        )
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(
            function.__code__, frames._FrameExecStrategy(skip, skip)
        )


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors look into one storage (works for fake tensors too).

    Source: torch/storage.py, UntypedStorage._cdata (2.11, 2.13).
    """
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same shape and strides, expanded dimensions included.

    Source: torch/_inductor/compile_fx.py, clone_preserve_strides (2.11, 2.13).
    """
    sizes = zip(tensor.size(), tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in sizes)
    if tensor.numel() == 0:
        return tensor.clone()
    flat = tensor.as_strided((reach,), (1,)).clone()
    return flat.as_strided(tensor.size(), tensor.stride())


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its dimensions as they follow each other in memory; None if it has gaps or folds.

    ``tensor.permute(order)`` is contiguous.
    """
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: -strides[d]))
    return order if tensor.permute(order).is_contiguous() else None


def write_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written in place; none may be an inference tensor.

    Source: torch/csrc/autograd/python_variable.cpp, _version (2.11, 2.13).
    """
    return [tensor._version for tensor in tensors]


def load_cubin(path: str, symbol: str, shared: int, index: int) -> int:
    """Load a kernel onto a device; the driver's handle of its function.

    Source: torch/csrc/inductor/static_launcher/cuda.cpp, load_kernel. It returns
    (function, registers, spills) in 2.11 and (module, function, registers, spills) in
    2.13.
    """
    loaded = torch._C._StaticCudaLauncher._load_kernel(path, symbol, shared, index)
    return int(loaded[-3])


def cubin_launcher() -> Callable[..., None]:
    """The C function that launches a loaded function: (function, grid x, y, z, warps,
    shared bytes, argument types, arguments, stream).

    Source: torch/csrc/inductor/static_launcher/cuda.cpp, launch_kernel (2.11, 2.13); a
    CPU build of torch doesn't have it.
    """
    launch: Callable[..., None] = torch._C._StaticCudaLauncher._launch_kernel
    return launch


def operator_schema(packet: Any) -> str:
    """Schemas of all overloads of an operator, sorted.

    Source: torch/_ops.py, OpOverload._schema (2.11, 2.13).
    """
    schemas = [str(getattr(packet, name)._schema) for name in packet.overloads()]
    return "; ".join(sorted(schemas))
