"""An image that Red Hat's Model Cache Vault (MCV) extracts, and so GKM and KServe.

They carry kernel caches to a cluster's nodes. An image of theirs has one gzipped layer
and labels that say which GPUs it is for; what they put into a node's directory is a
whole artifact, in ``artifact/`` with its records beside it:

    io.triton.cache/artifact/…            what they extract
    io.triton.cache/artifact.*.json
    io.triton.manifest/manifest.json      {"triton": []}: no kernel of Triton's own

Source: GKM's mcv/docs/spec-compat.md, mcv/pkg/cache/triton.go and
mcv/pkg/preflightcheck/utils.go. Their check of labels takes place; the one of their
manifest, which compares driver versions for equality, has nothing to look at.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from compilekit.artifact import Artifact, archive
from compilekit.artifact.parts import write_part
from compilekit.errors import ConfigError
from compilekit.registry.remote import MANIFEST_TYPE, Remote

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"

_CACHE = "io.triton.cache"
_MANIFEST = "io.triton.manifest/manifest.json"
_LABELS = "cache.triton.image"


class Carried(NamedTuple):
    """What a push left: the image's digest, the artifact's, and the labels."""

    reference: str
    manifest: str
    target: str
    digest: str
    labels: dict[str, str]


def push_carrier(
    artifact: Artifact,
    reference: str,
    *,
    target: str = "",
    insecure: bool = False,
    sign: Callable[[Artifact], object] | None = None,
) -> Carried:
    """Put one target's artifact into a registry as an image of MCV's kind.

    Args:
        target: Which; the only one by default.
        sign: Signs the artifact of that target.
    Raises:
        ConfigError: There is no such target, or several and none was named.
        ResourceError: The registry can't be reached, or refuses.
    """
    known = sorted(artifact.manifest.targets)
    if not target and len(known) == 1:
        target = known[0]
    if target not in known:
        raise ConfigError(
            f"an MCV image holds one target: expected one of {', '.join(known)}, found"
            f" {target or 'none'}",
            hint="Name it with --target.",
        )
    remote = Remote(reference, insecure)
    with tempfile.TemporaryDirectory(prefix="compilekit-push-") as name:
        folder = Path(name)
        part = write_part(artifact, [target], folder / "artifact")
        if sign is not None:
            sign(part)
        packed = archive.pack(part, folder / "packed.tar", reports=False)
        layer, size, plain = _write_layer(packed.file, folder / "layer.tar.gz")
        labels = mcv_labels(part, target, size)
        config = folder / "config.json"
        config.write_text(json.dumps(_config(labels, plain), sort_keys=True))
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": remote.upload(config, CONFIG_TYPE),
            "layers": [remote.upload(layer, LAYER_TYPE)],
        }
    digest = remote.upload_manifest(manifest)
    return Carried(reference, digest, target, part.digest, labels)


def mcv_labels(part: Artifact, target: str, size: int) -> dict[str, str]:
    """What MCV compares with a node's GPUs, and with what it extracted."""
    described = part.manifest.targets[target]
    device = described["device"]
    if described["kind"] == "cuda":
        arch = f"{device['major']}{device['minor']}"
        summary = {"backend": "cuda", "arch": arch, "warp_size": device["warp_size"]}
    else:
        summary = {"backend": "cpu", "arch": described["march"], "warp_size": 1}
    return {
        f"{_LABELS}/entry-count": str(len(part.programs)),
        f"{_LABELS}/cache-size-bytes": str(size),
        f"{_LABELS}/summary": json.dumps({"targets": [summary]}, separators=(",", ":")),
        "io.compilekit.digest": part.digest,
        "io.compilekit.target": target,
    }


def _config(labels: dict[str, str], layer: str) -> dict[str, Any]:
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
    }


def _write_layer(packed: Path, out: Path) -> tuple[Path, int, str]:
    """The packed artifact's members below MCV's folder, gzipped, the same bytes again.

    Returns:
        The layer, the bytes of the files in it, and the digest of what was gzipped.
    """
    plain = out.with_suffix("")
    size = 0
    with (
        tarfile.open(packed) as members,
        tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as layer,
    ):
        folders = set()
        for member in members:
            name = f"{_CACHE}/{member.name}"
            for folder in [str(parent) for parent in reversed(Path(name).parents)][1:]:
                if folder not in folders:
                    folders.add(folder)
                    _add(layer, folder, None)
            data = members.extractfile(member)
            size += _add(layer, name, data.read() if data else b"")
        _add(layer, _MANIFEST.partition("/")[0], None)
        _add(layer, _MANIFEST, b'{"triton":[]}\n')
    with open(plain, "rb") as source, open(out, "wb") as stream:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
        source.seek(0)
        # Neither a name nor a time in the header.
        with gzip.GzipFile("", "wb", 6, stream, mtime=0) as squeezed:
            shutil.copyfileobj(source, squeezed, 1 << 20)
    return out, size, digest


def _add(layer: tarfile.TarFile, name: str, data: bytes | None) -> int:
    """Add a file, or a folder without data; its size."""
    member = tarfile.TarInfo(name)
    member.mode = 0o755 if data is None else 0o644
    member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
    member.size = len(data or b"")
    layer.addfile(member, io.BytesIO(data or b""))
    return member.size
