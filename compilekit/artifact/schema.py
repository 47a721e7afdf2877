"""Check parsed JSON against the schemas that ship in ``schemas/``.

The files are plain JSON Schema (draft 2020-12), for any validator. This module
understands the keywords that they use and no others, compiled to closures once per
process: opening an artifact must cost milliseconds and need no dependency.

Standard library only.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compilekit.errors import ManifestError

FOLDER = Path(__file__).with_name("schemas")

_Check = Callable[[Any], None]

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_NOTES = {"$schema", "$defs", "title", "description"}
_OF_OBJECTS = {"properties", "required", "additionalProperties", "propertyNames"}
_OF_ARRAYS = {"items", "prefixItems", "minItems", "maxItems"}
_OF_VALUES = {"$ref", "type", "const", "enum", "pattern", "minimum", "anyOf"}
_KEYWORDS = _NOTES | _OF_OBJECTS | _OF_ARRAYS | _OF_VALUES


class _InvalidError(Exception):
    """A value that doesn't fit.

    Attributes:
        message: What was expected there, and what was found.
        constant: True if the schema asks for one constant there.
        steps: The place, innermost step first.
    """

    def __init__(self, message: str, *, constant: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.constant = constant
        self.steps: list[str] = []


def validate(name: str, value: Any, where: str) -> None:
    """Check one parsed file.

    Args:
        name: The schema: ``manifest`` for ``schemas/manifest.json``.
        value: The parsed file.
        where: The file's path, for the error.
    Raises:
        ManifestError: The first place that doesn't fit, with what was expected there.
    """
    try:
        _load(name)(value)
    except _InvalidError as exc:
        place = "".join(reversed(exc.steps)).lstrip(".")
        raise ManifestError(
            f"{where}: {place + ': ' if place else ''}{exc.message}",
            path=where,
            place=place,
        ) from None
    except RecursionError as exc:
        raise ManifestError(f"{where}: nested too deeply", path=where) from exc


@functools.cache
def _load(name: str) -> _Check:
    root = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    checks: dict[str, _Check] = {}

    def resolve(reference: str) -> _Check:
        # A definition may refer to itself, so one that isn't there yet is looked up
        # when it's called.
        return checks.get(reference) or (lambda value: checks[reference](value))

    for key, definition in root.get("$defs", {}).items():
        checks[f"#/$defs/{key}"] = _compile(definition, resolve)
    return _compile(root, resolve)


def _compile(schema: Mapping[str, Any], resolve: Callable[[str], _Check]) -> _Check:
    unknown = set(schema) - _KEYWORDS
    if unknown:
        raise ValueError(f"schema keywords that compilekit doesn't know: {unknown}")
    if "$ref" in schema:
        return resolve(schema["$ref"])
    checks: list[_Check] = []
    if "type" in schema:
        checks.append(_type(schema))
    if "const" in schema:
        checks.append(_const(schema["const"]))
    if "enum" in schema:
        checks.append(_enum(schema["enum"]))
    if "pattern" in schema:
        checks.append(_pattern(schema["pattern"]))
    if "minimum" in schema:
        checks.append(_minimum(schema["minimum"]))
    if schema.keys() & _OF_OBJECTS:
        checks.append(_object(schema, resolve))
    if schema.keys() & _OF_ARRAYS:
        checks.append(_array(schema, resolve))
    if "anyOf" in schema:
        checks.append(_any_of([_compile(s, resolve) for s in schema["anyOf"]]))
    if len(checks) == 1:
        return checks[0]
    if len(checks) == 2:
        first, second = checks

        def check_both(value: Any) -> None:
            first(value)
            second(value)

        return check_both

    def check(value: Any) -> None:
        for one in checks:
            one(value)

    return check


def _classes(schema: Mapping[str, Any]) -> frozenset[type]:
    """The exact classes that json.loads makes for the schema's types.

    Exact, so that true is never taken for an integer.
    """
    names = schema.get("type", list(_TYPES))
    listed = [names] if isinstance(names, str) else names
    return frozenset(cls for name in listed for cls in _TYPES[name])


def _only(schema: Mapping[str, Any], *keywords: str) -> bool:
    return not schema.keys() - {"description", *keywords}


def _type(schema: Mapping[str, Any]) -> _Check:
    classes = _classes(schema)
    names = schema["type"]
    text = names if isinstance(names, str) else " or ".join(names)

    def check(value: Any) -> None:
        if type(value) not in classes:
            raise _InvalidError(f"expected {text}, found {_show(value)}")

    return check


def _const(expected: Any) -> _Check:
    def check(value: Any) -> None:
        if value != expected or type(value) is not type(expected):
            message = f"expected {_show(expected)}, found {_show(value)}"
            raise _InvalidError(message, constant=True)

    return check


def _enum(allowed: list[Any]) -> _Check:
    def check(value: Any) -> None:
        if value not in allowed:
            choices = ", ".join(_show(item) for item in allowed)
            raise _InvalidError(f"expected one of {choices}, found {_show(value)}")

    return check


def _pattern(pattern: str) -> _Check:
    # In Python `$` also fits before a newline at the end; in JSON Schema it doesn't.
    ending = re.sub(r"\$$", r"\\Z", pattern)
    search = re.compile(ending).search

    def check(value: Any) -> None:
        if not search(value):
            raise _InvalidError(f"expected text like {pattern}, found {_show(value)}")

    return check


def _minimum(least: int) -> _Check:
    def check(value: Any) -> None:
        if value < least:
            raise _InvalidError(f"expected at least {least}, found {_show(value)}")

    return check


def _object(schema: Mapping[str, Any], resolve: Callable[[str], _Check]) -> _Check:
    properties: Mapping[str, Any] = schema.get("properties", {})
    fields = {key: _compile(one, resolve) for key, one in properties.items()}
    required = frozenset(schema.get("required", ()))
    others = schema.get("additionalProperties", True)
    rest = _compile(others, resolve) if isinstance(others, dict) else None
    names = schema.get("propertyNames")
    name_check = _compile(names, resolve) if names else None
    tags = [key for key, one in properties.items() if "const" in one]

    def check_field(key: str, one: _Check, item: Any) -> None:
        try:
            one(item)
        except _InvalidError as exc:
            exc.steps.append(f".{key}")
            raise

    def check(value: Any) -> None:
        # Constants come first: they say which branch of an `anyOf` is meant.
        for key in tags:
            if key in value:
                check_field(key, fields[key], value[key])
        missing = required - value.keys()
        if missing:
            raise _InvalidError(f"expected the key {min(missing)!r}, found none")
        for key, item in value.items():
            one = fields.get(key, rest)
            if name_check is not None:
                check_field(key, name_check, key)
            if one is not None:
                check_field(key, one, item)
            elif others is False:
                known = ", ".join(sorted(fields))
                raise _InvalidError(f"expected only the keys {known}, found {key!r}")

    if others is not False or required != properties.keys():
        return check

    # A record, every key required, is what most of a program.json consists of: the
    # fields that are only typed are compared here, not by a call each.
    typed = [(k, _classes(one)) for k, one in properties.items() if _only(one, "type")]
    called = [(k, fields[k]) for k, one in properties.items() if not _only(one, "type")]

    def check_record(value: Any) -> None:
        if value.keys() != required:
            check(value)
        for key, classes in typed:
            if type(value[key]) not in classes:
                check(value)
        for key, one in called:
            check_field(key, one, value[key])

    return check_record


def _array(schema: Mapping[str, Any], resolve: Callable[[str], _Check]) -> _Check:
    first = [_compile(one, resolve) for one in schema.get("prefixItems", [])]
    items: Mapping[str, Any] = schema.get("items", {})
    rest = _compile(items, resolve)
    least, most = schema.get("minItems", 0), schema.get("maxItems", sys.maxsize)

    def check(value: Any) -> None:
        if not least <= len(value) <= most:
            upper = "" if most == sys.maxsize else f" and at most {most}"
            raise _InvalidError(
                f"expected at least {least}{upper} items, found {len(value)}"
            )
        for index, item in enumerate(value):
            try:
                (first[index] if index < len(first) else rest)(item)
            except _InvalidError as exc:
                exc.steps.append(f"[{index}]")
                raise

    if first or least or most != sys.maxsize or not _only(items, "type", "minimum"):
        return check

    # Shapes and strides: two calls for the whole list.
    classes, minimum = _classes(items), items.get("minimum")

    def check_plain(value: Any) -> None:
        if not classes.issuperset(map(type, value)) or (
            minimum is not None and value and min(value) < minimum
        ):
            check(value)

    return check_plain


def _any_of(branches: list[_Check]) -> _Check:
    def check(value: Any) -> None:
        failures: list[_InvalidError] = []
        for branch in branches:
            try:
                branch(value)
            except _InvalidError as exc:
                failures.append(exc)
            else:
                return
        # A branch whose constant fits is the one that was meant; else the one that
        # got furthest.
        meant = [failure for failure in failures if not failure.constant]
        raise max(meant or failures, key=lambda failure: len(failure.steps))

    return check


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
