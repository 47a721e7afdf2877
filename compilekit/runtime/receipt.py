"""What a start did: the route of every bucket, misses with reasons, milliseconds."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compilekit.errors import Mismatch, PolicyError, ResourceError


@dataclasses.dataclass(frozen=True)
class Route:
    """How one bucket gets its code: ``program``, ``cache``, ``jit`` or ``eager``."""

    entry: str
    bucket: str
    route: str
    kernels: int


@dataclasses.dataclass
class Uncovered:
    """Calls that no program covered, for one reason."""

    entry: str
    reason: str
    route: str
    calls: int = 0


class Receipt:
    """The record of one `attach`; `detach` gives the model its own methods back.

    Attributes:
        artifact: The artifact's digest.
        path: Where it lies.
        target: The target whose code was chosen.
        routes: One per bucket.
        compiles: Frames or kernels compiled by the start; a program never compiles.
        milliseconds: Phase → time: ``open``, ``check``, ``load``, ``bind``.
        warnings: Mismatches that don't refuse.
        uncovered: Calls that went elsewhere, by reason.
        serialised: Entries whose calls take a lock, because they write the model.
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
        self.compiles = 0
        self.milliseconds = milliseconds
        self.warnings = warnings
        self.serialised = serialised
        self.require = require
        self.uncovered: list[Uncovered] = []
        self._undo = undo
        self._lock = threading.Lock()
        self.file = os.environ.get("COMPILEKIT_RECEIPT", "")

    def __repr__(self) -> str:
        ways = sorted({route.route for route in self.routes})
        total = sum(self.milliseconds.values())
        return (
            f"<Receipt {self.artifact[:12]} {self.target}: {len(self.routes)} buckets"
            f" by {', '.join(ways)}, {self.compiles} compiles, {total:.1f} ms>"
        )

    def detach(self) -> None:
        """Undo the attach: the model's own methods are back. Twice is fine."""
        self._undo()

    def note_uncovered(self, entry: str, reason: str, route: str) -> None:
        """Count a call that no program covered."""
        with self._lock:
            for item in self.uncovered:
                if (item.entry, item.reason, item.route) == (entry, reason, route):
                    item.calls += 1
                    return
            self.uncovered.append(Uncovered(entry, reason, route, 1))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema": 1,
            "artifact": self.artifact,
            "path": str(self.path),
            "target": self.target,
            "routes": [dataclasses.asdict(route) for route in self.routes],
            "compiles": self.compiles,
            "milliseconds": {k: round(v, 3) for k, v in self.milliseconds.items()},
            "warnings": [dataclasses.asdict(item) for item in self.warnings],
            "serialised": list(self.serialised),
            "uncovered": [dataclasses.asdict(item) for item in self.uncovered],
        }

    def write(self, file: str = "") -> None:
        """Write the receipt to a file (COMPILEKIT_RECEIPT by default), by one rename.

        Raises:
            ResourceError: the file can't be written.
        """
        file = file or self.file
        if not file:
            return
        staging = f"{file}.{os.getpid()}"
        try:
            with open(staging, "w", encoding="utf-8") as stream:
                json.dump(self.as_json(), stream, indent=2)
                stream.write("\n")
            os.replace(staging, file)
        except OSError as exc:
            raise ResourceError(
                f"the receipt can't be written to {file}: {exc.strerror}",
                hint="Set COMPILEKIT_RECEIPT to a writable place, or unset it.",
            ) from exc

    def finish(self) -> Receipt:
        """Add the end state, write the file, and hold the start to its requirements.

        Raises:
            PolicyError: ``require`` names a route that calls didn't take.
        """
        self.write()
        if "program" in self.require and self.uncovered:
            reasons = "; ".join(f"{u.entry}: {u.reason}" for u in self.uncovered)
            raise PolicyError(
                f"require = program, but calls took another route: {reasons}",
                hint="Add the missing buckets, or lower the requirement.",
                uncovered=[dataclasses.asdict(item) for item in self.uncovered],
            )
        return self
