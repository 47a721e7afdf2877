"""``compilekit check``: does an artifact fit this machine?"""

from __future__ import annotations

from pathlib import Path

import click

from compilekit.cli.options import Command, artifact_argument, quoted
from compilekit.console import Facts, Mark, Report, Table, Tone
from compilekit.errors import Mismatch, MismatchError

_TONES: dict[str, Tone] = {"refuse": "bad", "warn": "warn"}


@click.command(cls=Command, example="compilekit check artifact")
@artifact_argument
def check(artifact: Path) -> Report:
    """Verify every digest of ARTIFACT and compare it with this machine.

    All mismatches are reported at once. Exit code 6 if one of them forbids the start.
    """
    from compilekit.runtime.check import check as find_mismatches
    from compilekit.runtime.requirements import open_required

    opened = open_required(artifact).parse_all()
    mismatches = find_mismatches(opened)
    if "cache" in opened.manifest.routes and not refusals(mismatches):
        from compilekit.runtime.restore import mismatches_here

        mismatches += mismatches_here(opened)
    fits = not refusals(mismatches)
    return Report(
        result={"artifact": str(artifact), "fits": fits, "mismatches": mismatches},
        blocks=(
            *([describe(mismatches)] if mismatches else []),
            Facts(
                (
                    ("artifact", str(artifact)),
                    ("fits", Mark("yes", "good") if fits else Mark("no", "bad")),
                )
            ),
        ),
        next=f"compilekit load {quoted(artifact)} -- python serve.py" if fits else "",
        exit_code=0 if fits else MismatchError.exit_code,
    )


def refusals(mismatches: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
    """The mismatches that forbid a start."""
    return tuple(m for m in mismatches if m.verdict == "refuse")


def describe(mismatches: tuple[Mismatch, ...]) -> Table:
    """One row per mismatch: both values, what would happen, what to do."""
    return Table(
        "mismatch",
        ("factor", "verdict", "artifact", "here", "consequence", "next step"),
        [
            (
                mismatch.factor,
                Mark(mismatch.verdict, _TONES.get(mismatch.verdict, "")),
                mismatch.artifact,
                mismatch.here,
                mismatch.consequence,
                mismatch.hint,
            )
            for mismatch in mismatches
        ],
        tall=True,
    )
