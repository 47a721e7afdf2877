"""``compilekit push`` and ``pull``: artifacts in an OCI registry."""

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
from compilekit.console import Facts, Report, Size, Table
from compilekit.errors import ConfigError

_INSECURE = "Speak HTTP, to a registry without TLS."


@click.command(
    cls=Command, example="compilekit push artifact registry.example.com/team/model:1"
)
@artifact_argument
@click.argument("reference", metavar="REFERENCE")
@click.option(
    "--key",
    type=PATH,
    metavar="FILE",
    help="Sign each target's artifact with this Ed25519 private key.",
)
@click.option(
    "--serial",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    help="The signatures' serial; rises with each release.",
)
@click.option("--insecure", is_flag=True, help=_INSECURE)
@click.option(
    "--mcv",
    is_flag=True,
    help="Push an image that Red Hat's Model Cache Vault extracts (GKM, KServe).",
)
@click.option("--target", metavar="NAME", help="The target that an MCV image holds.")
def push(
    artifact: Path,
    reference: str,
    key: Path | None,
    serial: int | None,
    insecure: bool,
    mcv: bool,
    target: str | None,
) -> Report:
    """Put ARTIFACT into an OCI registry, one layer per target.

    REFERENCE is registry/repository:tag. What the registry has isn't sent again.
    """
    from compilekit import registry
    from compilekit.artifact import Artifact, open_artifact

    def sign(part: Artifact) -> None:
        from compilekit.trust import signature

        if key is not None:
            signature.sign(part, key, serial or 0)

    if serial is not None and key is None:
        raise ConfigError("--serial: expected --key too; only a signature has one")
    if target and not mcv:
        raise ConfigError("--target: expected --mcv too; a push takes every target")
    opened = open_artifact(artifact).parse_all()
    signing = sign if key else None
    if mcv:
        from compilekit.registry.carrier import push_carrier

        carried = push_carrier(
            opened, reference, target=target or "", insecure=insecure, sign=signing
        )
        facts = [(name, str(value)) for name, value in carried._asdict().items()]
        shown = Table("label", ("label", "value"), list(carried.labels.items()))
        return Report(carried, (Facts(facts[:-1]), shown))
    pushed = registry.push(opened, reference, insecure=insecure, sign=signing)
    rows = [
        (one.target, Size(one.size), one.layer, one.digest) for one in pushed.layers
    ]
    return Report(
        pushed,
        (
            Facts((("reference", reference), ("manifest", pushed.manifest))),
            Table("layer", ("target", "size", "layer", "artifact"), rows),
        ),
        next=f"compilekit pull {reference} -o artifact",
    )


@click.command(
    cls=Command,
    example="compilekit pull registry.example.com/team/model:1 -o artifact",
)
@click.argument("reference", metavar="REFERENCE")
@click.option(
    "-o",
    "--output",
    type=PATH,
    required=True,
    metavar="DIR",
    help="The artifact's place; an artifact there is replaced in one step.",
)
@click.option(
    "--target",
    default="",
    metavar="NAME",
    help="Which target; the best one for this CPU by default.",
)
@click.option("--insecure", is_flag=True, help=_INSECURE)
@trust_options
def pull(
    reference: str,
    output: Path,
    target: str,
    insecure: bool,
    expect_digest: str | None,
    require_signature: Path | None,
    min_serial: int | None,
) -> Report:
    """Get what this machine needs of an artifact in an OCI registry.

    Every digest is verified before the artifact appears in its place, in one step.
    """
    from compilekit import registry
    from compilekit.trust.policy import Trust, approval, checked

    key_file = str(require_signature or "")
    trust = checked(Trust(expect_digest or "", key_file, min_serial or 0))
    demand = approval(trust)
    artifact = registry.pull(
        reference,
        output,
        target=target,
        insecure=insecure,
        approve=lambda digest, record: demand(digest, record, reference),
    )
    result = {
        "artifact": artifact.root,
        "digest": artifact.digest,
        "targets": list(artifact.manifest.targets),
        "size_bytes": artifact.size_bytes,
    }
    facts = (
        ("artifact", str(artifact.root)),
        ("digest", artifact.digest),
        ("target", ", ".join(artifact.manifest.targets)),
        ("size", Size(artifact.size_bytes)),
    )
    return Report(result, (Facts(facts),), next=f"compilekit check {quoted(output)}")
