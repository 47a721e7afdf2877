"""``compilekit load``: check an artifact, then become the command that serves it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from compilekit.cli.check import describe
from compilekit.cli.options import PATH, Command, artifact_argument, trust_options
from compilekit.console import Block, Console, Facts, Mark, Report, Size
from compilekit.errors import Mismatch, ResourceError

if TYPE_CHECKING:
    from compilekit.artifact import Artifact


@click.command(
    cls=Command,
    example="compilekit load artifact --require program -- python serve.py",
)
@artifact_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option(
    "--require",
    envvar="COMPILEKIT_REQUIRE",
    metavar="WORDS",
    help="What a start must show, separated by commas: program, cache, verified.",
)
@click.option(
    "--on-uncovered",
    type=click.Choice(("error", "eager", "jit")),
    envvar="COMPILEKIT_ON_UNCOVERED",
    help="What becomes of a bucket that isn't covered; the artifact says otherwise.",
)
@click.option(
    "--receipt",
    type=PATH,
    envvar="COMPILEKIT_RECEIPT",
    metavar="FILE",
    help="Where attach writes its receipt.",
)
@click.option(
    "--metrics",
    type=PATH,
    envvar="COMPILEKIT_METRICS",
    metavar="FILE",
    help="Where attach writes its receipt as Prometheus text.",
)
@trust_options
@click.pass_obj
def load(
    console: Console,
    artifact: Path,
    command: tuple[str, ...],
    require: str | None,
    on_uncovered: str | None,
    receipt: Path | None,
    metrics: Path | None,
    expect_digest: str | None,
    require_signature: Path | None,
    min_serial: int | None,
) -> Report:
    """Check ARTIFACT against this machine, then run COMMAND with it.

    Every digest is verified and every mismatch named. In COMMAND, which replaces this
    process, compilekit.attach(model) finds the artifact by itself, and
    compilekit.restore() the caches, which are staged before. Stdout is COMMAND's
    alone: the preflight goes to stderr. Without COMMAND the preflight is all that
    happens.
    """
    from compilekit.runtime import requirements
    from compilekit.runtime.check import check, choose_target
    from compilekit.runtime.check import refuse as refuse_misfit

    # What attach will read, and what the preflight reads: the same functions decide.
    os.environ.update(
        environment(artifact, require, on_uncovered, receipt, metrics)
        | trust_environment(expect_digest, require_signature, min_serial)
    )
    opened = requirements.open_required(artifact)
    required = requirements.requirements(require)
    misfit = f"artifact {opened.root} doesn't fit this machine"
    warnings = refuse_misfit(misfit, check(opened))
    target = choose_target(opened)
    requirements.check_requirements(required, opened, target)
    staged = None
    if "cache" in opened.manifest.routes:
        from compilekit.runtime import restore

        found = restore.mismatches_here(opened, needed="cache" in required)
        warnings += refuse_misfit(misfit, found)
        staged = restore.stage_ahead(opened) if command else None
    preflight = report(opened, target, warnings, required, staged)
    if not command:
        return preflight
    if console.json or console.verbosity >= 0:
        console.report(preflight, stream=sys.stderr)
    become(command)


def environment(
    artifact: Path,
    require: str | None,
    on_uncovered: str | None,
    receipt: Path | None,
    metrics: Path | None,
) -> dict[str, str]:
    """The variables that attach reads; what wasn't asked for isn't set.

    Paths are absolute: the command may change its directory before it attaches.
    """
    variables = {
        "COMPILEKIT_ARTIFACT": os.path.realpath(artifact),
        "COMPILEKIT_REQUIRE": require,
        "COMPILEKIT_ON_UNCOVERED": on_uncovered,
        "COMPILEKIT_RECEIPT": os.path.abspath(receipt) if receipt else None,
        "COMPILEKIT_METRICS": os.path.abspath(metrics) if metrics else None,
    }
    return {name: value for name, value in variables.items() if value}


def trust_environment(
    expect_digest: str | None, require_signature: Path | None, min_serial: int | None
) -> dict[str, str]:
    """The variables by which attach demands the same of the artifact's origin."""
    key = os.path.abspath(require_signature) if require_signature else None
    variables = {
        "COMPILEKIT_EXPECT_DIGEST": expect_digest,
        "COMPILEKIT_REQUIRE_SIGNATURE": key,
        "COMPILEKIT_MIN_SERIAL": str(min_serial) if min_serial else None,
    }
    return {name: value for name, value in variables.items() if value}


def report(
    artifact: Artifact,
    target: str,
    warnings: tuple[Mismatch, ...],
    required: tuple[str, ...],
    staged: Path | None = None,
) -> Report:
    """The preflight of an artifact that fits."""
    policy = os.environ.get("COMPILEKIT_ON_UNCOVERED")
    policy = policy or artifact.manifest.serve.on_uncovered
    buckets = sum(len(entry.buckets) for entry in artifact.manifest.entries.values())
    blocks: list[Block] = [describe(warnings)] if warnings else []
    blocks.append(
        Facts(
            (
                ("artifact", str(artifact.root)),
                ("digest", artifact.digest),
                ("model", artifact.manifest.model.source),
                ("target", Mark(f"{target}, fits this machine", "good")),
                ("routes", ", ".join(artifact.manifest.routes)),
                ("buckets", buckets),
                ("size", Size(artifact.size_bytes)),
                ("required", ", ".join(required) or None),
                ("signed", os.environ.get("COMPILEKIT_REQUIRE_SIGNATURE")),
                ("uncovered", policy),
                ("caches", str(staged) if staged else None),
            )
        )
    )
    result = {
        "artifact": str(artifact.root),
        "digest": artifact.digest,
        "target": target,
        "routes": artifact.manifest.routes,
        "buckets": buckets,
        "caches": staged,
        "required": required,
        "on_uncovered": policy,
        "mismatches": warnings,
    }
    return Report(result, tuple(blocks))


def become(command: tuple[str, ...]) -> NoReturn:
    """Replace this process by the command.

    Raises:
        ResourceError: there is no such program, or it can't be run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        raise ResourceError(
            f"can't run {command[0]}: {exc.strerror}",
            hint="Check the command after -- and the PATH.",
            command=list(command),
        ) from exc
