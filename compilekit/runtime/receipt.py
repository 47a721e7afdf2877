"""What a start did: the route of every bucket, misses with reasons, milliseconds."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from compilekit._torch.runtime import compiled_frames
from compilekit.errors import Mismatch, PolicyError, ResourceError

# A reason can name a shape that a client chose: this bounds what one can make us keep.
_MOST_REASONS = 100
_OTHER_REASONS = "other reasons"


class Route(NamedTuple):
    """How one bucket gets its code: ``program``, ``cache``, ``jit`` or ``eager``."""

    entry: str
    bucket: str
    route: str
    kernels: int


class Uncovered:
    """Calls that no program covered, for one reason.

    Attributes:
        route: What became of them: ``error``, ``eager`` or ``jit``.
    """

    def __init__(self, entry: str, reason: str, route: str) -> None:
        self.entry = entry
        self.reason = reason
        self.route = route
        self.calls = 0


class Receipt:
    """The record of one `attach`; `detach` gives the model its own methods back.

    Attributes:
        artifact: The artifact's digest.
        path: Where it lies.
        target: The target whose code was chosen.
        routes: One per bucket.
        milliseconds: Phase → time (``open``, ``check``, ``compare``, …).
        warnings: Mismatches that don't refuse.
        serialised: Entries whose calls take a lock, because they write the model.
        require: What the start is held to.
        rebinds: How often a changed model was compared and bound again.
        calls: ``entry/bucket`` → calls of a language model's step so far.
        graphs: ``entry/bucket`` → MB that capturing its CUDA graph took.
    """

    def __init__(
        self,
        artifact: str,
        path: Path,
        target: str,
        routes: tuple[Route, ...],
        milliseconds: dict[str, float],
        warnings: tuple[Mismatch, ...],
        serialised: tuple[str, ...],
        require: tuple[str, ...],
        undo: Callable[[], None],
    ) -> None:
        self.artifact = artifact
        self.path = path
        self.target = target
        self.routes = routes
        self.milliseconds = milliseconds
        self.warnings = warnings
        self.serialised = serialised
        self.require = require
        self.rebinds = 0
        self.calls: dict[str, int] = {}
        self.graphs: dict[str, float] = {}
        self.file = os.environ.get("COMPILEKIT_RECEIPT", "")
        self.metrics = os.environ.get("COMPILEKIT_METRICS", "")
        self._undo = undo
        self._uncovered: dict[tuple[str, str, str], Uncovered] = {}
        self._lock = threading.Lock()
        self._frames = compiled_frames()

    def __repr__(self) -> str:
        ways = sorted({route.route for route in self.routes})
        total = sum(self.milliseconds.values())
        return (
            f"<Receipt {self.artifact[:12]} {self.target}: {len(self.routes)} buckets"
            f" by {', '.join(ways)}, {self.compiles} compiles, {total:.1f} ms>"
        )

    @property
    def compiles(self) -> int:
        """Frames that this process compiled since attach; a program never does."""
        return max(0, compiled_frames() - self._frames)

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """Calls that no program covered, by reason."""
        return tuple(self._uncovered.values())

    def detach(self) -> None:
        """Undo the attach: the model's own methods are back. Twice is fine."""
        self._undo()

    def note_uncovered(self, entry: str, reason: str, route: str) -> None:
        """Count a call that no program covered."""
        with self._lock:
            key = (entry, reason, route)
            if key not in self._uncovered and len(self._uncovered) >= _MOST_REASONS:
                key = (entry, _OTHER_REASONS, route)
            self._uncovered.setdefault(key, Uncovered(*key)).calls += 1

    def note_call(self, entry: str, bucket: str) -> None:
        """Count a call of a language model's step."""
        name = f"{entry}/{bucket}"
        with self._lock:
            self.calls[name] = self.calls.get(name, 0) + 1

    def note_graph(self, entry: str, bucket: str, size_bytes: int) -> None:
        """Note what a CUDA graph took; a later capture of the same adds to it."""
        name = f"{entry}/{bucket}"
        with self._lock:
            self.graphs[name] = self.graphs.get(name, 0.0) + size_bytes / 1e6

    def note_rebind(self) -> None:
        """Count a comparison after the model changed."""
        with self._lock:
            self.rebinds += 1

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema": 1,
            "artifact": self.artifact,
            "path": str(self.path),
            "target": self.target,
            "routes": [route._asdict() for route in self.routes],
            "compiles": self.compiles,
            "milliseconds": {k: round(v, 3) for k, v in self.milliseconds.items()},
            "warnings": [item._asdict() for item in self.warnings],
            "serialised": list(self.serialised),
            "require": list(self.require),
            "rebinds": self.rebinds,
            "calls": dict(self.calls),
            "graphs": {name: round(mb, 3) for name, mb in self.graphs.items()},
            "uncovered": [vars(item).copy() for item in self.uncovered],
        }

    def write(self, file: str = "") -> None:
        """Write the receipt to a file (COMPILEKIT_RECEIPT by default), by one rename.

        The same as Prometheus text goes to the file that COMPILEKIT_METRICS names. Both
        are as of this call, which attach and `finish` make: a server whose counters are
        to be watched makes it again, from a timer say.

        Raises:
            ResourceError: a file can't be written.
        """
        file = file or self.file
        if file:
            text = json.dumps(self.as_json(), indent=2) + "\n"
            _replace(file, text, "COMPILEKIT_RECEIPT")
        if self.metrics:
            from compilekit.runtime import metrics

            _replace(self.metrics, metrics.text(self), "COMPILEKIT_METRICS")

    def finish(self) -> Receipt:
        """Add the end state, write the file, and hold the start to its requirements.

        Raises:
            PolicyError: ``require = program``, and a call took none.
        """
        self.write()
        if "program" in self.require and self.uncovered:
            reasons = "; ".join(f"{u.entry}: {u.reason}" for u in self.uncovered)
            raise PolicyError(
                f"require = program, but calls took no program: {reasons}",
                hint="Add the missing buckets, or lower the requirement.",
                uncovered=[vars(item).copy() for item in self.uncovered],
            )
        return self


def _no_link(path: str, flags: int) -> int:
    """Open a file whose name others may guess: a link there would be followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _replace(file: str, text: str, variable: str) -> None:
    staging = f"{file}.{os.getpid()}"
    try:
        with open(staging, "w", encoding="utf-8", opener=_no_link) as stream:
            stream.write(text)
        os.replace(staging, file)
    except OSError as exc:
        if os.path.isfile(staging) and not os.path.islink(staging):
            os.unlink(staging)
        raise ResourceError(
            f"the receipt can't be written to {file}: {exc.strerror}",
            hint=f"Set {variable} to a writable place, or unset it.",
        ) from exc
