"""Events and results: what crosses a process comes back the same."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from compilekit.events import KINDS, BuildEvent, ProcessError, from_line, to_line
from compilekit.results import (
    BucketResult,
    BucketStatus,
    BucketVerified,
    BuildResult,
    VerifyResult,
    to_json,
)

PASSED = BucketVerified("forward", "b1_s32", 1, 3e-7, 1e-5, 1e-5, 0, 0, True)
FAILED = dataclasses.replace(PASSED, max_abs_error=math.inf, passed=False, message="x")

EVENTS = [
    BuildEvent("started"),
    BuildEvent(
        kind="failed",
        target="cpu-x86_64-v4",
        entry="forward",
        bucket="b1_s32",
        stage="lower",
        seconds=3.25,
        kernels=3,
        total_kernels=18,
        index=2,
        count=8,
        message='two\nlines, "quotes" and é',
        log="logs/b1_s32.log",
        error_type="HarvestError",
        exit_code=4,
        size_bytes=12,
    ),
    ProcessError("ConfigError", "no such module: é", "Install it."),
]


@pytest.mark.parametrize("event", EVENTS)
def test_event_survives_its_line(event: BuildEvent | ProcessError) -> None:
    """Every field of every event comes back equal from one line of ASCII."""
    line = to_line(event)
    assert "\n" not in line
    assert line.isascii()
    assert from_line(line) == event


def test_line_leaves_defaults_out() -> None:
    """An event at its defaults is as short as its kind."""
    assert json.loads(to_line(BuildEvent("log"))) == {"event": "build", "kind": "log"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a library printed this",
        '{"event": "build", "kind": "started"',
        '{"event": "build"}',
        '{"event": "build", "kind": "unheard-of"}',
        '{"event": "build", "kind": "started", "colour": 1}',
        '{"event": "else", "kind": "started"}',
        "[1, 2]",
    ],
)
def test_other_lines_are_refused(line: str) -> None:
    """A line that isn't an event is a ValueError that shows the line."""
    with pytest.raises(ValueError, match="not an event line"):
        from_line(line)


def test_kinds_are_the_documented_ones() -> None:
    """The kinds are frozen: the console draws each of them."""
    assert KINDS == ("started", "progress", "stage", "finished", "failed", "log")


def test_result_is_json() -> None:
    """A result with paths, tuples and infinity becomes strict JSON."""
    bucket = BucketResult("cpu", "forward", "b1", "failed", error="no")
    result = BuildResult(Path("a/b"), "00", (bucket,), 1.0, exit_code=4)
    shown = to_json({"build": result, "verify": VerifyResult((FAILED,), None)})
    text = json.dumps(shown, allow_nan=False)
    data = json.loads(text)
    assert data["build"]["artifact"] == "a/b"
    assert data["build"]["buckets"][0]["status"] == "failed"
    assert data["verify"]["buckets"][0]["max_abs_error"] == "inf"
    assert data["verify"]["record"] is None


def test_verify_of_nothing_has_not_passed() -> None:
    """A verify that replayed no bucket proves nothing."""
    assert not VerifyResult((), None).passed
    assert VerifyResult((PASSED,), None).passed
    assert not VerifyResult((PASSED, FAILED), None).passed


def test_failed_buckets() -> None:
    """``failed`` picks the buckets that failed, in plan order."""
    cases: list[tuple[str, BucketStatus]]
    cases = [("a", "built"), ("b", "failed"), ("c", "failed")]
    buckets = tuple(
        BucketResult("cpu", "forward", name, status) for name, status in cases
    )
    result = BuildResult(None, "", buckets, 1.0)
    assert [bucket.bucket for bucket in result.failed] == ["b", "c"]
