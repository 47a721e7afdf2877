"""Private Inductor names: the command line that compiles a CPU kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch._inductor.config
from torch._inductor import cpp_builder, cpu_vec_isa
from torch._inductor.cpp_builder import CppTorchDeviceOptions

# Every kernel includes it; compiled once per build it saves 4 s per kernel.
PREFIX_HEADER = "torch/csrc/inductor/cpp_prefix.h"

# Warnings and debug info are for torch's developers; debug info also holds paths.
_DROPPED = frozenset({"g1", "Wall", "pedantic", "shared"})


@dataclasses.dataclass(frozen=True)
class CppFlags:
    """Arguments for the C++ compiler.

    Attributes:
        compile: Flags that code generation and preprocessing need, in order.
        link: Flags for making the shared object.
        include_dirs: Header folders (also in `compile`).
    """

    compile: tuple[str, ...]
    link: tuple[str, ...]
    include_dirs: tuple[str, ...]


def kernel_flags(simd_width: int, march: str) -> CppFlags:
    """torch's own flags for a kernel, for one ISA level instead of this machine's.

    Args:
        simd_width: 256 (AVX2), 512 (AVX-512) or 0 (scalar).
        march: Value of ``-march``, e.g. ``x86-64-v3``.
    Source: torch/_inductor/cpp_builder.py, CppTorchDeviceOptions (2.11, 2.13). torch
    2.11 has no cpp.march and always writes ``-march=native``.
    """
    _decode_leniently()
    isa = {
        256: cpu_vec_isa.VecAVX2,
        512: cpu_vec_isa.VecAVX512,
        0: cpu_vec_isa.InvalidVecISA,
    }[simd_width]()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        options = CppTorchDeviceOptions(
            vec_isa=isa,
            device_type="cpu",
            extra_flags=(),
            include_pytorch=False,
            shared=True,
        )
    flags = [f"-D{name.strip()}" for name in options.get_definitions()]
    for flag in options.get_cflags():
        if flag.startswith("march="):
            flags.append(f"-march={march}")
        elif flag not in _DROPPED:
            flags.append(f"-{flag}")
    for group in options.get_passthrough_args():
        flags += group.split()
    include_dirs = tuple(options.get_include_dirs())
    flags += [f"-I{folder}" for folder in include_dirs]
    link = [f"-L{folder}" for folder in options.get_libraries_dirs()]
    # c10 is for runtime/calls.cpp; compiler/kernels.py links with --as-needed.
    link += [f"-l{name}" for name in (*options.get_libraries(), "c10")]
    link += [f"-{flag}" for flag in options.get_ldflags()]
    return CppFlags(tuple(flags), tuple(link), include_dirs)


def _decode_leniently() -> None:
    """Have torch read what a compiler says about itself in any encoding.

    Source: torch/_inductor/cpp_builder.py, SUBPROCESS_DECODE_ARGS (2.11, 2.13), empty
    on Linux: a banner that isn't UTF-8 would end the build with a UnicodeDecodeError.
    """
    builder: Any = cpp_builder
    builder.SUBPROCESS_DECODE_ARGS = ("utf-8", "replace")
