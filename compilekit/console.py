"""The only module that prints: results to stdout, narration to stderr.

A command returns a `Report`; `Console.report` shows it in one of three forms:

- on a terminal: tables and aligned facts (rich);
- plain, automatic off a terminal, in CI and with ``NO_COLOR``: one fact per line,
  separated by tabs, nothing shortened;
- ``--json``: exactly one document.

rich is imported when something is drawn: ``--help`` and plain output never pay for it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Literal

from compilekit.errors import CompilekitError

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live

JSON_SCHEMA = 1

# A table must not break a line between a number and its unit.
_NBSP = "\N{NO-BREAK SPACE}"

Tone = Literal["", "good", "bad", "warn", "faint"]
_STYLES: dict[str, str] = {
    "": "",
    "good": "green",
    "bad": "bold red",
    "warn": "yellow",
    "faint": "bright_black",
}


@dataclasses.dataclass(frozen=True)
class Seconds:
    """A duration; plain output keeps the number alone."""

    value: float

    def human(self) -> str:
        """Two or three digits, with the unit that suits."""
        if self.value < 0.9995:
            digits = 0 if self.value >= 0.01 else 2
            return f"{self.value * 1000:.{digits}f}{_NBSP}ms"
        if self.value < 100:
            return f"{self.value:.1f}{_NBSP}s"
        minutes, seconds = divmod(round(self.value), 60)
        return f"{minutes}{_NBSP}min{_NBSP}{seconds:02d}{_NBSP}s"

    def plain(self) -> str:
        """Seconds, to the microsecond."""
        return f"{self.value:.6f}"


@dataclasses.dataclass(frozen=True)
class Number:
    """A number whose unit is in the column's name."""

    value: float
    digits: int = 2

    def human(self) -> str:
        """With that many digits behind the point."""
        return f"{self.value:.{self.digits}f}"

    def plain(self) -> str:
        """Every digit."""
        return repr(self.value)


@dataclasses.dataclass(frozen=True)
class Size:
    """A number of bytes."""

    value: int

    def human(self) -> str:
        """Decimal units, as disks and registries count."""
        if self.value < 1000:
            return f"{self.value}{_NBSP}B"
        scaled, unit = self.value / 1000, "kB"
        for larger in ("MB", "GB", "TB"):
            if scaled < 999.95:
                break
            scaled, unit = scaled / 1000, larger
        return f"{scaled:.1f}{_NBSP}{unit}"

    def plain(self) -> str:
        """Bytes."""
        return str(self.value)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A numeric difference between two results; nan if there was nothing to compare."""

    value: float

    def human(self) -> str:
        """Two digits; zero is exact and says so."""
        if math.isnan(self.value):
            return "no outputs"
        return "0" if self.value == 0 else f"{self.value:.1e}"

    def plain(self) -> str:
        """Every digit."""
        return repr(self.value)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A word with a tone: the colour it has on a terminal."""

    text: str
    tone: Tone = ""

    def human(self) -> str:
        """The word."""
        return self.text

    def plain(self) -> str:
        """The word."""
        return self.text


Cell = str | int | Seconds | Size | Number | Difference | Mark | None


_NUMBERS = (int, Seconds, Size, Number, Difference)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of one kind.

    Attributes:
        kind: First word of each plain line (``bucket``), so that grep finds the rows.
        columns: Names of the columns.
        rows: Cells; None is shown as ``-``.
        fold: Columns that a terminal leaves out when all rows agree on them.
        note: A line above the table on a terminal.
        tall: A terminal shows each row as a paragraph, for rows of sentences.
    """

    kind: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    fold: tuple[str, ...] = ()
    note: str = ""
    tall: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """Name and value pairs."""

    pairs: Sequence[tuple[str, Cell]]


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines shown as they are; plain output prints them too."""

    text: str
    tone: Tone = ""


Block = Table | Facts | Text


@dataclasses.dataclass(frozen=True)
class Report:
    """What a command found or did.

    Attributes:
        result: The ``result`` of the JSON document; dataclasses are fine.
        blocks: The same for people, in order.
        next: The next command to type; narration, so it goes to stderr.
        exit_code: What the process exits with.
    """

    result: Any
    blocks: tuple[Block, ...] = ()
    next: str = ""
    exit_code: int = 0


class Console:
    """Where the words of one run of the command line go.

    Attributes:
        json: ``--json`` was given.
        plain: ``--plain`` was given.
        verbosity: Number of ``-v``, or -1 for ``-q``.
        command: The command that runs, for the JSON document.
    """

    def __init__(self) -> None:
        self.json = False
        self.plain = False
        self.verbosity = 0
        self.command = ""
        self._live: Live | None = None

    def is_terminal(self, stream: IO[str]) -> bool:
        """True if tables, colours and movement are welcome on this stream."""
        if self.json or self.plain or not stream.isatty():
            return False
        quiet = os.environ.get("CI", "").lower() not in ("", "0", "false")
        return not (
            quiet
            or os.environ.get("NO_COLOR", "")
            or os.environ.get("TERM", "") == "dumb"
        )

    def note(self, text: str, tone: Tone = "") -> None:
        """Say something on stderr, unless ``-q``."""
        if self.verbosity < 0:
            return
        self._line(sys.stderr, text, tone)

    def width(self, stream: IO[str]) -> int:
        """Columns of the terminal behind a stream."""
        return self._rich(stream).width

    def detail(self, text: str) -> None:
        """Say something on stderr with ``-v`` only."""
        if self.verbosity > 0:
            self._line(sys.stderr, text, "faint")

    def report(self, report: Report, stream: IO[str] | None = None) -> None:
        """Show a command's result, then the next command to type.

        Args:
            report: What to show.
            stream: Where to; stdout unless stdout belongs to somebody else (``load``).
        """
        stream = stream or sys.stdout
        if self.json:
            self._document({"result": report.result}, stream)
            return
        terminal = self.is_terminal(stream)
        for number, block in enumerate(report.blocks):
            if terminal:
                self._draw(block, stream, gap=number > 0)
            else:
                for line in plain_lines(block):
                    print(line, file=stream)
        stream.flush()
        if report.next:
            if terminal and report.blocks:
                self.note("")
            self.note(f"next: {report.next}")

    def error(
        self, kind: str, message: str, *, hint: str = "", fields: Any = None
    ) -> None:
        """Say what went wrong on stderr; ``--json`` puts it on stdout as well."""
        self._line(sys.stderr, f"error: {message}", "bad")
        if hint:
            self._line(sys.stderr, hint)
        if self.json:
            full = f"{message}\n{hint}" if hint else message
            body = {"type": kind, "message": full, "fields": fields or {}}
            self._document({"error": body}, sys.stdout)

    def failure(self, error: CompilekitError) -> None:
        """`error`, from the tree."""
        self.error(
            type(error).__name__, error.message, hint=error.hint, fields=error.fields
        )

    @contextmanager
    def live(self, draw: Any) -> Iterator[None]:
        """Keep ``draw()`` on the terminal, under the lines that `note` prints.

        What was drawn is gone afterwards: the report is what stays.
        """
        from rich.live import Live

        with Live(
            get_renderable=draw,
            console=self._rich(sys.stderr),
            refresh_per_second=8,
            transient=True,
            vertical_overflow="crop",
        ) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def _line(self, stream: IO[str], text: str, tone: Tone = "") -> None:
        if not self.is_terminal(stream):
            print(text, file=stream, flush=True)
            return
        from rich.text import Text as RichText

        # While something live is on the terminal, only its console may write there.
        console = self._live.console if self._live else self._rich(stream)
        # Words wrap; a path longer than the terminal stays whole, to be copied.
        console.print(
            RichText(text, style=_STYLES[tone]), overflow="ignore", crop=False
        )

    def _document(self, body: dict[str, Any], stream: IO[str]) -> None:
        import json

        from compilekit.results import to_json

        head = {"schema": JSON_SCHEMA, "command": self.command}
        document = to_json({**head, **body})
        print(json.dumps(document, indent=2, allow_nan=False), file=stream, flush=True)

    def _draw(self, block: Block, stream: IO[str], *, gap: bool) -> None:
        console = self._rich(stream)
        if gap:
            console.print()
        if isinstance(block, Text):
            self._line(stream, block.text, block.tone)
            return
        if isinstance(block, Table) and block.note:
            self._line(stream, block.note, "faint")
        console.print(renderable(block))

    def _rich(self, stream: IO[str]) -> RichConsole:
        from rich.console import Console as RichConsole

        return RichConsole(file=stream, markup=False, highlight=False, emoji=False)


def first_line(text: str) -> str:
    """The first line of a message, for places that have one line only."""
    return text.strip().partition("\n")[0]


def plain_lines(block: Block) -> Iterator[str]:
    """A block as lines for grep, cut and a CI log; nothing is shortened."""
    if isinstance(block, Text):
        yield from block.text.splitlines()
    elif isinstance(block, Facts):
        for name, value in block.pairs:
            yield f"{name}\t{_plain(value)}"
    else:
        yield "\t".join((f"# {block.kind}", *block.columns))
        for row in block.rows:
            yield "\t".join((block.kind, *(_plain(cell) for cell in row)))


def renderable(block: Table | Facts) -> RenderableType:
    """A block as rich draws it: cells are folded at the edge, never cut off."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable

    if isinstance(block, Facts):
        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(style=_STYLES["faint"], no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in block.pairs:
            grid.add_row(name, _drawn(value))
        return grid
    kept = [n for n, name in enumerate(block.columns) if not _folds(block, n, name)]
    if block.tall:
        paragraphs: list[RenderableType] = []
        for row in block.rows:
            known = [(block.columns[n], row[n]) for n in kept if row[n]]
            paragraphs += [*([""] if paragraphs else []), renderable(Facts(known))]
        return Group(*paragraphs)
    table = RichTable(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for n in kept:
        cells = [row[n] for row in block.rows]
        numbers = any(isinstance(cell, _NUMBERS) for cell in cells)
        name = block.columns[n]
        table.add_column(
            name,
            justify="right" if numbers else "left",
            overflow="fold",
            min_width=max(map(len, name.split())),
        )
    for row in block.rows:
        table.add_row(*(_drawn(row[n]) for n in kept))
    return table


def _folds(table: Table, column: int, name: str) -> bool:
    if name not in table.fold:
        return False
    return len({_plain(row[column]) for row in table.rows}) < 2


def _plain(cell: Cell) -> str:
    if cell is None:
        return "-"
    text = str(cell) if isinstance(cell, (str, int)) else cell.plain()
    # A tab or newline inside a fact would make two facts of it.
    return " ".join(text.split()) if "\n" in text or "\t" in text else text


def _drawn(cell: Cell) -> RenderableType:
    from rich.text import Text as RichText

    if cell is None:
        return RichText("-", style=_STYLES["faint"])
    text = str(cell) if isinstance(cell, (str, int)) else cell.human()
    return RichText(text, style=_STYLES[cell.tone if isinstance(cell, Mark) else ""])
