"""A receipt as a Prometheus text file, for a node exporter's textfile collector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compilekit.runtime.receipt import Receipt


def text(receipt: Receipt) -> str:
    """One sample per line. Reasons, which clients choose, are never labels."""
    base = {"artifact": receipt.artifact, "target": receipt.target}
    routes = Counter((route.entry, route.route) for route in receipt.routes)
    calls: Counter[tuple[str, str]] = Counter()
    for item in receipt.uncovered:
        calls[item.entry, item.route] += item.calls
    families: list[tuple[str, str, str, list[tuple[dict[str, str], float]]]] = [
        (
            "compilekit_attach_seconds",
            "gauge",
            "Time of one phase of attach.",
            [
                ({**base, "phase": phase}, ms / 1e3)
                for phase, ms in receipt.milliseconds.items()
            ],
        ),
        (
            "compilekit_buckets",
            "gauge",
            "Buckets by the route that they took.",
            [
                ({**base, "entry": entry, "route": route}, count)
                for (entry, route), count in routes.items()
            ],
        ),
        (
            "compilekit_compiles_total",
            "counter",
            "Frames compiled in this process since attach.",
            [(base, receipt.compiles)],
        ),
        (
            "compilekit_rebinds_total",
            "counter",
            "Times a changed model was compared and bound again.",
            [(base, receipt.rebinds)],
        ),
        (
            "compilekit_uncovered_calls_total",
            "counter",
            "Calls that no program covered, by what became of them.",
            [
                ({**base, "entry": entry, "route": route}, count)
                for (entry, route), count in calls.items()
            ],
        ),
        (
            "compilekit_warnings",
            "gauge",
            "Factors that differ without forbidding the start.",
            [(base, len(receipt.warnings))],
        ),
    ]
    lines = []
    for name, kind, meaning, samples in families:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels(labels)} {_number(v)}" for labels, v in samples]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Whole numbers to the last digit: a counter that is rounded stands still."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _labels(labels: Mapping[str, str]) -> str:
    shown = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(shown) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
