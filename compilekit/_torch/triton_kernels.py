"""Private Inductor and Triton names: what each Triton kernel needs to launch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from compilekit.artifact.canonical import sha256


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """One Triton kernel, its config chosen.

    Attributes:
        cubin: Machine code for the target.
        symbol: The kernel's name in the cubin.
        source: Its Triton source as Inductor wrote it.
        num_warps: Warps per block.
        shared: Dynamic shared memory, in bytes.
        arg_types: One letter per argument (``O`` pointer, ``i`` int32, ``l`` int64, …).
        scratch: Trailing null pointers that this Triton version's kernels take.
        parameters: Names of what a call passes, in order.
        arguments: Those of them that the cubin takes, in order.
        prefix: Assignments that the grid expressions use.
        grid: Expressions for the three grid sizes over the parameters.
        config: The chosen config: block sizes, warps, stages.
        candidates: How many configs Inductor would benchmark.
        registers: Per thread.
        tuned: True if a tuning file named the config.
    """

    cubin: bytes
    symbol: str
    source: str
    num_warps: int
    shared: int
    arg_types: str
    scratch: int
    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    prefix: tuple[str, ...]
    grid: tuple[str, str, str]
    config: dict[str, Any]
    candidates: int
    registers: int
    tuned: bool


class NotStaticError(Exception):
    """A kernel needs Triton's own launcher; the message says why."""


@contextlib.contextmanager
def kept_triton_kernels(
    into: dict[str, Any], tuned: Mapping[str, Mapping[str, Any]]
) -> Iterator[None]:
    """Keep every Triton kernel by the name output code gives it, for `kernel_facts`.

    Only one config is compiled: the tuned one, or else the first that fits; nothing
    here could choose another, nor the smaller one that Inductor would add for a kernel
    with many registers. A kernel that torch's static launcher can't launch is kept as
    the `NotStaticError` that says why.

    Args:
        into: Name in output code → autotuner.
        tuned: Digest of a kernel's source → its config.

    Source: torch/_inductor/runtime/triton_heuristics.py, CachingAutotuner.precompile
    and _dynamic_scale_rblock, StaticTritonCompileResult.can_statically_launch
    (2.11, 2.13).
    """
    from torch._inductor.runtime.triton_heuristics import (
        CachingAutotuner,
        CannotStaticallyLaunchKernel,
    )

    original = CachingAutotuner.precompile

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.inductor_meta["kernel_name"]
        into[name] = self
        configs = list(self.configs or ())
        if configs:
            self.compilekit_candidates = len(configs)
            winner = tuned.get(sha256(self.fn.src.encode()))
            if winner is not None:
                configs.insert(0, config_of(winner, configs[0]))
            self.compilekit_winner = configs[0] if winner is not None else None
        for number, config in enumerate(configs, 1):
            self.configs, self.compile_results, self.launchers = [config], [], []
            try:
                original(self, *args, **kwargs)
                return
            except CannotStaticallyLaunchKernel as exc:
                into[name] = NotStaticError(str(exc))
                return
            except RuntimeError:
                # It needs more than the device has: the next one, as on the device.
                if number == len(configs):
                    raise
        original(self, *args, **kwargs)

    with (
        mock.patch.object(CachingAutotuner, "precompile", keep),
        mock.patch.object(CachingAutotuner, "_dynamic_scale_rblock"),
    ):
        yield


def config_of(values: Mapping[str, Any], like: Any) -> Any:
    """A Triton config from plain values, and from another one for what they lack."""
    from triton import Config

    own = {name: values[name] for name in values if name in like.kwargs}
    return Config(
        {**like.kwargs, **own},
        num_warps=values["num_warps"],
        num_stages=values["num_stages"],
    )


def config_values(config: Any) -> dict[str, Any]:
    """A Triton config as plain values."""
    return {
        **config.kwargs,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def kernel_facts(kept: Any) -> TritonKernel:
    """Everything a launch needs, for the autotuner's first config that fits.

    The first is Inductor's own default; a tuning file may name another.

    Args:
        kept: From `kept_triton_kernels`.
    Raises:
        NotStaticError: the static launcher can't launch it.
    Source: torch/_inductor/runtime/triton_heuristics.py, StaticTritonCompileResult
    .make_launcher and CompileResult._get_arg_lists, GridExpr.from_meta (2.11, 2.13).
    """
    from torch._inductor.runtime.triton_heuristics import GridExpr

    if isinstance(kept, NotStaticError):
        raise kept
    # Configs that need more than the device has get no launcher.
    chosen = kept.launchers[0].config
    result = next(r for r in kept.compile_results if r.config is chosen)
    kernel = result.kernel
    _, parameters, none_arguments = result._get_arg_lists(
        kernel.arg_names, kernel.declared_constexprs
    )
    arguments = [
        name
        for index, name in enumerate(kernel.arg_names)
        if index not in kernel.full_constexprs and name not in none_arguments
    ]
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    return TritonKernel(
        cubin=kernel.cubin_raw or _stored_cubin(kernel),
        symbol=kernel.name,
        source=kept.fn.src,
        num_warps=kernel.num_warps,
        shared=kernel.shared,
        arg_types=kernel.arg_tys,
        scratch=int(kernel.has_global_scratch) + int(kernel.has_profile_scratch),
        parameters=tuple(name.partition("=")[0] for name in parameters),
        arguments=tuple(arguments),
        prefix=tuple(grid.prefix),
        grid=(str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)),
        config=config_values(result.config),
        candidates=kept.compilekit_candidates,
        registers=int(kernel.n_regs),
        tuned=chosen is kept.compilekit_winner,
    )


def _stored_cubin(kernel: Any) -> bytes:
    """A cubin from Triton's cache: a kernel drops its own once a device has loaded it.

    Source: torch/_inductor/runtime/triton_heuristics.py, StaticTritonCompileResult
    .reload_cubin_path (2.11, 2.13).
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    folder = Path(triton_cache_dir(0)) / triton_hash_to_path_key(kernel.hash)
    return (folder / f"{kernel.name}.cubin").read_bytes()
