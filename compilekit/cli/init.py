"""``compilekit init``: write a commented configuration."""

from __future__ import annotations

import os
from pathlib import Path

import click

from compilekit.cli.options import PATH, Command, quoted
from compilekit.console import Facts, Report
from compilekit.errors import ConfigError
from compilekit.output import write_text


@click.command(
    cls=Command, example="compilekit init sentence-transformers/all-MiniLM-L6-v2"
)
@click.argument("model")
@click.option(
    "-o",
    "--output",
    type=PATH,
    default=Path("compilekit.toml"),
    show_default=True,
    metavar="FILE",
    help="Where the configuration goes.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
def init(model: str, output: Path, force: bool) -> Report:
    """Write a commented configuration for a model.

    MODEL is a Hugging Face directory or id, or package.module:factory.
    """
    from compilekit.init import render

    if os.path.exists(output) and not force:
        raise ConfigError(
            f"{output} exists already; it was left as it is.",
            hint="Choose another place with -o, or replace it with --force.",
            path=str(output),
        )
    text = render(model, output.parent)
    write_text(output, text)
    return Report(
        result={"config": str(output), "model": model},
        blocks=(Facts((("config", str(output)), ("model", model))),),
        next=f"compilekit plan {quoted(output)}",
    )
