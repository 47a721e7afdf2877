"""Read an artifact: every byte verified before anything is parsed or run.

Lifecycle of `open_artifact`:

1. ``manifest.json`` is read and checked against the digest that it states; then the
   schema version, then its shape and its paths; the same for ``reports/index.json``.
2. The directory is walked: only the listed files and their folders may be there, as
   plain files and plain folders. Every file is read once, hashed, and compared.
3. ``entry.json`` and ``program.json`` are parsed from the bytes that were hashed, when
   they are first asked for, and what they refer to must exist: a start parses its own
   target's only.

All problems that one step finds come in one error. Folders are opened relative to each
other and links are never followed, so nothing can be swapped between check and use.

Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, TypeVar

from compilekit.artifact import canonical, manifest, program, schema
from compilekit.artifact.manifest import File, Manifest
from compilekit.artifact.program import Entry, KernelRef, Program
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
_AGAIN = "Nothing of it was used. Copy the artifact again, or build it again."


class Artifact:
    """An artifact whose every file has been verified.

    Attributes:
        root: Its directory, links resolved.
        manifest: ``manifest.json``.
        reports: Path → digest and size of each file below ``reports/``.
        entries: (target, entry) → calling convention.
        programs: (target, entry, bucket) → program.
        from_memory: Somebody else could change its kernels: they are to be loaded from
            a copy of the verified bytes.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        reports: Mapping[str, File],
        kept: Mapping[str, bytes],
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.reports = MappingProxyType(dict(reports))
        self.entries, self.programs = _parse_programs(root, manifest, kept)
        self.from_memory = False
        self._kept = kept

    def __repr__(self) -> str:
        return f"Artifact(root={str(self.root)!r}, digest={self.digest!r})"

    def moved(self, root: Path) -> Artifact:
        """The same artifact at the place where it was put."""
        return Artifact(root, self.manifest, self.reports, self._kept)

    @property
    def digest(self) -> str:
        """The artifact's identity: the manifest's digest."""
        return self.manifest.digest

    @property
    def size_bytes(self) -> int:
        """Size of all listed files, reports included."""
        listed = (*self.manifest.files.values(), *self.reports.values())
        return sum(file.size for file in listed)

    def read(self, path: str) -> bytes:
        """The verified bytes of a listed file.

        What a start parses or runs is kept from the verification; anything else is
        read now and compared with its digest again.

        Raises:
            DigestError: The file has changed since the artifact was opened.
            ManifestError: The path isn't listed.
        """
        if path in self._kept:
            return self._kept[path]
        file = self._listed(path)
        root = _open_root(self.root)
        try:
            return _read_below(root, path, file)
        except (ArtifactError, ResourceError) as exc:
            raise _located(self.root, exc) from exc.__cause__
        finally:
            os.close(root)

    def read_index(self, path: str) -> bytes:
        """The bytes of one of the two files that list the others.

        Raises:
            DigestError: The file has changed since the artifact was opened.
        """
        root = _open_root(self.root)
        try:
            data = _read_index(root, path)
            if path == manifest.MANIFEST:
                same = manifest.read_manifest(data) == self.manifest
            else:
                reports = manifest.read_reports(data, self.digest).files
                same = reports == dict(self.reports)
        except (ArtifactError, ResourceError) as exc:
            raise _located(self.root, exc) from exc.__cause__
        finally:
            os.close(root)
        if not same:
            raise DigestError(
                f"artifact {self.root}: {path} has changed since it was opened",
                hint=_AGAIN,
                path=path,
            )
        return data

    def json(self, path: str) -> dict[str, Any]:
        """A listed JSON file, parsed strictly from its verified bytes."""
        return canonical.decode(self.read(path), path)

    def path(self, path: str) -> Path:
        """Where a listed file lies, for what can only be loaded by path.

        Its bytes were verified at open; they could have changed since. `read` has no
        such gap.
        """
        self._listed(path)
        return self.root / path

    def parse_all(self) -> Artifact:
        """Hold every ``entry.json`` and ``program.json`` to its schema, and parse it.

        A start leaves that out: whoever sealed the manifest has done it, and it would
        take a third of attach's time.

        Raises:
            ManifestError: One of them is malformed, or contradicts the manifest.
        """
        for target, name in self.entries:
            self._validate("entry", manifest.entry_path(target, name))
        for key in self.programs:
            self._validate("program", manifest.program_path(*key))
        list(self.entries.values())
        list(self.programs.values())
        return self

    def _validate(self, kind: str, path: str) -> None:
        try:
            schema.validate(kind, self.json(path), path)
        except ArtifactError as exc:
            raise _located(self.root, exc) from exc.__cause__

    def _listed(self, path: str) -> File:
        file = self.manifest.files.get(path) or self.reports.get(path)
        if file is None:
            raise ManifestError(
                f"artifact {self.root}: {path!r} isn't listed in its manifest",
                path=path,
            )
        return file


class _Problem(NamedTuple):
    kind: type[ArtifactError]
    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Open an artifact after verifying every byte of it.

    Args:
        path: Its directory; may be a link to it.
    Raises:
        DigestError: A file's bytes aren't the listed ones, or a listed file is missing.
        UnsafePathError: A link, a device or a folder in place of a file, or a listed
            path that leaves the artifact.
        ManifestError: No manifest, a malformed one, or a file that it doesn't list.
        SchemaVersionError: A schema that this version doesn't know.
        ResourceError: A file can't be read (permissions, disk).
    """
    return open_approved(path, None)


Approve = Callable[[Path, str], None]


def open_approved(path: str | os.PathLike[str], approve: Approve | None) -> Artifact:
    """Open an artifact, after its digest was approved and every byte verified.

    Args:
        approve: Called with the artifact's directory and its digest, which was computed
            from bytes that nobody has parsed yet; raises to refuse it.
    Raises:
        CompilekitError: As `open_artifact`, and whatever `approve` raises.
    """
    while True:
        root = Path(os.path.realpath(path))
        descriptor = _open_root(root)
        try:
            return _open_verified(root, descriptor, approve)
        except (ArtifactError, ResourceError) as exc:
            # A build that finished meanwhile has put another artifact in this place.
            if not _replaced(root, descriptor):
                raise _located(root, exc) from exc.__cause__
        finally:
            os.close(descriptor)


def _open_verified(root: Path, descriptor: int, approve: Approve | None) -> Artifact:
    index = _read_index(descriptor, manifest.MANIFEST)
    listing = approved_manifest(
        index, approve and (lambda digest: approve(root, digest))
    )
    own = {manifest.MANIFEST}
    reports: Mapping[str, File] = {}
    if _is_folder(descriptor, manifest.REPORTS.rstrip("/")):
        data = _read_index(descriptor, manifest.REPORTS_INDEX)
        reports = manifest.read_reports(data, listing.digest).files
        own.add(manifest.REPORTS_INDEX)
    kept, problems = _verify_tree(descriptor, {**listing.files, **reports}, own)
    if problems:
        raise _joined(problems)
    return Artifact(root, listing, reports, kept)


def approved_manifest(data: bytes, approve: Callable[[str], None] | None) -> Manifest:
    """Parse ``manifest.json`` after its digest was approved."""
    if approve is None:
        return manifest.read_manifest(data)
    approved = canonical.sealed_digest(data)
    approve(approved)
    listing = manifest.read_manifest(data)
    if listing.digest != approved:
        # Two lines look like the digest's: what was approved isn't what it states.
        raise DigestError(
            f"{manifest.MANIFEST}: expected sha256 {approved}, found one that states"
            f" {listing.digest}",
            path=manifest.MANIFEST,
        )
    return listing


# --- Reading files -----------------------------------------------------------------


def _open_root(root: Path) -> int:
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


def _replaced(root: Path, descriptor: int) -> bool:
    try:
        here = os.stat(root)
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) != (opened.st_dev, opened.st_ino)


def _read_index(root: int, path: str) -> bytes:
    """The bytes of one of the two files that no other file vouches for."""
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


def _read_below(root: int, path: str, file: File) -> bytes:
    """Read one listed file, one folder at a time; its bytes must be the listed ones."""
    *folders, name = path.split("/")
    opened = [root]
    try:
        for part in folders:
            opened.append(_open_at(opened[-1], part, _FOLDER_FLAGS, path))
        read = _verify_file(opened[-1], name, path, file, keep=True)
    finally:
        for descriptor in opened[1:]:
            os.close(descriptor)
    if isinstance(read, _Problem):
        raise _joined([read])
    return read


def _verify_tree(
    root: int, listed: Mapping[str, File], own: set[str]
) -> tuple[dict[str, bytes], list[_Problem]]:
    """Verify all files below a folder; returns the bytes that are kept."""
    folders = {parent for path in (*listed, *own) for parent in manifest.parents(path)}
    kept: dict[str, bytes] = {}
    seen: set[str] = set()
    problems: list[_Problem] = []

    def walk(folder: int, prefix: str) -> None:
        with os.scandir(folder) as found:
            for item in sorted(found, key=lambda item: item.name):
                path = prefix + item.name
                if path in listed:
                    seen.add(path)
                    keep = path.startswith("programs/")
                    file = listed[path]
                    read = _verify_file(folder, item.name, path, file, keep=keep)
                    if isinstance(read, _Problem):
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
                    problems.append(_Problem(UnsafePathError, path, "a folder", kind))
                elif path not in own:
                    mode = item.stat(follow_symlinks=False).st_mode
                    plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
                    error = ManifestError if plain else UnsafePathError
                    expected = "nothing (it isn't listed)"
                    problems.append(_Problem(error, path, expected, _kind(mode)))

    try:
        walk(root, "")
    except OSError as exc:
        raise _unreadable(str(exc.filename or "the artifact"), exc) from exc
    for path in sorted(listed.keys() - seen):
        problems.append(
            _Problem(DigestError, path, f"sha256 {listed[path].sha256}", "no file")
        )
    return kept, problems


def _verify_file(
    folder: int, name: str, path: str, file: File, *, keep: bool
) -> bytes | _Problem:
    """Read a file once; compare kind, size and digest.

    Returns:
        What is wrong with it; else its bytes if `keep`, and nothing if not.
    """
    wanted = f"sha256 {file.sha256}"
    try:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return _Problem(DigestError, path, wanted, "no file")
    except OSError as exc:
        mode = _mode(folder, name)
        if mode is None or stat.S_ISREG(mode):
            raise _unreadable(path, exc) from exc
        return _Problem(UnsafePathError, path, "a plain file", _kind(mode))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _kind(status.st_mode)
            return _Problem(UnsafePathError, path, "a plain file", kind)
        if status.st_size != file.size:
            found = f"{status.st_size} bytes"
            return _Problem(DigestError, path, f"{file.size} bytes", found)
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
        return _Problem(DigestError, path, wanted, f"sha256 {digest}")
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


def _is_folder(root: int, name: str) -> bool:
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


# --- Parsing what was read ---------------------------------------------------------


Key = TypeVar("Key")
Value = TypeVar("Value")


class _Parsed(Mapping[Key, Value]):
    """Parsed files by key; each is parsed when it's first asked for."""

    def __init__(self, root: Path, parsers: Mapping[Key, Callable[[], Value]]) -> None:
        self._root = root
        self._parsers = parsers
        self._values: dict[Key, Value] = {}

    def __getitem__(self, key: Key) -> Value:
        if key not in self._values:
            parse = self._parsers[key]
            try:
                self._values[key] = parse()
            except ArtifactError as exc:
                raise _located(self._root, exc) from exc.__cause__
        return self._values[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._parsers)

    def __len__(self) -> int:
        return len(self._parsers)


def _parse_programs(
    root: Path, listing: Manifest, kept: Mapping[str, bytes]
) -> tuple[Mapping[tuple[str, str], Entry], Mapping[tuple[str, str, str], Program]]:
    entries: dict[tuple[str, str], Callable[[], Entry]] = {}
    programs: dict[tuple[str, str, str], Callable[[], Program]] = {}
    if "program" in listing.routes:
        for target in listing.targets:
            for name, convention in listing.entries.items():
                entries[target, name] = partial(
                    _parse_entry, target, name, convention.axes, listing, kept
                )
                for bucket in convention.buckets:
                    programs[target, name, bucket.name] = partial(
                        _parse_program,
                        *(target, name, bucket.name, bucket.axes, listing, kept),
                    )
    return _Parsed(root, entries), _Parsed(root, programs)


def _parse_entry(
    target: str,
    name: str,
    axes: tuple[str, ...],
    listing: Manifest,
    kept: Mapping[str, bytes],
) -> Entry:
    path = manifest.entry_path(target, name)
    entry = _rebuilt("entry", program.entry_from_json, path, kept)
    _same(path, "target", target, entry.target)
    _same(path, "name", name, entry.name)
    _same(path, "axes", axes, entry.axes)
    if entry.native is not None:
        _kernel_exists(path, "native", listing, entry.native)
    return entry


def _parse_program(
    target: str,
    name: str,
    bucket: str,
    axes: Mapping[str, int],
    listing: Manifest,
    kept: Mapping[str, bytes],
) -> Program:
    path = manifest.program_path(target, name, bucket)
    parsed = _rebuilt("program", program.program_from_json, path, kept)
    _same(path, "target", target, parsed.target)
    _same(path, "entry", name, parsed.entry)
    _same(path, "bucket", bucket, parsed.bucket)
    # Not yet held to its schema: it may be anything.
    _same(path, "axes", axes, parsed.axes)
    for label, kernel in parsed.kernels.items():
        _kernel_exists(path, label, listing, kernel)
    for label, constant in parsed.constants.items():
        _exists(path, f"constant {label}", listing, "constants", constant.digest)
    return parsed


def _rebuilt(
    kind: str,
    rebuild: Callable[[Mapping[str, Any]], Value],
    path: str,
    kept: Mapping[str, bytes],
) -> Value:
    fields = canonical.decode(kept[path], path)
    if fields.get("schema") != program.SCHEMA:
        schema.validate(kind, fields, path)
    try:
        return rebuild(fields)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        # The schema says what is wrong with it, and where.
        schema.validate(kind, fields, path)
        raise


_SUFFIXES = {
    "kernels": (".so", ".cubin"),
    "sources": (".cpp", ".py"),
    "constants": (".safetensors",),
}


def _kernel_exists(path: str, label: str, listing: Manifest, kernel: KernelRef) -> None:
    _exists(path, f"kernel {label}", listing, "kernels", kernel.digest)
    _exists(path, f"the source of {label}", listing, "sources", kernel.source)


def _exists(path: str, what: str, listing: Manifest, folder: str, digest: str) -> None:
    names = [f"{folder}/{digest}{suffix}" for suffix in _SUFFIXES[folder]]
    if not any(name in listing.files for name in names):
        manifest.refuse(f"{what}: expected {' or '.join(names)}, found neither", path)


def _same(path: str, field: str, expected: object, found: object) -> None:
    if expected != found:
        manifest.refuse(f"{field}: expected {expected!r}, found {found!r}", path)


# --- Errors ------------------------------------------------------------------------


def _located(
    root: Path, error: ArtifactError | ResourceError
) -> ArtifactError | ResourceError:
    """The same error, saying which artifact it is about."""
    return type(error)(
        f"artifact {root}: {error.message}",
        hint=error.hint or _AGAIN,
        **{**error.fields, "artifact": str(root)},
    )


def _joined(problems: list[_Problem]) -> ArtifactError:
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
