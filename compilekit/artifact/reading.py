"""Read the files of an artifact, each held to the digest that the manifest states.

Folders are opened relative to each other and links are never followed, so nothing can
be swapped between check and use. All problems that one step finds come in one error.

Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from compilekit.artifact import manifest
from compilekit.artifact.manifest import File
from compilekit.errors import (
    ArtifactError,
    DigestError,
    ManifestError,
    ResourceError,
    UnsafePathError,
)

# 10,000 files take 2 MB; a larger index is no index.
MAX_INDEX_BYTES = 64 << 20
_CHUNK = 1 << 20
_SHOWN = 20

# O_NONBLOCK: a named pipe in place of a file must not hang the start.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY

_NO_ARTIFACT = "A directory without a manifest.json is no artifact."
AGAIN = "Nothing of it was used. Copy the artifact again, or build it again."


class Problem(NamedTuple):
    """One thing that is wrong with a file, to be joined with others in one error."""

    kind: type[ArtifactError]
    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


def open_root(root: Path) -> int:
    """A descriptor of an artifact's directory; the caller closes it.

    Raises:
        ManifestError: There is no such directory.
        ResourceError: It can't be opened.
    """
    try:
        return os.open(root, _FOLDER_FLAGS)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"no artifact at {root}: expected a directory, found nothing",
            hint="Build one with `compilekit build CONFIG -o DIR`, or check the path.",
            path=str(root),
        ) from exc
    except NotADirectoryError as exc:
        raise ManifestError(
            f"no artifact at {root}: expected a directory, found a file",
            hint="Give the directory that `compilekit build` wrote.",
            path=str(root),
        ) from exc
    except OSError as exc:
        raise _unreadable(str(root), exc) from exc


def was_replaced(root: Path, descriptor: int) -> bool:
    """Whether another directory lies where an opened one lay."""
    try:
        here = os.stat(root)
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) != (opened.st_dev, opened.st_ino)


def read_index(root: int, path: str) -> bytes:
    """The bytes of one of the two files that no other file vouches for.

    Raises:
        ManifestError: It isn't there, or too large.
        UnsafePathError: It's no plain file.
        ResourceError: It can't be read.
    """
    name = path
    folder = root
    if "/" in path:
        parent, name = path.split("/")
        folder = _open_at(root, parent, _FOLDER_FLAGS, path)
    try:
        descriptor = _open_at(folder, name, _FILE_FLAGS, path)
    finally:
        if folder != root:
            os.close(folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePathError(
                f"{path}: expected a plain file, found {_kind(status.st_mode)}",
                path=path,
            )
        if status.st_size > MAX_INDEX_BYTES:
            raise ManifestError(
                f"{path}: expected at most {MAX_INDEX_BYTES} bytes, found"
                f" {status.st_size}",
                path=path,
            )
        return _read_all(descriptor, status.st_size)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    finally:
        os.close(descriptor)


def _open_at(folder: int, name: str, flags: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{path}: expected a file, found nothing",
            hint=_NO_ARTIFACT if path == manifest.MANIFEST else "",
            path=path,
        ) from exc
    except OSError as exc:
        mode = _mode(folder, name)
        if mode is not None and not stat.S_ISREG(mode):
            raise UnsafePathError(
                f"{path}: expected a plain file, found {_kind(mode)}", path=path
            ) from exc
        raise _unreadable(path, exc) from exc


def read_beside(path: Path, most: int) -> bytes:
    """A record that lies beside an artifact, which nothing vouches for.

    Args:
        most: Its size in bytes, at most.
    Raises:
        OSError: It isn't there, no plain file, larger, or can't be read.
    """
    with open_plain(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = b"" if size > most else _read_all(stream.fileno(), size)
        if max(size, len(data)) > most:
            raise OSError(errno.EFBIG, f"expected at most {most} bytes", path)
        return data


def open_plain(path: Path) -> IO[bytes]:
    """Open a file that lies outside any artifact; a pipe must not hang a start.

    Raises:
        OSError: It isn't there, is no plain file, or can't be read.
    """
    # Not _FILE_FLAGS: whoever owns the folder may put a link there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"expected a plain file, found {_kind(mode)}", path)


def read_below(root: int, path: str, file: File) -> bytes:
    """Read one listed file, one folder at a time; its bytes must be the listed ones.

    Raises:
        ArtifactError: They aren't, or it's no plain file.
        ResourceError: It can't be read.
    """
    *folders, name = path.split("/")
    opened = [root]
    try:
        for part in folders:
            opened.append(_open_at(opened[-1], part, _FOLDER_FLAGS, path))
        read = _verify_file(opened[-1], name, path, file, keep=True)
    finally:
        for descriptor in opened[1:]:
            os.close(descriptor)
    if isinstance(read, Problem):
        raise joined([read])
    return read


def verify_tree(
    root: int, listed: Mapping[str, File], own: set[str]
) -> tuple[dict[str, bytes], list[Problem]]:
    """Verify all files below an artifact's directory.

    Args:
        listed: Path → what the manifest says of it.
        own: Paths of the files that list the others.
    Returns:
        The bytes of what a start parses or runs, by path, and everything that is wrong.
    Raises:
        ResourceError: A file can't be read.
    """
    folders = {parent for path in (*listed, *own) for parent in manifest.parents(path)}
    kept: dict[str, bytes] = {}
    seen: set[str] = set()
    problems: list[Problem] = []

    def walk(folder: int, prefix: str) -> None:
        with os.scandir(folder) as found:
            for item in sorted(found, key=lambda item: item.name):
                path = prefix + item.name
                if path in listed:
                    seen.add(path)
                    keep = path.startswith("programs/")
                    file = listed[path]
                    read = _verify_file(folder, item.name, path, file, keep=keep)
                    if isinstance(read, Problem):
                        problems.append(read)
                    elif keep:
                        kept[path] = read
                elif path in folders and item.is_dir(follow_symlinks=False):
                    inner = os.open(item.name, _FOLDER_FLAGS, dir_fd=folder)
                    try:
                        walk(inner, path + "/")
                    finally:
                        os.close(inner)
                elif path in folders:
                    kind = _kind(item.stat(follow_symlinks=False).st_mode)
                    problems.append(Problem(UnsafePathError, path, "a folder", kind))
                elif path not in own:
                    mode = item.stat(follow_symlinks=False).st_mode
                    plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
                    error = ManifestError if plain else UnsafePathError
                    expected = "nothing (it isn't listed)"
                    problems.append(Problem(error, path, expected, _kind(mode)))

    try:
        walk(root, "")
    except OSError as exc:
        raise _unreadable(str(exc.filename or "the artifact"), exc) from exc
    for path in sorted(listed.keys() - seen):
        problems.append(
            Problem(DigestError, path, f"sha256 {listed[path].sha256}", "no file")
        )
    return kept, problems


def _verify_file(
    folder: int, name: str, path: str, file: File, *, keep: bool
) -> bytes | Problem:
    """Read a file once; compare kind, size and digest.

    Returns:
        What is wrong with it; else its bytes if `keep`, and nothing if not.
    """
    wanted = f"sha256 {file.sha256}"
    try:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return Problem(DigestError, path, wanted, "no file")
    except OSError as exc:
        mode = _mode(folder, name)
        if mode is None or stat.S_ISREG(mode):
            raise _unreadable(path, exc) from exc
        return Problem(UnsafePathError, path, "a plain file", _kind(mode))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _kind(status.st_mode)
            return Problem(UnsafePathError, path, "a plain file", kind)
        if status.st_size != file.size:
            found = f"{status.st_size} bytes"
            return Problem(DigestError, path, f"{file.size} bytes", found)
        if keep or file.size <= _CHUNK:
            data = _read_all(descriptor, file.size)
            digest = hashlib.sha256(data).hexdigest()
        else:
            data = b""
            digest = _hash_all(descriptor)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    finally:
        os.close(descriptor)
    if digest != file.sha256:
        return Problem(DigestError, path, wanted, f"sha256 {digest}")
    return data if keep else b""


def _read_all(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, size + 1)
    if len(data) == size:
        return data
    parts = [data]
    while more := os.read(descriptor, _CHUNK):
        parts.append(more)
    return b"".join(parts)


def _hash_all(descriptor: int) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    while count := os.readv(descriptor, [buffer]):
        digest.update(view[:count])
    return digest.hexdigest()


def _mode(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except OSError:
        return None


def is_folder(root: int, name: str) -> bool:
    """Whether a plain folder of that name lies in an opened one."""
    mode = _mode(root, name)
    return mode is not None and stat.S_ISDIR(mode)


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISREG(mode):
        return "a file"
    return "a device, pipe or socket"


def located(
    root: Path, error: ArtifactError | ResourceError
) -> ArtifactError | ResourceError:
    """The same error, saying which artifact it is about."""
    return type(error)(
        f"artifact {root}: {error.message}",
        hint=error.hint or AGAIN,
        **{**error.fields, "artifact": str(root)},
    )


def joined(problems: list[Problem]) -> ArtifactError:
    """One error for all problems, of the gravest class among them."""
    kinds = {problem.kind for problem in problems}
    order = (UnsafePathError, ManifestError, DigestError)
    kind = next(one for one in order if one in kinds)
    first = next(problem for problem in problems if problem.kind is kind)
    text = str(first)
    if len(problems) > 1:
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        more = len(problems) - _SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        text = f"{len(problems)} files are wrong{shown}{rest}"
    return kind(
        text,
        path=first.path,
        expected=first.expected,
        found=first.found,
        problems=[
            {
                "error": problem.kind.__name__,
                "path": problem.path,
                "expected": problem.expected,
                "found": problem.found,
            }
            for problem in problems
        ],
    )


def _unreadable(path: str, exc: OSError) -> ResourceError:
    return ResourceError(
        f"{path} can't be read: {exc.strerror}",
        hint="Check the file's owner and mode, and the disk.",
        path=path,
    )
