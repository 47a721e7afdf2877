"""Digests of Python functions, to notice a model whose source changed.

A digest covers what a function does (bytecode, constants, names, defaults) and not
where it stands: comments, line numbers and unrelated edits don't change it. It holds
for one Python minor, as the artifact does.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
import types
from typing import Any

_FIXED = frozenset({"torch", "compilekit", *sys.stdlib_module_names})


def is_fixed(module: str) -> bool:
    """True for code that isn't the model's, and whose version is a factor.

    A bug-fix release of Python changes functions of its library, and no graph.
    """
    return module.partition(".")[0] in _FIXED


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
    # A function's first constant is its docstring or None; a comprehension's isn't.
    documented = not code.co_name.startswith("<")
    for index, constant in enumerate(code.co_consts):
        if isinstance(constant, types.CodeType):
            _feed(digest, constant)
        elif index == 0 and documented and isinstance(constant, str):
            continue
        elif isinstance(constant, frozenset):
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())


def function_digest(function: types.FunctionType) -> str:
    """sha256 over a function's code and the defaults of its parameters."""
    defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
    text = f"{code_digest(function.__code__)} {_shown(defaults)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(value: Any) -> str:
    """Scalars and containers of them in full, anything else by its class.

    The text of other objects can hold an address.
    """
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, dict):
        return _shown([(str(key), value[key]) for key in sorted(value, key=str)])
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return f"{type(value).__module__}:{type(value).__qualname__}"


def find_functions(name: str) -> tuple[types.FunctionType, ...]:
    """The functions behind ``module:qualname``, decorators unwrapped.

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


def named_digest(name: str) -> str:
    """sha256 over a function and all that it wraps, or is wrapped in, under its name.

    Wrappers of torch and Python's library aside (`is_fixed`). Empty if there is none.
    """
    found = [
        function_digest(function)
        for function in find_functions(name)
        if not is_fixed(written_in(function))
    ]
    return hashlib.sha256(" ".join(found).encode()).hexdigest() if found else ""


def written_in(function: types.FunctionType) -> str:
    """The module whose source a function is; ``functools.wraps`` changes the stated."""
    return str(function.__globals__.get("__name__", ""))


def _unwrap(value: Any) -> list[types.FunctionType]:
    functions: list[types.FunctionType] = []
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
            functions.append(item)
            pending.append(getattr(item, "__wrapped__", None))
            # A decorator keeps the function it wraps in a closure cell.
            pending += [
                cell.cell_contents
                for cell in item.__closure__ or ()
                if isinstance(_contents(cell), types.FunctionType)
            ]
    return functions


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
