"""``compilekit tune``: measure kernels' configs on the GPU that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import PATH, Command, config_argument
from compilekit.console import Block, Console, Facts, Number, Report, Seconds, Table

if TYPE_CHECKING:
    from compilekit.compiler.tune import TuneResult

_SHOWN = 20


@click.command(
    cls=Command, example="compilekit tune compilekit.toml -o autotune/nvidia-h200.json"
)
@config_argument
@click.option(
    "-o",
    "--output",
    type=PATH,
    required=True,
    metavar="FILE",
    help="The tuning file; what it has already isn't measured again.",
)
@click.option(
    "-b",
    "--bucket",
    "buckets",
    multiple=True,
    metavar="ENTRY/BUCKET",
    help="Only this bucket's kernels; repeatable.",
)
@click.pass_obj
def tune(
    console: Console, config: Path, output: Path, buckets: tuple[str, ...]
) -> Report:
    """Measure every kernel's configs on the device, and keep what won.

    [autotune] from = FILE gives the result to builds, which run anywhere.
    """
    from compilekit.config import load

    configuration = load(config)
    from compilekit.cli.progress import BuildProgress, labeller
    from compilekit.compiler.tune import tune_config

    with BuildProgress(console, labeller(1, len(configuration.entries))) as progress:
        result = tune_config(configuration, output, buckets=buckets, on_event=progress)
    return report(result)


def report(result: TuneResult) -> Report:
    """What was found, the most gained first."""
    gained = sorted(result.found, key=lambda k: k.milliseconds - k.default_milliseconds)
    blocks: list[Block] = []
    if gained:
        rows = [
            (
                kernel.source[:12],
                Number(kernel.default_milliseconds * 1e3),
                Number(kernel.milliseconds * 1e3),
                kernel.measured,
                " ".join(f"{name}={value}" for name, value in kernel.config.items()),
            )
            for kernel in gained[:_SHOWN]
        ]
        columns = ("kernel", "default µs", "best µs", "measured", "config")
        note = f"the {len(rows)} that gained most, of {len(gained)} measured"
        blocks.append(Table("kernel", columns, rows, note=note))
    if result.choices:
        columns = ("product", "library µs", "best µs", "measured", "blocks")
        choices = [
            (
                choice.product,
                Number(choice.library_milliseconds * 1e3),
                Number(choice.milliseconds * 1e3),
                choice.measured,
                " ".join(map(str, choice.blocks)) or "library",
            )
            for choice in result.choices
        ]
        blocks.append(Table("product", columns, choices))
    blocks.append(
        Facts(
            (
                ("tuning file", str(result.path)),
                ("target", result.target),
                ("kernels", result.kernels),
                ("time", Seconds(result.seconds)),
            )
        )
    )
    return Report(result.as_json(), tuple(blocks))
