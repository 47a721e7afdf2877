"""Digests of functions: what counts as a change, and where functions are found."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compilekit.runtime.code import (
    code_digest,
    find_functions,
    function_digest,
    named_digest,
    written_in,
)


def code(source: str) -> types.CodeType:
    """The code object of the first function in a source."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    function = next(v for v in namespace.values() if isinstance(v, types.FunctionType))
    return function.__code__


PLAIN = "def f(x, y=1):\n    return [v + 1 for v in x if v != 'a']\n"


@pytest.mark.parametrize(
    "other",
    [
        "\n\n\n" + PLAIN,
        "# a comment\n" + PLAIN.replace("    return", "    # another\n    return"),
        PLAIN.replace("y=1", "y=2"),
        PLAIN.replace(":\n    return", ":\n\n    return"),
    ],
    ids=["moved", "commented", "default", "spaced"],
)
def test_the_same_code(other: str) -> None:
    """Where it stands and what is written about it don't matter."""
    assert code_digest(code(other)) == code_digest(code(PLAIN))


@pytest.mark.parametrize("body", ["lambda v: v != 'a'", "(v for v in x if v != 'a')"])
def test_a_first_constant_is_no_docstring(body: str) -> None:
    """Only a ``def`` has one: text that a lambda or a loop compares with counts."""
    one = f"def f(x):\n    return {body}\n"
    assert code_digest(code(one)) != code_digest(code(one.replace("'a'", "'b'")))


def test_a_docstring_does_not_count() -> None:
    """Editing one is no change of the program."""
    one = "def f(x):\n    '''One.'''\n    return x\n"
    assert code_digest(code(one)) == code_digest(code(one.replace("One", "Two")))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("v + 1", "v + 2"),
        ("v + 1", "v - 1"),
        ("v + 1", "v.real"),
        ("'a'", "'b'"),
        ("v + 1", "v + 1.0"),
        ("x, y", "x, z"),
        ("if v", "if not v"),
    ],
)
def test_another_code(old: str, new: str) -> None:
    """Constants, operators, names and nested code do."""
    assert code_digest(code(PLAIN.replace(old, new))) != code_digest(code(PLAIN))


def function(defaults: str) -> types.FunctionType:
    """A function whose parameters have these defaults."""
    namespace: dict[str, Any] = {"object": object}
    exec(f"def f({defaults}):\n    return x\n", namespace)
    made: types.FunctionType = namespace["f"]
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x=1", "x=2"),
        ("x=1", "x=1.0"),
        ("x=1", "x=True"),
        ("x=(1, (2,))", "x=(1, (3,))"),
        ("*, x=1", "*, x=2"),
        ("*, x=1, y=2", "*, x=2, y=1"),
        ("x=None", "x=object()"),
        ("x={'a': 1}", "x={'a': 2}"),
    ],
)
def test_defaults_count(one: str, other: str) -> None:
    """A default that a call leaves out is baked into the graph."""
    assert function_digest(function(one)) == function_digest(function(one))
    assert function_digest(function(one)) != function_digest(function(other))


def test_sets_have_one_digest() -> None:
    """A set constant's order depends on hash randomisation; the digest doesn't."""
    one = code("def f(x):\n    return x in {'a', 'b', 'c', 'd'}\n")
    (names,) = (c for c in one.co_consts if isinstance(c, frozenset))
    other = one.replace(
        co_consts=tuple(
            frozenset(sorted(names, reverse=True)) if c is names else c
            for c in one.co_consts
        )
    )
    assert code_digest(one) == code_digest(other)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides what it wraps in a closure."""

    def around(*args: Any) -> Any:
        return function(*args)

    return around


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that says what it wraps."""

    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args)

    return around


class Thing:
    """Functions in all their forms."""

    @staticmethod
    def static() -> int:
        """1"""
        return 1

    @classmethod
    def of_class(cls) -> int:
        """2"""
        return 2

    @property
    def computed(self) -> int:
        """3"""
        return 3

    @decorated
    def hidden(self) -> int:
        """4"""
        return 4

    @wrapped
    def shown(self) -> int:
        """5"""
        return 5

    partial = functools.partial(max, 1)

    class Inner:
        """One level below."""

        def method(self) -> int:
            """6"""
            return 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Thing.static", 1),
        ("Thing.of_class", 2),
        ("Thing.computed", 3),
        ("Thing.hidden", 4),
        ("Thing.shown", 5),
        ("Thing.Inner.method", 6),
    ],
)
def test_functions_are_found_under_their_wrappers(name: str, value: int) -> None:
    """Whatever decorates it, the function's own code is among those found."""
    found = find_functions(f"{__name__}:{name}")
    assert any(value in each.__code__.co_consts for each in found)


@pytest.mark.parametrize(
    "name", ["no_such_module:f", f"{__name__}:nothing", f"{__name__}:Thing.nothing"]
)
def test_nothing_is_found_where_there_is_nothing(name: str) -> None:
    """A name that leads nowhere is no error: attach reports it."""
    assert find_functions(name) == ()


@contextlib.contextmanager
def managed() -> Iterator[None]:
    """A function in a wrapper of Python's library."""
    yield


def test_wrappers_of_the_standard_library_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug-fix release of Python may change them; a wrapper of one's own counts."""
    name = f"{__name__}:managed"
    inner, wrapper = managed.__wrapped__, managed  # type: ignore[attr-defined]
    assert written_in(wrapper) == "contextlib"
    assert wrapper.__module__ == __name__
    assert named_digest(name)
    monkeypatch.setattr(sys.modules[__name__], "managed", inner)
    assert named_digest(name) == NAMED
    monkeypatch.setattr(sys.modules[__name__], "managed", lambda: wrapper())
    assert named_digest(name) not in ("", NAMED)
    assert named_digest("contextlib:contextmanager") == ""


NAMED = named_digest(f"{__name__}:managed")
