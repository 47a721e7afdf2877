"""The command line: the commands, and the one place that catches everything.

A command is a function that returns a `Report`. It imports what is heavy inside itself,
so that ``--help`` answers at once. `run` shows the report, or turns an error into one
clean message and an exit code.

Exit codes: 0 ok, 1 a defect of compilekit, 2 usage or configuration, 3 to 13 as in
`compilekit.errors`, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from compilekit._version import __version__
from compilekit.cli import (
    bench,
    build,
    check,
    combine,
    doctor,
    explain,
    init,
    inspect,
    load,
    pack,
    plan,
    registry,
    sign,
    target,
    tune,
    verify,
)
from compilekit.cli.options import Commands, command_name
from compilekit.console import Console, Report
from compilekit.errors import CompilekitError, ResourceError

INTERRUPTED = 130
TERMINATED = 143

root = Commands(
    "compilekit",
    help=(
        "Compile PyTorch models ahead of time and package the result, so that a"
        " container that serves the model never compiles anything."
    ),
    epilog=(
        "\b\nExample:\n"
        "  compilekit build compilekit.toml -o artifact\n"
        "  compilekit load artifact -- python serve.py"
    ),
    sections={
        "Build": (init.init, plan.plan, explain.explain, build.build, tune.tune),
        "Serve": (load.load, check.check, doctor.doctor),
        "Ship": (
            combine.prune,
            combine.merge,
            pack.pack,
            pack.unpack,
            registry.push,
            registry.pull,
            sign.sign,
            sign.verify_signature,
        ),
        "Look": (
            inspect.inspect,
            combine.diff,
            verify.verify,
            bench.bench,
            target.target,
        ),
    },
)
click.version_option(__version__, message="%(prog)s %(version)s")(root)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: What follows the program's name.
    """
    console = Console()
    for stream in (sys.stdout, sys.stderr):
        # A model's name must not crash a terminal that speaks ASCII.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        outcome = root.main(
            list(arguments),
            prog_name="compilekit",
            standalone_mode=False,
            obj=console,
        )
        if not isinstance(outcome, Report):
            # --help and --version printed what was asked for.
            return int(outcome or 0)
        console.report(outcome)
        return outcome.exit_code
    except click.ClickException as error:
        return _refuse_usage(error, arguments, console)
    except CompilekitError as error:
        console.failure(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        console.error("Interrupted", "interrupted; nothing was written")
        # click puts an Abort around it.
        ended = isinstance(error.__cause__, _Terminated)
        return TERMINATED if ended else INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not _has_directory():
            lost = ResourceError("the current directory is gone", hint="cd elsewhere.")
            console.failure(lost)
            return lost.exit_code
        return _confess(error, console)
    finally:
        signal.signal(signal.SIGTERM, before)


def _has_directory() -> bool:
    """Whether the current directory is still there for relative paths."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which a CI job that is cancelled gets: clean up as after Ctrl-C."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _refuse_usage(
    error: click.ClickException, arguments: Sequence[str], console: Console
) -> int:
    """Say what is wrong with the command line, and which help says how it's right."""
    before_command = list(arguments)
    if "--" in before_command:
        before_command = before_command[: before_command.index("--")]
    # Options that come after the mistake weren't read.
    console.json = console.json or "--json" in before_command
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return 2
    path = context.command_path if context else "compilekit"
    if context and not console.command:
        console.command = command_name(context)
    console.error("UsageError", error.format_message(), hint=f"Help: {path} --help")
    return 2


def _confess(error: Exception, console: Console) -> int:
    """Report a defect: a short message, the traceback kept in a file."""
    import tempfile
    import traceback

    trace = "".join(traceback.format_exception(error))
    try:
        handle, kept = tempfile.mkstemp(prefix="compilekit-error-", suffix=".log")
        with os.fdopen(handle, "w") as file:
            file.write(trace)
        hint = f"The traceback is in {kept}; please report it with the command."
    except OSError:
        # Nowhere to write: the terminal is the only place left to keep it.
        kept, hint = "", trace
    summary = "".join(traceback.format_exception_only(error)).strip()
    console.error(
        type(error).__name__,
        f"a defect of compilekit, not of your input: {summary}",
        hint=hint,
        fields={"traceback": kept},
    )
    return 1
