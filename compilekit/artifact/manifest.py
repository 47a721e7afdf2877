"""What ``manifest.json`` and ``reports/index.json`` say, as named tuples.

The manifest lists every file of an artifact except itself and ``reports/``: it is the
same, digest included, whenever the same inputs are built. Reports hold times, so they
have an index of their own, sealed the same way and bound to the manifest by digest.

Standard library only.
"""

# Annotations are evaluated: as text, a named tuple would compile each of them, and a
# start pays for it.

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from compilekit.artifact import canonical, schema
from compilekit.errors import ManifestError, SchemaVersionError, UnsafePathError
from compilekit.plan import Bucket

FORMAT = "compilekit-artifact"
SCHEMA = 1
MANIFEST = "manifest.json"
REPORTS = "reports/"
REPORTS_INDEX = "reports/index.json"

# A name of one of these folders states the digest of the file's bytes.
CONTENT_ADDRESSED = ("constants/", "kernels/", "sources/")

_NAME = re.compile(r"[A-Za-z0-9._+=@~-]{1,255}", re.ASCII)


class File(NamedTuple):
    """Digest and size in bytes of one file."""

    sha256: str
    size: int


class Model(NamedTuple):
    """The model that was compiled; never its weights.

    Attributes:
        source: As configured: ``hf:…`` or ``package.module:factory``. A local
            directory is recorded by its name only, so that the build host stays out.
        class_name: ``module:qualname`` of its class (``class`` in the file).
        dtype: dtype of its parameters.
        config_digest: sha256 of the canonical bytes of `config`.
        config: The model's configuration values; empty for a plain module.
    """

    source: str
    class_name: str
    dtype: str
    config: Mapping[str, Any] = {}
    config_digest: str = ""


class ManifestEntry(NamedTuple):
    """An entry's axes, in configuration order, and its buckets."""

    axes: tuple[str, ...]
    buckets: tuple[Bucket, ...]


class Serve(NamedTuple):
    """Defaults that an artifact carries for ``attach``."""

    on_uncovered: str = "error"
    over_length: str = "error"
    cuda_graphs: bool = True


class Manifest(NamedTuple):
    """``manifest.json``. `write` fills in `files` and `digest`.

    Attributes:
        model: What was compiled.
        targets: Name → target description; its optional ``factors`` are this target's
            own (ISA, symbol versions of its kernels).
        entries: Name → axes and buckets. Each target has every bucket.
        routes: ``program``, ``cache`` or both.
        factors: Name → value of everything the artifact's code depends on that is the
            same for all targets: ``torch.version``, ``python``, compile options.
        serve: Defaults for ``attach``.
        files: Path → digest and size of every file but this one and ``reports/``.
        layout: Reserved: rank, world size, tensor subclasses, adapters.
        digest: sha256 of this file without its digest line: the artifact's identity.
    """

    model: Model
    targets: Mapping[str, Mapping[str, Any]]
    entries: Mapping[str, ManifestEntry]
    factors: Mapping[str, Any]
    routes: tuple[str, ...] = ("program",)
    serve: Serve = Serve()
    files: Mapping[str, File] = {}
    layout: Mapping[str, Any] = {}
    digest: str = ""
    schema: int = SCHEMA

    def factors_for(self, target: str) -> dict[str, Any]:
        """The common factors and those of one target, together."""
        return {**self.factors, **self.targets[target].get("factors", {})}


class ReportsIndex(NamedTuple):
    """``reports/index.json``: `files` below ``reports/``, for one artifact's digest."""

    artifact: str
    files: Mapping[str, File]
    digest: str = ""
    schema: int = SCHEMA


def seal_manifest(
    manifest: Manifest, files: Mapping[str, bytes]
) -> tuple[bytes, Manifest]:
    """The bytes of ``manifest.json`` for these files, and the manifest as it reads."""
    config = dict(manifest.model.config)
    sealed = manifest._replace(
        model=manifest.model._replace(
            config_digest=canonical.sha256(canonical.encode(config))
        ),
        files=describe(files),
    )
    data, digest = canonical.seal(_manifest_to_json(sealed))
    return data, sealed._replace(digest=digest)


def read_manifest(data: bytes) -> Manifest:
    """Rebuild a manifest from its file, after checking every byte of it.

    Raises:
        DigestError: The bytes don't have the digest that they state.
        SchemaVersionError: A schema that this version doesn't know.
        ManifestError: Not a manifest, or it contradicts itself.
        UnsafePathError: A listed path leaves the artifact.
    """
    fields = canonical.unseal(data, MANIFEST)
    if fields.get("format") != FORMAT:
        refuse(f"expected format {FORMAT!r}, found {fields.get('format')!r}")
    if fields.get("schema") != SCHEMA:
        raise SchemaVersionError(
            f"{MANIFEST}: expected schema {SCHEMA}, found {fields.get('schema')!r}",
            hint="Use the compilekit that built the artifact, or build it again.",
            path=MANIFEST,
            expected=SCHEMA,
            found=fields.get("schema"),
        )
    schema.validate("manifest", fields, MANIFEST)
    check_paths(fields["files"])
    for path in fields["files"]:
        if path == MANIFEST or path.startswith(REPORTS):
            refuse(f"lists {path}, which it must not")
    model = fields["model"]
    config_digest = canonical.sha256(canonical.encode(model["config"]))
    if model["config_sha256"] != config_digest:
        refuse(
            f"model.config_sha256: expected {config_digest} (of model.config), found"
            f" {model['config_sha256']}"
        )
    manifest = Manifest(
        model=Model(
            model["source"],
            model["class"],
            model["dtype"],
            model["config"],
            model["config_sha256"],
        ),
        targets=fields["targets"],
        entries={
            name: _entry(name, entry) for name, entry in fields["entries"].items()
        },
        factors=fields["factors"],
        routes=tuple(fields["routes"]),
        serve=Serve(**fields["serve"]),
        files=_files(fields["files"]),
        layout=fields["layout"],
        digest=fields["digest"],
    )
    _check_listed(manifest)
    return manifest


def seal_reports(artifact: str, files: Mapping[str, bytes]) -> bytes:
    """The bytes of ``reports/index.json`` for these reports of one artifact."""
    data, _ = canonical.seal(
        {"artifact": artifact, "files": _to_json(describe(files)), "schema": SCHEMA}
    )
    return data


def read_reports(data: bytes, artifact: str) -> ReportsIndex:
    """Rebuild the index of the reports of one artifact; raises as `read_manifest`."""
    fields = canonical.unseal(data, REPORTS_INDEX)
    schema.validate("reports", fields, REPORTS_INDEX)
    if fields["artifact"] != artifact:
        raise ManifestError(
            f"{REPORTS_INDEX}: expected the reports of artifact {artifact}, found"
            f" those of {fields['artifact']}",
            path=REPORTS_INDEX,
            expected=artifact,
            found=fields["artifact"],
        )
    check_paths(fields["files"])
    for path in fields["files"]:
        if not path.startswith(REPORTS) or path == REPORTS_INDEX:
            refuse(f"lists {path}, which it must not", REPORTS_INDEX)
    return ReportsIndex(artifact, _files(fields["files"]), fields["digest"])


def describe(files: Mapping[str, bytes]) -> dict[str, File]:
    """Digest and size of each file, sorted by path."""
    return {
        path: File(canonical.sha256(files[path]), len(files[path]))
        for path in sorted(files)
    }


def check_paths(paths: Iterable[str]) -> None:
    """Refuse paths that could leave the artifact, collide, or not travel.

    Raises:
        UnsafePathError: A path is absolute, has ``..`` or an empty part, or a character
            outside letters, digits and ``. _ + = @ ~ -``; or one path is a folder of
            another.
    """
    known = set(paths)
    for path in known:
        parts = path.split("/")
        if not all(_NAME.fullmatch(part) and part not in (".", "..") for part in parts):
            raise UnsafePathError(
                f"unsafe path {path!r}: expected relative names of letters, digits and"
                " . _ + = @ ~ - between single slashes",
                path=path,
            )
        for parent in parents(path):
            if parent in known:
                raise UnsafePathError(
                    f"unsafe path {path!r}: {parent!r} is listed as a file too",
                    path=path,
                )


def parents(path: str) -> tuple[str, ...]:
    """The folders above a path, outermost first: ``a/b/c`` has ``a`` and ``a/b``."""
    parts = path.split("/")
    return tuple("/".join(parts[:end]) for end in range(1, len(parts)))


def entry_path(target: str, entry: str) -> str:
    """Where an entry's calling convention lies."""
    return f"programs/{target}/{entry}/entry.json"


def program_path(target: str, entry: str, bucket: str) -> str:
    """Where a bucket's program description lies."""
    return f"programs/{target}/{entry}/{bucket}/program.json"


def call_path(target: str, entry: str, bucket: str) -> str:
    """Where a bucket's output code lies."""
    return f"programs/{target}/{entry}/{bucket}/call.py"


def refuse(message: str, name: str = MANIFEST) -> NoReturn:
    """Raise the `ManifestError` of a file that contradicts itself."""
    raise ManifestError(f"{name}: {message}", path=name)


def _check_listed(manifest: Manifest) -> None:
    for path, file in manifest.files.items():
        if path.startswith(CONTENT_ADDRESSED):
            stem = path.rsplit("/", 1)[1].split(".", 1)[0]
            if stem != file.sha256:
                refuse(f"{path}: the name states another digest than {file.sha256}")
    if "program" not in manifest.routes:
        return
    for target in manifest.targets:
        for name, entry in manifest.entries.items():
            expected = [entry_path(target, name)]
            for bucket in entry.buckets:
                expected.append(program_path(target, name, bucket.name))
                expected.append(call_path(target, name, bucket.name))
            for path in expected:
                if path not in manifest.files:
                    refuse(f"expected it to list {path}, which its entries call for")


def _manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    model = manifest.model
    return {
        "format": FORMAT,
        "schema": manifest.schema,
        "model": {
            "source": model.source,
            "class": model.class_name,
            "dtype": model.dtype,
            "config": model.config,
            "config_sha256": model.config_digest,
        },
        "targets": manifest.targets,
        "entries": {
            name: {
                "axes": entry.axes,
                "buckets": {bucket.name: bucket.axes for bucket in entry.buckets},
            }
            for name, entry in manifest.entries.items()
        },
        "factors": manifest.factors,
        "routes": manifest.routes,
        "serve": manifest.serve._asdict(),
        "layout": manifest.layout,
        "files": _to_json(manifest.files),
    }


def _entry(name: str, fields: Mapping[str, Any]) -> ManifestEntry:
    axes = tuple(fields["axes"])
    for bucket, sizes in fields["buckets"].items():
        if set(sizes) != set(axes):
            refuse(
                f"entries.{name}.buckets.{bucket}: expected a size for each of"
                f" {list(axes)}, found {sorted(sizes)}"
            )
    buckets = [
        Bucket(bucket, {axis: sizes[axis] for axis in axes})
        for bucket, sizes in fields["buckets"].items()
    ]
    # By size, not by name: b1_s32 comes before b1_s128.
    buckets.sort(key=lambda bucket: (*bucket.axes.values(), bucket.name))
    return ManifestEntry(axes, tuple(buckets))


def _files(fields: Mapping[str, Any]) -> dict[str, File]:
    return {path: File(file["sha256"], file["size"]) for path, file in fields.items()}


def _to_json(files: Mapping[str, File]) -> dict[str, Any]:
    return {
        path: {"sha256": file.sha256, "size": file.size} for path, file in files.items()
    }
