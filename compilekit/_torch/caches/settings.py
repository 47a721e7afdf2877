"""Settings that a build and a start make alike, for every thread of the process.

From torch 2.13 on an assignment to an option holds in the thread that made it: a server
that compiles in its worker threads would get other graphs and other keys.
"""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
from torch._inductor.runtime import cache_dir_utils
from torch.utils import _config_module


def set_option(
    patches: contextlib.ExitStack, module: Any, name: str, value: object
) -> None:
    """Set an option in this thread, and for threads that don't set it themselves.

    Args:
        patches: Closing it sets the option back.
        module: A config module, e.g. ``torch._inductor.config``.
    Source: torch/utils/_config_module.py, _ConfigEntry and ConfigModule.__getattr__
    (2.11, 2.13): what one kind of variable says goes before an override (2.13: of the
    thread), that before what the other kind says, and that before the default.
    """
    entry = module._config[name]
    patches.callback(setattr, module, name, getattr(module, name))
    unset = _config_module._UNSET_SENTINEL
    patches.enter_context(mock.patch.object(entry, "env_value_force", unset))
    patches.enter_context(mock.patch.object(entry, "env_value_default", value))
    setattr(module, name, value)


def compile_all_buckets_once(patches: contextlib.ExitStack, limit: int) -> None:
    """What build and start set alike, so that every bucket is compiled, and once.

    Shapes stay static (with automatic dynamic shapes the graphs depend on the order of
    calls); more buckets than Dynamo's limit are compiled all; every cache is on,
    whatever the environment says. What torch reads from the variable CI is set as
    without it (a custom operator whose outputs alias is warned of): an artifact is
    built in CI and served elsewhere.

    Args:
        limit: Variants of one function that Dynamo must allow.
    """
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    functorch = torch._functorch.config
    each = max(dynamo.recompile_limit, limit)
    for module, name, value in (
        (dynamo, "automatic_dynamic_shapes", False),
        (dynamo, "recompile_limit", each),
        (
            dynamo,
            "accumulated_recompile_limit",
            max(dynamo.accumulated_recompile_limit, 8 * limit),
        ),
        (inductor, "fx_graph_cache", True),
        (inductor, "fx_graph_remote_cache", False),
        (functorch, "enable_autograd_cache", True),
        (functorch, "enable_remote_autograd_cache", False),
        (torch.compiler.config, "force_disable_caches", False),
        # torch/_functorch/config.py (2.11, 2.13).
        (functorch, "error_on_custom_op_aliasing", False),
    ):
        set_option(patches, module, name, value)


# What caches for a GPU are built and looked up with, in place of torch's defaults.
# Triton shortens a long file name, and Inductor then doesn't find the machine code and
# takes Triton's own launcher, which every start compiles with gcc.
# Source: torch/_inductor/runtime/triton_heuristics.py, StaticTritonCompileResult
# .can_statically_launch (2.11, 2.13).
GPU_OPTIONS: Mapping[str, object] = {
    "triton.descriptive_names": False,
    "static_launch_user_defined_triton_kernels": True,
}


def pin_options(patches: contextlib.ExitStack, options: Mapping[str, object]) -> None:
    """Set options of Inductor's that a build and its starts must agree on."""
    for name, value in options.items():
        set_option(patches, torch._inductor.config, name, value)


def compile_in_process(patches: contextlib.ExitStack) -> Callable[[], None]:
    """Start none of torch's worker processes: complete caches need none.

    Returns:
        A function to call before something is compiled after all: it lets torch start
        them.
    Source: torch/_inductor/async_compile.py, maybe_warm_pool and
    AsyncCompile.use_process_pool (2.11, 2.13).
    """
    inductor = torch._inductor.config
    usual = inductor.compile_threads
    set_option(patches, inductor, "compile_threads", 1)

    def allow() -> None:
        if inductor.compile_threads != usual:
            set_option(patches, inductor, "compile_threads", usual)

    return allow


def name_user(patches: contextlib.ExitStack) -> None:
    """Let torch be imported by a user id without a name, as containers have.

    Source: torch/_inductor/runtime/cache_dir_utils.py, default_cache_dir, which
    codecache.py calls when it's imported (2.11; 2.13 takes the id).
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        named = SimpleNamespace(getuser=lambda: f"uid_{os.getuid()}")
        patches.enter_context(mock.patch.object(cache_dir_utils, "getpass", named))


def pin_compiler(patches: contextlib.ExitStack, value: list[Any]) -> None:
    """Make torch's keys name the compiler of the build instead of this machine's."""
    set_option(patches, torch._inductor.config, "cpp.cxx", tuple(value))
