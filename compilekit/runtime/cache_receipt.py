"""The receipt of a `restore`: what was restored, and every step it didn't spare."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from compilekit.errors import PolicyError
from compilekit.runtime.receipt import Receipt

# A server that compiles without end must not fill its memory with reasons.
_MOST_MISSES = 200


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
    def misses(self) -> tuple[Miss, ...]:
        """Every unexpected step so far, in order."""
        return tuple(self._misses)

    @property
    def strict(self) -> bool:
        """True while an unexpected step is an error."""
        return "cache" in self.require and not self.finished

    def note_miss(self, kind: str, reason: str) -> None:
        """Keep an unexpected step.

        Raises:
            PolicyError: ``require = cache``. torch swallows some exceptions; `hold`
                raises it again when the step at hand is over.
        """
        with self._guard:
            if len(self._misses) < _MOST_MISSES:
                self._misses.append(Miss(kind, reason))
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
        first, *others = self._misses
        more = f" (and {len(others)} more)" if others else ""
        return PolicyError(
            f"require = cache, but the caches don't cover a step: {first.reason}{more}",
            hint="Build again with what differs, set it back, or lower the requirement.",
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
