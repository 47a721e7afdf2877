"""The console: three forms of the same report, and which stream gets what."""

from __future__ import annotations

import io
import json
import math

import pytest

from compilekit.console import (
    Cell,
    Console,
    Difference,
    Facts,
    Mark,
    Number,
    Report,
    Seconds,
    Size,
    Table,
    Text,
    plain_lines,
)
from compilekit.errors import ConfigError

DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

TABLE = Table(
    "bucket",
    ("target", "bucket", "kernels", "time"),
    [
        ("cpu-x86_64-v4", "b1_s32", 12, Seconds(3.25)),
        ("cpu-x86_64-v4", "b1_s64", None, Seconds(0.0412)),
    ],
    fold=("target",),
    note="two buckets",
)
REPORT = Report(
    {"digest": DIGEST},
    (TABLE, Facts((("digest", DIGEST),)), Text("kernel [sm_90] :smile:", "bad")),
    next="compilekit check artifact",
)


class Terminal(io.StringIO):
    """A stream that says it's a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, and no variable that forbids drawing."""
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def drawn(report: Report) -> str:
    """What a terminal shows, without colours."""
    from rich.text import Text as RichText

    stream = Terminal()
    Console().report(report, stream)
    return RichText.from_ansi(stream.getvalue()).plain


def test_plain_is_one_fact_per_line() -> None:
    """Off a terminal: kind first, tabs between, nothing shortened or folded away."""
    stream = io.StringIO()
    Console().report(REPORT, stream)
    assert stream.getvalue().splitlines() == [
        "# bucket\ttarget\tbucket\tkernels\ttime",
        "bucket\tcpu-x86_64-v4\tb1_s32\t12\t3.250000",
        "bucket\tcpu-x86_64-v4\tb1_s64\t-\t0.041200",
        f"digest\t{DIGEST}",
        "kernel [sm_90] :smile:",
    ]


def test_plain_fact_stays_one_line() -> None:
    """A tab or newline inside a value can't make two facts of one."""
    lines = list(plain_lines(Facts((("why", "a\tb\nc"),))))
    assert lines == ["why\ta b c"]


def test_terminal_shows_a_table() -> None:
    """On a terminal: units, no column that says the same everywhere, text untouched."""
    shown = drawn(REPORT)
    assert "two buckets" in shown
    assert "cpu-x86_64-v4" not in shown
    assert "3.2\N{NO-BREAK SPACE}s" in shown
    assert "41\N{NO-BREAK SPACE}ms" in shown
    assert DIGEST in shown
    assert "kernel [sm_90] :smile:" in shown


@pytest.mark.parametrize("columns", ["40", "80"])
def test_terminal_cuts_nothing(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal, a long cell is folded and never lost."""
    monkeypatch.setenv("COLUMNS", columns)
    table = Table("file", ("name", "digest"), [("kernels/a.so", DIGEST)])
    shown = drawn(Report({}, (table,)))
    assert "…" not in shown
    tail = "".join(line.split()[-1] for line in shown.splitlines() if line.strip())
    assert DIGEST in tail


def test_tall_table_is_paragraphs() -> None:
    """Rows of sentences are drawn as paragraphs; empty cells are left out."""
    table = Table(
        "mismatch", ("factor", "hint"), [("torch", ""), ("isa", "h")], tall=True
    )
    lines = [line.rstrip() for line in drawn(Report({}, (table,))).splitlines()]
    assert lines == ["factor  torch", "", "factor  isa", "hint    h"]


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json`` stdout has the document and nothing else; numbers are strict."""
    console = Console()
    console.json, console.command = True, "verify"
    console.note("busy")
    console.report(Report({"error": math.inf}, REPORT.blocks, next="more"))
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "schema": 1,
        "command": "verify",
        "result": {"error": "inf"},
    }
    assert captured.err == "busy\n"


def test_next_command_is_narration(capsys: pytest.CaptureFixture[str]) -> None:
    """The next command goes to stderr, so stdout holds results only."""
    Console().report(REPORT)
    captured = capsys.readouterr()
    assert "next:" not in captured.out
    assert captured.err == "next: compilekit check artifact\n"


def test_quiet_says_results_and_errors_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``-q`` drops narration, never an error."""
    console = Console()
    console.verbosity = -1
    console.note("busy")
    console.detail("very busy")
    console.report(Report({}, (Text("result"),), next="more"))
    console.failure(ConfigError("it failed.", hint="Do this."))
    captured = capsys.readouterr()
    assert captured.out == "result\n"
    assert captured.err == "error: it failed.\nDo this.\n"


@pytest.mark.parametrize(
    ("name", "value", "draws"),
    [
        ("CI", "true", False),
        ("CI", "false", True),
        ("NO_COLOR", "1", False),
        ("NO_COLOR", "", True),
        ("TERM", "dumb", False),
    ],
)
def test_environment_asks_for_plain(
    name: str, value: str, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI, NO_COLOR and a dumb terminal get plain output even on a terminal."""
    monkeypatch.setenv(name, value)
    assert Console().is_terminal(Terminal()) is draws


def test_plain_option_wins_over_the_terminal() -> None:
    """``--plain`` is plain everywhere."""
    console = Console()
    console.plain = True
    assert not console.is_terminal(Terminal())


@pytest.mark.parametrize(
    ("cell", "human", "plain"),
    [
        (Seconds(0.0000123), "0.01 ms", "0.000012"),
        (Seconds(0.0042), "4.20 ms", "0.004200"),
        (Seconds(0.4125), "412 ms", "0.412500"),
        (Seconds(0.9999), "1.0 s", "0.999900"),
        (Seconds(99.9), "99.9 s", "99.900000"),
        (Seconds(125), "2 min 05 s", "125.000000"),
        (Size(0), "0 B", "0"),
        (Size(999), "999 B", "999"),
        (Size(1000), "1.0 kB", "1000"),
        (Size(999_999), "1.0 MB", "999999"),
        (Size(90_900_000), "90.9 MB", "90900000"),
        (Number(1.256), "1.26", "1.256"),
        (Difference(0.0), "0", "0.0"),
        (Difference(3.14e-7), "3.1e-07", "3.14e-07"),
        (Difference(math.inf), "inf", "inf"),
        (Mark("no", "bad"), "no", "no"),
    ],
)
def test_cells(cell: Cell, human: str, plain: str) -> None:
    """Each kind of cell has a form for people and one that loses nothing."""
    assert not isinstance(cell, (str, int, type(None)))
    assert cell.human().replace("\N{NO-BREAK SPACE}", " ") == human
    assert cell.plain() == plain
