"""Compare a cache with this machine and this process: every mismatch at once."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from compilekit import targets
from compilekit.artifact.cache import Cache
from compilekit.errors import Mismatch


def cache_mismatches(cache: Cache) -> list[Mismatch]:
    """Factors of the cache route that differ here.

    What refuses would run wrong code or die; what only makes keys miss is a warning,
    and each miss says by itself what differs.
    """
    factors = cache.factors
    # Without C++ kernels (a GPU's caches) nothing depends on the CPU that compiled.
    found = _cpu(factors) if cache.kernels else []
    found += _versions(factors)
    found += rank_mismatches(cache.layout)
    if factors["cache.threads"] != torch.get_num_threads():
        found.append(
            Mismatch(
                "cache.threads",
                str(factors["cache.threads"]),
                str(torch.get_num_threads()),
                "warn",
                "Graphs compiled for another thread count are compiled again.",
                "Set [compile] threads and OMP_NUM_THREADS alike.",
            )
        )
    return found


def rank_mismatches(layout: Mapping[str, Any]) -> list[Mismatch]:
    """One rank's caches in the process of another, or of none.

    Caches of a process that was alone fit any: a job of several may well run copies.
    """
    if not layout:
        return []
    built = f"{layout['rank']} of {layout['world_size']}"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        here = f"{distributed.get_rank()} of {distributed.get_world_size()}"
    else:
        # What torchrun says before the process has joined.
        known = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
        here = " of ".join(known) if all(known) else "none"
    if here == built:
        return []
    return [
        Mismatch(
            "cache.rank",
            built,
            here,
            "refuse",
            "The code is that of one rank: its part of the model, its peers.",
            "Restore each rank from the artifact that was built as that rank.",
        )
    ]


def _cpu(factors: Any) -> list[Mismatch]:
    found = []
    capability = torch.backends.cpu.get_cpu_capability()
    if factors["cache.cpu_capability"] != capability:
        found.append(
            Mismatch(
                "cache.cpu_capability",
                str(factors["cache.cpu_capability"]),
                capability,
                "refuse",
                "Code for one vector width gives wrong numbers when it's compiled for"
                " another, and torch's keys don't hold it.",
                "Build on such a machine, and unset ATEN_CPU_CAPABILITY.",
            )
        )
    missing = sorted(set(factors["cache.cpu_flags"]) - targets.cpu_flags())
    if missing:
        found.append(
            Mismatch(
                "cache.cpu_flags",
                f"kernels for a CPU with {' '.join(missing)}",
                "a CPU without",
                "refuse",
                "The process would die of an illegal instruction.",
                "Build on the oldest CPU that serves.",
            )
        )
    return found


def _versions(factors: Any) -> list[Mismatch]:
    found = []
    if factors["cache.torch"] != torch.__version__:
        found.append(
            Mismatch(
                "cache.torch",
                factors["cache.torch"],
                torch.__version__,
                "warn",
                "Every key holds torch's own sources: nothing will be found.",
                f"Install torch {factors['cache.torch']}, or build with this one.",
            )
        )
    if factors["cache.python"] != platform.python_version():
        found.append(
            Mismatch(
                "cache.python",
                factors["cache.python"],
                platform.python_version(),
                "warn",
                "torch installs its packages in the same patch release only: frames"
                " are traced again.",
                f"Run Python {factors['cache.python']}, or build with this one.",
            )
        )
    return found
