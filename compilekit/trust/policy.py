"""What a start demands of an artifact's origin, and opening one under it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from compilekit.artifact import Artifact, store
from compilekit.errors import ArtifactError, ConfigError
from compilekit.trust.places import keep_from_others


class Trust(NamedTuple):
    """What is demanded.

    Attributes:
        digest: The only artifact that may be opened; empty = any.
        key_file: Public keys, of which one must have signed it; empty = no signature.
        min_serial: The oldest serial that a signature may have.
    """

    digest: str = ""
    key_file: str = ""
    min_serial: int = 0


def from_environment() -> Trust:
    """What COMPILEKIT_EXPECT_DIGEST, _REQUIRE_SIGNATURE and _MIN_SERIAL demand."""
    environment = os.environ
    serial = environment.get("COMPILEKIT_MIN_SERIAL", "")
    if serial and not serial.isdecimal():
        raise ConfigError(f"COMPILEKIT_MIN_SERIAL: expected a number, found {serial!r}")
    return checked(
        Trust(
            digest=environment.get("COMPILEKIT_EXPECT_DIGEST", ""),
            key_file=environment.get("COMPILEKIT_REQUIRE_SIGNATURE", ""),
            min_serial=int(serial or 0),
        )
    )


def checked(trust: Trust) -> Trust:
    """The same, if it makes sense.

    Raises:
        ConfigError: A serial without a signature demands nothing.
    """
    if trust.min_serial and not trust.key_file:
        raise ConfigError(
            "a minimal serial is set, and no signature is required: a serial counts"
            " only where it's signed",
            hint="Set --require-signature KEY (COMPILEKIT_REQUIRE_SIGNATURE) too.",
        )
    return trust


def open_trusted(path: str | os.PathLike[str], trust: Trust) -> Artifact:
    """Open an artifact whose origin is as demanded, before anything in it is parsed.

    Where somebody else could change its kernels after they were verified, the artifact
    is marked to have them loaded from private memory.

    Raises:
        SignatureError: It isn't signed as demanded.
        ArtifactError: It has another digest, or is damaged.
    """
    demand = approval(trust)

    def approve(root: Path, digest: str) -> None:
        from compilekit.trust import signature

        record = signature.read_record(root) if trust.key_file else None
        demand(digest, record, str(root))

    artifact = store.open_approved(path, approve)
    keep_from_others(artifact)
    return artifact


def approval(trust: Trust) -> Callable[[str, bytes | None, str], None]:
    """A function of digest, signature record and place that raises to refuse them."""
    if trust.key_file:
        from compilekit.trust import signature

        keys = signature.load_keys(trust.key_file)

    def approve(digest: str, record: bytes | None, place: str) -> None:
        if trust.digest and trust.digest != digest:
            raise ArtifactError(
                f"expected digest {trust.digest}, found {digest}",
                hint="This isn't the artifact that was approved.",
                expected=trust.digest,
                found=digest,
            )
        if trust.key_file:
            signature.verify(digest, record, keys, trust.min_serial, place)

    return approve
