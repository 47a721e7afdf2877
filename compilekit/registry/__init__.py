"""Artifacts in an OCI registry: push, and pull what one machine needs.

An image manifest has one layer per target: the packed artifact of that target alone,
as `artifact.edit.prune` and `artifact.archive.pack` make it. So a pull takes one layer,
and what it unpacks is an artifact with a digest, and a signature, of its own.

Nothing that a registry answers is trusted: each blob is held to its digest, and the
artifact in it to its manifest, its signature and the digest that was asked for.

Needs the package oras (``pip install 'compilekit[oci]'``).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from compilekit import targets
from compilekit.artifact import (
    Artifact,
    archive,
    edit,
    read_verification,
    write_artifact,
    write_verification,
)
from compilekit.errors import (
    ArtifactError,
    ConfigError,
    DigestError,
    ManifestError,
    Mismatch,
    MismatchError,
    ResourceError,
)

ARTIFACT_TYPE = "application/vnd.compilekit.artifact.v1"
LAYER_TYPE = "application/vnd.compilekit.artifact.v1.tar"
CONFIG_TYPE = "application/vnd.compilekit.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
TARGET = "io.compilekit.target"
DIGEST = "io.compilekit.digest"

_MAX_MANIFEST = 4 << 20
_CHUNK = 1 << 20
_AGAIN = "Nothing of it was used. Pull again, or push the artifact again."


class Layer(NamedTuple):
    """One target in a registry: the layer's digest and size, the artifact's digest."""

    target: str
    layer: str
    size: int
    digest: str


class Pushed(NamedTuple):
    """What a push left: the manifest's digest, by which it can be pulled for ever."""

    reference: str
    manifest: str
    layers: tuple[Layer, ...]


def push(
    artifact: Artifact,
    reference: str,
    *,
    insecure: bool = False,
    sign: Callable[[Artifact], object] | None = None,
) -> Pushed:
    """Put an artifact into a registry, one layer per target; blobs there are kept.

    Args:
        reference: ``registry/repository:tag``.
        insecure: Speak HTTP.
        sign: Signs the artifact of each target. Without it a signature goes along
            where there is one target.
    Raises:
        ResourceError: The registry can't be reached, or refuses.
    """
    remote = _Remote(reference, insecure)
    config = json.dumps(
        {
            "schema": 1,
            "targets": {n: dict(t) for n, t in artifact.manifest.targets.items()},
        },
        sort_keys=True,
    ).encode()
    layers = []
    with tempfile.TemporaryDirectory(prefix="compilekit-push-") as folder:
        place = Path(folder, "config.json")
        place.write_bytes(config)
        described = remote.upload(place, CONFIG_TYPE)
        for number, target in enumerate(sorted(artifact.manifest.targets)):
            part = _part(artifact, target, Path(folder, str(number), "artifact"))
            if sign is not None:
                sign(part)
            packed = archive.pack(part, Path(folder, f"{number}.tar"), reports=False)
            layer = remote.upload(packed.file, LAYER_TYPE)
            title = {"org.opencontainers.image.title": f"{target}.compilekit.tar"}
            layer["annotations"] = {**title, TARGET: target, DIGEST: part.digest}
            layers.append(layer)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": described,
        "layers": layers,
        "annotations": {DIGEST: artifact.digest},
    }
    return Pushed(
        reference,
        remote.upload_manifest(manifest),
        tuple(
            Layer(
                layer["annotations"][TARGET],
                layer["digest"],
                layer["size"],
                layer["annotations"][DIGEST],
            )
            for layer in layers
        ),
    )


def _part(artifact: Artifact, target: str, place: Path) -> Artifact:
    """The artifact of one target, its records beside it."""
    part = write_artifact(place, *edit.prune(artifact, targets=[target]))
    if part.digest == artifact.digest:
        archive.write_records(part.root, archive.read_records(artifact))
        return part
    record, _ = read_verification(artifact)
    if record is not None and target in record.targets:
        # Its programs are these, byte for byte.
        write_verification(part, {target: record.targets[target]})
    return part


def pull(
    reference: str,
    out_dir: str | os.PathLike[str],
    *,
    target: str = "",
    insecure: bool = False,
    approve: archive.Approve | None = None,
) -> Artifact:
    """Get one target's artifact from a registry and put it into its place in one step.

    Args:
        reference: ``registry/repository:tag``, or ``…@sha256:…``.
        target: Which; the one with the most CPU features that this machine has, by
            default.
        approve: See `archive.unpack`.
    Raises:
        MismatchError: No target fits this machine.
        ArtifactError: What came isn't what its digests say.
        ResourceError: The registry can't be reached, or refuses.
    """
    remote = _Remote(reference, insecure)
    manifest = remote.manifest()
    try:
        layers = {one["annotations"][TARGET]: one for one in manifest["layers"]}
        config = json.loads(remote.blob(manifest["config"]))
        layer = layers[target or _choose(config["targets"])]
        size, digest = int(layer["size"]), str(layer["digest"])
    except KeyError as exc:
        if target and exc.args == (target,):
            raise ConfigError(
                f"target {target}: expected one of {', '.join(sorted(layers))}"
            ) from exc
        raise _no_artifact(reference, exc) from exc
    except (TypeError, ValueError, AttributeError) as exc:
        raise _no_artifact(reference, exc) from exc
    folder = Path(os.path.realpath(out_dir)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name: a process that is killed leaves nothing.
        with tempfile.TemporaryFile(dir=folder) as stream:
            remote.download(digest, size, stream)
            return archive.unpack(f"/proc/self/fd/{stream.fileno()}", out_dir, approve)
    except OSError as exc:
        raise ResourceError(
            f"{reference} can't be put into {folder}: {exc.strerror}",
            hint="Choose another place with -o, or free some space.",
        ) from exc


def _choose(described: Mapping[str, Mapping[str, Any]]) -> str:
    """The target whose code this machine runs, the one with the most features."""
    here, flags = targets.machine(), targets.cpu_flags()
    fitting = {
        name: len(target.get("features", ()))
        for name, target in described.items()
        if target["kind"] == "cpu"
        and target["machine"] == here
        and flags.issuperset(target.get("features", ()))
    }
    if not fitting:
        raise MismatchError(
            "no target in the registry fits this machine's CPU",
            (
                Mismatch(
                    "isa",
                    ", ".join(sorted(described)),
                    here,
                    "refuse",
                    "A GPU's target isn't chosen by itself.",
                    "Name it with --target, or build for this machine.",
                ),
            ),
        )
    return max(sorted(fitting), key=lambda name: fitting[name])


def _no_artifact(reference: str, exc: Exception) -> ManifestError:
    return ManifestError(
        f"{reference}: expected a manifest that `compilekit push` wrote: {exc!r}",
        hint=_AGAIN,
    )


# --- The registry ------------------------------------------------------------------


class _Remote:
    """One repository; every answer is an error of the tree, or held to its digest."""

    def __init__(self, reference: str, insecure: bool) -> None:
        try:
            import oras.client
        except ImportError as exc:
            raise ResourceError(
                f"registries need the package oras: {exc}",
                hint="pip install 'compilekit[oci]'",
            ) from exc
        self._reference = reference
        self._client = oras.client.OrasClient(insecure=insecure)
        try:
            self._place = self._client.get_container(reference)
        except (ValueError, TypeError, AttributeError) as exc:
            raise ConfigError(
                f"{reference}: expected registry/repository:tag: {exc}"
            ) from exc
        self._client.auth.load_configs(self._place)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        import requests

        try:
            yield
        except (requests.RequestException, ValueError) as exc:
            raise ResourceError(
                f"registry of {self._reference}: {exc}",
                hint="Check the name, the network and `docker login`; a registry"
                " without TLS needs --insecure.",
            ) from exc

    def upload(self, file: Path, kind: str) -> dict[str, Any]:
        """Upload a blob that isn't there yet; its descriptor."""
        with open(file, "rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        size = file.stat().st_size
        layer = {"mediaType": kind, "digest": f"sha256:{sha256}", "size": size}
        with self._talking():
            self._check(self._client.upload_blob(str(file), self._place, layer))
        return layer

    def upload_manifest(self, manifest: dict[str, Any]) -> str:
        """Upload the manifest, which makes the rest visible; its digest."""
        data = json.dumps(manifest, sort_keys=True).encode()
        with self._talking():
            answer = self._client.do_request(
                f"{self._client.prefix}://{self._place.manifest_url()}",
                "PUT",
                data=data,
                headers={"Content-Type": MANIFEST_TYPE},
            )
            self._check(answer)
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def manifest(self) -> dict[str, Any]:
        """The manifest; its bytes have the digest in the reference, if there is one."""
        url = f"{self._client.prefix}://{self._place.manifest_url()}"
        data = b"".join(self._get(url, _MAX_MANIFEST, {"Accept": MANIFEST_TYPE}))
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if self._place.digest and self._place.digest != found:
            raise _other(f"manifest of {self._reference}", self._place.digest, found)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise _no_artifact(self._reference, exc) from exc
        if not isinstance(value, dict):
            raise _no_artifact(self._reference, TypeError("no object"))
        return value

    def blob(self, described: Mapping[str, Any]) -> bytes:
        """A small blob, held to its digest."""
        data = b"".join(self._get(self._url(described["digest"]), _MAX_MANIFEST, {}))
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if found != described["digest"]:
            raise _other("config", described["digest"], found)
        return data

    def download(self, digest: str, size: int, stream: IO[bytes]) -> None:
        """A layer of this size into a file, held to its digest.

        Raises:
            DigestError: It's larger, smaller or another one.
        """
        room = os.fstatvfs(stream.fileno())
        # Twice: the layer, and what is unpacked from it.
        if room.f_bavail * room.f_frsize < 2 * size:
            raise OSError(28, f"needs {2 * size} bytes free")
        sha256 = hashlib.sha256()
        for chunk in self._get(self._url(digest), size, {}):
            sha256.update(chunk)
            stream.write(chunk)
        stream.flush()
        found = f"sha256:{sha256.hexdigest()}"
        if found != digest:
            raise _other(f"layer of {self._reference}", digest, found)

    def _url(self, digest: str) -> str:
        return f"{self._client.prefix}://{self._place.get_blob_url(digest)}"

    def _get(self, url: str, limit: int, headers: dict[str, str]) -> Iterator[bytes]:
        """What a registry answers, as long as it isn't more than it said."""
        with self._talking():
            answer = self._client.do_request(url, "GET", headers=headers, stream=True)
            self._check(answer)
            count = 0
            with closing(answer):
                for chunk in answer.iter_content(_CHUNK):
                    count += len(chunk)
                    if count > limit:
                        raise DigestError(
                            f"{url}: expected {limit} bytes, found more", hint=_AGAIN
                        )
                    yield chunk

    def _check(self, answer: Any) -> None:
        if answer.status_code not in (200, 201, 202):
            text = " ".join(answer.text[:200].split())
            raise ValueError(f"{answer.status_code} {answer.reason} {text}".strip())


def _other(what: str, expected: str, found: str) -> ArtifactError:
    return DigestError(
        f"{what}: expected {expected}, found {found}",
        hint=_AGAIN,
        expected=expected,
        found=found,
    )
