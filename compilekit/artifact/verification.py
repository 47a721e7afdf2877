"""The verification record: proof, beside an artifact, that its programs equal eager.

``<artifact>.verified.json`` is no part of the artifact: it is written later, often on
another machine, and the artifact's bytes and digest stay as they are. An artifact
without a record that fits its digest is *unverified*.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compilekit import results
from compilekit.artifact import canonical, reading, schema
from compilekit.artifact.store import Artifact
from compilekit.errors import ArtifactError, ResourceError
from compilekit.results import BucketVerified

SCHEMA = 1
# Ten thousand replays take 4 MB.
MAX_BYTES = 16 << 20
# Where a build leaves a copy of its configuration, which a verify makes the model from.
CONFIG_REPORT = "reports/compilekit.toml"


@dataclasses.dataclass(frozen=True)
class TargetVerified:
    """What a verify found for one target.

    Attributes:
        factors: Name → value on the machine that verified.
        buckets: Every replay.
    """

    factors: Mapping[str, Any]
    buckets: tuple[BucketVerified, ...]


@dataclasses.dataclass(frozen=True)
class Verification:
    """``<artifact>.verified.json``: target → results, for one artifact's digest."""

    artifact: str
    targets: Mapping[str, TargetVerified]


def verification_path(artifact: Artifact) -> Path:
    """Where an artifact's record lies."""
    return artifact.root.with_name(f"{artifact.root.name}.verified.json")


def write_verification(
    artifact: Artifact, targets: Mapping[str, TargetVerified]
) -> Path:
    """Write the record, keeping what it says about other targets of this artifact.

    Raises:
        ResourceError: The folder around the artifact can't be written.
    """
    before, _ = read_verification(artifact)
    merged = {**(before.targets if before else {}), **targets}
    data, _ = canonical.seal(
        {
            "artifact": artifact.digest,
            "schema": SCHEMA,
            "targets": {name: results.to_json(one) for name, one in merged.items()},
        }
    )
    path = verification_path(artifact)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise ResourceError(
            f"verification record {path} can't be written: {exc.strerror}",
            hint="Verify a copy of the artifact in a folder that you may write.",
            path=str(path),
        ) from exc
    return path


def read_verification(artifact: Artifact) -> tuple[Verification | None, str]:
    """The record of this very artifact, or None and the reason why there is none.

    A record that doesn't fit is no damage to the artifact, so it's never an error.
    """
    path = verification_path(artifact)
    try:
        data = reading.read_beside(path, MAX_BYTES)
    except FileNotFoundError:
        return None, f"there is no record at {path}"
    except OSError as exc:
        return None, f"the record {path} can't be read: {exc.strerror}"
    try:
        fields = canonical.unseal(data, path.name)
        schema.validate("verification", fields, path.name)
    except ArtifactError as exc:
        return None, f"the record is damaged: {exc.message}"
    if fields["artifact"] != artifact.digest:
        return None, (
            f"the record {path} is about artifact {fields['artifact']}, this is"
            f" {artifact.digest}"
        )
    return _from_json(fields), ""


def why_unverified(artifact: Artifact, target: str) -> str:
    """Why an artifact doesn't count as verified for a target; empty if it does.

    It does if every bucket was replayed at least once and every replay passed.
    """
    record, reason = read_verification(artifact)
    if record is None:
        return reason
    if target not in record.targets:
        return f"the record holds {', '.join(sorted(record.targets))}, not {target}"
    replays = record.targets[target].buckets
    failed = [replay for replay in replays if not replay.passed]
    if failed:
        one = failed[0]
        return f"{one.entry} {one.bucket} didn't pass: {one.message}"
    done = {(replay.entry, replay.bucket) for replay in replays}
    for name, entry in artifact.manifest.entries.items():
        for bucket in entry.buckets:
            if (name, bucket.name) not in done:
                return f"{name} {bucket.name} wasn't replayed"
    return ""


def _from_json(fields: Mapping[str, Any]) -> Verification:
    return Verification(
        artifact=fields["artifact"],
        targets={
            name: TargetVerified(
                factors=one["factors"],
                buckets=tuple(
                    # float: "inf" and "nan" are written as text.
                    BucketVerified(
                        **{**bucket, "max_abs_error": float(bucket["max_abs_error"])}
                    )
                    for bucket in one["buckets"]
                ),
            )
            for name, one in fields["targets"].items()
        },
    )
