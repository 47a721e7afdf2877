"""Read an artifact: every byte verified before anything is parsed or run.

Lifecycle of `open_artifact`:

1. ``manifest.json`` is read and checked against the digest that it states; then the
   schema version, then its shape and its paths; the same for ``reports/index.json``.
2. The directory is walked: only the listed files and their folders may be there, as
   plain files and plain folders. Every file is read once, hashed, and compared.
3. ``entry.json`` and ``program.json`` are parsed from the bytes that were hashed, when
   they are first asked for, and what they refer to must exist: a start parses its own
   target's only.

reading.py reads; what it can't be tricked into is said there.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from compilekit.artifact import canonical, manifest, program, reading, schema
from compilekit.artifact.manifest import File, Manifest
from compilekit.artifact.program import Entry, KernelRef, Program
from compilekit.errors import (
    ArtifactError,
    DigestError,
    ManifestError,
    ResourceError,
)


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
        root = reading.open_root(self.root)
        try:
            return reading.read_below(root, path, file)
        except (ArtifactError, ResourceError) as exc:
            raise reading.located(self.root, exc) from exc.__cause__
        finally:
            os.close(root)

    def read_index(self, path: str) -> bytes:
        """The bytes of one of the two files that list the others.

        Raises:
            DigestError: The file has changed since the artifact was opened.
        """
        root = reading.open_root(self.root)
        try:
            data = reading.read_index(root, path)
            if path == manifest.MANIFEST:
                same = manifest.read_manifest(data) == self.manifest
            else:
                reports = manifest.read_reports(data, self.digest).files
                same = reports == dict(self.reports)
        except (ArtifactError, ResourceError) as exc:
            raise reading.located(self.root, exc) from exc.__cause__
        finally:
            os.close(root)
        if not same:
            raise DigestError(
                f"artifact {self.root}: {path} has changed since it was opened",
                hint=reading.AGAIN,
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
            raise reading.located(self.root, exc) from exc.__cause__

    def _listed(self, path: str) -> File:
        file = self.manifest.files.get(path) or self.reports.get(path)
        if file is None:
            raise ManifestError(
                f"artifact {self.root}: {path!r} isn't listed in its manifest",
                path=path,
            )
        return file


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
        descriptor = reading.open_root(root)
        try:
            return _open_verified(root, descriptor, approve)
        except (ArtifactError, ResourceError) as exc:
            # A build that finished meanwhile has put another artifact in this place.
            if not reading.was_replaced(root, descriptor):
                raise reading.located(root, exc) from exc.__cause__
        finally:
            os.close(descriptor)


def _open_verified(root: Path, descriptor: int, approve: Approve | None) -> Artifact:
    index = reading.read_index(descriptor, manifest.MANIFEST)
    listing = approved_manifest(
        index, approve and (lambda digest: approve(root, digest))
    )
    own = {manifest.MANIFEST}
    reports: Mapping[str, File] = {}
    if reading.is_folder(descriptor, manifest.REPORTS.rstrip("/")):
        data = reading.read_index(descriptor, manifest.REPORTS_INDEX)
        reports = manifest.read_reports(data, listing.digest).files
        own.add(manifest.REPORTS_INDEX)
    kept, problems = reading.verify_tree(descriptor, {**listing.files, **reports}, own)
    if problems:
        raise reading.joined(problems)
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
                raise reading.located(self._root, exc) from exc.__cause__
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
