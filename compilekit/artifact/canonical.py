"""The one way compilekit writes JSON, and the strict way it reads it.

Written: UTF-8, keys sorted by code point, two spaces of indentation, a list or object
on one line where it fits in 120 columns, floats in their shortest exact form, one
newline at the end. The same value always gives the same bytes.

A sealed file carries its own digest: a line ``  "digest": "<sha256>",`` that is the
sha256 of the file without that line. ``grep -v '^  "digest"' FILE | sha256sum`` gives
the same value, so no JSON parser is needed to check one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from compilekit.errors import DigestError, ManifestError

WIDTH = 120


def sha256(data: bytes) -> str:
    """The lower-case hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def encode(value: Mapping[str, Any]) -> bytes:
    """Write a JSON object in canonical form.

    Args:
        value: Mappings with string keys, lists, tuples, strings, booleans, None,
            integers and finite floats.
    Raises:
        ManifestError: Anything else is in it; the place is named.
    """
    text = _render(_plain(value, ""), indent=0, used=WIDTH) + "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ManifestError(
            f"a string can't be written as UTF-8: {exc.object[exc.start : exc.end]!r}"
        ) from exc


def decode(data: bytes, name: str) -> dict[str, Any]:
    """Read one JSON object, strictly.

    Args:
        data: The whole file.
        name: What to call it in an error.
    Raises:
        ManifestError: Not UTF-8, not JSON, a key twice, NaN or Infinity, nested too
            deeply, or not an object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as exc:
        raise ManifestError(
            f"{name}: expected UTF-8, found byte 0x{data[exc.start]:02x} at offset"
            f" {exc.start}",
            path=name,
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise ManifestError(f"{name}: not valid JSON: {exc}", path=name) from exc
    if not isinstance(value, dict):
        raise ManifestError(
            f"{name}: expected a JSON object, found {type(value).__name__}", path=name
        )
    return value


def seal(fields: Mapping[str, Any]) -> tuple[bytes, str]:
    """Write a JSON object with its own digest; returns the bytes and the digest.

    Args:
        fields: Must have a key that sorts after ``digest`` (every file has ``schema``).
    """
    digest = sha256(encode(fields))
    return encode({**fields, "digest": digest}), digest


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """Read a sealed JSON object after checking every byte of it against its digest.

    Raises:
        DigestError: The bytes don't have the digest that the file states.
        ManifestError: See `decode`; or it states no digest.
    """
    fields = decode(data, name)
    stated = fields.get("digest")
    if not is_digest(stated):
        raise ManifestError(
            f"{name}: expected its own digest (64 hexadecimal digits) under 'digest',"
            f" found {stated!r}",
            path=name,
        )
    line = f'\n  "digest": "{stated}",\n'.encode()
    head, found, tail = data.partition(line)
    actual = sha256(head + b"\n" + tail)
    if not found or actual != stated:
        raise DigestError(
            f"{name}: expected sha256 {stated} (stated in it), found {actual}",
            path=name,
            expected=stated,
            found=actual,
        )
    return fields


def sealed_digest(data: bytes) -> str:
    """The digest of a sealed file, from its bytes alone: nothing is parsed.

    If the file states another digest, `unseal` refuses it.
    """
    head, found, tail = data.partition(b'\n  "digest": "')
    return sha256(head + b"\n" + tail.partition(b"\n")[2] if found else data)


def is_digest(value: object) -> bool:
    """True for a lower-case hexadecimal sha256."""
    return (
        isinstance(value, str)
        and len(value) == 64
        and all(char in "0123456789abcdef" for char in value)
    )


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ManifestError(f"JSON keys are strings, found {key!r} in {where}")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ManifestError(f"{where.lstrip('.')}: can't be written as JSON: {value!r}")


def _render(value: Any, *, indent: int, used: int) -> str:
    """One value as text; `used` columns of its first line are taken already."""
    flat = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or not value or used + len(flat) < WIDTH:
        return flat
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        heads = {key: json.dumps(key, ensure_ascii=False) + ": " for key in value}
        items = [
            inner
            + heads[key]
            + _render(value[key], indent=indent + 2, used=indent + 2 + len(heads[key]))
            for key in sorted(value)
        ]
        opening, closing = "{", "}"
    else:
        items = [
            inner + _render(item, indent=indent + 2, used=indent + 2) for item in value
        ]
        opening, closing = "[", "]"
    return opening + "\n" + ",\n".join(items) + "\n" + " " * indent + closing


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't a JSON number")


def plain(value: Any) -> Any:
    """Records (named tuples), mappings and tuples as JSON's own values."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value
