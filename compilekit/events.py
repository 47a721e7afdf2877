"""What a build or a verify reports while it runs, as frozen dataclasses.

Library code calls ``on_event(event)`` and never prints; the console turns events into
a live display or plain lines. A worker process writes each event of a build as one JSON
line (`to_line`), and what ended it; the parent reads them back (`from_line`).

Lifecycle of one bucket::

    started                            the bucket's turn has come
    started  stage="capture"           a stage begins
    stage    stage="capture"           ... and ends, after `seconds`
    started  stage="compile"
    progress stage="compile"           3 of 18 kernels are compiled
    stage    stage="compile"
    finished | failed                  once per bucket
    started  stage="verify"            later, once per replay of the bucket
    stage    stage="verify"            with a `message` if it doesn't equal eager

Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from compilekit.results import BucketResult, BucketVerified

Kind = Literal["started", "progress", "stage", "finished", "failed", "log"]
KINDS: tuple[Kind, ...] = ("started", "progress", "stage", "finished", "failed", "log")

STAGES: Mapping[str, str] = {
    "model": "made model",
    "capture": "captured",
    "lower": "lowered",
    "compile": "compiled",
    "harvest": "harvested",
    "pack": "packed",
    "verify": "verified",
}
"""Stage → the word for a stage that is done, in the order stages run."""


@dataclasses.dataclass(frozen=True)
class BuildEvent:
    """One step of a build.

    Attributes:
        kind: See the module's lifecycle; ``log`` carries a line of narration.
        target: Name of the target; empty for an event about the whole build.
        entry: Name of the entry.
        bucket: Name of the bucket; empty for an event about the whole build.
        stage: A key of `STAGES`; empty for the bucket as a whole.
        seconds: What the stage took; for ``finished`` and ``failed``, the bucket.
        kernels: Kernels that exist so far (``progress``) or in the end.
        total_kernels: Kernels expected; 0 = not known.
        index: The bucket's place in the plan, counted from 1.
        count: Buckets in the plan.
        message: Why it failed, or a line of narration.
        log: Path of the kept log of a failed bucket; empty = none.
        error_type: Class name of the error, for ``failed``.
        exit_code: What the error's class fixes, for ``failed``.
        size_bytes: Program and kernels, for ``finished``.
        attention: What its attention calls got, for ``finished``: ``cudnn 28``.
        warning: What a gate has to say, for ``finished``.
    """

    kind: Kind
    target: str = ""
    entry: str = ""
    bucket: str = ""
    stage: str = ""
    seconds: float = 0.0
    kernels: int = 0
    total_kernels: int = 0
    index: int = 0
    count: int = 0
    message: str = ""
    log: str = ""
    error_type: str = ""
    exit_code: int = 0
    size_bytes: int = 0
    attention: str = ""
    warning: str = ""


@dataclasses.dataclass(frozen=True)
class VerifyEvent:
    """One step of a verify; one bucket at one thread count.

    Attributes:
        kind: ``started``, ``finished`` (with `result`), ``failed`` (the replay process
            died; `message` says how) or ``log``.
        seconds: What the replay took, start of its process included.
        result: The comparison, for ``finished``.
    """

    kind: Kind
    target: str = ""
    entry: str = ""
    bucket: str = ""
    threads: int = 0
    seconds: float = 0.0
    index: int = 0
    count: int = 0
    message: str = ""
    result: BucketVerified | None = None


@dataclasses.dataclass(frozen=True)
class ProcessError:
    """Why a child process can't go on, in its last line.

    Attributes:
        error_type: Class name of an error in `compilekit.errors`.
        message: Its message.
        hint: What to do about it.
    """

    error_type: str
    message: str
    hint: str = ""


Event = BuildEvent | VerifyEvent
OnBuildEvent = Callable[[BuildEvent], None]
OnVerifyEvent = Callable[[VerifyEvent], None]


def ignore(event: Event) -> None:
    """The ``on_event`` of a caller that wants no progress."""


def bucket_result(event: BuildEvent) -> BucketResult:
    """What a bucket's last event (``finished`` or ``failed``) says about it."""
    failed = event.kind == "failed"
    return BucketResult(
        target=event.target,
        entry=event.entry,
        bucket=event.bucket,
        status="failed" if failed else "built",
        kernels=event.kernels,
        seconds=event.seconds,
        size_bytes=event.size_bytes,
        error=event.message if failed else "",
        error_type=event.error_type,
        log=event.log,
        attention=event.attention,
        warning=event.warning,
    )


def to_line(said: BuildEvent | ProcessError) -> str:
    """One JSON line, without the newline; fields at their defaults are left out."""
    fields = {
        field.name: getattr(said, field.name)
        for field in dataclasses.fields(said)
        if getattr(said, field.name) != field.default
    }
    about = "build" if isinstance(said, BuildEvent) else "error"
    return json.dumps({"event": about, **fields}, ensure_ascii=True)


def from_line(line: str) -> BuildEvent | ProcessError:
    """Rebuild what a worker said with `to_line`.

    Raises:
        ValueError: the line is none of its (a library printed into the pipe, or the
            process was killed while it wrote).
    """
    try:
        fields: dict[str, Any] = dict(json.loads(line))
        about = fields.pop("event")
        if about == "error":
            return ProcessError(**fields)
        if about != "build":
            raise ValueError(f"unknown event {about!r}")
        if fields["kind"] not in KINDS:
            raise ValueError(f"unknown kind {fields['kind']!r}")
        return BuildEvent(**fields)
    except (ValueError, TypeError, KeyError) as exc:
        raise ValueError(f"not an event line ({exc}): {line[:200]!r}") from exc
