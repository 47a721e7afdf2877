"""Put a target's caches into a private, writable directory, once for many processes.

The artifact may be read-only or another user's, and torch writes into its cache
directory: so the files are copied, into a staging folder that one rename publishes.
Whoever comes second finds the place taken and uses it. A staging folder that nobody
locks was left by a killed process and is removed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from compilekit.artifact import Artifact
from compilekit.artifact.cache import PLACE, Cache, blob_path
from compilekit.doctor import mount_point
from compilekit.errors import ResourceError
from compilekit.runtime.requirements import is_demanding
from compilekit.trust.places import why_writable

_PLACE = PLACE.encode()


def work_directory(given: str | os.PathLike[str] | None) -> Path:
    """The directory below which caches are staged, private to this user.

    Args:
        given: As passed to `restore`; ``COMPILEKIT_WORK_DIR``, then a folder of this
            user below the temporary directory by default.
    Raises:
        ResourceError: it can't be made or written, is another user's, is mounted
            noexec, or could be replaced by others while the artifact's origin is held
            to a digest or a signature.
    """
    chosen = chosen_directory(given)
    hint = "Pass work_dir=, or set COMPILEKIT_WORK_DIR to a private directory."
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = chosen.stat()
    except OSError as exc:
        raise ResourceError(
            f"work directory {chosen} can't be made: {exc.strerror}", hint=hint
        ) from exc
    if found.st_uid != os.getuid():
        raise ResourceError(
            f"work directory {chosen}: expected one of user {os.getuid()}, found one of"
            f" user {found.st_uid}, who could change the code in it",
            hint=hint,
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ResourceError(
            f"work directory {chosen}: expected one that only its owner can write,"
            f" found mode {stat.S_IMODE(found.st_mode):o}",
            hint=f"chmod 700 {chosen}, or choose another one.",
        )
    if os.statvfs(chosen).f_flag & os.ST_NOEXEC:
        raise ResourceError(
            f"work directory {chosen} is on {mount_point(chosen)}, which is mounted"
            " noexec: compiled kernels can't be loaded from it",
            hint=f"Mount it with exec. {hint}",
        )
    if reason := why_writable(chosen.resolve()) if is_demanding() else "":
        raise ResourceError(
            f"work directory {chosen}: {reason}, who could put other code in its place"
            " after it was verified",
            hint=hint,
        )
    return chosen.resolve()


def chosen_directory(given: str | os.PathLike[str] | None = None) -> Path:
    """Where `work_directory` makes or expects one."""
    default = Path(tempfile.gettempdir()) / f"compilekit-{os.getuid()}"
    return Path(given or os.environ.get("COMPILEKIT_WORK_DIR") or default)


def stage(artifact: Artifact, cache: Cache, work: Path) -> tuple[Path, bool]:
    """Restore a target's caches below `work`, unless they're there already.

    Returns:
        The directory, and whether this call made it.
    Raises:
        ResourceError: the disk is full, or can't be written.
        ArtifactError: a file has changed since the artifact was opened.
    """
    from compilekit.artifact import write

    place = work / f"{artifact.digest[:32]}-{cache.target}"
    try:
        write.recover(place)
        if os.path.isdir(place):
            return place, False
        refuse_full(artifact, cache, work)
        with write.staging(place) as staging:
            os.chmod(staging, 0o700)
            _write_files(artifact, cache, staging, place)
            try:
                os.rename(staging, place)
            except OSError:
                # Another process was faster: what it published is the same. Local file
                # systems say ENOTEMPTY, network file systems anything.
                if not os.path.isdir(place):
                    raise
                return place, False
    except OSError as exc:
        raise ResourceError(
            f"caches can't be restored to {place}: {exc.strerror}",
            hint="Nothing was left there. Pass work_dir=, or set COMPILEKIT_WORK_DIR.",
        ) from exc
    return place, True


def refuse_full(artifact: Artifact, cache: Cache, work: Path) -> None:
    """Refuse a disk that can't hold the files, before the first is written.

    Raises:
        ResourceError: with the bytes or inodes that are expected and found.
    """
    listed = artifact.manifest.files
    blobs = [listed[blob_path(cache.target, digest)] for digest in cache.files.values()]
    blobs += [listed[f"kernels/{d}.so"] for d in set(cache.kernels.values())]
    bytes_needed = sum(file.size for file in blobs)
    files_needed = 3 * len(blobs)  # an entry has folders of its own
    disk = os.statvfs(work)
    bytes_free = disk.f_bavail * disk.f_frsize
    if bytes_free < bytes_needed:
        raise ResourceError(
            f"caches can't be restored to {work}: expected {bytes_needed} bytes free,"
            f" found {bytes_free}",
            hint="Free some space, or set COMPILEKIT_WORK_DIR to another disk.",
        )
    # File systems without a fixed number of inodes say 0.
    if disk.f_files and disk.f_favail < files_needed:
        raise ResourceError(
            f"caches can't be restored to {work}: expected {files_needed} inodes free,"
            f" found {disk.f_favail}",
            hint="Remove some files, or set COMPILEKIT_WORK_DIR to another disk.",
        )


def _write_files(artifact: Artifact, cache: Cache, staging: Path, place: Path) -> None:
    relocated = set(cache.relocated)
    for folder in ("inductor", "triton", "kernels"):
        (staging / folder).mkdir(mode=0o700)
    for name, digest in cache.files.items():
        data = artifact.read(blob_path(cache.target, digest))
        if name in relocated:
            data = data.replace(_PLACE, os.fsencode(place))
        path = staging / name
        for parent in (*reversed(path.relative_to(staging).parents),):
            (staging / parent).mkdir(mode=0o700, exist_ok=True)
        _write(path, data)
    for digest in sorted(set(cache.kernels.values())):
        data = artifact.read(f"kernels/{digest}.so")
        _write(staging / "kernels" / f"{digest}.so", data)


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def bind(patches: contextlib.ExitStack, place: Path) -> None:
    """Point torch at a staged directory.

    Assigned, not set by default: importing Dynamo sets the variable to a directory of
    torch's own.

    Args:
        patches: Closing it sets the variables back.
    """
    for name, value in (
        ("TORCHINDUCTOR_CACHE_DIR", str(place / "inductor")),
        ("TRITON_CACHE_DIR", str(place / "triton")),
    ):
        patches.callback(_set_variable, name, os.environ.get(name))
        _set_variable(name, value)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
