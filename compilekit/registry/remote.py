"""One repository of a registry: its answers are held to their digests.

Needs the package oras (``pip install 'compilekit[oci]'``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

from compilekit.errors import (
    ArtifactError,
    ConfigError,
    DigestError,
    ManifestError,
    ResourceError,
)

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
AGAIN = "Nothing of it was used. Pull again, or push the artifact again."

_MAX_MANIFEST = 4 << 20
# OCI's distribution specification: registries answer anything else with pages of text.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
# What is lost of a connection that breaks off, at most.
_CHUNK = 1 << 16
_PARTIAL = 206
# Seconds to connect, and without a byte of an answer: oras sets no limit.
_TIMEOUT = (10, 120)

log = logging.getLogger(__name__)


class Remote:
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
        host, name = self._place.registry, self._place.api_prefix
        tag = self._place.tag
        if not (
            # oras leaves out what it can't read, and asks docker.io for the rest.
            reference.startswith(f"{host}/{name}")
            and _REPOSITORY.fullmatch(name)
            and (not tag or _TAG.fullmatch(tag))
        ):
            raise ConfigError(
                f"{reference}: expected registry/repository:tag, the repository in"
                f" lower case, found registry {host!r}, repository {name!r}, tag"
                f" {tag!r}"
            )
        self._client.auth.load_configs(self._place)
        for scheme in ("http://", "https://"):
            self._client.session.mount(scheme, _adapter())

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
            raise no_artifact(self._reference, exc) from exc
        if not isinstance(value, dict):
            raise no_artifact(self._reference, TypeError("no object"))
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

        A connection that breaks off is continued from there, as long as each brings
        more of it.

        Raises:
            DigestError: It's larger, smaller or another one.
            ResourceError: The registry can't be reached, or can't continue.
        """
        room = os.fstatvfs(stream.fileno())
        # Twice: the layer, and what is unpacked from it.
        if room.f_bavail * room.f_frsize < 2 * size:
            raise OSError(28, f"needs {2 * size} bytes free")
        sha256 = hashlib.sha256()
        count, complete = 0, False
        while not complete:
            start = count
            # A range of what a proxy compresses would be another one each time.
            headers = {"Accept-Encoding": "identity"}
            if start:
                headers["Range"] = f"bytes={start}-"
            try:
                for chunk in self._get(self._url(digest), size - start, headers):
                    sha256.update(chunk)
                    stream.write(chunk)
                    count += len(chunk)
                complete = True
            except ResourceError:
                if count == start:
                    raise
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
            if "Range" in headers and answer.status_code != _PARTIAL:
                raise ValueError("a blob broke off, and can't be continued there")
            count = 0
            with closing(answer):
                for chunk in answer.iter_content(_CHUNK):
                    count += len(chunk)
                    if count > limit:
                        raise DigestError(
                            f"{url}: expected {limit} bytes, found more", hint=AGAIN
                        )
                    yield chunk

    def _check(self, answer: Any) -> None:
        if answer.status_code not in (200, 201, 202, _PARTIAL):
            text = " ".join(answer.text[:200].split())
            raise ValueError(f"{answer.status_code} {answer.reason} {text}".strip())


def _adapter() -> Any:
    """Requests that end, and that say so when they fail: oras tries for two minutes."""
    from requests import RequestException
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            options["timeout"] = options.get("timeout") or _TIMEOUT
            try:
                return super().send(request, *args, **options)
            except RequestException as exc:
                log.warning("%s %s: %s", request.method, request.url, exc)
                raise

    return Adapter()


def _other(what: str, expected: str, found: str) -> ArtifactError:
    return DigestError(
        f"{what}: expected {expected}, found {found}",
        hint=AGAIN,
        expected=expected,
        found=found,
    )


def no_artifact(reference: str, found: Exception | str) -> ManifestError:
    return ManifestError(
        f"{reference}: expected a manifest that `compilekit push` wrote for pulling:"
        f" {found if isinstance(found, str) else repr(found)}",
        hint=AGAIN,
    )
