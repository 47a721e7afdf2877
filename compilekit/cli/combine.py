"""``compilekit diff``, ``prune`` and ``merge``: artifacts beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import PATH, Command, artifact_argument, quoted
from compilekit.console import Facts, Mark, Report, Seconds, Size, Table

if TYPE_CHECKING:
    from compilekit.artifact import Artifact
    from compilekit.artifact.edit import Parts

_LONGEST = 60


@click.command(cls=Command, example="compilekit diff artifact-old artifact-new")
@click.argument("a", type=PATH, metavar="A")
@click.argument("b", type=PATH, metavar="B")
def diff(a: Path, b: Path) -> Report:
    """Show what differs between artifacts A and B, from the model to the kernel.

    Exit code 0 either way; equal artifacts have equal digests, whatever time their
    builds took. Imports no torch.
    """
    from compilekit.artifact import open_artifact
    from compilekit.artifact.compare import compare, compare_times

    one, two = open_artifact(a).parse_all(), open_artifact(b).parse_all()
    changes = compare(one, two)
    facts = Facts(
        (
            ("a", one.digest),
            ("b", two.digest),
            ("changes", len(changes)),
            ("equal", Mark("yes", "good") if not changes else Mark("no", "warn")),
        )
    )
    times = compare_times(one, two)
    rows = [(c.kind, c.name, _shown(c.a), _shown(c.b)) for c in changes]
    took = [(c.name, _seconds(c.a), _seconds(c.b)) for c in times]
    tables = [Table("change", ("kind", "name", "a", "b"), rows)] if rows else []
    tables += [Table("time", ("bucket", "a", "b"), took)] if took else []
    result = {
        "a": one.digest,
        "b": two.digest,
        "changes": _as_json(changes),
        "times": _as_json(times),
    }
    return Report(result, (facts, *tables))


@click.command(
    cls=Command,
    example="compilekit prune artifact -o small --target cpu-x86_64-v3",
)
@artifact_argument
@click.option(
    "-o", "--output", type=PATH, required=True, metavar="DIR", help="Where to."
)
@click.option("--target", multiple=True, metavar="NAME", help="Keep it; repeatable.")
@click.option("--entry", multiple=True, metavar="NAME", help="Keep it; repeatable.")
@click.option("--bucket", multiple=True, metavar="NAME", help="Keep it; repeatable.")
def prune(
    artifact: Path,
    output: Path,
    target: tuple[str, ...],
    entry: tuple[str, ...],
    bucket: tuple[str, ...],
) -> Report:
    """Write the part of ARTIFACT with these targets, entries and buckets.

    What isn't named by an option stays whole. Kernels that nothing uses any more go.
    """
    from compilekit.artifact import edit, open_artifact

    opened = open_artifact(artifact).parse_all()
    parts = edit.prune(opened, targets=target, entries=entry, buckets=bucket)
    return _written(parts, output, [opened])


@click.command(
    cls=Command, example="compilekit merge artifact-v3 artifact-v4 -o artifact"
)
@click.argument("artifacts", type=PATH, nargs=-1, required=True, metavar="ARTIFACT...")
@click.option(
    "-o", "--output", type=PATH, required=True, metavar="DIR", help="Where to."
)
def merge(artifacts: tuple[Path, ...], output: Path) -> Report:
    """Put the targets and buckets of several ARTIFACTs into one.

    Exit code 6 if they contradict each other: model, factors, a bucket that one target
    lacks.
    """
    from compilekit.artifact import edit, open_artifact

    opened = [open_artifact(path).parse_all() for path in artifacts]
    return _written(edit.merge(opened), output, opened)


def _written(parts: Parts, output: Path, sources: list[Artifact]) -> Report:
    from compilekit.artifact import write_artifact

    made = write_artifact(output, *parts)
    before = sum(source.size_bytes for source in sources)
    result = {
        "artifact": made.root,
        "digest": made.digest,
        "targets": list(made.manifest.targets),
        "programs": len(made.programs),
        "size_bytes": made.size_bytes,
        "size_bytes_before": before,
    }
    facts = (
        ("artifact", str(made.root)),
        ("digest", made.digest),
        ("targets", ", ".join(made.manifest.targets)),
        ("programs", len(made.programs)),
        ("size", Size(made.size_bytes)),
        ("before", Size(before)),
    )
    # Records are about a digest, and this is another one.
    return Report(
        result,
        (Facts(facts),),
        next=f"compilekit verify {quoted(output)} --config CONFIG",
    )


def _shown(value: object) -> str | None:
    if value is None:
        return None
    text = str(value)
    digest = len(text) == 64 and text.isalnum()
    return text if digest or len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"


def _seconds(value: object) -> Seconds | None:
    """A cell of a report's number; what isn't one is left out."""
    return Seconds(value) if isinstance(value, int | float) else None


def _as_json(changes: tuple[object, ...]) -> list[object]:
    import json

    from compilekit.results import to_json

    # A value of a kind that JSON doesn't have is shown as text.
    return list(json.loads(json.dumps(to_json(changes), default=str)))
