"""One value of a file after the other: what is wrong is noted with its line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compilekit.config.lines import KeyPath
from compilekit.config.records import Scalar
from compilekit.config.rules import (
    DTYPE_ALIASES,
    FUNCTION,
    KEYS,
    RANGES,
    SCRIPT,
)
from compilekit.errors import ConfigError, nearest_name


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration file.

    Attributes:
        line: Line in the file, from 1.
        key: Dotted key, e.g. ``model.dtpye``; empty for a syntax error.
        message: What was expected and what was found.
        nearest: The right name that is closest, or "".
    """

    line: int
    key: str
    message: str
    nearest: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}: {self.key}: " if self.key else f"line {self.line}: "
        nearest = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{where}{self.message}{nearest}"


def is_function(source: str) -> bool:
    """True if a model's source has the form ``package.module:function``."""
    # hf:bert has the form too: no module can be called hf.
    return not names_hugging_face(source) and FUNCTION.fullmatch(source) is not None


def is_script(warmup: str) -> bool:
    """True if a warm-up has the form ``train.py --batch {b}``."""
    return SCRIPT.fullmatch(warmup) is not None


def names_hugging_face(source: str) -> bool:
    return source.startswith("hf:") and len(source) > len("hf:")


@dataclasses.dataclass(frozen=True)
class File:
    """Where keys are, and what is wrong so far."""

    lines: Mapping[KeyPath, int]
    problems: list[Problem]

    def report(self, key: KeyPath, message: str, nearest: str = "") -> None:
        """Add a problem at a key, or at the closest table above it."""
        place = key
        while place and place not in self.lines:
            place = place[:-1]
        line = self.lines.get(place, 1)
        self.problems.append(Problem(line, _dotted(key), message, nearest))


def config_error(path: Path, problems: list[Problem]) -> ConfigError:
    problems = sorted(problems, key=lambda problem: problem.line)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listing = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(
        f"{path}: {count}\n{listing}",
        path=str(path),
        problems=[dataclasses.asdict(problem) for problem in problems],
    )


def syntax_problem(text: str, message: str) -> Problem:
    """tomllib puts the position at the end of its message, as words."""
    place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    if place is None:
        return Problem(1, "", f"not TOML: {message}")
    line = int(place[1]) if place[1] else text.rstrip().count("\n") + 1
    return Problem(line, "", f"not TOML: {message[: place.start()]}")


def _dotted(key: KeyPath) -> str:
    dotted = ""
    for part in key:
        if isinstance(part, int):
            dotted += f"[{part}]"
            continue
        bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
        quote = "'" if '"' in part else '"'
        name = part if bare else f"{quote}{part}{quote}"
        dotted += f".{name}" if dotted else name
    return dotted


def shown(value: object) -> str:
    """A value as the writer of a TOML file knows it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return f'"{value}"'
    names: dict[type, str] = {list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")


def has_type(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def read_table(
    file: File, parent: Mapping[str, Any], key: KeyPath, keys: str = ""
) -> Mapping[str, Any]:
    """A table below `parent`; with `keys`, its unknown keys are reported."""
    value = parent.get(str(key[-1]), {})
    if not isinstance(value, dict):
        file.report(key, f"expected a table, found {shown(value)}")
        return {}
    if keys:
        check_keys(file, value, key, keys)
    return value


def check_keys(file: File, table: Mapping[str, Any], place: KeyPath, keys: str) -> None:
    known = KEYS[keys]
    for name in table:
        if name in known:
            continue
        key = (*place, name)
        nearest = nearest_name(name, known)
        elsewhere = [t for t, names in KEYS.items() if t and name in names]
        if not nearest and elsewhere:
            nearest = f"{elsewhere[0].replace('*', 'NAME')}.{name}"
        table_name = f"[{_dotted(place)}]" if place else "the file"
        message = f"unknown key; {table_name} takes {', '.join(known)}"
        file.report(key, message, nearest)


def read_text(
    file: File,
    table: Mapping[str, Any],
    key: KeyPath,
    default: str = "",
    choices: Iterable[str] = (),
) -> str:
    value = table.get(str(key[-1]), default)
    if not isinstance(value, str):
        file.report(key, f"expected a string, found {shown(value)}")
        return default
    choices = tuple(choices)
    if choices and value not in choices and value != default:
        _report_choice(file, key, value, choices)
    return value


def _report_choice(
    file: File, key: KeyPath, value: str, choices: tuple[str, ...]
) -> None:
    message = f'expected one of {", ".join(choices)}, found "{value}"'
    file.report(key, message, nearest_name(value, choices))


def read_integer(
    file: File, table: Mapping[str, Any], key: KeyPath, default: int, least: int = 0
) -> int:
    value = table.get(str(key[-1]), default)
    if not has_type(value, int) or value < least:
        file.report(key, f"expected an integer from {least}, found {shown(value)}")
        return default
    return int(value)


def read_flag(
    file: File, table: Mapping[str, Any], key: KeyPath, default: bool
) -> bool:
    value = table.get(str(key[-1]), default)
    if not isinstance(value, bool):
        file.report(key, f"expected true or false, found {shown(value)}")
        return default
    return value


def read_tolerance(file: File, table: Mapping[str, Any], key: KeyPath) -> float | None:
    value = table.get(str(key[-1]))
    if value is None:
        return None
    if not has_type(value, float) or not 0 <= value <= RANGES["float64"][1]:
        file.report(key, f"expected a finite number from 0, found {shown(value)}")
        return None
    return float(value)


def read_choices(
    file: File,
    table: Mapping[str, Any],
    key: KeyPath,
    default: tuple[str, ...],
    choices: tuple[str, ...],
) -> tuple[str, ...]:
    """A non-empty array of distinct names."""
    value = table.get(str(key[-1]), list(default))
    if not isinstance(value, list) or not value:
        file.report(key, f"expected a non-empty array, found {shown(value)}")
        return default
    for index, item in enumerate(value):
        place = (*key, index)
        if not isinstance(item, str):
            file.report(place, f"expected a string, found {shown(item)}")
        elif item not in choices:
            _report_choice(file, place, item, choices)
        elif item in value[:index]:
            file.report(place, f'"{item}" is listed twice')
    return tuple(str(item) for item in value)


def read_scalars(
    file: File, parent: Mapping[str, Any], key: KeyPath
) -> dict[str, Scalar]:
    """A table of booleans, finite numbers and strings; nested names get dots."""
    scalars: dict[str, Scalar] = {}
    for name, (place, value) in flatten(file, parent, key).items():
        if not isinstance(value, bool | int | float | str):
            message = f"expected a boolean, number or string, found {shown(value)}"
            file.report(place, message)
        elif isinstance(value, float) and not math.isfinite(value):
            file.report(place, f"expected a finite number, found {value}")
        else:
            scalars[name] = value
    return scalars


def flatten(
    file: File, parent: Mapping[str, Any], key: KeyPath, prefix: str = ""
) -> dict[str, tuple[KeyPath, object]]:
    """Dotted name → its key in the file and its value, for a table of tables.

    ``a.b = 1``, ``"a.b" = 1`` and ``a = { b = 1 }`` mean the same.
    """
    flat: dict[str, tuple[KeyPath, object]] = {}
    for name, value in read_table(file, parent, key).items():
        place = (*key, name)
        if isinstance(value, dict):
            below = flatten(file, {name: value}, place, f"{prefix}{name}.")
        else:
            below = {f"{prefix}{name}": (place, value)}
        for dotted, found in below.items():
            if dotted in flat:
                file.report(found[0], f"{dotted} is given twice")
            flat[dotted] = found
    return flat


def read_dtype(
    file: File, table: Mapping[str, Any], key: KeyPath, known: tuple[str, ...]
) -> str:
    value = read_text(file, table, key)
    if not value or value in known:
        return value
    name = value.removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    nearest = name if name in known else nearest_name(name, known)
    message = f'expected one of {", ".join(known)}, found "{value}"'
    file.report(key, message, nearest)
    return ""
