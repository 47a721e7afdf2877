"""``compilekit plan``: the jobs of a build, before they run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import Command, config_argument, quoted
from compilekit.console import Report, Table

if TYPE_CHECKING:
    from compilekit.config import Config, EntryConfig
    from compilekit.plan import Job


@click.command(cls=Command, example="compilekit plan compilekit.toml")
@config_argument
def plan(config: Path) -> Report:
    """Show what a build would compile: every target, entry and bucket."""
    from compilekit.config import load
    from compilekit.plan import make_plan

    configuration = load(config)
    jobs = make_plan(configuration).jobs
    shapes = [
        input_shapes(configuration.entries[job.entry], job.bucket.axes) for job in jobs
    ]
    rows = [
        (job.target, job.entry, job.bucket.name, describe(shape))
        for job, shape in zip(jobs, shapes, strict=True)
    ]
    return Report(
        result={
            "model": configuration.model.source,
            "jobs": [
                {
                    "target": job.target,
                    "entry": job.entry,
                    "bucket": job.bucket.name,
                    "axes": job.bucket.axes,
                    "inputs": shape,
                }
                for job, shape in zip(jobs, shapes, strict=True)
            ],
        },
        blocks=(
            Table(
                "job",
                ("target", "entry", "bucket", "inputs"),
                rows,
                fold=("target", "entry"),
                note=headline(configuration, jobs),
            ),
        ),
        next=f"compilekit build {quoted(config)} -o artifact",
    )


def headline(config: Config, jobs: tuple[Job, ...]) -> str:
    """What is built, for what, in one line."""
    targets = ", ".join(dict.fromkeys(job.target for job in jobs))
    entries = ", ".join(dict.fromkeys(job.entry for job in jobs))
    noun = "job" if len(jobs) == 1 else "jobs"
    return f"{config.model.source}: {len(jobs)} {noun}, {entries} for {targets}"


def input_shapes(
    entry: EntryConfig, axes: Mapping[str, int]
) -> dict[str, dict[str, object]]:
    """Argument path → dtype and shape, the axes replaced by the bucket's sizes."""
    return {
        path: {
            "dtype": rule.dtype,
            "shape": [axes[d] if isinstance(d, str) else d for d in rule.shape],
        }
        for path, rule in entry.inputs.items()
    }


def describe(inputs: Mapping[str, Mapping[str, object]]) -> str:
    """``input_ids int64[1, 32]``, one after the other."""
    return ", ".join(f"{path} {i['dtype']}{i['shape']}" for path, i in inputs.items())
