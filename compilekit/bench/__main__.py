"""``python -m compilekit.bench``: the measurements that are no command of their own.

    steady CONFIG ARTIFACT      an artifact against torch.compile, call by call
    growth                      how overhead grows with buckets, layers and kernels
    tables FILE …               Markdown tables of any measurement's JSON

``compilekit bench startup`` is a command of compilekit itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..config import load
from ..errors import CompilekitError
from . import growth, steady, tables
from .process import ProcessEvent


def main(arguments: list[str] | None = None) -> int:
    """Run one measurement; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        if given.measurement == "tables":
            for path in given.files:
                _show(tables.markdown(json.loads(path.read_text())))
            return 0
        _show(tables.markdown(_measure(given)))
    except CompilekitError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _measure(given: argparse.Namespace) -> dict[str, object]:
    if given.measurement == "growth":
        return growth.run(
            buckets=given.buckets,
            layers=given.layers,
            kernels=given.kernels,
            threads=given.threads,
            repeat=given.repeat,
            on_event=_narrate,
            out=given.out,
            work=given.work,
        ).as_json()
    config = load(given.config)
    return steady.run(
        config,
        artifact=given.artifact,
        threads=given.threads,
        weights=config.verify.weights if given.weights is None else given.weights,
        on_event=_narrate,
        out=given.out,
        processes=given.repeat,
        pairs=given.pairs,
        buckets=tuple(given.buckets.split(",")) if given.buckets else (),
        work=given.work,
    ).as_json()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compilekit.bench")
    commands = parser.add_subparsers(dest="measurement", required=True)
    shown = commands.add_parser("tables", help="Markdown tables of results")
    shown.add_argument("files", nargs="+", type=Path, metavar="FILE")
    pairs = commands.add_parser("steady", help="an artifact against torch.compile")
    pairs.add_argument("config", type=Path, metavar="CONFIG")
    pairs.add_argument("artifact", type=Path, metavar="ARTIFACT")
    pairs.add_argument("--pairs", type=int, default=200, help="pairs of calls (200)")
    pairs.add_argument("--weights", help="instead of those under [verify] in CONFIG")
    pairs.add_argument("--buckets", metavar="NAMES", help="only these, by commas")
    pairs.add_argument(
        "--work", type=Path, metavar="DIR", help="keep torch's cache, and find it"
    )
    lines = commands.add_parser("growth", help="overhead by buckets, layers, kernels")
    for name, default in (
        ("buckets", [1, 3, 8]),
        ("layers", [4, 12, 24]),
        ("kernels", [8, 32, 128]),
    ):
        lines.add_argument(f"--{name}", nargs="*", type=int, default=default)
    lines.add_argument(
        "--work", type=Path, metavar="DIR", help="keep the artifacts, and find them"
    )
    for command in (pairs, lines):
        command.add_argument("--repeat", type=int, default=3, help="processes (3)")
        command.add_argument("--threads", type=int, default=1)
        command.add_argument("--out", type=Path, metavar="FILE", help="raw numbers")
    return parser


def _narrate(event: ProcessEvent) -> None:
    if event.kind != "started":
        sys.stderr.write(
            f"{event.index}/{event.count}\t{event.row}\t{event.kind}"
            f"\t{event.seconds:.1f}s\t{event.message}\n"
        )


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
