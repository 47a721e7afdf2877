"""What the caches of this process depend on and no hash of torch states in words."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from compilekit._torch.caches.kernels import capability
from compilekit.targets import cpu_flags

# Features that g++ -march=native compiles for, of those that differ between servers.
_COMPILED_FOR = frozenset(
    {
        *("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "adx", "sha_ni"),
        *("vaes", "vpclmulqdq", "gfni", "avx_vnni", "sse4a", "clzero"),
        *("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma"),
        *("avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg"),
        *("avx512_vpopcntdq", "avx512_bf16", "avx512_fp16", "avx512_vp2intersect"),
        *("amx_tile", "amx_int8", "amx_bf16"),
    }
)


def here(options: Mapping[str, object]) -> dict[str, Any]:
    """Factor → value on this machine, in this process.

    Args:
        options: Those of Inductor's that the build sets and a start must set alike;
            none for a CPU's caches.
    Source: torch/_inductor/codecache.py, FxGraphHashDetails (num_threads: 2.13);
    torch/_dynamo/package.py, SystemInfo.check_compatibility, which asks for the same
    torch build and the same Python patch release (2.11, 2.13).
    """
    cxx: Any = torch._inductor.config.cpp.cxx
    gpu = assembler = ""
    if options:
        from compilekit._torch.caches import triton_keys

        major, minor = torch.cuda.get_device_capability()
        gpu = torch.cuda.get_device_name()
        assembler = triton_keys.assembler(major * 10 + minor)
    return {
        "cache.assembler": assembler,
        "cache.compiler": list(cxx) if isinstance(cxx, tuple) else [cxx],
        "cache.cpu_capability": capability(),
        "cache.cpu_flags": sorted(cpu_flags() & _COMPILED_FOR),
        "cache.gpu": gpu,
        "cache.options": dict(options),
        "cache.python": platform.python_version(),
        "cache.threads": torch.get_num_threads(),
        "cache.torch": torch.__version__,
    }


def default_directory() -> str:
    """The cache directory that torch takes when nobody names one.

    Source: torch/_inductor/runtime/cache_dir_utils.py, default_cache_dir (2.11, 2.13).
    """
    return str(default_cache_dir())
