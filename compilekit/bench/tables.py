"""Markdown tables from the JSON that a measurement wrote, as the docs show them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = ("row", "ready", "overhead", "attach", "peak memory", "ships", "build")


def markdown(data: Mapping[str, Any]) -> str:
    """The tables of one result of ``startup``, ``steady`` or ``growth``."""
    if "rows" in data:
        return startup_tables(data)
    if "lines" in data:
        return "\n".join(f"- {line['text']}" for line in data["lines"])
    return steady_table(data)


def startup_tables(data: Mapping[str, Any]) -> str:
    """One table by row, one by row and bucket, and what they were measured on."""
    return "\n\n".join(
        (
            _table(_COLUMNS, [_startup_row(row, data) for row in data["rows"]]),
            _bucket_table(data),
            f"{data['config']}, {_count(len(data['buckets']), 'bucket')},"
            f" {_count(data['threads'], 'thread')},"
            f" {_count(data['repeat'], 'process')} per row{_runs(data)},"
            f" seed {data['seed']}. {_environment(data)}",
        )
    )


def steady_table(data: Mapping[str, Any]) -> str:
    """Both sides, their ratio and the dispatcher, by bucket."""
    sides = ("bucket", "torch.compile", "attached", "ratio")
    columns = (*sides, "dispatch", "alone", "module")
    rows = [
        (
            bucket["bucket"],
            _ms(bucket["compiled_ms"]),
            _ms(bucket["program_ms"]),
            f"{bucket['ratio']:.3f}",
            f"{bucket['dispatch_us']:.0f} µs",
            f"{bucket['dispatch_alone_us']:.0f} µs",
            f"{bucket['module_us']:.0f} µs" if "module_us" in bucket else "",
        )
        for bucket in data["buckets"]
    ]
    note = (
        f"{data['config']}, {_count(data['threads'], 'thread')},"
        f" {_count(data['processes'], 'process')} of {data['pairs']} pairs."
        f" {_environment(data)}"
    )
    return f"{_table(columns, rows)}\n\n{note}"


def _startup_row(row: Mapping[str, Any], data: Mapping[str, Any]) -> Sequence[str]:
    spreads = row["over_repetitions"]
    if spreads["ready_ms"] is None:
        why = "failed: " + row["error"] if row["error"] else "not measured yet"
        return (row["name"], why, *[""] * (len(_COLUMNS) - 2))
    build = row["build_seconds"]
    done = len(row["samples"])
    partly = f" ({done} of {data['repeat']})" if done < data["repeat"] else ""
    return (
        row["name"] + partly,
        _spread(spreads["ready_ms"]),
        _spread(spreads["overhead_ms"]),
        _ms(spreads["attach_ms"]["median"]),
        _megabytes(spreads["peak_rss_bytes"]["median"]),
        _megabytes(row["shipped_bytes"]) if row["shipped_bytes"] else "–",
        f"{build:.0f} s" if build is not None else "–",
    )


def _runs(data: Mapping[str, Any]) -> str:
    """Rows of different runs weren't interleaved; a reader should know."""
    runs = data.get("runs", 1)
    return "" if runs == 1 else f" from {runs} runs"


def _bucket_table(data: Mapping[str, Any]) -> str:
    """Medians of first and steady call over the samples, and the worst difference."""
    rows = []
    for row in data["rows"]:
        samples = row["samples"]
        for place, bucket in enumerate(data["buckets"] if samples else ()):
            found = [sample["buckets"][place] for sample in samples]
            rows.append(
                (
                    row["name"],
                    bucket.partition("/")[2],
                    _ms(statistics.median(item["first_ms"] for item in found)),
                    _ms(statistics.median(item["steady_ms"] for item in found)),
                    f"{max(float(item['max_abs_diff']) for item in found):.1e}",
                )
            )
    return _table(("row", "bucket", "first call", "steady call", "max diff"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _environment(data: Mapping[str, Any]) -> str:
    found = data["environment"]
    versions = ", ".join(
        f"{name} {found[name]}"
        for name in ("torch", "transformers", "python")
        if name in found
    )
    return f"{found['cpu']} ({found['cpus']} CPUs), {versions}."


def _spread(spread: Mapping[str, float]) -> str:
    low, high = _ms(spread["minimum"]), _ms(spread["maximum"])
    middle = _ms(spread["median"])
    return middle if low == high else f"{middle} ({low} – {high})"


def _ms(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1e3:.{1 if milliseconds >= 10_000 else 2}f} s"
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:.{digits}f} ms"


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
