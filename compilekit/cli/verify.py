"""``compilekit verify``: replay every bucket and compare it with eager."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import (
    PATH,
    Command,
    artifact_argument,
    quoted,
    weights_option,
)
from compilekit.console import Block, Console, Difference, Facts, Mark, Report, Table
from compilekit.errors import VerifyError

if TYPE_CHECKING:
    from compilekit.results import VerifyResult


@click.command(cls=Command, example="compilekit verify artifact")
@artifact_argument
@click.option(
    "--config",
    type=PATH,
    metavar="CONFIG",
    help="What ARTIFACT was built from; prune, merge and pull keep no copy of it.",
)
@weights_option("Weights for the comparison, instead of those of the configuration.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Intra-op threads of a replay; repeatable; 1, all CPUs and 4 times as many.",
)
@click.pass_obj
def verify(
    console: Console,
    artifact: Path,
    config: Path | None,
    weights: str | None,
    threads: tuple[int, ...],
) -> Report:
    """Replay every bucket of ARTIFACT afresh and compare it with eager.

    Each bucket runs in a fresh process. Nothing may be compiled, no process spawned.
    What was verified is written beside
    the artifact, for --require verified. Exit code 8 if a bucket fails.
    """
    from compilekit import config as configuration
    from compilekit.artifact import open_artifact

    opened = open_artifact(artifact)
    given = configuration.load(config) if config else None
    from compilekit.cli.progress import VerifyProgress, labeller
    from compilekit.compiler.verify import verify as replay

    label = labeller(len(opened.manifest.targets), len(opened.manifest.entries))
    with VerifyProgress(console, label) as progress:
        result = replay(
            artifact, config=given, weights=weights, threads=threads, on_event=progress
        )
    return report(artifact, result)


def _uncompared(result: VerifyResult) -> str | None:
    """What the replays of warm-ups without outputs show; None if there are none."""
    count = sum(replay.uncompared for replay in result.buckets)
    if not count:
        return None
    return (
        f"{count} of {len(result.buckets)} replays: the warm-up leaves no tensor, so"
        " they show only that nothing was compiled"
    )


def report(artifact: Path, result: VerifyResult) -> Report:
    """One row per replay, and where the record lies."""
    rows = [
        (
            replay.target or None,
            replay.entry,
            replay.bucket,
            replay.threads,
            Difference(replay.max_abs_error),
            Difference(replay.atol),
            replay.compiles,
            replay.spawned,
            Mark("passed", "good") if replay.passed else Mark("failed", "bad"),
        )
        for replay in result.buckets
    ]
    columns = (
        "target",
        "entry",
        "bucket",
        "threads",
        "differs by",
        "allowed",
        "compiles",
        "processes",
        "result",
    )
    blocks: list[Block] = [Table("replay", columns, rows, fold=("target", "entry"))]
    failed = [replay for replay in result.buckets if not replay.passed]
    if failed:
        blocks.append(
            Table(
                "failure",
                ("entry", "bucket", "threads", "why"),
                [(r.entry, r.bucket, r.threads, r.message) for r in failed],
                tall=True,
            )
        )
    blocks.append(
        Facts(
            (
                ("not compared", _uncompared(result)),
                ("artifact", str(artifact)),
                ("digest", result.digest),
                ("record", str(result.record) if result.record else None),
                (
                    "verified",
                    Mark("yes", "good") if result.passed else Mark("no", "bad"),
                ),
            )
        )
    )
    return Report(
        result,
        tuple(blocks),
        next=f"compilekit load {quoted(artifact)} -- python serve.py"
        if result.passed
        else "",
        exit_code=0 if result.passed else VerifyError.exit_code,
    )
