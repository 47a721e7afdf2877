"""``compilekit bench``: measurements, each number from a fresh process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compilekit.cli.options import (
    PATH,
    Command,
    Commands,
    config_argument,
    count_option,
    weights_option,
)
from compilekit.console import (
    Block,
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
)
from compilekit.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from compilekit.bench.records import Row, Sample, StartupResult

# The rows of the table by bucket, in this order; the other tables have all of them.
_BY_BUCKET = ("compilekit", "cache", "cold", "eager")
# The route a row's buckets take; a bucket of ours that can't take it is an error.
_ROUTES = {"compilekit": "program", "cache": "cache", "cold": "jit", "eager": "eager"}


@click.command(
    cls=Command,
    example="compilekit bench startup compilekit.toml --repeat 5 --out startup.json",
)
@config_argument
@click.option(
    "--artifact",
    type=PATH,
    metavar="DIR",
    help="A built artifact; one is built for the occasion otherwise.",
)
@click.option(
    "--route",
    type=click.Choice(("program", "cache")),
    default="program",
    show_default=True,
    help="Route to measure; it decides what it's compared with.",
)
@click.option(
    "--rows",
    metavar="NAMES",
    help="Ways to start, separated by commas; the route's own otherwise.",
)
@count_option("--repeat", 5, "Fresh processes for each row.")
@count_option("--threads", 1, "Intra-op threads in every process.")
@count_option("--calls", 10, "Steady calls per bucket and process.")
@weights_option("Real weights, instead of those under [verify] in CONFIG.")
@click.option(
    "--seed",
    type=int,
    metavar="N",
    help="Seed of the order in which the rows run; drawn and recorded otherwise.",
)
@click.option(
    "--out",
    type=PATH,
    metavar="FILE",
    help="Write every raw number there as JSON, after each process; what an earlier run"
    " of the same setting left there is kept and added to.",
)
@click.pass_obj
def startup(
    console: Console,
    config: Path,
    artifact: Path | None,
    route: str,
    rows: str | None,
    repeat: int,
    threads: int,
    calls: int,
    weights: str | None,
    seed: int | None,
    out: Path | None,
) -> Report:
    """Time fresh processes to their first outputs, one way to start after the other.

    The rows are eager, cold (torch.compile), moved (a copied cache directory), mega
    and mega+kernels (Mega-cache without and with its kernels), aot (a saved
    aot_compile), aoti (AOTInductor's direct loader), compilekit (programs) and cache
    (restored caches). They run
    interleaved, in a shuffled order.
    """
    from compilekit.config import load

    configuration = load(config)
    if any(entry.role for entry in configuration.entries.values()):
        raise ConfigError(
            f"{config}: bench startup calls methods, and [generate] makes steps",
            hint="`compilekit bench throughput` measures them, their start included.",
        )
    from compilekit.bench import startup as bench
    from compilekit.cli.progress import BenchProgress

    chosen = bench.ROUTES[route]
    if rows is not None:
        chosen = tuple(name.strip() for name in rows.split(",") if name.strip())
    with BenchProgress(console) as progress:
        result = bench.run(
            configuration,
            artifact=artifact,
            rows=chosen,
            repeat=repeat,
            threads=threads,
            weights=configuration.verify.weights if weights is None else weights,
            calls=calls,
            seed=seed,
            on_event=progress,
            out=out,
        )
    return report(result, out)


def report(result: StartupResult, out: Path | None = None) -> Report:
    """Medians by row and by bucket; the raw numbers are in the JSON."""
    threads = (
        "1 thread"
        if result.setting.threads == 1
        else f"{result.setting.threads} threads"
    )
    blocks: list[Block] = [
        Table(
            "start",
            ("row", "imports", "weights", "attach", "first calls", "ready", "overhead"),
            [times(row) for row in result.rows],
            note=(
                f"{result.setting.model}: medians of {result.repeat} fresh processes,"
                f" {threads}; overhead = ready - one steady call of each bucket"
            ),
        ),
        Table(
            "cost",
            ("row", "peak memory", "ships", "prepared in", "processes", "differs by"),
            [costs(row) for row in result.rows],
        ),
    ]
    if parts := parts_table(result.rows):
        blocks.append(parts)
    if by_bucket := bucket_table(result):
        blocks.append(by_bucket)
    failed = [(row.name, row.error) for row in result.rows if row.error]
    if failed:
        blocks.append(Table("failure", ("row", "why"), failed, tall=True))
    if out is not None:
        blocks.append(Facts((("raw numbers", str(out)),)))
    return Report(
        result.as_json(),
        tuple(blocks),
        exit_code=ResourceError.exit_code if failed else 0,
    )


def times(row: Row) -> tuple[Cell, ...]:
    """Where the time to the first outputs goes."""
    if not row.samples:
        return (row.name, Mark("failed", "bad"), *[None] * 5)
    phases: tuple[Callable[[Sample], float], ...] = (
        lambda sample: sample.import_torch_ms + sample.import_code_ms,
        lambda sample: sample.model_ms,
        lambda sample: sample.attach_ms,
        lambda sample: sample.ready_ms - sample.attach_ms,
        lambda sample: sample.ready_ms,
        lambda sample: sample.overhead_ms,
    )
    medians = (statistics.median(map(phase, row.samples)) for phase in phases)
    return (row.name, *(Seconds(ms / 1e3) for ms in medians))


def costs(row: Row) -> tuple[Cell, ...]:
    """What a start needs besides time, and how far its outputs are from eager's."""
    if not row.samples:
        return (row.name, Mark("failed", "bad"), *[None] * 4)
    return (
        row.name,
        Size(round(statistics.median(s.peak_rss_bytes for s in row.samples))),
        Size(row.shipped_bytes) if row.shipped_bytes else None,
        None if row.build_seconds is None else Seconds(row.build_seconds),
        max(sample.processes for sample in row.samples),
        Difference(max(sample.max_abs_diff for sample in row.samples)),
    )


def parts_table(measured: Sequence[Row]) -> Table | None:
    """What attaching consists of, for the rows whose receipt tells."""
    rows: list[tuple[Cell, ...]] = []
    for row in measured:
        parts = [sample.attach_phases_ms for sample in row.samples]
        for name in parts[0] if parts else ():
            spent = statistics.median(part.get(name, 0.0) for part in parts)
            rows.append((row.name, name, Number(spent)))
    return Table("part", ("row", "part of attach", "ms"), rows) if rows else None


def bucket_table(result: StartupResult) -> Table | None:
    """First and steady call of each bucket, for the rows that people compare."""
    samples = {row.name: row.samples for row in result.rows if row.samples}
    names = [name for name in _BY_BUCKET if name in samples]
    if not names:
        return None
    columns = ["entry", "bucket", "route", "first ms", "steady ms"]
    for name in names[1:]:
        columns += [f"{name} first ms", f"{name} steady ms"]
    rows: list[tuple[Cell, ...]] = []
    for place, bucket in enumerate(samples[names[0]][0].buckets):
        cells: list[Cell] = [bucket.entry, bucket.bucket, _ROUTES[names[0]]]
        for name in names:
            calls = [sample.buckets[place] for sample in samples[name]]
            cells += [
                Number(statistics.median(call.first_ms for call in calls)),
                Number(statistics.median(call.steady_ms for call in calls)),
            ]
        differences = [s.buckets[place].max_abs_diff for s in samples[names[0]]]
        rows.append((*cells, Difference(max(differences))))
    return Table(
        "bucket",
        (*columns, "differs by"),
        rows,
        fold=("entry",),
        note=" beside ".join((f"the buckets of {names[0]}", *names[1:])),
    )


@click.command(
    cls=Command,
    example="compilekit bench throughput compilekit.toml artifact --out rows.json",
)
@config_argument
@click.argument("artifact", type=PATH, metavar="ARTIFACT")
@click.option(
    "--tuned",
    type=PATH,
    metavar="ARTIFACT",
    help="The same, built with a tuning file: one strategy more.",
)
@click.option(
    "--strategies",
    metavar="NAMES",
    help="Strategies, separated by commas; all of them otherwise.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long one strategy may take.",
)
@count_option("--calls", 5, "Timed prefills, and rounds of decode steps.")
@count_option(
    "--new-tokens", 128, "Tokens that generate makes; 0 leaves it out.", least=0
)
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    help="Where to measure; a GPU if there is one otherwise.",
)
@weights_option("Real weights, instead of random ones.")
@click.option(
    "--out",
    type=PATH,
    default=Path("throughput.json"),
    show_default=True,
    metavar="FILE",
    help="Raw numbers; what is there already isn't measured again.",
)
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE",
    help="Draw tokens per second there (needs matplotlib).",
)
@click.pass_obj
def throughput(
    console: Console,
    config: Path,
    artifact: Path,
    tuned: Path | None,
    strategies: str | None,
    deadline: float,
    calls: int,
    new_tokens: int,
    device: str | None,
    weights: str | None,
    out: Path,
    plot: Path | None,
) -> Report:
    """Measure how fast a language model is served, by strategy.

    The strategies are eager, torch.compile in its four modes, and compilekit with and
    without CUDA graphs and tuning, each in a fresh process. The configuration needs
    [generate].
    """
    from compilekit.bench import throughput as bench
    from compilekit.config import load

    chosen: tuple[str, ...] = ()
    if strategies is not None:
        chosen = tuple(name.strip() for name in strategies.split(",") if name.strip())
    result = bench.run(
        load(config),
        artifact=artifact,
        out=out,
        tuned=tuned,
        strategies=chosen,
        device=device or "",
        deadline=deadline,
        calls=calls,
        new_tokens=new_tokens,
        weights=weights or "",
        on_event=console.note,
    )
    if plot is not None:
        bench.plot(result, plot)
    return throughput_report(result, out)


def throughput_report(result: dict[str, Any], out: Path) -> Report:
    """Medians by strategy, each beside the part of the device's limit that it is."""
    from compilekit.bench.throughput import LIMITS, claims, figures

    rows = [row for row in result["rows"] if row["strategy"] != LIMITS]
    kinds = [("prefill", b) for b in result["batches"]]
    kinds += [("decode", b) for b in result["batches"]]
    table: list[tuple[Cell, ...]] = []
    for row in rows:
        if "error" in row:
            blanks = [None] * (2 * len(kinds) + 1)
            table.append((row["strategy"], Mark("failed", "bad"), *blanks))
            continue
        found = figures(result, row)
        cells: list[Cell] = [row["strategy"], Seconds(row["ready_s"])]
        for kind in kinds:
            figure = found[kind]
            cells += [Number(figure["ms"]), Number(100 * figure.get("of_limit", 0.0))]
        generated = row.get("generate")
        cells.append(Seconds(generated[-1]["seconds"]) if generated else None)
        table.append(tuple(cells))
    columns = ["strategy", "ready"]
    for name, batch in kinds:
        columns += [f"{name} b{batch} ms", "% of limit"]
    columns.append("generate")
    blocks: list[Block] = [
        Table(
            "throughput",
            tuple(columns),
            table,
            note=(
                f"{result['model']}: prompt {result['prompt']}, cache"
                f" {result['cache']}; medians; limit = weights read once per decode"
                " step, or the matrix rate for a prefill, measured on this device"
            ),
        )
    ]
    held = [
        (claim.claim, claim.claimed, what, Number(percent))
        for claim in claims(result)
        for what, percent in claim.measured
    ]
    if held:
        columns = ["claim", "claimed", "measured on", "%"]
        blocks.append(Table("claim", tuple(columns), held))
    failed = [(row["strategy"], row["error"]) for row in rows if "error" in row]
    if failed:
        blocks.append(Table("failure", ("strategy", "why"), failed, tall=True))
    blocks.append(Facts((("raw numbers", str(out)),)))
    return Report(
        result,
        tuple(blocks),
        exit_code=ResourceError.exit_code if failed else 0,
    )


bench = Commands(
    "bench",
    help="Measure, each number from a fresh process.",
    sections={"Commands": (startup, throughput)},
)
