"""docs/factors.md lists every factor that the code can report."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "factors.md").read_text(encoding="utf-8")


def factors() -> list[str]:
    """First argument of every mismatch made in the runtime, up to what varies."""
    found = set()
    for name in ("check.py", "gpu.py", "model.py", "cache_check.py"):
        tree = ast.parse((ROOT / "compilekit" / "runtime" / name).read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id not in ("Mismatch", "_mismatch") or not node.args:
                continue
            first = node.args[0]
            if isinstance(first, ast.Constant):
                found.add(str(first.value))
            elif isinstance(first, ast.JoinedStr) and isinstance(
                first.values[0], ast.Constant
            ):
                found.add(str(first.values[0].value).rstrip())
    return sorted(found)


def test_there_are_some() -> None:
    """The search itself works."""
    assert {"torch.version", "isa", "model.class", "tensor", "function"} <= set(
        factors()
    )


@pytest.mark.parametrize("factor", factors())
def test_a_factor_is_on_the_page(factor: str) -> None:
    """Whoever reads a refusal finds it in the table."""
    assert f"`{factor}" in PAGE
