"""``compilekit sign`` and ``verify-signature``: who made an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from compilekit.cli.options import PATH, Command, artifact_argument, quoted
from compilekit.console import Facts, Mark, Report


@click.command(cls=Command, example="compilekit sign artifact --key release.key")
@artifact_argument
@click.option(
    "--key",
    type=PATH,
    required=True,
    metavar="FILE",
    help="Ed25519 private key in PEM: openssl genpkey -algorithm ed25519.",
)
@click.option(
    "--serial",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    metavar="N",
    help="Rises with each release: --min-serial then refuses older ones.",
)
def sign(artifact: Path, key: Path, serial: int) -> Report:
    """Sign ARTIFACT's digest, after verifying every byte of it.

    The signature is written beside it (ARTIFACT.signature.json); its digest stays. What
    other keys signed stays too.
    """
    from compilekit.artifact import open_artifact
    from compilekit.trust import signature

    opened = open_artifact(artifact).parse_all()
    made = signature.sign(opened, key, serial)
    path = signature.record_path(opened.root)
    result = {
        "artifact": opened.root,
        "digest": opened.digest,
        "signature": path,
        "key": made.key,
        "serial": made.serial,
    }
    facts = Facts([(name, str(value)) for name, value in result.items()])
    then = f"compilekit verify-signature {quoted(artifact)} --key PUBLIC_KEY"
    return Report(result, (facts,), next=then)


@click.command(
    cls=Command, example="compilekit verify-signature artifact --key release.pub"
)
@artifact_argument
@click.option(
    "--key",
    type=PATH,
    required=True,
    metavar="FILE",
    help="Ed25519 public keys in PEM; any one of them will do.",
)
@click.option(
    "--min-serial",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Refuse a signature with an older serial.",
)
def verify_signature(artifact: Path, key: Path, min_serial: int) -> Report:
    """Verify who signed ARTIFACT, then every byte of it.

    Exit code 11 if it isn't signed as required, 5 if it is damaged.
    """
    from compilekit.trust import signature
    from compilekit.trust.policy import Trust, open_trusted

    opened = open_trusted(artifact, Trust(key_file=str(key), min_serial=min_serial))
    record = signature.read_record(opened.root)
    good = signature.verify(
        opened.digest, record, signature.load_keys(key), min_serial, str(opened.root)
    )
    result = {
        "artifact": opened.root,
        "digest": opened.digest,
        "key": good.key,
        "serial": good.serial,
    }
    facts = [(name, str(value)) for name, value in result.items()]
    return Report(result, (Facts([*facts, ("signed", Mark("yes", "good"))]),))
