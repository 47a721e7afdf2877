"""Ed25519 signatures of an artifact's digest, in a record beside the artifact.

``<artifact>.signature.json`` holds one signature per key. Three lines are signed:

    compilekit-signature 1
    artifact <digest>
    serial <number>

The digest covers every file but ``reports/``. The serial rises with each release: it
keeps an older artifact with its own good signature from being put in the place of a
newer one (``--min-serial``).
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compilekit.artifact import Artifact, canonical, reading, schema, write
from compilekit.errors import ManifestError, ResourceError, SignatureError
from compilekit.trust.places import why_replaceable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SCHEMA = 1
SUFFIX = ".signature.json"
MAX_SERIAL = 2**63 - 1

_MAX_BYTES = 64 << 10
_PEM = re.compile(rb"-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----", re.DOTALL)
_MAKE_KEYS = (
    "Make a pair: openssl genpkey -algorithm ed25519 -out release.key; openssl pkey"
    " -in release.key -pubout -out release.pub"
)


class Signature(NamedTuple):
    """One signature.

    Attributes:
        key: sha256 of the public key's 32 bytes.
        serial: What was signed along with the digest.
        signature: 64 bytes.
    """

    key: str
    serial: int
    signature: bytes


class PublicKey(NamedTuple):
    """A key that is trusted, and its name in records."""

    id: str
    key: Ed25519PublicKey


def message(digest: str, serial: int) -> bytes:
    """The bytes that are signed."""
    text = f"compilekit-signature {SCHEMA}\nartifact {digest}\nserial {serial}\n"
    return text.encode("ascii")


def record_path(root: Path) -> Path:
    """Where the record of the artifact in a directory lies."""
    return root.with_name(root.name + SUFFIX)


def sign(
    artifact: Artifact, key_file: str | os.PathLike[str], serial: int
) -> Signature:
    """Sign an artifact; its record keeps what other keys signed.

    Raises:
        SignatureError: The key can't be used.
        ResourceError: The key can't be read, or the record can't be written.
    """
    serialization, ed25519, unsupported = _cryptography()
    data = _read_key(key_file)
    try:
        private = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, unsupported) as exc:
        raise SignatureError(
            f"{key_file}: expected an unencrypted Ed25519 private key in PEM: {exc}",
            hint=_MAKE_KEYS,
        ) from exc
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise SignatureError(
            f"{key_file}: expected an Ed25519 key, found {type(private).__name__}",
            hint=_MAKE_KEYS,
        )
    made = Signature(
        key=_key_id(private.public_key()),
        serial=serial,
        signature=private.sign(message(artifact.digest, serial)),
    )
    others = [one for one in _signed_before(artifact) if one.key != made.key]
    path = record_path(artifact.root)
    try:
        with write.replacing(path) as part:
            write.write_file(part, [encode_record(artifact.digest, [*others, made])])
    except OSError as exc:
        raise ResourceError(
            f"signature {path} can't be written: {exc.strerror}",
            hint="Sign a copy of the artifact in a folder that you may write.",
            path=str(path),
        ) from exc
    return made


def read_record(root: Path) -> bytes | None:
    """The bytes of the record beside an artifact; None if there is none.

    Raises:
        SignatureError: It can't be read, or is too large to be one.
    """
    path = record_path(root)
    try:
        return reading.read_beside(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise SignatureError(
            f"signature {path} can't be read: {exc.strerror}", path=str(path)
        ) from exc


def verify(
    digest: str,
    record: bytes | None,
    keys: Sequence[PublicKey],
    min_serial: int = 0,
    place: str = "",
) -> Signature:
    """The signature that makes an artifact trusted.

    Args:
        digest: The artifact's, computed from its bytes.
        record: Its signature record.
        keys: Any one of them will do.
        min_serial: An older serial is refused.
        place: What to call the artifact in an error.
    Raises:
        SignatureError: There is none.
    """
    wanted = " or ".join(key.id[:16] for key in keys)
    if record is None:
        raise _refused(place, f"expected a signature by key {wanted}, found no record")
    about, signatures = _parse(record, place)
    if about != digest:
        what = f"expected a signature of {digest}, found one of {about}"
        raise _refused(place, what)
    known = {key.id: key.key for key in keys}
    mine = [one for one in signatures if one.key in known]
    if not mine:
        found = ", ".join(one.key[:16] for one in signatures) or "none"
        raise _refused(place, f"expected a signature by key {wanted}, found {found}")
    good = [one for one in mine if _is_good(known[one.key], digest, one)]
    if not good:
        raise _refused(place, f"the signature by key {mine[0].key[:16]} is wrong")
    newest = max(good, key=lambda one: one.serial)
    if newest.serial < min_serial:
        what = f"expected serial {min_serial} or newer, found {newest.serial}"
        raise _refused(place, what, "An older release was put in its place.")
    return newest


def load_keys(file: str | os.PathLike[str]) -> tuple[PublicKey, ...]:
    """The public keys in a PEM file; several, while one takes over from another.

    Raises:
        SignatureError: No such key in it, or somebody else could write the file.
        ResourceError: It can't be read.
    """
    path = Path(file)
    _read_public(path)
    reason = why_replaceable(path)
    if reason:
        raise SignatureError(
            f"key {path} can't be trusted: {reason}, who could put another key there",
            hint="Keep it where only root or this user can write; of a configMap mount"
            " the file alone (subPath), for its folder is open to everybody.",
            path=str(path),
        )
    serialization, ed25519, unsupported = _cryptography()
    keys = []
    # Only what is read after the look at its place is what the place vouches for.
    for block in _PEM.findall(_read_public(path)):
        try:
            key = serialization.load_pem_public_key(block)
        except (ValueError, unsupported) as exc:
            raise _no_key(path, str(exc)) from exc
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise _no_key(path, f"found {type(key).__name__}")
        keys.append(PublicKey(_key_id(key), key))
    if not keys:
        raise _no_key(path, "found no PEM block")
    return tuple(keys)


# --- The record --------------------------------------------------------------------


def encode_record(digest: str, signatures: Sequence[Signature]) -> bytes:
    """The bytes of the record of an artifact."""
    return canonical.encode(
        {
            "schema": SCHEMA,
            "artifact": digest,
            "signatures": [
                {
                    "key": one.key,
                    "serial": one.serial,
                    "signature": base64.b64encode(one.signature).decode(),
                }
                for one in sorted(signatures)
            ],
        }
    )


def _parse(record: bytes, place: str) -> tuple[str, list[Signature]]:
    """A record's digest and signatures; nothing in it has been trusted yet."""
    try:
        fields = canonical.decode(_bounded(record, place), "signature record")
        schema.validate("signature", fields, "signature record")
        found = [_signature(one) for one in fields["signatures"]]
    except (ManifestError, ValueError) as exc:
        raise _refused(place, f"the signature record is malformed ({exc})") from exc
    return fields["artifact"], found


def _signature(fields: Mapping[str, Any]) -> Signature:
    serial = fields["serial"]
    if serial > MAX_SERIAL:
        raise ValueError(f"serial {serial}")
    # A pattern can't see that the bits behind the 64 bytes are zeros.
    signature = base64.b64decode(fields["signature"], validate=True)
    return Signature(fields["key"], serial, signature)


def _signed_before(artifact: Artifact) -> list[Signature]:
    try:
        record = read_record(artifact.root)
        about, found = _parse(record or b"", "")
    except SignatureError:
        # Another artifact's, or damaged: the new record replaces it.
        return []
    return found if about == artifact.digest else []


def _bounded(data: bytes, place: str) -> bytes:
    if len(data) > _MAX_BYTES:
        raise _refused(place, f"expected a record of at most {_MAX_BYTES} bytes")
    return data


# --- Keys --------------------------------------------------------------------------


def _cryptography() -> tuple[Any, Any, type[Exception]]:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as exc:
        raise SignatureError(
            f"signatures need the package cryptography: {exc}",
            hint="pip install 'compilekit[sign]'",
        ) from exc
    return serialization, ed25519, UnsupportedAlgorithm


def _key_id(key: Any) -> str:
    return canonical.sha256(key.public_bytes_raw())


def _is_good(key: Ed25519PublicKey, digest: str, one: Signature) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(one.signature, message(digest, one.serial))
    except InvalidSignature:
        return False
    return True


def _read_key(file: str | os.PathLike[str]) -> bytes:
    """A private key, which may come through a pipe."""
    with _reading(file), open(file, "rb") as stream:
        return stream.read(_MAX_BYTES)


def _read_public(file: Path) -> bytes:
    """A file of public keys; a pipe in its place must not hang the start."""
    with _reading(file):
        return reading.read_beside(file, _MAX_BYTES)


@contextmanager
def _reading(file: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ResourceError(
            f"key {os.fspath(file)} can't be read: {exc.strerror}",
            hint="Check the path, and the file's owner and mode.",
            path=os.fspath(file),
        ) from exc


def _no_key(path: Path, why: str) -> SignatureError:
    return SignatureError(
        f"key {path}: expected Ed25519 public keys in PEM: {why}",
        hint=_MAKE_KEYS,
        path=str(path),
    )


def _refused(place: str, what: str, hint: str = "") -> SignatureError:
    return SignatureError(
        f"artifact {place} isn't signed as required: {what}",
        hint=hint
        or "Nothing of it was used. Sign it with `compilekit sign`, or get it"
        " again with its .signature.json beside it.",
        artifact=place,
    )
