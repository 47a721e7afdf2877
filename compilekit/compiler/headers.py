"""torch's kernel header, precompiled once and kept between builds.

Compiling it takes 7 s, as long as three kernels. What is kept is memory that the C++
compiler loads as it is, so whoever could write it would decide what kernels do: it
lies in a folder of this user's that nobody else can read or write, and is used only
while every file that went into it is unchanged.

    <cache>/compilekit/headers/<key>-<random>/{prefix.h, prefix.h.gch, files.json}

The key covers the compiler and its flags. Nothing here is needed: where the folder
can't be used, a build compiles the header for itself.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HEADER = "prefix.h"
_FILES = "files.json"
# A header takes 140 MB; one that no build has used for so long is removed.
_KEPT_SECONDS = 7 * 24 * 3600

_logger = logging.getLogger("compilekit")


def find_header(key: str) -> Path | None:
    """A kept header that is still right, or None."""
    root = _root()
    if root is None:
        return None
    for folder in sorted(root.glob(f"{key}-*")):
        if _is_current(folder):
            os.utime(folder)
            return folder / HEADER
    return None


def keep_header(key: str, folder: Path, dependencies: str) -> None:
    """Keep a header for later builds; no matter if it can't be.

    Args:
        folder: Where it was compiled.
        dependencies: The files it was made from, as the compiler lists them (``-MD``).
    """
    root = _root(make=True)
    if root is None:
        return
    try:
        _prune(root)
        staging = Path(tempfile.mkdtemp(prefix=".", dir=root))
        try:
            for name in (HEADER, f"{HEADER}.gch"):
                shutil.copyfile(folder / name, staging / name)
            stamps = {file: _stamp(file) for file in _listed(dependencies)}
            (staging / _FILES).write_text(json.dumps(stamps), encoding="utf-8")
            staging.rename(root / f"{key}-{staging.name.removeprefix('.')}")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as exc:
        _logger.info("the precompiled header isn't kept in %s: %s", root, exc)


def _root(*, make: bool = False) -> Path | None:
    """The folder of headers, if it is this user's and nobody else's."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(cache, "compilekit", "headers")
    try:
        if make:
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
    except OSError as exc:
        _logger.info("no precompiled headers in %s: %s", root, exc)
        return None
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not (root.is_absolute() and private and found.st_uid == os.geteuid()):
        _logger.info("%s isn't a private folder of this user's; not used", root)
        return None
    return root


def _is_current(folder: Path) -> bool:
    try:
        stamps = json.loads((folder / _FILES).read_text(encoding="utf-8"))
        return all(_stamp(file) == stamp for file, stamp in stamps.items())
    except (OSError, ValueError):
        return False


def _stamp(file: str) -> list[int]:
    found = os.stat(file)
    return [found.st_size, found.st_mtime_ns]


def _listed(dependencies: str) -> Iterator[str]:
    """The files in a make rule: ``target: a b \\`` and so on."""
    _, _, files = dependencies.partition(":")
    for word in re.findall(r"(?:\\.|[^\s\\])+", files.replace("\\\n", " ")):
        path = re.sub(r"\\(.)", r"\1", word)
        # The one that only includes the others is written anew by each build.
        if path != HEADER:
            yield path


def _prune(root: Path) -> None:
    oldest = time.time() - _KEPT_SECONDS
    for folder in root.iterdir():
        if folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)
