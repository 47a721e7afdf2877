"""Progress: the picture on a terminal, and the lines of a log."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest

from compilekit.cli.progress import BuildProgress, Progress, VerifyProgress, labeller
from compilekit.console import Console
from compilekit.events import BuildEvent, VerifyEvent
from compilekit.results import BucketVerified

STARTED = BuildEvent("started", "cpu", "forward", "b1_s32", index=2, count=8)
REPLAY = VerifyEvent("started", "cpu", "forward", "b1_s32", index=1, count=2)
PASSED = BucketVerified("forward", "b1_s32", 4, 3e-7, 1e-5, 1e-5, 0, 0, True)


def picture(progress: Progress[BuildEvent] | Progress[VerifyEvent]) -> list[str]:
    """What is on the terminal right now, without colours."""
    from rich.console import Console as RichConsole

    stream = io.StringIO()
    RichConsole(file=stream, width=200).print(progress.draw())
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def step(**changes: object) -> BuildEvent:
    """The started bucket, some way on."""
    return dataclasses.replace(STARTED, **changes)  # type: ignore[arg-type]


@pytest.fixture
def build() -> BuildProgress:
    """A build of one target and entry."""
    return BuildProgress(Console(), labeller(1, 1))


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (STARTED, ""),
        (step(stage="lower"), ""),
        (step(kind="progress", stage="compile", kernels=3, total_kernels=18), ""),
        (
            step(kind="stage", stage="compile", seconds=41.23, kernels=18),
            "bucket 2/8 b1_s32 compiled 41.2s 18 kernels",
        ),
        (
            step(kind="stage", stage="lower", seconds=0.25),
            "bucket 2/8 b1_s32 lowered 0.2s",
        ),
        (
            step(kind="finished", seconds=44.0, kernels=1, total_kernels=1),
            "bucket 2/8 b1_s32 done 44.0s 1 kernel",
        ),
        (
            step(kind="failed", seconds=2.0, message="\nfirst\nsecond"),
            "bucket 2/8 b1_s32 failed 2.0s first",
        ),
        (
            step(kind="stage", stage="verify", seconds=2.0, message="differs"),
            "bucket 2/8 b1_s32 verify failed differs",
        ),
        (step(kind="log", message="a detail"), ""),
        (
            BuildEvent("stage", stage="pack", seconds=0.5),
            "build packed 0.5s",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, BuildEvent) else "",
)
def test_build_lines(event: BuildEvent, line: str, build: BuildProgress) -> None:
    """What a log gets: one line for what is done, none for what is under way."""
    assert build.tell(event) == line


def test_verified_bucket_is_told_once(build: BuildProgress) -> None:
    """Three thread counts are three events and one line."""
    event = step(kind="stage", stage="verify", seconds=2.0)
    lines = [build.tell(event) for _ in range(3)]
    assert lines == ["bucket 2/8 b1_s32 verified 2.0s", "", ""]


def test_build_picture_follows_the_events(build: BuildProgress) -> None:
    """Running buckets with their stage and kernels, finished ones above, a count."""
    build.take(STARTED)
    build.take(step(kind="progress", stage="compile", kernels=3, total_kernels=18))
    running, summary = picture(build)
    assert "b1_s32" in running
    assert "compile 3/18 kernels" in running
    assert summary.startswith("0 of 8, ")
    build.take(step(kind="finished", seconds=4.0, kernels=18))
    done, summary = picture(build)
    assert done.split() == ["✓", "b1_s32", "4.0s", "18", "kernels"]
    assert summary.startswith("1 of 8, ")


def test_build_picture_ends_after_verify(build: BuildProgress) -> None:
    """A verify inside a build leaves no bucket running."""
    build.take(step(kind="finished"))
    build.take(step(stage="verify"))
    assert any("verify" in line for line in picture(build))
    build.take(step(kind="stage", stage="verify"))
    assert build.running == {}


def test_failed_bucket_stays_on_the_terminal(
    build: BuildProgress, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure is a line that isn't wiped, and is counted."""
    build.take(STARTED)
    build.take(step(kind="failed", message="lowering failed\nmore"))
    assert capsys.readouterr().err == "✗ b1_s32: lowering failed\n"
    assert picture(build)[-1].startswith("1 of 8, 1 failed, ")


def test_verify_counts_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket is replayed at several thread counts and counts as one."""
    progress = VerifyProgress(Console(), labeller(1, 1))
    progress.take(REPLAY)
    for threads in (1, 4):
        finished = dataclasses.replace(
            REPLAY, kind="finished", threads=threads, result=PASSED
        )
        progress.take(finished)
        assert progress.tell(finished).startswith("replay 1/2 b1_s32")
    assert progress.running == {}
    assert picture(progress)[-1].startswith("1 of 2, ")
    wrong = dataclasses.replace(PASSED, passed=False, message="NaN")
    progress.take(dataclasses.replace(finished, result=wrong))
    assert capsys.readouterr().err == "✗ b1_s32 4 threads: NaN\n"


@pytest.mark.parametrize(
    ("targets", "entries", "label"),
    [
        (1, 1, "b1_s32"),
        (1, 2, "forward/b1_s32"),
        (2, 1, "cpu/b1_s32"),
        (2, 2, "cpu/forward/b1_s32"),
    ],
)
def test_label_says_what_is_needed(targets: int, entries: int, label: str) -> None:
    """A bucket's target and entry are named where there are several."""
    name: Callable[[BuildEvent], str] = labeller(targets, entries)
    assert name(STARTED) == label
