"""What every command shares: its class, the output options, the usual arguments."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from compilekit.console import Console

CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)


class Command(click.Command):
    """A command that takes the output options too and ends its help with an example.

    ``compilekit --json plan x`` and ``compilekit plan x --json`` are the same.

    Args:
        example: What a reader can copy.
    """

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        kwargs["context_settings"] = CONTEXT_SETTINGS
        kwargs["epilog"] = f"\b\nExample:\n  {example}"
        super().__init__(*args, **kwargs)
        self.params.extend(output_options())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and say which command runs before anything can fail."""
        ctx.ensure_object(Console).command = command_name(ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with what libraries log narrated."""
        from compilekit.cli.logs import narrate

        narrate(ctx.ensure_object(Console))
        return super().invoke(ctx)


class Commands(click.Group):
    """A group whose help keeps the order and the sections of a day's work.

    Args:
        sections: Heading → commands, in order.
    """

    command_class = Command

    def __init__(
        self, *args: Any, sections: dict[str, Iterable[click.Command]], **kwargs: Any
    ) -> None:
        kwargs["context_settings"] = CONTEXT_SETTINGS
        super().__init__(*args, **kwargs)
        self.sections = {
            heading: tuple(commands) for heading, commands in sections.items()
        }
        for commands in self.sections.values():
            for command in commands:
                self.add_command(command)
        self.params.extend(output_options())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the sections, not of the alphabet."""
        return [str(c.name) for commands in self.sections.values() for c in commands]

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """One list for each section, all with the same left column."""
        width = max(len(name) for name in self.list_commands(ctx))
        for heading, commands in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (str(c.name).ljust(width), c.get_short_help_str(limit=80))
                        for c in commands
                    ]
                )


def output_options() -> list[click.Option]:
    """``--json``, ``--plain``, ``-v`` and ``-q``; they set up the `Console`."""
    return [
        click.Option(
            ["--json"],
            is_flag=True,
            expose_value=False,
            callback=_set_json,
            help="Print the result as one JSON document.",
        ),
        click.Option(
            ["--plain"],
            is_flag=True,
            expose_value=False,
            callback=_set_plain,
            help="Tab-separated lines; automatic off a terminal.",
        ),
        click.Option(
            ["-v", "--verbose"],
            count=True,
            expose_value=False,
            callback=_set_verbose,
            help="Say more; twice for everything.",
        ),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_set_quiet,
            help="Say nothing but results and errors.",
        ),
    ]


def config_argument(function: F) -> F:
    """``CONFIG``, the path of a ``compilekit.toml``."""
    return click.argument("config", type=PATH, metavar="CONFIG")(function)


def count_option(
    name: str, default: int, text: str, *, least: int = 1
) -> Callable[[F], F]:
    """An option ``--name N``: a whole number with a default that its help shows."""
    return click.option(
        name,
        type=click.IntRange(min=least),
        default=default,
        show_default=True,
        metavar="N",
        help=text,
    )


def artifact_argument(function: F) -> F:
    """``ARTIFACT``, a directory that a build wrote."""
    return click.argument("artifact", type=PATH, metavar="ARTIFACT")(function)


def trust_options(function: F) -> F:
    """``--expect-digest``, ``--require-signature`` and ``--min-serial``."""
    for option in (
        click.option(
            "--min-serial",
            type=click.IntRange(min=0),
            envvar="COMPILEKIT_MIN_SERIAL",
            metavar="N",
            help="Refuse a signature with an older serial.",
        ),
        click.option(
            "--require-signature",
            type=PATH,
            envvar="COMPILEKIT_REQUIRE_SIGNATURE",
            metavar="KEY",
            help="Refuse what none of the public keys in this file signed.",
        ),
        click.option(
            "--expect-digest",
            callback=_check_digest,
            envvar="COMPILEKIT_EXPECT_DIGEST",
            metavar="SHA256",
            help="Refuse every artifact but the one with this digest.",
        ),
    ):
        function = option(function)
    return function


def _check_digest(
    _: click.Context, __: click.Parameter, value: str | None
) -> str | None:
    # An unset shell variable leaves "", which must not demand nothing.
    if value is None or re.fullmatch("[0-9a-f]{64}", value):
        return value
    raise click.BadParameter(
        "expected 64 hexadecimal digits, as `compilekit inspect` shows them, found"
        f" {value!r}."
    )


def quoted(path: object) -> str:
    """A path for a command line that can be copied."""
    return shlex.quote(str(path))


def command_name(context: click.Context) -> str:
    """``target list`` for the context of ``compilekit target list``."""
    return context.command_path.partition(" ")[2]


def _set_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Console).json = True


def _set_plain(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Console).plain = True


def _set_verbose(ctx: click.Context, _: click.Parameter, value: int) -> None:
    if value:
        ctx.ensure_object(Console).verbosity += value


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Console).verbosity = -1


def weights_option(instead: str) -> Callable[[F], F]:
    """``--weights``: a path counts from the current directory, as any argument does."""

    def here(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        return os.path.abspath(value) if value and os.path.exists(value) else value

    return click.option("--weights", metavar="DIR", callback=here, help=instead)
