"""What an artifact's code depends on, recorded in its manifest."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compilekit._torch.versions import installed_torch
from compilekit.artifact import Model
from compilekit.config import Config


def common_factors(config: Config) -> dict[str, Any]:
    """Factors that all targets share: versions, machine, compile options."""
    factors: dict[str, Any] = {
        "torch.version": installed_torch().version.partition("+")[0],
        "python.version": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "machine": platform.machine(),
        "compile.mode": config.compile.mode,
        "compile.threads": config.compile.threads,
        "compile.options": dict(config.compile.options),
    }
    if config.model.source.startswith("hf:"):
        factors["transformers.version"] = _installed("transformers")
    return factors


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def target_factors(scratch: Path) -> dict[str, Any]:
    """What a target's code depends on besides the common factors.

    Args:
        scratch: Where the target's workers left their files.
    """
    written = scratch / "factors.json"
    stated = json.loads(written.read_bytes()) if os.path.isfile(written) else {}
    shared = max(_shared_memory(scratch), default=0)
    if shared:
        stated["shared_memory"] = shared
    return {**kernel_factors(scratch / "kernels"), **stated}


def _shared_memory(scratch: Path) -> Iterator[int]:
    """Bytes of shared memory that each kernel of a GPU target needs in a block."""
    for path in scratch.glob("buckets/*/*/program.json"):
        for kernel in json.loads(path.read_bytes())["kernels"].values():
            yield int(kernel["launch"].get("shared", 0))


def kernel_factors(kernels: Path) -> dict[str, Any]:
    """Highest C and C++ runtime symbols that a target's kernels need."""
    highest: dict[str, tuple[int, ...]] = {}
    for library in kernels.glob("*.so"):
        for name, number in symbol_versions(library.read_bytes()).items():
            highest[name] = max(highest.get(name, ()), number)
    return {
        f"{name.lower()}.symbols": ".".join(map(str, number))
        for name, number in sorted(highest.items())
    }


_SYMBOL_VERSION = re.compile(rb"(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)\0")


def symbol_versions(library: bytes) -> dict[str, tuple[int, ...]]:
    """Highest version of each C and C++ runtime symbol set that a library needs.

    Returns:
        ``{"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29)}``.
    """
    highest: dict[str, tuple[int, ...]] = {}
    for name, text in _SYMBOL_VERSION.findall(library):
        version = tuple(int(part) for part in text.split(b"."))
        key = name.decode()
        highest[key] = max(highest.get(key, ()), version)
    return highest


def model(config: Config, described: Mapping[str, Any] | None) -> Model:
    """The manifest's description of the model.

    Args:
        described: ``class``, ``dtype`` and ``config`` as the worker saw them; None if
            every entry is a warm-up, which brings its models along.
    """
    if described is None:
        warm = next(entry.warmup for entry in config.entries.values() if entry.warmup)
        return Model(source=config.model.source or warm, class_name="", dtype="")
    return Model(
        source=_portable_source(config.model.source),
        class_name=described["class"],
        dtype=described["dtype"],
        config=described["config"],
    )


def _portable_source(source: str) -> str:
    """A local directory by its name only, so that the build host stays out."""
    kind, _, place = source.partition(":")
    if kind == "hf" and not place.startswith("package:") and Path(place).is_absolute():
        return f"hf:{Path(place).name}"
    return source
