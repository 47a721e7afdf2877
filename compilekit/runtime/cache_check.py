"""Compare a cache with this machine and this process: every mismatch at once."""

from __future__ import annotations

import platform
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
