"""Digests of Python functions, to notice a model whose source changed.

A digest covers what a function does (bytecode, constants, names) and not where it
stands: comments, line numbers and unrelated edits don't change it. It holds for one
Python minor, as the artifact does. Defaults aren't part of the code: those that capture
read are among an entry's reads.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import types
from typing import Any


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> str:
    """sha256 over a code object and those nested in it; 20 µs, the first time."""
    digest = hashlib.sha256()
    _feed(digest, code)
    return digest.hexdigest()


def _feed(digest: Any, code: types.CodeType) -> None:
    names = (
        code.co_name,
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
    )
    digest.update(repr(names).encode())
    digest.update(code.co_code)
    docstring = code.co_consts[0] if code.co_consts else None
    for index, constant in enumerate(code.co_consts):
        if isinstance(constant, types.CodeType):
            _feed(digest, constant)
        elif index == 0 and isinstance(docstring, str):
            continue
        elif isinstance(constant, frozenset):
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())


def find_codes(name: str) -> tuple[types.CodeType, ...]:
    """The code objects behind ``module:qualname``, decorators unwrapped.

    Returns:
        Every function met while unwrapping; empty if the name leads nowhere.
    """
    module, _, qualname = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = value.__dict__[part]
    except (ImportError, AttributeError, KeyError):
        return ()
    return tuple(_unwrap(value))


def _unwrap(value: Any) -> list[types.CodeType]:
    codes: list[types.CodeType] = []
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (staticmethod, classmethod)):
            pending.append(item.__func__)
        elif isinstance(item, property):
            pending.append(item.fget)
        elif isinstance(item, functools.partial):
            pending.append(item.func)
        elif isinstance(item, types.FunctionType):
            codes.append(item.__code__)
            pending.append(getattr(item, "__wrapped__", None))
            # A decorator keeps the function it wraps in a closure cell.
            pending += [
                cell.cell_contents
                for cell in item.__closure__ or ()
                if isinstance(_contents(cell), types.FunctionType)
            ]
    return codes


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
