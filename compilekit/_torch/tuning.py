"""Private Inductor names: tune kernels on the device, and read what won.

Nothing of this runs in a build: `tune` is for ``compilekit tune``, on a machine that
has the target's GPU. A build only takes the configs that came out of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._inductor.compile_fx import compile_fx

from compilekit._torch.capture import Capture
from compilekit._torch.lower import lowering
from compilekit._torch.triton_kernels import config_values
from compilekit.artifact.canonical import sha256


@dataclasses.dataclass(frozen=True)
class TunedKernel:
    """What a kernel's candidates came to on the device.

    Attributes:
        source: sha256 of its Triton source.
        config: The fastest: block sizes, ``num_warps``, ``num_stages``.
        default: The one that a build takes without a tuning file.
        milliseconds: Of the fastest.
        default_milliseconds: Of the default; the same where nothing was faster.
        measured: Configs that were measured; 0 = there was one, and no reason to.
    """

    source: str
    config: Mapping[str, Any]
    default: Mapping[str, Any]
    milliseconds: float
    default_milliseconds: float
    measured: int


def tune(
    capture: Capture,
    inputs: list[torch.Tensor],
    options: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]],
) -> list[TunedKernel]:
    """Compile a captured graph for the GPU that is here, run it, and tune its kernels.

    Args:
        capture: Of the call.
        inputs: Real tensors in the order of the graph's inputs; those that the graph
            writes are overwritten.
        options: Inductor options, as a build has them.
        known: Source digest → config that was found already; not measured again.
    Source: torch/_inductor/runtime/triton_heuristics.py, CachingAutotuner.run, bench
    and coordinate_descent_tuning (2.11, 2.13).
    """
    kernels: dict[str, Any] = {}
    times: dict[int, dict[str, float]] = {}
    with lowering(capture, options, simd_width=0), _measured(kernels, times, known):
        compiled: Any = compile_fx(capture.graph, list(capture.example_inputs))
        with torch.no_grad():
            compiled(*inputs)
            torch.cuda.synchronize()
    found = []
    for digest, autotuner in kernels.items():
        if digest in known or not autotuner.launchers:
            continue
        measured = times.get(id(autotuner), {})
        best = config_values(autotuner.launchers[0].config)
        default = config_values(autotuner.compilekit_default)
        fastest = min(measured.values(), default=0.0)
        found.append(
            TunedKernel(
                source=digest,
                config=best,
                default=default,
                milliseconds=measured.get(str(best), fastest),
                default_milliseconds=measured.get(str(default), fastest),
                measured=len(measured),
            )
        )
    return found


@contextlib.contextmanager
def _measured(
    kernels: dict[str, Any],
    times: dict[int, dict[str, float]],
    known: Mapping[str, Mapping[str, Any]],
) -> Iterator[None]:
    """Keep every autotuner by the digest of its source, and every time it takes."""
    from torch._inductor.runtime.hints import HeuristicType
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    autotuner: Any = CachingAutotuner
    precompile, bench = autotuner.precompile, autotuner.bench

    def configs(self: Any) -> list[Any]:
        """Compiled here from configs, or by a worker process to results."""
        return list(self.configs or [r.config for r in self.compile_results])

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        digest = sha256(self.fn.src.encode())
        if (
            self.heuristic_type is HeuristicType.USER_AUTOTUNE
            and len(configs(self)) < 2
        ):
            # A caller's own, with nothing to choose from. Its source is the same for
            # all the constants that it's compiled with, so it's no name for a config.
            precompile(self, *args, **kwargs)
            return
        if digest in known:
            # Any config would do: it only has to run. The first is measured no more.
            self.configs = (self.configs or ())[:1]
            self.compile_results = self.compile_results[:1]
        first = next(iter(configs(self)), None)
        if not hasattr(self, "compilekit_default") and first is not None:
            self.compilekit_default = first
            first.found_by_coordesc = digest in known
        precompile(self, *args, **kwargs)
        kernels.setdefault(digest, self)

    def timed(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> float:
        # Twice: a first time was seen that was six times what the kernel takes.
        milliseconds: float = min(
            bench(self, launcher, *args, **kwargs) for _ in range(2)
        )
        key = str(config_values(launcher.config))
        mine = times.setdefault(id(self), {})
        mine[key] = min(milliseconds, mine.get(key, milliseconds))
        return milliseconds

    with (
        mock.patch.object(CachingAutotuner, "precompile", keep),
        mock.patch.object(CachingAutotuner, "bench", timed),
    ):
        yield
