"""Write an artifact so that its place holds a whole one at every moment, or none.

Lifecycle of `write_artifact`:

1. What stands in the place is looked at: nothing, an empty directory, or an artifact
   with no file of anyone else in it. Anything else is refused.
2. A staging directory is made beside it, ``.NAME.staging-PID-RANDOM``, and locked.
   Staging directories that nobody locks were left by a killed process: removed.
3. All files are written and synced; ``manifest.json`` comes last, by rename. The
   result is opened, which verifies it.
4. One rename publishes it. An artifact in the place is swapped out by the same system
   call (``RENAME_EXCHANGE``), or moved aside first where the file system can't swap.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from compilekit.artifact import canonical, manifest, reading, store
from compilekit.artifact.manifest import Manifest, parents
from compilekit.artifact.store import Artifact
from compilekit.errors import ManifestError, ResourceError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_artifact(
    out_dir: str | os.PathLike[str],
    parts: Manifest,
    files: Mapping[str, bytes],
    reports: Mapping[str, bytes] | None = None,
) -> Artifact:
    """Write an artifact; the same arguments give the same bytes outside ``reports/``.

    Args:
        out_dir: Where it goes; parents are made. An artifact in this place is replaced.
        parts: The manifest; `files` and `digest` in it are computed here.
        files: Path below the artifact → bytes, except ``manifest.json`` and
            ``reports/``.
        reports: Path below the artifact, ``reports/…`` → bytes; may differ between
            builds of the same thing.
    Returns:
        The artifact, opened and verified.
    Raises:
        ResourceError: The place holds something that isn't an artifact, or can't be
            written (permissions, disk full).
        ArtifactError: The files and the manifest don't make an artifact.
    """
    with staged_artifact(out_dir, parts, files, reports) as artifact:
        return publish(artifact, out_dir)


def staged_artifact(
    out_dir: str | os.PathLike[str],
    parts: Manifest,
    files: Mapping[str, bytes],
    reports: Mapping[str, bytes] | None = None,
) -> contextlib.AbstractContextManager[Artifact]:
    """What `write_artifact` writes, `staged` beside its place."""
    contents = _contents(parts, files, reports or {})
    return staged(out_dir, lambda folder: _write_files(folder, contents))


def install(
    out_dir: str | os.PathLike[str],
    fill: Callable[[Path], None],
) -> Artifact:
    """Put an artifact into its place in one step, after verifying every byte of it.

    Args:
        out_dir: Where it goes; parents are made. An artifact in this place is replaced.
        fill: Writes the whole artifact into the empty staging directory it is given.
    Raises:
        ResourceError: The place holds something that isn't an artifact, or can't be
            written (permissions, disk full).
        ArtifactError: What was written is no artifact.
    """
    with staged(out_dir, fill) as artifact:
        return publish(artifact, out_dir)


@contextlib.contextmanager
def staged(
    out_dir: str | os.PathLike[str], fill: Callable[[Path], None]
) -> Iterator[Artifact]:
    """An artifact beside its place, verified; gone at the end unless it is published.

    Args:
        out_dir: Its place; parents are made.
        fill: Writes the whole artifact into the empty staging directory it is given.
    Raises:
        ResourceError: The place holds something that isn't an artifact, or can't be
            written (permissions, disk full).
        ArtifactError: What was written is no artifact.
    """
    out = Path(os.path.realpath(out_dir))
    with contextlib.ExitStack() as stack:
        with _writing(out):
            check_place(out)
            out.parent.mkdir(parents=True, exist_ok=True)
            recover(out)
            folder = stack.enter_context(staging(out))
            fill(folder)
            artifact = store.open_artifact(folder).parse_all()
        yield artifact


def publish(artifact: Artifact, out_dir: str | os.PathLike[str]) -> Artifact:
    """Put a staged artifact into its place in one step; one there is replaced.

    Raises:
        ResourceError: The place can't be written.
    """
    out = Path(os.path.realpath(out_dir))
    with _writing(out):
        _publish(artifact.root, out)
    return artifact.moved(out)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ResourceError(
            f"artifact {out} can't be written: {exc.strerror}"
            + (f" ({exc.filename})" if exc.filename else ""),
            hint=_HINTS.get(exc.errno or 0, "Choose another place with -o."),
            path=str(out),
        ) from exc


_HINTS = {
    errno.EBUSY: "A mount point can't be replaced: choose a directory inside it. On a"
    " network file system another host may use it: try again.",
    errno.ESTALE: "Another host replaced it on this network file system: try again.",
    errno.ENOSPC: "Free some space, or choose another place with -o.",
    errno.EXDEV: "This directory belongs to a lower layer of an overlay file system"
    " and can't be replaced in one step; remove it first, or choose another place.",
}


def _contents(
    parts: Manifest, files: Mapping[str, bytes], reports: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Every file of the artifact; ``manifest.json`` is last."""
    manifest.check_paths((*files, *reports))
    data, sealed = manifest.seal_manifest(parts, files)
    contents = {path: files[path] for path in sorted(files)}
    if reports:
        contents.update((path, reports[path]) for path in sorted(reports))
        contents[manifest.REPORTS_INDEX] = manifest.seal_reports(sealed.digest, reports)
    contents[manifest.MANIFEST] = data
    return contents


def check_place(out_dir: str | os.PathLike[str]) -> None:
    """Refuse to replace anything but an artifact, or to delete a stranger's file.

    Raises:
        ResourceError: Something else is there, or nothing can be written there.
    """
    out = Path(os.path.realpath(out_dir))
    above = next(folder for folder in out.parents if os.path.exists(folder))
    if not os.access(above, os.W_OK | os.X_OK):
        raise ResourceError(
            f"artifact {out} can't be written: {above} isn't this user's to write in",
            hint="Choose another place with -o.",
            path=str(out),
        )
    if not os.path.lexists(out):
        return
    if not os.path.isdir(out):
        raise ResourceError(
            f"{out}: expected a directory to replace, found a file",
            hint="Choose another place with -o.",
            path=str(out),
        )
    found = {
        os.path.relpath(os.path.join(folder, name), out)
        for folder, folders, names in os.walk(out)
        for name in (*folders, *names)
    }
    listed = _listed_files(out)
    strange = sorted(found - listed - {p for one in listed for p in parents(one)})
    if strange:
        raise ResourceError(
            f"{out} holds files that aren't part of an artifact: {strange[0]}"
            + (f" and {len(strange) - 1} more" if len(strange) > 1 else ""),
            hint="Nothing was changed. Choose another place with -o, or move them.",
            path=str(out),
        )


def _listed_files(out: Path) -> set[str]:
    """What an artifact's indexes list; empty if this is no artifact.

    A damaged artifact may be replaced too, so digests aren't looked at.
    """
    listed: set[str] = set()
    for index in (manifest.MANIFEST, manifest.REPORTS_INDEX):
        try:
            data = reading.read_beside(out / index, reading.MAX_INDEX_BYTES)
            fields = canonical.decode(data, index)
        except (OSError, ManifestError):
            continue
        if index == manifest.MANIFEST and fields.get("format") != manifest.FORMAT:
            return set()
        files = fields.get("files")
        listed |= {index, *(files if isinstance(files, dict) else ())}
    return listed if manifest.MANIFEST in listed else set()


# --- Staging -----------------------------------------------------------------------


def _prefix(out: Path) -> str:
    return f".{out.name}.staging-"


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A locked directory beside `out`; what is left of it at the end is removed.

    The lock, not the process number, tells a live writer from a dead one: numbers are
    reused, and differ between containers that share a volume.
    """
    lock = None
    path = out
    try:
        while lock is None:
            path = out.with_name(f"{_prefix(out)}{os.getpid()}-{os.urandom(4).hex()}")
            path.mkdir(mode=0o755)
            # None: another writer took it for a left-over before it was locked.
            lock = _lock(path, required=False)
        yield path
    finally:
        if path != out:
            _remove(path)
        if lock is not None:
            os.close(lock)


def _remove(path: Path) -> None:
    """Remove a directory, read-only folders in it too; what can't go stays."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path, *, required: bool) -> int | None:
    """Lock a directory until its descriptor is closed.

    Args:
        required: What to answer on a file system without locks: None, or an unlocked
            descriptor (nobody else can take the directory for a left-over there).
    Returns:
        None if the directory is gone, or locked by someone else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if required or isinstance(exc, BlockingIOError):
            os.close(descriptor)
            return None
    if not os.path.exists(path):
        os.close(descriptor)
        return None
    return descriptor


def recover(out: Path) -> None:
    """Remove what killed writers left; put back what one of them had moved aside."""
    for name in sorted(os.listdir(out.parent)):
        if not name.startswith(_prefix(out)):
            continue
        path = out.with_name(name)
        lock = _lock(path, required=True)
        if lock is None:
            continue
        try:
            if name.endswith(_ASIDE) and not os.path.exists(out):
                os.rename(path, out)
            else:
                _remove(path)
        finally:
            os.close(lock)


def _write_files(staging: Path, contents: Mapping[str, bytes]) -> None:
    """Write and sync every file, ``manifest.json`` last and by rename."""
    make_folders(staging, contents)
    # All are written before the first is synced: the journal commits them together.
    for path, data in contents.items():
        name = path + PART if path == manifest.MANIFEST else path
        write_file(staging / name, [data])
    seal(staging, contents)


PART = ".part"


def make_folders(staging: Path, paths: Iterable[str]) -> None:
    """Make the folders of these files in an empty directory."""
    os.chmod(staging, 0o755)
    for folder in sorted({p for path in paths for p in parents(path)}):
        os.mkdir(staging / folder)
        os.chmod(staging / folder, 0o755)


def seal(staging: Path, paths: Iterable[str]) -> None:
    """Sync what was written; ``manifest.json`` gets its name last."""
    paths = list(paths)
    folders = sorted({p for path in paths for p in parents(path)})
    for path in paths:
        sync(staging / (path + PART if path == manifest.MANIFEST else path))
    for folder in reversed(folders):
        sync(staging / folder)
    os.rename(staging / (manifest.MANIFEST + PART), staging / manifest.MANIFEST)
    sync(staging)


def write_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a new file that everyone may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        # Whatever the umask: an artifact is read by other users than its builder.
        os.fchmod(file.fileno(), 0o644)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, whose file takes the place of `path` at the end.

    A file that an error or a kill interrupted never has that name; what a killed
    process left is removed by the next one.
    """
    recover(path)
    with staging(path) as folder:
        part = folder / path.name
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Publishing --------------------------------------------------------------------

_ASIDE = ".old"


def _publish(staging: Path, out: Path) -> None:
    """Put `staging` in the place of `out`, in one step where the system can."""
    try:
        # Nothing there, or an empty directory.
        os.rename(staging, out)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(staging, out):
            _move_aside(staging, out)
    sync(out.parent)


def _exchange(staging: Path, out: Path) -> bool:
    """Swap two directories; False where the C library or file system can't.

    Source: Linux renameat2(2); glibc 2.28 and newer have the function.
    """
    import ctypes  # only a second build into one place needs it

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(
        _AT_FDCWD, os.fsencode(staging), _AT_FDCWD, os.fsencode(out), _RENAME_EXCHANGE
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(out))


def _move_aside(staging: Path, out: Path) -> None:
    """Two renames; if the process dies between them, the next writer undoes the first.

    The lock keeps that writer away while this one is alive.
    """
    aside = staging.with_name(staging.name + _ASIDE)
    lock = _lock(out, required=False)
    try:
        os.rename(out, aside)
        try:
            os.rename(staging, out)
        except OSError:
            os.rename(aside, out)
            raise
        _remove(aside)
    finally:
        if lock is not None:
            os.close(lock)
