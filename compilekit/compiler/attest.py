"""Who built an artifact, from what: provenance and a bill of materials, as reports.

    reports/provenance.json   in-toto statement with an SLSA provenance predicate
    reports/sbom.json         CycloneDX: every distribution that was installed

They say when a build ran and where, so they differ between builds of the same thing and
lie in ``reports/``, outside the artifact's digest. Their subject is that digest: what
they are about can't be exchanged. Their own bytes are sealed by ``reports/index.json``
and aren't signed; whoever must prove them to others signs the statement.

Needs ``pip install 'compilekit[attest]'``.
"""

from __future__ import annotations

import hashlib
import platform
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import distributions
from typing import Any

from compilekit._version import __version__
from compilekit.artifact import Manifest, canonical
from compilekit.errors import ResourceError

PROVENANCE = "reports/provenance.json"
SBOM = "reports/sbom.json"
PREDICATE = "https://slsa.dev/provenance/v1"
# Names the way that the external parameters below are to be read.
BUILD_TYPE = "urn:compilekit:build:1"


def require_libraries() -> None:
    """Refuse before a build what it couldn't finish.

    Raises:
        ResourceError: A library of the extra is missing.
    """
    try:
        import cyclonedx.model.bom  # noqa: F401
        import in_toto_attestation.v1.statement  # noqa: F401
    except ImportError as exc:
        raise ResourceError(
            f"provenance and a bill of materials need more packages: {exc}",
            hint="pip install 'compilekit[attest]'",
        ) from exc


def attestations(
    sealed: Manifest,
    manifest: bytes,
    config: bytes,
    builder: str,
    began: datetime,
    ended: datetime,
) -> dict[str, bytes]:
    """Both documents, by path.

    Args:
        sealed: The artifact's manifest with its digest.
        manifest: The bytes of ``manifest.json``.
        config: The bytes of ``compilekit.toml``.
        builder: URI of who builds.
        began: When the build began, with a time zone.
    """
    packages = sorted({(d.name, d.version) for d in distributions()})
    return {
        PROVENANCE: _statement(
            sealed, manifest, config, builder, (began, ended), packages
        ),
        SBOM: _bill(sealed, packages, ended),
    }


def _statement(
    sealed: Manifest,
    manifest: bytes,
    config: bytes,
    builder: str,
    times: tuple[datetime, datetime],
    packages: Iterable[tuple[str, str]],
) -> bytes:
    from google.protobuf import json_format
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement

    # What is hashed by anyone, and what compilekit calls the artifact.
    digests = {"sha256": canonical.sha256(manifest), "compilekit": sealed.digest}
    subject = ResourceDescriptor(name="manifest.json", digest=digests)
    dependencies = [
        {"name": "compilekit.toml", "digest": {"sha256": canonical.sha256(config)}},
        *({"uri": f"pkg:pypi/{name}@{version}"} for name, version in packages),
    ]
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "config": config.decode(),
                "targets": sorted(sealed.targets),
            },
            "internalParameters": {"machine": platform.machine()},
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": {"id": builder, "version": {"compilekit": __version__}},
            "metadata": {
                "startedOn": times[0].isoformat(timespec="seconds"),
                "finishedOn": times[1].isoformat(timespec="seconds"),
            },
        },
    }
    statement = Statement([subject.pb], PREDICATE, predicate)
    statement.validate()
    fields: dict[str, Any] = json_format.MessageToDict(statement.pb)
    return canonical.encode(fields)


def _bill(
    sealed: Manifest, packages: Iterable[tuple[str, str]], now: datetime
) -> bytes:
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot5
    from packageurl import PackageURL

    # The same for the same artifact: two bills about it are versions of one.
    number = uuid.UUID(bytes=hashlib.sha256(sealed.digest.encode()).digest()[:16])
    bill = Bom(serial_number=number)
    bill.metadata.timestamp = now
    bill.metadata.component = Component(
        name=sealed.model.source,
        version=sealed.digest,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sealed.digest)],
        bom_ref=sealed.digest,
    )
    for name, version in packages:
        link = PackageURL("pypi", name=name, version=version)
        bill.components.add(
            Component(
                name=name,
                version=version,
                type=ComponentType.LIBRARY,
                purl=link,
                bom_ref=link.to_string(),
            )
        )
    bill.register_dependency(bill.metadata.component, bill.components)
    text: str = JsonV1Dot5(bill).output_as_string(indent=2)
    return text.encode() + b"\n"


def summary(reports: Mapping[str, bytes]) -> dict[str, Any]:
    """What ``inspect`` shows of the two documents; empty without them."""
    found: dict[str, Any] = {}
    if PROVENANCE in reports:
        predicate = canonical.decode(reports[PROVENANCE], PROVENANCE)["predicate"]
        details = predicate["runDetails"]
        found["builder"] = details["builder"]["id"]
        found["finished"] = details["metadata"]["finishedOn"]
    if SBOM in reports:
        found["components"] = len(canonical.decode(reports[SBOM], SBOM)["components"])
    return found
