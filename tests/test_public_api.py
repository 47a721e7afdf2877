"""The Python API, frozen: names and signatures."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import compilekit
from compilekit import errors


def test_names_are_frozen() -> None:
    """Exactly these names are public, and ``dir`` shows them."""
    names = ["__version__", "attach", "check", "errors", "open", "prepare", "restore"]
    assert sorted(compilekit.__all__) == names
    assert dir(compilekit) == names


def test_every_name_resolves() -> None:
    """Each lazy name leads to something, the same at every access."""
    for name in compilekit.__all__:
        assert getattr(compilekit, name) is getattr(compilekit, name)


def test_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does on any module."""
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = compilekit.atach


def test_errors_is_the_module() -> None:
    """``compilekit.errors.ConfigError`` works without another import."""
    code = "import compilekit; compilekit.errors.ConfigError('x')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert compilekit.errors is errors


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "attach",
            "model, artifact, *entry, *require, *on_uncovered, *device, *target,"
            " *loading",
        ),
        ("prepare", "artifact, *device, *target"),
        ("restore", "artifact, *work_dir, *require"),
        ("check", "artifact, *libraries"),
        ("open", "path"),
    ],
)
def test_signatures_are_frozen(name: str, parameters: str) -> None:
    """Parameter names and what is keyword-only (``*``) don't change unnoticed."""
    shown = [
        f"*{p.name}" if p.kind is p.KEYWORD_ONLY else p.name
        for p in inspect.signature(getattr(compilekit, name)).parameters.values()
    ]
    assert ", ".join(shown) == parameters


def test_version_is_the_installed_one() -> None:
    """``compilekit.__version__`` is what the command line says."""
    process = subprocess.run(
        [sys.executable, "-m", "compilekit", "--version"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert process.stdout == f"compilekit {compilekit.__version__}\n"
