"""``compilekit build``: compile every bucket and write the artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import PATH, Command, config_argument, quoted
from compilekit.console import (
    Block,
    Console,
    Facts,
    Mark,
    Report,
    Seconds,
    Size,
    Table,
    Text,
    Tone,
)

if TYPE_CHECKING:
    from compilekit.results import BucketResult, BuildResult

_TONES: dict[str, Tone] = {
    "verified": "good",
    "built": "",
    "unverified": "warn",
    "skipped": "warn",
    "failed": "bad",
}


@click.command(cls=Command, example="compilekit build compilekit.toml -o artifact")
@config_argument
@click.option(
    "-o",
    "--output",
    type=PATH,
    required=True,
    metavar="DIR",
    help="Where the artifact goes.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Build for this target instead of the configured ones; repeatable.",
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Kernels compiled at once; one per CPU unless CONFIG says otherwise.",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Replay each bucket in a fresh process and compare with eager (default).",
)
@click.option(
    "--allow-untested-torch",
    is_flag=True,
    help="Try a torch minor that compilekit wasn't tested with.",
)
@click.option(
    "--attest",
    metavar="URI",
    help="Who builds: writes provenance (in-toto, SLSA) and a bill of materials"
    " (CycloneDX) into the artifact's reports.",
)
@click.pass_obj
def build(
    console: Console,
    config: Path,
    output: Path,
    targets: tuple[str, ...],
    jobs: int | None,
    verify: bool,
    allow_untested_torch: bool,
    attest: str | None,
) -> Report:
    """Compile every bucket of CONFIG and write the artifact.

    Needs neither the weights nor the target's device. A bucket that fails is named,
    its log is kept, the others finish, and the exit code is that of its error.
    """
    from compilekit.config import load

    configuration = load(config)
    from compilekit.targets import load_target

    wanted = targets or configuration.build.targets
    names = dict.fromkeys(load_target(name).name for name in wanted)
    console.note(f"building {configuration.model.source} for {', '.join(names)}")
    from compilekit.cli.progress import BuildProgress, labeller
    from compilekit.compiler.build import build as build_artifact

    label = labeller(len(names), len(configuration.entries))
    with BuildProgress(console, label) as progress:
        result = build_artifact(
            configuration,
            output,
            targets=targets or None,
            jobs=configuration.build.jobs if jobs is None else jobs,
            verify=verify,
            allow_untested_torch=allow_untested_torch,
            attest=attest or "",
            on_event=progress,
        )
    return report(result, output)


def report(result: BuildResult, output: Path) -> Report:
    """The summary of a build: one table, what failed and why, the artifact."""
    rows = [
        (
            bucket.target,
            bucket.entry,
            bucket.bucket,
            bucket.kernels,
            Seconds(bucket.seconds),
            Size(bucket.size_bytes),
            Mark(bucket.status, _TONES[bucket.status]),
        )
        for bucket in result.buckets
    ]
    blocks: list[Block] = [
        Table(
            "bucket",
            ("target", "entry", "bucket", "kernels", "time", "size", "status"),
            rows,
            fold=("target", "entry"),
        )
    ]
    if any(bucket.attention for bucket in result.buckets):
        attention = [(b.target, b.entry, b.bucket, b.attention) for b in result.buckets]
        columns = ("target", "entry", "bucket", "backends")
        blocks.append(Table("attention", columns, attention, fold=("target", "entry")))
    blocks += [
        Text(f"{one.target}/{one.entry}/{one.bucket}: {one.warning}", "warn")
        for one in result.buckets
        if one.warning
    ]
    blocks += [Text(text, "bad") for text in failures(result.failed)]
    if result.artifact is None:
        count = len(result.failed)
        noun = "bucket" if count == 1 else "buckets"
        blocks.append(Text(f"no artifact: {count} {noun} failed", "bad"))
        return Report(result, tuple(blocks), exit_code=result.exit_code)
    blocks.append(
        Facts(
            (
                ("artifact", str(output)),
                ("digest", result.digest),
                ("size", Size(result.size_bytes)),
                ("kernels", result.kernels),
                *((f"configs {name}", n) for name, n in result.configs.items()),
                ("time", Seconds(result.seconds)),
            )
        )
    )
    return Report(
        result,
        tuple(blocks),
        next=next_command(result, output),
        exit_code=result.exit_code,
    )


def next_command(result: BuildResult, output: Path) -> str:
    """What to do with the artifact: prove it first, then serve it."""
    if result.failed:
        return ""
    if all(bucket.status == "verified" for bucket in result.buckets):
        return f"compilekit load {quoted(output)} -- python serve.py"
    return f"compilekit verify {quoted(output)}"


def failures(buckets: tuple[BucketResult, ...]) -> list[str]:
    """Why buckets failed; those with the same reason together."""
    by_reason: dict[str, list[BucketResult]] = {}
    for bucket in buckets:
        by_reason.setdefault(bucket.error, []).append(bucket)
    texts = []
    for reason, failed in by_reason.items():
        names = [f"{one.target}/{one.entry}/{one.bucket}" for one in failed]
        lines = reason.splitlines() or ["no reason was given"]
        lines += [f"log: {one.log}" for one in failed if one.log]
        indented = (f"  {line}".rstrip() for line in lines)
        texts.append("\n".join((f"{', '.join(names)} failed", *indented)))
    return texts
