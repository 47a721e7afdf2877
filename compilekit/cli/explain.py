"""``compilekit explain``: where a model breaks its graph, and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from compilekit.cli.options import Command, config_argument, quoted
from compilekit.console import Block, Cell, Console, Facts, Mark, Report, Table, Text
from compilekit.errors import GraphBreakError

if TYPE_CHECKING:
    from compilekit.compiler.explained import ExplainResult


@click.command(cls=Command, example="compilekit explain compilekit.toml")
@config_argument
@click.option(
    "--every-bucket",
    is_flag=True,
    help="Look at all buckets, not at the first of each entry.",
)
@click.option(
    "--values",
    type=click.Choice(("auto", "fake", "random")),
    default="auto",
    show_default=True,
    help="Run on fake tensors, on random weights, or on what is needed.",
)
@click.pass_obj
def explain(
    console: Console,
    config: Path,
    every_bucket: bool,
    values: Literal["auto", "fake", "random"],
) -> Report:
    """Find every graph break, with its reason, its line and the fix to try.

    Needs no weights. Exit code 3 if there are more breaks than [gates] graph_breaks
    allows, so that CI can use it as a gate.
    """
    from compilekit.config import load

    configuration = load(config)
    from compilekit.cli.progress import ExplainProgress, labeller
    from compilekit.compiler.explain import explain as find_breaks

    label = labeller(1, len(configuration.entries))
    with ExplainProgress(console, label) as progress:
        result = find_breaks(
            configuration, every_bucket=every_bucket, values=values, on_event=progress
        )
    return report(result, str(config))


def report(result: ExplainResult, config: str) -> Report:
    """Counts by bucket, then each break as a paragraph of its own."""
    rows: list[tuple[Cell, ...]] = [
        (
            bucket.entry,
            bucket.bucket,
            len(bucket.graphs),
            bucket.ops,
            len(bucket.breaks),
            bucket.counted,
            Mark("passed", "good") if bucket.passed else Mark("failed", "bad"),
        )
        for bucket in result.buckets
    ]
    blocks: list[Block] = [
        Table(
            "bucket",
            ("entry", "bucket", "graphs", "ops", "breaks", "counted", "gate"),
            rows,
        )
    ]
    blocks += [table for table in details(result) if table.rows]
    notes = dict.fromkeys(note for bucket in result.buckets for note in bucket.notes)
    blocks += [Text(f"note: {note}", "faint") for note in notes]
    allowed = Facts(
        (
            ("breaks allowed", result.allowed),
            ("full graph required", "yes" if result.full_graph else "no"),
            ("torch", result.torch),
        )
    )
    return Report(
        result,
        (*blocks, allowed),
        next=f"compilekit build {quoted(config)} -o artifact" if result.passed else "",
        exit_code=0 if result.passed else GraphBreakError.exit_code,
    )


def details(result: ExplainResult) -> tuple[Table, ...]:
    """What was found: breaks, functions that run eagerly, where an analysis ended."""
    breaks: list[tuple[Cell, ...]] = []
    eager: list[tuple[Cell, ...]] = []
    stops: list[tuple[Cell, ...]] = []
    for bucket in result.buckets:
        where = (bucket.entry, bucket.bucket)
        for found in bucket.breaks:
            at = f"{place(found.file, found.line)} in {found.function}"
            effect = found.consequence
            if result.full_graph and not found.full_graph:
                effect += " A build gets past it, so it isn't counted."
            said = (found.source, found.reason, effect, found.fix)
            breaks.append((*where, at, *said))
        for one in bucket.eager:
            at = f"{place(one.file, one.line)} {one.function}"
            eager.append((*where, at, one.extent, one.reason))
        if stopped := bucket.stopped:
            ended = stopped.place
            at = place(ended.file, ended.line) if ended else "-"
            stops.append((*where, at, stopped.error, stopped.hint))
    first = ("entry", "bucket")
    return (
        Table(
            "break",
            (*first, "break", "code", "reason", "effect", "fix"),
            breaks,
            fold=first,
            tall=True,
        ),
        Table(
            "eager",
            (*first, "runs eagerly", "extent", "why"),
            eager,
            fold=first,
            tall=True,
        ),
        Table(
            "stopped",
            (*first, "stopped at", "error", "next step"),
            stops,
            fold=first,
            tall=True,
        ),
    )


def place(file: str, line: int) -> str:
    """``model.py:12``, relative where the file is below the working directory."""
    below = os.path.relpath(file)
    return f"{file if below.startswith(os.pardir) else below}:{line}"
