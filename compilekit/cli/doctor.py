"""``compilekit doctor``: what this machine or image lacks, and the fix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import PATH, Command
from compilekit.console import Facts, Mark, Report, Table, Tone
from compilekit.errors import CompilekitError, Mismatch, MismatchError

if TYPE_CHECKING:
    from compilekit.artifact import Artifact
    from compilekit.doctor import Finding

_TONES: dict[str, Tone] = {"ok": "good", "warning": "warn", "failure": "bad"}


@click.command(cls=Command, example="compilekit doctor artifact")
@click.argument("artifact", type=PATH, metavar="[ARTIFACT]", required=False)
def doctor(artifact: Path | None) -> Report:
    """Look at this machine or image, and at how ARTIFACT would start on it.

    A line each: ok, warning (a fall-back lacks something) or failure, with the fix.
    Without ARTIFACT, the one in COMPILEKIT_ARTIFACT. Exit code 0 if nothing fails.
    """
    from compilekit import doctor as machine

    place = artifact or os.environ.get("COMPILEKIT_ARTIFACT") or None
    found: list[Finding] = []
    opened = None
    if place is not None:
        opened = _open(place, found)
    policy = os.environ.get("COMPILEKIT_ON_UNCOVERED", "")
    kinds = set()
    if opened is not None:
        policy = policy or opened.manifest.serve.on_uncovered
        kinds = {str(target["kind"]) for target in opened.manifest.targets.values()}
    found = [*machine.examine(jit=policy == "jit", cuda=kinds == {"cuda"}), *found]
    if opened is not None:
        found += _artifact(opened, found)
    counts = {
        verdict: sum(item.verdict == verdict for item in found) for verdict in _TONES
    }
    failed = [item.exit_code for item in found if item.verdict == "failure"]
    rows = [
        (item.check, Mark(item.verdict, _TONES[item.verdict]), item.found, item.fix)
        for item in found
    ]
    return Report(
        {"findings": found, **counts},
        (
            Table("finding", ("check", "verdict", "found", "fix"), rows),
            Facts(
                [
                    (name, Mark(str(count), _TONES[name] if count else ""))
                    for name, count in counts.items()
                ]
            ),
        ),
        exit_code=failed[-1] if failed else 0,
    )


def _open(place: Path | str, found: list[Finding]) -> Artifact | None:
    """The artifact as a start would open it; what refuses it becomes a finding."""
    from compilekit.doctor import Finding
    from compilekit.runtime.requirements import open_required
    from compilekit.trust.policy import from_environment

    try:
        trust = from_environment()
        opened = open_required(place).parse_all()
    except CompilekitError as error:
        found.append(
            Finding("artifact", "failure", error.message, error.hint, error.exit_code)
        )
        return None
    found.append(Finding("artifact", "ok", f"{opened.root}, every digest verified"))
    if trust.key_file:
        found.append(Finding("signature", "ok", f"by a key of {trust.key_file}"))
    return opened


def _artifact(artifact: Artifact, before: list[Finding]) -> Iterator[Finding]:
    """How the kernels would be loaded, and every mismatch."""
    from compilekit.doctor import Finding, is_noexec

    memory = all(f.verdict == "ok" for f in before if f.check == "memory files")
    if is_noexec(artifact.root):
        yield Finding(
            "kernels",
            "ok" if memory else "failure",
            f"{artifact.root} is mounted noexec: they are loaded from memory",
            "" if memory else "Mount it with exec: memory files are refused here.",
        )
    elif artifact.from_memory:
        yield Finding(
            "kernels",
            "warning",
            "others can write the artifact, its folders or those above",
            "Make it root's and mode 0644/0755: then replicas share its pages too.",
        )
    else:
        yield Finding("kernels", "ok", "mapped in place; only this user and root write")
    if find_spec("torch") is None:
        return
    from compilekit.runtime.check import check

    mismatches = check(artifact)
    yield from map(_mismatch, mismatches)
    if any(one.verdict == "refuse" for one in mismatches):
        return
    yield from _required(artifact)
    if "cache" in artifact.manifest.routes:
        yield from _caches(artifact)


def _mismatch(mismatch: Mismatch) -> Finding:
    from compilekit.doctor import Finding

    return Finding(
        mismatch.factor,
        "failure" if mismatch.verdict == "refuse" else "warning",
        f"{mismatch.here}; the artifact has {mismatch.artifact}",
        f"{mismatch.consequence} {mismatch.hint}",
        MismatchError.exit_code,
    )


def _required(artifact: Artifact) -> Iterator[Finding]:
    """What COMPILEKIT_REQUIRE asks of a start."""
    from compilekit.doctor import Finding
    from compilekit.runtime import requirements
    from compilekit.runtime.check import choose_target

    try:
        required = requirements.requirements(None)
        target = choose_target(artifact)
        requirements.check_requirements(required, artifact, target)
    except CompilekitError as error:
        yield Finding("required", "failure", error.message, error.hint, error.exit_code)
        return
    if required:
        yield Finding("required", "ok", ", ".join(required))


def _caches(artifact: Artifact) -> Iterator[Finding]:
    """Where a start would put the caches, and what of them doesn't fit."""
    from compilekit.doctor import Finding
    from compilekit.runtime import restore, stage

    needed = "cache" in os.environ.get("COMPILEKIT_REQUIRE", "").split(",")
    place = stage.chosen_directory()
    made = [one for one in (place, *place.parents) if not os.path.lexists(one)]
    try:
        yield from map(_mismatch, restore.mismatches_here(artifact, needed=needed))
        work = stage.work_directory(None)
        stage.refuse_full(artifact, restore.read_cache(artifact)[1], work)
    except CompilekitError as error:
        yield Finding(
            "work directory", "failure", error.message, error.hint, error.exit_code
        )
    else:
        yield Finding("work directory", "ok", f"{work}, private and with room")
    finally:
        # A look changes nothing.
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
