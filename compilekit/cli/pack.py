"""``compilekit pack`` and ``unpack``: an artifact as one file, and back."""

from __future__ import annotations

from pathlib import Path

import click

from compilekit.cli.options import (
    PATH,
    Command,
    artifact_argument,
    quoted,
    trust_options,
)
from compilekit.console import Facts, Mark, Report, Size, Table


@click.command(cls=Command, example="compilekit pack artifact -o model.compilekit.tar")
@artifact_argument
@click.option(
    "-o",
    "--output",
    type=PATH,
    required=True,
    metavar="FILE",
    help="The file to write; it appears in one step.",
)
@click.option(
    "--reports/--no-reports",
    default=True,
    help="Take the build's reports along; without them equal builds give equal files.",
)
@click.option(
    "--hub",
    is_flag=True,
    help="Write plain files instead, in the layout of a Hub repository: an artifact in"
    " OUTPUT/torchX.Y/smNN, or a CPU target's name, for each.",
)
def pack(artifact: Path, output: Path, reports: bool, hub: bool) -> Report:
    """Put ARTIFACT into one file, the same bytes each time.

    Every digest is verified on the way. The verification record and the signature that
    lie beside the artifact go along.
    """
    from compilekit.artifact import archive, open_artifact

    if hub:
        return _hub(artifact, output)
    packed = archive.pack(open_artifact(artifact), output, reports=reports)
    facts = (
        ("file", str(packed.file)),
        ("sha256", packed.sha256),
        ("size", Size(packed.size)),
        ("digest", packed.digest),
    )
    return Report(
        packed, (Facts(facts),), next=f"compilekit unpack {quoted(output)} -o artifact"
    )


def _hub(artifact: Path, output: Path) -> Report:
    from compilekit.artifact import open_artifact
    from compilekit.artifact.parts import write_hub

    made = write_hub(open_artifact(artifact).parse_all(), output)
    rows = [
        (
            str(part.root.relative_to(output.resolve())),
            ", ".join(part.manifest.targets),
            Size(part.size_bytes),
            part.digest,
        )
        for part in made
    ]
    result = [
        {
            "artifact": part.root,
            "targets": list(part.manifest.targets),
            "digest": part.digest,
            "size_bytes": part.size_bytes,
        }
        for part in made
    ]
    table = Table("artifact", ("place", "targets", "size", "digest"), rows)
    return Report(result, (table,), next=f"compilekit load {quoted(output)}")


@click.command(
    cls=Command, example="compilekit unpack model.compilekit.tar -o artifact"
)
@click.argument("file", type=PATH, metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=PATH,
    required=True,
    metavar="DIR",
    help="The artifact's place; an artifact there is replaced in one step.",
)
@trust_options
def unpack(
    file: Path,
    output: Path,
    expect_digest: str | None,
    require_signature: Path | None,
    min_serial: int | None,
) -> Report:
    """Put the artifact in FILE into its place, after verifying every digest.

    Nothing is written outside, and nothing at all if anything is wrong.
    """
    from compilekit.artifact import archive
    from compilekit.trust.policy import Trust, approval, checked

    key_file = str(require_signature or "")
    trust = checked(Trust(expect_digest or "", key_file, min_serial or 0))
    demand = approval(trust)
    artifact = archive.unpack(
        file, output, lambda digest, record: demand(digest, record, str(file))
    )
    facts = (
        ("artifact", str(artifact.root)),
        ("digest", artifact.digest),
        ("files", len(artifact.manifest.files)),
        ("size", Size(artifact.size_bytes)),
        ("verified", Mark("every digest", "good")),
    )
    result = {
        "artifact": artifact.root,
        "digest": artifact.digest,
        "files": len(artifact.manifest.files),
        "size_bytes": artifact.size_bytes,
    }
    return Report(result, (Facts(facts),), next=f"compilekit check {quoted(output)}")
