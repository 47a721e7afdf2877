"""Live progress of the long commands: a moving picture on a terminal, else lines.

A progress is a context manager and the ``on_event`` of a library call. What it draws is
gone when it's done, failures excepted: the command's report is what stays.
"""

from __future__ import annotations

import abc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from compilekit.console import Console, Difference, Seconds, first_line
from compilekit.events import STAGES, BuildEvent, VerifyEvent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from compilekit.bench.process import ProcessEvent

E = TypeVar("E")

_SHOWN_DONE = 8
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Progress(abc.ABC, Generic[E]):
    """What all progresses share: the picture, and where lines go."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.terminal = console.is_terminal(sys.stderr) and console.verbosity >= 0
        self.running: dict[str, tuple[str, float]] = {}
        self.done: list[str] = []
        self.total = 0
        self.finished = 0
        self.failed = 0
        self._started = time.monotonic()
        self._live: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> Self:
        if self.terminal:
            self._live = self.console.live(self.draw)
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def __call__(self, event: E) -> None:
        """Take in one event."""
        if self.terminal:
            self.take(event)
        elif line := self.tell(event):
            self.console.note(line)

    @abc.abstractmethod
    def take(self, event: E) -> None:
        """Update the picture."""

    @abc.abstractmethod
    def tell(self, event: E) -> str:
        """A line for a log; empty = not worth one."""

    def doing(self, name: str, what: str) -> None:
        """`name` is at `what`; the clock of a new name starts now."""
        since = self.running[name][1] if name in self.running else time.monotonic()
        self.running[name] = (what, since)

    def finish(self, name: str, line: str) -> None:
        """`name` is done."""
        self.running.pop(name, None)
        self.finished += 1
        self.done.append(line)

    def fail(self, name: str, line: str) -> None:
        """`name` failed: the line stays on the terminal."""
        self.running.pop(name, None)
        self.finished += 1
        self.failed += 1
        self.console.note(line, "bad")

    def draw(self) -> RenderableType:
        """The last finished ones, the running ones, and how far it is."""
        from rich.console import Group
        from rich.text import Text

        now = time.monotonic()
        spin = _SPINNER[int((now - self._started) * 8) % len(_SPINNER)]
        lines = [Text(line, style="bright_black") for line in self.done[-_SHOWN_DONE:]]
        for name, (what, since) in self.running.items():
            line = Text(f"{spin} ", style="cyan")
            line.append(f"{name:<16} {what:<28} ", style="default")
            line.append(Seconds(now - since).human(), style="bright_black")
            lines.append(line)
        if self.total:
            failed = f", {self.failed} failed" if self.failed else ""
            spent = Seconds(now - self._started).human()
            summary = f"{self.finished} of {self.total}{failed}, {spent}"
            lines.append(Text(summary, style="bold"))
        for line in lines:
            line.truncate(self.console.width(sys.stderr), overflow="ellipsis")
        return Group(*lines)


class BuildProgress(Progress[BuildEvent]):
    """A build: bucket, stage, seconds, kernels.

    Args:
        console: Where to show it.
        label: Event → how its bucket is called; see `labeller`.
    """

    def __init__(self, console: Console, label: Callable[[BuildEvent], str]) -> None:
        super().__init__(console)
        self.label = label
        self._verified: set[str] = set()

    def take(self, event: BuildEvent) -> None:
        """Update the picture."""
        name = self.label(event)
        self.total = max(self.total, event.count)
        if event.kind == "log":
            self.console.detail(f"{name}: {event.message}")
        elif event.kind == "finished" and event.bucket:
            self.finish(name, f"✓ {name:<16} {_cost(event)}")
        elif event.kind == "finished":
            self.running.pop(name, None)
        elif event.kind == "failed":
            self.fail(name, f"✗ {name}: {first_line(event.message)}")
        elif event.kind == "stage" and event.stage == "verify":
            self.running.pop(name, None)
            if event.message:
                self.console.note(f"✗ {name}: {first_line(event.message)}", "bad")
        elif event.kind == "stage":
            self.doing(name, STAGES.get(event.stage, event.stage))
        else:
            self.doing(name, f"{event.stage or 'started'}{_kernels(event)}")

    def tell(self, event: BuildEvent) -> str:
        """A line for a log."""
        place = f"{event.index}/{event.count} " if event.count else ""
        subject = f"bucket {place}{self.label(event)}" if event.bucket else "build"
        if event.kind == "log":
            return f"{subject} {event.message}" if self.console.verbosity > 0 else ""
        if event.kind == "stage" and event.message:
            return f"{subject} {event.stage} failed {first_line(event.message)}"
        if event.kind == "stage" and event.stage == "verify":
            # One event for each thread count, one line for the bucket.
            if subject in self._verified:
                return ""
            self._verified.add(subject)
        if event.kind == "stage":
            return f"{subject} {STAGES.get(event.stage, event.stage)} {_cost(event)}"
        if event.kind == "finished":
            return f"{subject} done {_cost(event)}"
        if event.kind == "failed":
            return f"{subject} failed {event.seconds:.1f}s {first_line(event.message)}"
        return ""


class ExplainProgress(BuildProgress):
    """An explain: one line per bucket that was looked at."""

    def take(self, event: BuildEvent) -> None:
        """Update the picture."""
        name = self.label(event)
        self.total = event.count
        if event.kind == "stage":
            self.finish(name, f"✓ {name:<16} {event.seconds:.1f}s")
        else:
            self.doing(name, "looking for graph breaks")


class VerifyProgress(Progress[VerifyEvent]):
    """A verify: bucket, threads, difference from eager."""

    def __init__(self, console: Console, label: Callable[[VerifyEvent], str]) -> None:
        super().__init__(console)
        self.label = label
        self._buckets: set[str] = set()

    def take(self, event: VerifyEvent) -> None:
        """Update the picture; a bucket is replayed several times but counts once."""
        name = self.label(event)
        self.total = max(self.total, event.count)
        if event.kind == "log":
            self.console.detail(event.message)
            return
        if event.kind == "started":
            self.doing(name, "replay in a fresh process")
            return
        replay = f"{name} {_threads(event.threads)}".strip()
        if event.kind == "failed" or (event.result and not event.result.passed):
            message = event.result.message if event.result else event.message
            self.fail(name, f"✗ {replay}: {first_line(message)}")
        else:
            self.finish(name, f"✓ {replay:<24} {_difference(event)}")
        self._buckets.add(name)
        self.finished = len(self._buckets)

    def tell(self, event: VerifyEvent) -> str:
        """A line for a log."""
        place = f"{event.index}/{event.count} " if event.count else ""
        subject = f"replay {place}{self.label(event)} {_threads(event.threads)}"
        if event.kind == "log":
            return event.message if self.console.verbosity > 0 else ""
        if event.kind == "failed":
            return f"{subject} failed {first_line(event.message)}"
        if event.kind != "finished":
            return ""
        if event.result and not event.result.passed:
            return f"{subject} failed {first_line(event.result.message)}"
        return f"{subject} passed {_difference(event)}"


class BenchProgress(Progress["ProcessEvent"]):
    """``bench startup``: one line per process."""

    def take(self, event: ProcessEvent) -> None:
        """Update the picture."""
        self.total = event.count
        if event.kind == "kept":
            self.done.append(self.tell(event))
        elif event.kind == "started":
            self.doing(event.row, self._what(event))
        elif event.kind == "failed":
            self.fail(event.row, f"✗ {self.tell(event)}")
        else:
            self.finish(event.row, f"✓ {event.row:<16} {self._outcome(event)}")

    def tell(self, event: ProcessEvent) -> str:
        """A line for a log."""
        subject = f"process {event.index}/{event.count} {event.row}"
        if event.kind == "kept":
            return f"kept {event.message}"
        if event.kind == "started":
            return ""
        if event.kind == "failed":
            return f"{subject} failed {event.seconds:.1f}s {first_line(event.message)}"
        return f"{subject} {self._outcome(event)}"

    def _what(self, event: ProcessEvent) -> str:
        return f"start {event.repetition}" if event.repetition else "prepare"

    def _outcome(self, event: ProcessEvent) -> str:
        if not event.repetition:
            return f"prepared {event.seconds:.1f}s"
        return f"ready {event.ready_ms:.0f}ms ({event.seconds:.1f}s in all)"


def labeller(targets: int, entries: int) -> Callable[[BuildEvent | VerifyEvent], str]:
    """How a bucket is called: with its target and entry only where there are several.

    Args:
        targets: Number of targets in the run.
        entries: Number of entries in the run.
    """

    def label(event: BuildEvent | VerifyEvent) -> str:
        parts = (
            event.target if targets > 1 else "",
            event.entry if entries > 1 else "",
            event.bucket,
        )
        return "/".join(part for part in parts if part) or "build"

    return label


def _kernels(event: BuildEvent) -> str:
    if event.kernels < event.total_kernels:
        return f" {event.kernels}/{event.total_kernels} kernels"
    if not event.kernels:
        return ""
    return " 1 kernel" if event.kernels == 1 else f" {event.kernels} kernels"


def _cost(event: BuildEvent) -> str:
    return f"{event.seconds:.1f}s{_kernels(event)}"


def _threads(threads: int) -> str:
    if not threads:
        return ""
    return "1 thread" if threads == 1 else f"{threads} threads"


def _difference(event: VerifyEvent) -> str:
    if event.result is None:
        return ""
    difference = Difference(event.result.max_abs_error).human()
    return difference if event.result.uncompared else f"differs by {difference}"
