"""Which backend attention got, and the gate on those that got none."""

from __future__ import annotations

import pytest

from compilekit.compiler.attention import Attention, counted, hold_gate, shown
from compilekit.errors import CaptureError

CALLS = [("cudnn", "a"), ("math", "q at m.py:7"), ("math", "q at m.py:7"), ("flex", "")]


def test_calls_are_counted() -> None:
    """Backends with their numbers; equal calls that got none are described once."""
    attention = counted(CALLS)
    assert attention == Attention({"cudnn": 1, "flex": 1, "math": 2}, ("q at m.py:7",))
    assert shown(attention) == "cudnn 1, flex 1, math 2"


def test_the_gate_warns() -> None:
    """The warning says how many, and which."""
    warning = hold_gate(counted(CALLS), "warn")
    assert warning == "2 attention calls got no fused kernel: q at m.py:7"


def test_the_gate_refuses() -> None:
    """As an error it fails the bucket."""
    with pytest.raises(CaptureError, match="2 attention calls got no fused kernel"):
        hold_gate(counted(CALLS), "error")


@pytest.mark.parametrize(
    ("calls", "gate"), [(CALLS, "ignore"), (CALLS[:1], "error"), ([], "error")]
)
def test_the_gate_lets_through(calls: list[tuple[str, str]], gate: str) -> None:
    """Nothing is said where nothing is wrong, or nobody asked."""
    assert hold_gate(counted(calls), gate) == ""
