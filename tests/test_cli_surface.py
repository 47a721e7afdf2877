"""The command line's surface, frozen: names, options and exit codes are promises."""

from __future__ import annotations

import click
import pytest

from compilekit import errors
from compilekit.cli import INTERRUPTED, root

OUTPUT = ["--json", "--plain", "-v/--verbose", "-q/--quiet"]

SURFACE = {
    "": ["--version"],
    "bench": [],
    "bench startup": [
        "CONFIG",
        "--artifact",
        "--route",
        "--rows",
        "--repeat",
        "--threads",
        "--calls",
        "--weights",
        "--seed",
        "--out",
    ],
    "bench throughput": [
        "CONFIG",
        "ARTIFACT",
        "--tuned",
        "--strategies",
        "--deadline",
        "--calls",
        "--new-tokens",
        "--device",
        "--weights",
        "--out",
        "--plot",
    ],
    "build": [
        "CONFIG",
        "-o/--output",
        "--target",
        "-j/--jobs",
        "--verify/--no-verify",
        "--allow-untested-torch",
        "--attest",
    ],
    "check": ["ARTIFACT"],
    "diff": ["A", "B"],
    "doctor": ["[ARTIFACT]"],
    "explain": ["CONFIG", "--every-bucket", "--values"],
    "init": ["MODEL", "-o/--output", "--force"],
    "inspect": ["ARTIFACT", "-b/--bucket"],
    "load": [
        "ARTIFACT",
        "[-- COMMAND...]",
        "--require",
        "--on-uncovered",
        "--receipt",
        "--metrics",
        "--expect-digest",
        "--require-signature",
        "--min-serial",
    ],
    "merge": ["ARTIFACT...", "-o/--output"],
    "pack": ["ARTIFACT", "-o/--output", "--reports/--no-reports", "--hub"],
    "plan": ["CONFIG"],
    "tune": ["CONFIG", "-o/--output", "-b/--bucket"],
    "target": [],
    "target list": [],
    "target show": ["NAME"],
    "target probe": ["--device", "--name", "--out"],
    "prune": ["ARTIFACT", "-o/--output", "--target", "--entry", "--bucket"],
    "pull": [
        "REFERENCE",
        "-o/--output",
        "--target",
        "--insecure",
        "--expect-digest",
        "--require-signature",
        "--min-serial",
    ],
    "push": [
        "ARTIFACT",
        "REFERENCE",
        "--key",
        "--serial",
        "--insecure",
        "--mcv",
        "--target",
    ],
    "sign": ["ARTIFACT", "--key", "--serial"],
    "unpack": [
        "FILE",
        "-o/--output",
        "--expect-digest",
        "--require-signature",
        "--min-serial",
    ],
    "verify": ["ARTIFACT", "--config", "--weights", "--threads"],
    "verify-signature": ["ARTIFACT", "--key", "--min-serial"],
}

EXIT_CODES = {
    "CompilekitError": 1,
    "ConfigError": 2,
    "CaptureError": 3,
    "HarvestError": 4,
    "ArtifactError": 5,
    "MismatchError": 6,
    "AttachError": 7,
    "VerifyError": 8,
    "PolicyError": 9,
    "NoBucketError": 10,
    "SignatureError": 11,
    "NeedsDeviceError": 12,
    "ResourceError": 13,
}


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> dict[str, click.Command]:
    """Every command below one, by the words that call it."""
    found = {" ".join(path): command}
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            found |= commands(child, (*path, name))
    return found


def parameters(command: click.Command) -> list[str]:
    """Arguments and options as people type them."""
    shown = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            shown.append(parameter.make_metavar(click.Context(command)))
        else:
            names = "/".join((*parameter.opts, *parameter.secondary_opts))
            shown.append(names)
    return shown


def test_commands_are_frozen() -> None:
    """No command appears or disappears unnoticed."""
    assert set(commands(root)) == set(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_options_are_frozen(name: str) -> None:
    """A command has exactly its arguments and options, then the output options."""
    shown = parameters(commands(root)[name])
    assert sorted(shown) == sorted([*SURFACE[name], *OUTPUT])


@pytest.mark.parametrize("name", [n for n in SURFACE if n])
def test_every_command_explains_itself(name: str) -> None:
    """Each command has a one-line summary; what runs has an example to copy."""
    command = commands(root)[name]
    summary = command.get_short_help_str(limit=80)
    assert summary.endswith(".")
    assert "..." not in summary
    if not isinstance(command, click.Group):
        assert f"compilekit {name}" in (command.epilog or "")


@pytest.mark.parametrize("name", [n for n in SURFACE if n])
def test_every_option_explains_itself(name: str) -> None:
    """No option is without help."""
    options = [p for p in commands(root)[name].params if isinstance(p, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_exit_codes_are_frozen() -> None:
    """Scripts rely on these numbers; a subclass may not bring a new one."""
    for name, code in EXIT_CODES.items():
        assert getattr(errors, name).exit_code == code
    assert INTERRUPTED == 130
    known = set(EXIT_CODES.values())
    classes = [e for e in vars(errors).values() if isinstance(e, type)]
    tree = [e for e in classes if issubclass(e, errors.CompilekitError)]
    assert {error.exit_code for error in tree} <= known
