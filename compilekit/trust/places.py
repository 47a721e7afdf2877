"""Who could change a file: owners and modes up to the root.

Standard library only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compilekit.artifact import Artifact

# As many as Linux follows.
_MAX_LINKS = 40


def why_writable(path: Path) -> str:
    """Why somebody else than root and this user could change what lies at a path.

    Args:
        path: Absolute, without links (``os.path.realpath``).
    Returns:
        The first reason; empty if nobody else can.
    """
    for place in (path, *path.parents):
        reason = _why(place)
        if reason:
            return reason
    return ""


def why_any_writable(root: Path, paths: Iterable[str]) -> str:
    """The same for several files below one folder, which has none of them twice."""
    files = [root / path for path in paths]
    for folder in {file.parent for file in files} | {root}:
        if reason := why_writable(folder):
            return reason
    return next(filter(None, map(_why, files)), "")


def keep_from_others(artifact: Artifact) -> None:
    """Have kernels that somebody else could change loaded from verified bytes."""
    kernels = [name for name in artifact.manifest.files if name.startswith("kernels/")]
    artifact.from_memory = bool(why_any_writable(artifact.root, kernels))


def why_replaceable(path: Path) -> str:
    """The same for a path with links, each of which somebody could point elsewhere.

    A link counts as what it leads to does, and so does the folder that it lies in.
    """
    place = Path("/")
    left = list(Path(os.getcwd(), path).parts[1:])
    links = 0
    while left:
        part = left.pop(0)
        place = place.parent if part == os.pardir else place / part
        reason = _why(place, link=True)
        if reason:
            return reason
        if os.path.islink(place):
            links += 1
            if links > _MAX_LINKS:
                return f"{path} has too many symbolic links"
            left = [*Path(os.readlink(place)).parts, *left]
            place = place.parent
    return _why(Path("/"))


def _why(place: Path, *, link: bool = False) -> str:
    try:
        status = os.lstat(place)
    except OSError as exc:
        return f"{place} can't be looked at: {exc.strerror}"
    mode = status.st_mode
    if stat.S_ISLNK(mode) and not link:
        return f"{place} is a symbolic link"
    if status.st_uid not in (0, os.geteuid()):
        return f"{place} belongs to user {status.st_uid}"
    # A link has no mode of its own.
    if stat.S_ISLNK(mode):
        return ""
    # In a sticky folder (/tmp) nobody can rename or remove what belongs to another.
    if mode & 0o022 and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        whom = "anyone" if mode & 0o002 else f"group {status.st_gid}"
        return f"{place} may be written by {whom} (mode {stat.S_IMODE(mode):04o})"
    return ""
