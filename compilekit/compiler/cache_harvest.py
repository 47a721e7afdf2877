"""What a compile wrote into its caches, as files that can travel.

Kept: entries of the FX graph cache and of AOTAutograd's, autotune records, compiled
Triton kernels. Left behind: locks, generated Python (the entries hold it), intermediate
code. A Triton group file names its members by absolute path; `PLACE` stands for the
directory in what is kept, and `relocate` writes the real one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compilekit.artifact.cache import PLACE
from compilekit.errors import HarvestError

# Below the Inductor directory; best_config files lie beside generated code.
_INDUCTOR = ("fxgraph/*/*/*", "aotautograd/*/*", "*/*.best_config", "cache/**/*")
# What a Triton kernel needs to run; the rest is for people and for compilers.
_TRITON = (".cubin", ".hsaco", ".json", ".so")
_GROUP = "__grp__"


def inductor_files(root: Path) -> dict[str, bytes]:
    """Path below the cache directory → bytes, of an Inductor cache."""
    return {
        f"inductor/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in _files(root, _INDUCTOR)
    }


def _files(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    found = {path for pattern in patterns for path in root.glob(pattern)}
    for path in sorted(found):
        if os.path.isfile(path) and path.suffix != ".lock" and ".tmp" not in path.name:
            yield path


def triton_files(
    root: Path, unused: frozenset[str] = frozenset()
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Files of a Triton cache, and which of them hold `PLACE`.

    Args:
        unused: Folders to leave behind: kernels that no graph launches.
    Raises:
        HarvestError: a group file names a member that isn't there.
    Source: triton 3.6 runtime/cache.py, FileCacheManager.put_group: the group's JSON
    holds ``child_paths``, name → absolute path, and each kernel its own directory.
    """
    files: dict[str, bytes] = {}
    relocated = []
    for path in _files(root, ("*/*",)):
        if path.suffix not in _TRITON or path.parent.name in unused:
            continue
        name = f"triton/{path.relative_to(root).as_posix()}"
        data = path.read_bytes()
        if path.name.startswith(_GROUP):
            data = _portable_group(path, data)
            relocated.append(name)
        files[name] = data
    return files, tuple(relocated)


def _portable_group(path: Path, data: bytes) -> bytes:
    group: dict[str, Any] = json.loads(data)
    children = {}
    for name, place in group["child_paths"].items():
        if Path(name).suffix not in _TRITON:
            continue
        member = path.parent / Path(place).name
        if not os.path.isfile(member):
            raise HarvestError(
                f"Triton's group file {path.name} names {name}, which isn't beside it",
                hint="Build again with an empty cache directory.",
            )
        children[name] = f"{PLACE}/triton/{path.parent.name}/{member.name}"
    return json.dumps({**group, "child_paths": children}, sort_keys=True).encode()
