"""Compiled C++ kernels, found by what they were compiled from instead of by a path.

torch's caches hold a kernel's source, never its shared object, and its own key for
one holds include paths and the compiler's banner: a start from caches calls g++ for
every kernel. Here a kernel's key is its source and every setting that shapes its code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.codecache
import torch._inductor.config

# Settings below inductor.cpp that end up on the compiler's command line.
# Source: torch/_inductor/cpp_builder.py, _get_optimization_cflags,
# _get_ffast_math_flags and get_cpp_torch_device_options; cpu_vec_isa.py, pick_vec_isa
# (2.11, 2.13; march: 2.13).
_FLAG_SETTINGS = (
    "march",
    "simdlen",
    "vec_isa_ok",
    "enable_floating_point_contract_flag",
    "enable_unsafe_math_opt_flag",
    "use_decompose_tanh",
    "dynamic_threads",
    "enable_kernel_profile",
    "inject_relu_bug_TESTING_ONLY",
    "inject_log1p_bug_TESTING_ONLY",
)
Loader = Callable[[], Any]


def capability() -> str:
    """The vector instructions that torch uses on this CPU, e.g. ``AVX512``.

    Inductor takes its own from the same source, and no cache key of torch holds it.
    """
    return str(torch.backends.cpu.get_cpu_capability())


def kernel_key(
    cls: Any,
    main_code: str,
    device_type: str,
    extra_flags: Sequence[str],
    optimized_code: str | None,
) -> str:
    """sha256 over a kernel's sources and the settings behind its command line."""
    cpp = torch._inductor.config.cpp
    flags = [(name, getattr(cpp, name, None)) for name in _FLAG_SETTINGS]
    parts = (
        cls.__name__,
        main_code,
        device_type,
        tuple(extra_flags),
        optimized_code,
        flags,
        capability(),
        torch.__version__.partition("+")[0],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def record(patches: contextlib.ExitStack, directory: Path) -> None:
    """From now on, copy every compiled kernel to ``directory/KEY.so``.

    A kernel that lies there already is loaded from there instead of compiled.
    """
    directory.mkdir(parents=True, exist_ok=True)

    def wrap(cls: Any, key: str, compile_: Callable[[], Loader]) -> Loader:
        kept = directory / f"{key}.so"
        if os.path.exists(kept):
            return _loader(cls, kept, key)
        loader = compile_()

        def load() -> Any:
            library = loader()
            # A CPython module has __file__, a ctypes library has _name.
            built = Path(getattr(library, "__file__", None) or library._name)
            if not os.path.exists(kept):
                partial = kept.with_suffix(".partial")
                shutil.copyfile(built, partial)
                partial.replace(kept)
            return library

        return load

    _wrap_load_async(patches, wrap)


def serve(
    patches: contextlib.ExitStack,
    known: Mapping[str, Path],
    on_build: Callable[[str], None],
) -> None:
    """From now on, load known kernels; tell `on_build` before any other is compiled."""

    def wrap(cls: Any, key: str, compile_: Callable[[], Loader]) -> Loader:
        if key in known:
            return _loader(cls, known[key], key)
        on_build(key)
        return compile_()

    _wrap_load_async(patches, wrap)


def _loader(cls: Any, path: Path, key: str) -> Loader:
    @functools.cache
    def load() -> Any:
        return cls._load_library(str(path), key)

    return load


def _wrap_load_async(
    patches: contextlib.ExitStack,
    wrap: Callable[[Any, str, Callable[[], Loader]], Loader],
) -> None:
    """Put `wrap` around what compiles and loads a C++ kernel.

    Source: torch/_inductor/codecache.py, CppCodeCache.load_async (2.11, 2.13; 2.13 adds
    needs_vec_isa and kernel_needs_vec_isa).
    """
    cache = torch._inductor.codecache.CppCodeCache
    original: Any = cache.load_async.__func__  # type: ignore[attr-defined]

    def load_async(
        cls: Any,
        /,
        main_code: str,
        device_type: str = "cpu",
        submit_fn: Any = None,
        extra_flags: Sequence[str] = (),
        optimized_code: str | None = None,
        **other: Any,
    ) -> Loader:
        key = kernel_key(cls, main_code, device_type, extra_flags, optimized_code)

        def compile_() -> Loader:
            loader: Loader = original(
                cls,
                main_code,
                device_type,
                submit_fn=submit_fn,
                extra_flags=extra_flags,
                optimized_code=optimized_code,
                **other,
            )
            return loader

        return wrap(cls, key, compile_)

    patches.enter_context(
        mock.patch.object(cache, "load_async", classmethod(load_async))
    )
