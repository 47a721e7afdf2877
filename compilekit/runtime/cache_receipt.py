"""The receipt of a `restore`: what was restored, and every step it didn't spare."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from compilekit.errors import PolicyError
from compilekit.runtime.receipt import Receipt

# A server that compiles without end must not fill its memory with reasons.
_MOST_MISSES = 200
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Miss:
    """One step that a start from complete caches doesn't take.

    Attributes:
        kind: ``frame`` (traced anew), ``key`` (not in the caches), ``bypass``,
            ``kernel`` (compiled), ``compile`` (by Inductor), ``benchmark`` or
            ``process``.
        reason: What differs, with both values where there are two.
    """

    kind: str
    reason: str


class CacheReceipt(Receipt):
    """A receipt whose buckets take the cache route.

    Attributes:
        staged: Where the caches lie.
        traced: Frames that torch traced as expected: no package could hold them.
        packages: Functions whose packages were installed.
    """

    def __init__(self, *args: Any, staged: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.staged = staged
        self.traced: list[str] = []
        self.packages: list[str] = []
        self.finished = False
        self._misses: list[Miss] = []
        self._guard = threading.Lock()

    @property
    def compiles(self) -> int:
        """Frames that were traced unexpectedly, and graphs that Inductor compiled."""
        return sum(miss.kind in ("frame", "compile") for miss in self._misses)

    @property
    def misses(self) -> tuple[Miss, ...]:
        """Every unexpected step so far, in order."""
        return tuple(self._misses)

    @property
    def strict(self) -> bool:
        """True while an unexpected step is an error."""
        return "cache" in self.require and not self.finished

    def note_miss(self, kind: str, reason: str) -> None:
        """Keep an unexpected step.

        A traced frame and a missed key come before the costly steps, and their reasons
        belong together: so they wait for `hold`, which a frame's end calls too.

        Raises:
            PolicyError: ``require = cache``, and something is about to be compiled.
        """
        with self._guard:
            if len(self._misses) < _MOST_MISSES:
                self._misses.append(Miss(kind, reason))
        if kind not in ("frame", "key", "bypass"):
            self.hold()

    def hold(self) -> None:
        """Hold the start to ``require = cache``.

        Raises:
            PolicyError: there was an unexpected step.
        """
        if self.strict and self._misses:
            raise self._error()

    def finish(self) -> CacheReceipt:
        """Write the end state; from now on an unexpected step is only counted.

        Raises:
            PolicyError: ``require = cache``, and something was compiled.
        """
        strict, self.finished = self.strict, True
        self.write()
        if strict and self._misses:
            raise self._error()
        return self

    def _error(self) -> PolicyError:
        reasons = list(dict.fromkeys(miss.reason for miss in self._misses))
        lines = "".join(f"\n  {reason}" for reason in reasons[:_SHOWN])
        more = len(reasons) - _SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        return PolicyError(
            f"require = cache, but the caches don't cover a step:{lines}{rest}",
            hint="Build again, set back what differs, or lower the requirement.",
            misses=[dataclasses.asdict(miss) for miss in self._misses],
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **super().as_json(),
            "staged": self.staged,
            "traced": list(self.traced),
            "packages": list(self.packages),
            "misses": [dataclasses.asdict(miss) for miss in self._misses],
        }
