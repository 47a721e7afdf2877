"""Artifacts in an OCI registry: push, and pull what one machine needs.

An image manifest has one layer per target: the packed artifact of that target alone,
as `artifact.edit.prune` and `artifact.archive.pack` make it. So a pull takes one layer,
and what it unpacks is an artifact with a digest, and a signature, of its own. The two
attestations have a layer each, for whoever asks; a pull leaves them.

Nothing that a registry answers is trusted: each blob is held to its digest, and the
artifact in it to its manifest, its signature and the digest that was asked for.

Needs the package oras (``pip install 'compilekit[oci]'``).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from compilekit import targets
from compilekit.artifact import Artifact, archive
from compilekit.artifact.parts import write_part
from compilekit.errors import ConfigError, Mismatch, MismatchError, ResourceError
from compilekit.registry.remote import MANIFEST_TYPE, Remote, no_artifact

ARTIFACT_TYPE = "application/vnd.compilekit.artifact.v1"
LAYER_TYPE = "application/vnd.compilekit.artifact.v1.tar"
CONFIG_TYPE = "application/vnd.compilekit.config.v1+json"
# Reports about the whole artifact, under the types that registries' tools know.
ATTESTATIONS = {
    "reports/provenance.json": "application/vnd.in-toto+json",
    "reports/sbom.json": "application/vnd.cyclonedx+json",
}
TARGET = "io.compilekit.target"
DIGEST = "io.compilekit.digest"


# What reading a stranger's JSON ends in: another shape, infinite numbers, deep nesting.
_MALFORMED = (TypeError, ValueError, AttributeError, OverflowError, RecursionError)


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
    remote = Remote(reference, insecure)
    config = json.dumps(
        {
            "schema": 1,
            "targets": {n: dict(t) for n, t in artifact.manifest.targets.items()},
        },
        sort_keys=True,
    ).encode()
    layers, documents = [], []
    with tempfile.TemporaryDirectory(prefix="compilekit-push-") as folder:
        place = Path(folder, "config.json")
        place.write_bytes(config)
        described = remote.upload(place, CONFIG_TYPE)
        for number, target in enumerate(sorted(artifact.manifest.targets)):
            part = write_part(artifact, [target], Path(folder, str(number), "artifact"))
            if sign is not None:
                sign(part)
            packed = archive.pack(part, Path(folder, f"{number}.tar"), reports=False)
            layer = remote.upload(packed.file, LAYER_TYPE)
            title = {"org.opencontainers.image.title": f"{target}.compilekit.tar"}
            layer["annotations"] = {**title, TARGET: target, DIGEST: part.digest}
            layers.append(layer)
        for path, kind in ATTESTATIONS.items():
            if path in artifact.reports:
                place = Path(folder, Path(path).name)
                place.write_bytes(artifact.read(path))
                title = {"org.opencontainers.image.title": place.name}
                documents.append({**remote.upload(place, kind), "annotations": title})
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": described,
        "layers": [*layers, *documents],
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
    remote = Remote(reference, insecure)
    manifest = remote.manifest()
    if (kind := manifest.get("artifactType")) != ARTIFACT_TYPE:
        what = f"found another kind: artifactType {kind!r}"
        raise no_artifact(reference, what)
    try:
        layers = {
            one["annotations"][TARGET]: one
            for one in manifest["layers"]
            if one["mediaType"] not in ATTESTATIONS.values()
        }
        config = json.loads(remote.blob(manifest["config"]))
        layer = layers[target or _choose(config["targets"])]
        size, digest = int(layer["size"]), str(layer["digest"])
    except KeyError as exc:
        if target and exc.args == (target,):
            raise ConfigError(
                f"target {target}: expected one of {', '.join(sorted(layers))}"
            ) from exc
        raise no_artifact(reference, exc) from exc
    except _MALFORMED as exc:
        raise no_artifact(reference, exc) from exc
    folder = Path(os.path.realpath(out_dir)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name: a process that is killed leaves nothing.
        with tempfile.TemporaryFile(dir=folder) as stream:
            remote.download(digest, size, stream)
            file = f"/proc/self/fd/{stream.fileno()}"
            return archive.unpack(file, out_dir, approve, called=reference)
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
