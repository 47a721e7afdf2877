"""An artifact as one file: a plain tar archive, the same bytes for the same artifact.

    artifact.signature.json     the records beside the artifact, if they are about it:
    artifact.verified.json      first, so that a signature is checked before the rest
    artifact/manifest.json      nothing is written before it is verified
    artifact/…                  every other file, sorted; then the reports

Members have no times, owners or links. `unpack` takes a listed plain file of the listed
size, each once, and nothing else: no name from the archive is ever used as a path, so
nothing can be written outside, and no member can be larger than the manifest says.

Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from compilekit.artifact import canonical, manifest, reading, store, write
from compilekit.artifact.manifest import File
from compilekit.artifact.store import Artifact
from compilekit.errors import (
    ArtifactError,
    DigestError,
    ManifestError,
    ResourceError,
    UnsafePathError,
)

FOLDER = "artifact"
SIGNATURE = ".signature.json"
RECORDS = (SIGNATURE, ".verified.json")

_MAX_RECORD_BYTES = 16 << 20
_CHUNK = 1 << 20

# Digest of the artifact, bytes of its signature record.
Approve = Callable[[str, bytes | None], None]
_NOTHING = "Nothing of it was used. Get the file again, or pack the artifact again."


class Packed(NamedTuple):
    """One packed artifact: its file, that file's sha256 and size in bytes."""

    file: Path
    sha256: str
    size: int
    digest: str


def pack(
    artifact: Artifact, file: str | os.PathLike[str], *, reports: bool = True
) -> Packed:
    """Write an artifact and its records into one file, which appears in one step.

    Args:
        reports: Take ``reports/`` along. Without it, builds of the same thing give the
            same file.
    Raises:
        ResourceError: The file can't be written.
        DigestError: The artifact has changed since it was opened.
    """
    out = Path(os.path.abspath(file))
    if os.path.isdir(out):
        raise ResourceError(
            f"{out}: expected a file to write, found a directory",
            hint="Name the file: -o model.compilekit.tar",
            path=str(out),
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with write.replacing(out) as part, open(part, "xb") as stream:
            _write_members(artifact, stream, reports)
            os.fchmod(stream.fileno(), 0o644)
            stream.flush()
            size = stream.tell()
            sha256 = _sha256(part)
    except OSError as exc:
        raise ResourceError(
            f"{out} can't be written: {exc.strerror}",
            hint="Choose another place with -o, or free some space.",
            path=str(out),
        ) from exc
    return Packed(out, sha256, size, artifact.digest)


def unpack(
    file: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    approve: Approve | None = None,
    *,
    called: str = "",
) -> Artifact:
    """Put a packed artifact into its place, verified, in one step; records beside it.

    Args:
        out_dir: The artifact's place; an artifact there is replaced.
        approve: Called with the artifact's digest and the bytes of its signature record
            (None without one) before anything is parsed; raises to refuse it.
        called: Its name in errors; the file's by default.
    Raises:
        ArtifactError: The archive is damaged, or holds what the manifest doesn't list.
        ResourceError: It can't be read, or the place can't be written.
    """
    path = Path(os.path.abspath(file))
    records: dict[str, bytes] = {}

    def fill(staging: Path) -> None:
        records.update(_extract(path, staging, approve))

    try:
        artifact = write.install(out_dir, fill)
    except ArtifactError as exc:
        raise type(exc)(
            f"packed artifact {called or path}: {exc.message}",
            hint=_NOTHING,
            **exc.fields,
        ) from exc
    write_records(artifact.root, records)
    return artifact


def read_records(artifact: Artifact) -> dict[str, bytes]:
    """The records that lie beside an artifact and are about it: suffix → bytes."""
    found = {}
    for suffix in RECORDS:
        place = artifact.root.with_name(artifact.root.name + suffix)
        try:
            data = reading.read_beside(place, _MAX_RECORD_BYTES)
            about = canonical.decode(data, place.name).get("artifact")
        except (OSError, ManifestError):
            continue
        if about == artifact.digest:
            found[suffix] = data
    return found


def write_records(root: Path, records: Mapping[str, bytes]) -> None:
    """Put records beside an artifact, each by one rename; older ones are removed.

    Raises:
        ResourceError: The folder around the artifact can't be written.
    """
    try:
        for suffix in RECORDS:
            place = root.with_name(root.name + suffix)
            if suffix in records:
                with write.replacing(place) as part:
                    write.write_file(part, [records[suffix]])
            else:
                place.unlink(missing_ok=True)
    except OSError as exc:
        raise ResourceError(
            f"a record beside {root} can't be written: {exc.strerror}",
            hint="The artifact is in its place; only its records are missing.",
            path=str(root),
        ) from exc


# --- Packing -----------------------------------------------------------------------


def _write_members(artifact: Artifact, stream: IO[bytes], reports: bool) -> None:
    index = manifest.MANIFEST
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for suffix, data in read_records(artifact).items():
            _add(archive, FOLDER + suffix, data)
        _add(archive, f"{FOLDER}/{index}", artifact.read_index(index))
        for path in sorted(artifact.manifest.files):
            _add(archive, f"{FOLDER}/{path}", artifact.read(path))
        if reports and artifact.reports:
            index = manifest.REPORTS_INDEX
            _add(archive, f"{FOLDER}/{index}", artifact.read_index(index))
            for path in sorted(artifact.reports):
                _add(archive, f"{FOLDER}/{path}", artifact.read(path))


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    archive.addfile(member, io.BytesIO(data))


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- Unpacking ---------------------------------------------------------------------


class _Bounded:
    """A file of which no single read is large.

    tarfile reads an extension header of any size at once; ours are short.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _CHUNK:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)


def _extract(path: Path, staging: Path, approve: Approve | None) -> dict[str, bytes]:
    """Write the files of an archive into an empty directory; returns the records."""
    try:
        with reading.open_plain(path) as stream:
            bounded: IO[bytes] = _Bounded(stream)  # type: ignore[assignment]
            with tarfile.open(fileobj=bounded, mode="r:") as archive:
                return _extract_members(archive, staging, approve)
    except (tarfile.TarError, EOFError, ValueError) as exc:
        raise ManifestError(
            f"expected a tar archive that `compilekit pack` wrote: {exc}",
            path=str(path),
        ) from exc
    except OSError as exc:
        if exc.filename is None or Path(os.fsdecode(exc.filename)) != path:
            raise
        raise ResourceError(
            f"packed artifact {path} can't be read: {exc.strerror}",
            hint="Check the path, and the file's owner and mode.",
            path=str(path),
        ) from exc


def _extract_members(
    archive: tarfile.TarFile, staging: Path, approve: Approve | None
) -> dict[str, bytes]:
    members = _members(archive)
    records: dict[str, bytes] = {}
    for name, member in members:
        suffix = name.removeprefix(FOLDER)
        if suffix not in RECORDS or suffix in records:
            break
        records[suffix] = _read(archive, member, _MAX_RECORD_BYTES)
    else:
        name = ""
    if name != f"{FOLDER}/{manifest.MANIFEST}":
        raise ManifestError(
            f"expected {FOLDER}/{manifest.MANIFEST} before any other file, found"
            f" {name or 'nothing'!r}",
            path=name,
        )
    data = _read(archive, member, reading.MAX_INDEX_BYTES)
    listing = store.approved_manifest(
        data, approve and (lambda digest: approve(digest, records.get(SIGNATURE)))
    )
    indexes = {manifest.MANIFEST: data}
    wanted = dict(listing.files)
    _check_space(staging, sum(file.size for file in wanted.values()))
    write.make_folders(staging, {**wanted, **indexes})
    write.write_file(staging / (manifest.MANIFEST + write.PART), [data])
    written = [manifest.MANIFEST]
    for name, member in members:
        path = name.removeprefix(f"{FOLDER}/")
        if path == manifest.REPORTS_INDEX and path not in indexes:
            data = indexes[path] = _read(archive, member, reading.MAX_INDEX_BYTES)
            reports = manifest.read_reports(data, listing.digest).files
            write.make_folders(staging, (path, *reports))
            write.write_file(staging / path, [data])
            wanted.update(reports)
        elif path != name and path in wanted:
            # Taken out: a second member of this name isn't listed any more.
            file = wanted.pop(path)
            write.write_file(staging / path, _chunks(archive, member, file))
        else:
            twice = path in written or path in indexes
            raise UnsafePathError(
                f"{name!r}: expected nothing (it isn't listed), found it"
                + (" twice" if twice else ""),
                path=name,
            )
        written.append(path)
    if wanted:
        path, file = next(iter(sorted(wanted.items())))
        raise DigestError(
            f"{path}: expected sha256 {file.sha256}, found no file", path=path
        )
    write.seal(staging, written)
    return records


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Every member with its name; anything but a plain file is refused."""
    while (member := archive.next()) is not None:
        plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        # What is reported as a file but stored in pieces has no size of its own.
        if not plain or member.sparse is not None:
            raise UnsafePathError(
                f"{member.name!r}: expected a plain file, found {_kind(member)}",
                path=member.name,
            )
        yield member.name, member
    # tarfile takes a damaged header for the end.
    if archive.fileobj is not None:
        archive.fileobj.seek(archive.offset)
        _check_end(archive.fileobj.read)


def _check_end(read: Callable[[int], bytes]) -> None:
    """Behind the last member there are zeros, two blocks at least, and nothing else."""
    count = 0
    while chunk := read(_CHUNK):
        count += len(chunk)
        # A sparse file of a terabyte would keep a start busy for minutes.
        if chunk.strip(b"\0") or count > _CHUNK:
            raise ManifestError("expected the end of the archive, found more data")
    if count < 2 * tarfile.BLOCKSIZE:
        raise ManifestError("expected the end of the archive, and the file ends before")


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "a link"
    if member.isdir():
        return "a folder"
    return "a sparse file" if member.issparse() else "a device or pipe"


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo, limit: int) -> bytes:
    if member.size > limit:
        raise ManifestError(
            f"{member.name}: expected at most {limit} bytes, found {member.size}",
            path=member.name,
        )
    return b"".join(_chunks(archive, member, File("", member.size)))


def _chunks(
    archive: tarfile.TarFile, member: tarfile.TarInfo, file: File
) -> Iterator[bytes]:
    """The member's bytes, if it is as large as the listed file."""
    if member.size != file.size:
        raise DigestError(
            f"{member.name}: expected {file.size} bytes, found {member.size}",
            path=member.name,
        )
    stream, left = archive.extractfile(member), file.size
    while stream is not None and left:
        chunk = stream.read(min(left, _CHUNK))
        if not chunk:
            break
        left -= len(chunk)
        yield chunk
    if left:
        raise DigestError(
            f"{member.name}: expected {file.size} bytes, and the archive ends before",
            path=member.name,
        )


def _check_space(folder: Path, size: int) -> None:
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < size:
        raise OSError(
            errno.ENOSPC,
            f"needs {size} bytes, and {free.f_bavail * free.f_frsize} are free",
            str(folder),
        )
