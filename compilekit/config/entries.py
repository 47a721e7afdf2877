"""Read the tables below ``[entries]``: inputs, outputs, fixed arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from compilekit import paths
from compilekit.config.lines import KeyPath
from compilekit.config.problems import (
    File,
    has_type,
    is_function,
    is_script,
    read_dtype,
    read_scalars,
    read_table,
    read_text,
    shown,
)
from compilekit.config.records import (
    EntryConfig,
    InputConfig,
    OutputConfig,
)
from compilekit.config.rules import (
    GRAD_MODES,
    IDENTIFIER,
    INPUT_DTYPES,
    INPUT_PATH,
    OUTPUT_PATH,
    PLACEHOLDER,
    RANGES,
)
from compilekit.errors import nearest_name


def read_entries(
    file: File,
    data: Mapping[str, Any],
    axes: Mapping[str, tuple[int, ...]],
    routes: tuple[str, ...],
) -> dict[str, EntryConfig]:
    tables = read_table(file, data, ("entries",))
    if not tables:
        message = "missing; name at least one callable, e.g. [entries.forward]"
        file.report(("entries",), message)
    entries = {name: _read_entry(file, tables, name, axes) for name in tables}
    for name, entry in entries.items():
        if entry.warmup and "program" in routes:
            message = 'code that compiles by itself needs [build] routes = ["cache"]'
            file.report(("entries", name, "warmup"), message)
    used = {axis for entry in entries.values() for axis in entry.used_axes(axes)}
    for axis in axes:
        if entries and axis not in used:
            message = "no input uses this axis, so it makes no bucket"
            file.report(("axes", axis), message)
    return entries


def _read_entry(
    file: File,
    tables: Mapping[str, Any],
    name: str,
    axes: Mapping[str, tuple[int, ...]],
) -> EntryConfig:
    key: KeyPath = ("entries", name)
    if not IDENTIFIER.fullmatch(name):
        file.report(key, "an entry's name is letters, digits and _, no digit first")
    table = read_table(file, tables, key, "entries.*")
    method = read_text(file, table, (*key, "method"), name)
    if "method" in table and not IDENTIFIER.fullmatch(method):
        message = f'expected the name of a method, found "{method}"'
        file.report((*key, "method"), message)
    example = read_text(file, table, (*key, "example"))
    if example and not is_function(example):
        message = f'expected "package.module:function", found "{example}"'
        file.report((*key, "example"), message)
    warmup = read_text(file, table, (*key, "warmup"))
    if warmup:
        _check_warmup(file, (*key, "warmup"), warmup, axes)
        for other in ("method", "inputs", "outputs", "kwargs", "example", "grad"):
            if other in table:
                message = "the warm-up makes its own calls; leave this out"
                file.report((*key, other), message)
    if "inputs" not in table and not example and not warmup:
        message = f"missing; name the tensors that {name} takes, or give an example"
        file.report((*key, "inputs"), message)
    inputs = _read_inputs(file, table, (*key, "inputs"), axes)
    kwargs = read_scalars(file, table, (*key, "kwargs"))
    # Up to the first dot or bracket; the path may be malformed.
    roots = {re.split(r"[.\[]", path, maxsplit=1)[0]: path for path in inputs}
    for argument in kwargs:
        if not IDENTIFIER.fullmatch(argument):
            message = "expected the name of a keyword argument"
            file.report((*key, "kwargs", argument), message)
        elif argument in roots:
            message = f"also an input ({roots[argument]}); an argument is one or other"
            file.report((*key, "kwargs", argument), message)
    return EntryConfig(
        name=name,
        method=method,
        inputs=inputs,
        outputs=_read_outputs(file, table, (*key, "outputs"), inputs),
        kwargs=kwargs,
        example=example,
        warmup=warmup,
        grad=read_text(file, table, (*key, "grad"), "off", GRAD_MODES),
    )


def _check_warmup(
    file: File, key: KeyPath, warmup: str, axes: Mapping[str, tuple[int, ...]]
) -> None:
    if is_function(warmup):
        return
    if not is_script(warmup):
        message = (
            'expected "package.module:function", or a script and its arguments,'
            f' "train.py --batch {{b}}", found "{warmup}"'
        )
        file.report(key, message)
        return
    try:
        shlex.split(warmup)
    except ValueError as exc:
        file.report(key, f"{exc}: {warmup}")
    for name in PLACEHOLDER.findall(warmup):
        if name not in axes:
            message = f"{{{name}}}: no such axis"
            file.report(key, message, nearest_name(name, axes))


def _read_inputs(
    file: File,
    entry: Mapping[str, Any],
    key: KeyPath,
    axes: Mapping[str, tuple[int, ...]],
) -> dict[str, InputConfig]:
    tables = read_table(file, entry, key)
    inputs: dict[str, InputConfig] = {}
    taken: dict[tuple[paths.Step, ...], str] = {}
    for written in tables:
        place = (*key, written)
        path = written
        if INPUT_PATH.fullmatch(written):
            steps = paths.parse(written)
            path = paths.render(steps)
            _check_input_path(file, place, steps, taken, "example" in entry)
            taken[steps] = path
        else:
            message = (
                'expected an argument path such as input_ids, batch["x"], state.h'
                " or layers[0]"
            )
            file.report(place, message)
        table = read_table(file, tables, place, "entries.*.inputs.*")
        inputs[path] = _read_input(file, table, place, axes)
    return inputs


def _check_input_path(
    file: File,
    place: KeyPath,
    steps: tuple[paths.Step, ...],
    taken: Mapping[tuple[paths.Step, ...], str],
    example: bool,
) -> None:
    for other, path in taken.items():
        shorter = min(len(steps), len(other))
        if steps[:shorter] == other[:shorter]:
            message = f"overlaps {path}, which is given above"
            file.report(place, message)
    if not example and any(isinstance(step, str) for step in steps[1:]):
        message = (
            "an attribute can't be made from dicts and lists; give example ="
            ' "package.module:function", which makes the arguments'
        )
        file.report(place, message)


def _read_input(
    file: File,
    table: Mapping[str, Any],
    key: KeyPath,
    axes: Mapping[str, tuple[int, ...]],
) -> InputConfig:
    for name in ("shape", "dtype"):
        if name not in table:
            file.report((*key, name), "missing")
    shape = _shape(file, table.get("shape", []), (*key, "shape"), axes)
    dtype = read_dtype(file, table, (*key, "dtype"), INPUT_DTYPES)
    values: dict[str, Any] = {}
    for name in ("pad", "default", "low", "high"):
        value = table.get(name)
        if value is None or not dtype:
            continue
        if problem := _outside(value, dtype, exclusive=name == "high"):
            file.report((*key, name), problem)
        else:
            values[name] = value
    if "pad" in values and not any(isinstance(size, str) for size in shape):
        file.report((*key, "pad"), "no axis in the shape, so nothing is ever padded")
    _check_samples(file, key, dtype, values)
    return InputConfig(shape=shape, dtype=dtype, **values)


def _shape(
    file: File, value: object, key: KeyPath, axes: Mapping[str, tuple[int, ...]]
) -> tuple[str | int, ...]:
    if not isinstance(value, list):
        message = f"expected an array of axis names and sizes, found {shown(value)}"
        file.report(key, message)
        return ()
    shape: list[str | int] = []
    for index, size in enumerate(value):
        place = (*key, index)
        if isinstance(size, str):
            shape.append(size)
            if size not in axes:
                declared = ", ".join(axes) or "none"
                message = f'axis "{size}" isn\'t declared; [axes] has {declared}'
                file.report(place, message, nearest_name(size, axes))
        elif not has_type(size, int) or size < 1:
            message = f"expected an axis name or a size from 1, found {shown(size)}"
            file.report(place, message)
        else:
            shape.append(size)
    return tuple(shape)


def _outside(value: object, dtype: str, *, exclusive: bool) -> str:
    """Why `value` isn't one of `dtype`'s, or ""."""
    if dtype == "bool":
        ok = isinstance(value, bool)
        return "" if ok else f"expected true or false (bool), found {shown(value)}"
    whole = dtype.startswith(("int", "uint"))
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "an integer" if whole else "a number"
        return f"expected {kind} ({dtype}), found {shown(value)}"
    low, high = RANGES[dtype]
    # An infinite value would not survive JSON; the comparison also refuses NaN.
    if not low <= value <= high + (1 if whole and exclusive else 0):
        return f"expected {low} to {high} ({dtype}), found {shown(value)}"
    return ""


def _check_samples(
    file: File, key: KeyPath, dtype: str, values: Mapping[str, Any]
) -> None:
    if dtype == "bool":
        for name in ("low", "high"):
            if name in values:
                message = "a bool has no sample range; both values are drawn"
                file.report((*key, name), message)
        return
    low, high = values.get("low", 0), values.get("high")
    if high is not None and low >= high:
        file.report((*key, "high"), f"expected more than low ({low}), found {high}")
    elif high is None and low >= 2 and dtype.startswith(("int", "uint")):
        message = f"samples below the default bound 2 can't start at {low}; give high"
        file.report((*key, "low"), message)


def _read_outputs(
    file: File,
    entry: Mapping[str, Any],
    key: KeyPath,
    inputs: Mapping[str, InputConfig],
) -> dict[str, OutputConfig]:
    tables = read_table(file, entry, key)
    sizes = [size for rule in inputs.values() for size in rule.shape]
    used = dict.fromkeys(size for size in sizes if isinstance(size, str))
    outputs: dict[str, OutputConfig] = {}
    for written in tables:
        place = (*key, written)
        path = written
        if OUTPUT_PATH.fullmatch(written):
            path = paths.render(paths.parse(written))
            if path in outputs:
                file.report(place, f"the same output as {path}, which is given above")
        else:
            message = 'expected an output path such as logits, ["x"], [0] or ""'
            file.report(place, message)
        table = read_table(file, tables, place, "entries.*.outputs.*")
        if "cut" not in table:
            message = 'missing; e.g. cut = { 1 = "s" } cuts dimension 1 to the real s'
            file.report((*place, "cut"), message)
        cut: dict[int, str] = {}
        for dimension, axis in read_table(file, table, (*place, "cut")).items():
            at = (*place, "cut", dimension)
            if not re.fullmatch(r"\d+", dimension, re.ASCII):
                message = f'expected a dimension from 0, found "{dimension}"'
                file.report(at, message)
            elif not isinstance(axis, str):
                file.report(at, f"expected an axis name, found {shown(axis)}")
            elif axis not in used:
                named = ", ".join(used) or "none"
                message = f'no input of this entry has axis "{axis}"; they use {named}'
                file.report(at, message, nearest_name(axis, used))
            else:
                cut[int(dimension)] = axis
        outputs[path] = OutputConfig(cut)
    return outputs
