"""Cache keys of Triton kernels, with everything that went into them.

Only what Triton itself compiles or launches has one: a kernel in a stored graph that
Inductor launches by its machine code is never looked up.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from torch._inductor.runtime import triton_compat
from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

from compilekit._torch.caches.keys import Component, Key

KIND = "Triton"


def assembler(architecture: int) -> str:
    """What Triton's assembler says of its version, which is part of every key.

    Source: triton/backends/nvidia/compiler.py, get_ptxas_version (3.6).
    """
    return str(_nvidia().get_ptxas_version(architecture))


def assume_assembler(patches: contextlib.ExitStack, version: str) -> None:
    """From now on Triton doesn't start its assembler to ask for its version.

    Args:
        version: That of the build, whose machine code there is.
    """
    patches.enter_context(
        mock.patch.object(_nvidia(), "get_ptxas_version", return_value=version)
    )


def _nvidia() -> Any:
    """Triton's compiler for NVIDIA GPUs; torch's CUDA wheel brings Triton along."""
    return triton_compat.triton.backends.nvidia.compiler


def watch(
    patches: contextlib.ExitStack,
    wanted: Callable[[str, str], bool],
    on_key: Callable[[Key], None],
) -> None:
    """From now on, pass every key of this process that is `wanted` to `on_key`.

    Args:
        patches: Closing it ends this.
        wanted: Called with kind and key.
    Source: triton/runtime/cache.py, get_cache_key, which triton/compiler/compiler.py
    calls before it looks for a kernel (3.6); a kernel's folder is named by the key.
    """
    compiler: Any = triton_compat.triton.compiler.compiler
    get_cache_key = compiler.get_cache_key

    def made(src: Any, backend: Any, options: Any, env_vars: Any) -> Any:
        text = get_cache_key(src, backend, options, env_vars)
        hashed = hashlib.sha256(text.encode()).hexdigest()
        key = str(triton_hash_to_path_key(hashed))
        if wanted(KIND, key):
            on_key(Key(KIND, key, _components(src, backend, options, env_vars), ()))
        return text

    patches.enter_context(mock.patch.object(compiler, "get_cache_key", made))


def _components(
    src: Any, backend: Any, options: Any, env_vars: Any
) -> dict[str, Component]:
    """The parts of a key: source, compiler, options, variables."""
    function = getattr(src, "fn", None)
    parts = {
        **{f"option {name}": value for name, value in vars(options).items()},
        **{f"variable {name}": value for name, value in env_vars.items()},
        **{name: getattr(src, name, "") for name in ("name", "signature", "attrs")},
        "constants": getattr(src, "constants", ""),
        "assembler": backend.hash(),
        "triton": hashlib.sha256(triton_compat.triton_key().encode()).hexdigest(),
    }
    found = {name: Component("", str(value)) for name, value in parts.items()}
    # A library counts by its contents, wherever it lies.
    libraries = [
        f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
        for name, path in getattr(options, "extern_libs", ())
    ]
    found["option extern_libs"] = Component("", ", ".join(libraries))
    if function is not None:
        found["source"] = Component(str(function.cache_key), function.src)
    return found
