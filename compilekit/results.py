"""What the long commands return, as frozen dataclasses.

The compiler side makes them; the command line prints them (``--json`` is `to_json`).
Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

BucketStatus = Literal["built", "verified", "unverified", "failed", "skipped"]


@dataclasses.dataclass(frozen=True)
class BucketResult:
    """What a build made of one bucket.

    Attributes:
        status: ``verified`` (built, and equals eager), ``unverified`` (built; verify
            needs the target's device), ``built`` (verify wasn't asked for), ``failed``
            (`error` says why) or ``skipped`` (the build stopped before it).
        kernels: Kernels that the bucket's program launches.
        seconds: Wall time, all stages.
        size_bytes: Its program and kernels; a shared kernel counts for each bucket.
        error: Message and hint; empty unless failed.
        error_type: Class name in `compilekit.errors`; empty unless failed.
        log: Where the bucket's log was kept; empty = none.
        attention: Backends that its attention calls got: ``cudnn 28, math 1``.
        warning: What a gate has to say about it.
    """

    target: str
    entry: str
    bucket: str
    status: BucketStatus
    kernels: int = 0
    seconds: float = 0.0
    size_bytes: int = 0
    error: str = ""
    error_type: str = ""
    log: str = ""
    attention: str = ""
    warning: str = ""


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """What a build left behind.

    Attributes:
        artifact: The artifact's directory; None when a failed bucket kept it from
            being written.
        digest: The manifest's digest; empty without an artifact.
        buckets: Every job of the plan, in plan order.
        seconds: Wall time of the whole build.
        size_bytes: Size of the artifact on disk.
        kernels: Kernels in the artifact, each counted once.
        configs: How GPU kernels came by their config, each counted once: ``tuned`` on
            the target itself, ``inherited`` from another target's measurement, or
            ``default``; empty without GPU kernels.
        exit_code: 0, or that of the first failed bucket's error.
    """

    artifact: Path | None
    digest: str
    buckets: tuple[BucketResult, ...]
    seconds: float
    size_bytes: int = 0
    kernels: int = 0
    configs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    exit_code: int = 0

    @property
    def failed(self) -> tuple[BucketResult, ...]:
        """The buckets that failed."""
        return tuple(bucket for bucket in self.buckets if bucket.status == "failed")


@dataclasses.dataclass(frozen=True)
class BucketVerified:
    """One bucket replayed in a fresh process at one thread count.

    Attributes:
        threads: Intra-op threads of the replay.
        max_abs_error: Largest absolute difference from eager over all outputs; inf
            when an output isn't comparable (class, shape, dtype, NaN), nan when a
            warm-up left nothing to compare.
        compiles: Counted by torch's own counters; must be 0.
        spawned: Processes started during attach and calls; must be 0.
        message: Why it didn't pass; empty when it did.
    """

    entry: str
    bucket: str
    threads: int
    max_abs_error: float
    atol: float
    rtol: float
    compiles: int
    spawned: int
    passed: bool
    message: str = ""
    target: str = ""

    @property
    def uncompared(self) -> bool:
        """True if it shows that nothing was compiled, and no more."""
        return math.isnan(self.max_abs_error)


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """Every bucket's replay, and the record written beside the artifact.

    Attributes:
        buckets: Bucket by bucket, each at every thread count.
        record: The verification record; None when it wasn't written.
        digest: The artifact's digest, as in the record.
        seconds: Wall time.
    """

    buckets: tuple[BucketVerified, ...]
    record: Path | None
    digest: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if every replay passed, and there was at least one."""
        return bool(self.buckets) and all(bucket.passed for bucket in self.buckets)


def to_json(value: Any) -> Any:
    """Dataclasses, named tuples, paths and tuples as plain JSON values.

    Infinity and NaN become strings: JSON has no numbers for them, and a strict reader
    would refuse the whole document.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in _fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(item) for item in value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)
