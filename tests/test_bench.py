"""`compilekit.bench`: the harness on small models, its arithmetic and its failures."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compilekit.bench import __main__ as command
from compilekit.bench import growth, process, records, startup, steady, tables
from compilekit.cli import bench
from compilekit.config import Config, load
from compilekit.errors import ConfigError, ManifestError, ResourceError
from compilekit.results import to_json

# torch 2.13 warns about itself when a build imports Inductor into this process.
quiet_inductor = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

MODEL = """\
import torch


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 16)

    def forward(self, x):
        return {"y": self.second(torch.nn.functional.gelu(self.first(x)))}


def make():
    return Small()


def broken():
    raise RuntimeError("no such luck")
"""

CONFIG = """\
[model]
source = "small_bench_model:FACTORY"
dtype = "float32"

[axes]
b = [2, 4]

[entries.forward.inputs.x]
shape = ["b", 16]
dtype = "float32"
"""


@pytest.fixture
def small(tmp_path: Path) -> Callable[[str], Config]:
    """Writes a two-bucket configuration of a small model with the given factory."""

    def write(factory: str = "make") -> Config:
        (tmp_path / "small_bench_model.py").write_text(MODEL)
        path = tmp_path / "compilekit.toml"
        path.write_text(CONFIG.replace("FACTORY", factory))
        return load(path)

    return write


def start(
    config: Config,
    *rows: str,
    repeat: int = 1,
    out: Path | None = None,
    events: list[process.ProcessEvent] | None = None,
    artifact: Path | None = None,
    timeout_seconds: float = 600.0,
) -> records.StartupResult:
    """One run on one thread with a fixed seed."""
    seen: list[process.ProcessEvent] = [] if events is None else events
    return startup.run(
        config,
        artifact=artifact,
        rows=rows,
        repeat=repeat,
        threads=1,
        weights="",
        on_event=seen.append,
        out=out,
        calls=3,
        seed=7,
        timeout_seconds=timeout_seconds,
    )


def sample(attach_ms: float, *buckets: tuple[float, float]) -> records.Sample:
    """A sample with these (first, steady) milliseconds."""
    return records.Sample(
        repetition=1,
        position=1,
        import_torch_ms=1.0,
        import_code_ms=1.0,
        model_ms=1.0,
        attach_ms=attach_ms,
        attach_phases_ms={},
        buckets=tuple(
            records.BucketSample("forward", f"b{index}", first, steady_ms, 0.0)
            for index, (first, steady_ms) in enumerate(buckets)
        ),
        peak_rss_bytes=2,
        weights_rss_bytes=1,
        maxrss_bytes=2,
        spawned={"g++": 2, "python": 1},
        counters={},
        compiler_modules=(),
        wall_ms=9.0,
    )


def test_ready_and_overhead_follow_their_definitions() -> None:
    """Ready is attach plus first calls, overhead is that less one steady call each."""
    found = sample(10.0, (5.0, 1.0), (7.0, 2.0))
    assert found.ready_ms == 22.0
    assert found.overhead_ms == 19.0
    assert found.processes == 3


def test_a_spread_is_median_and_range() -> None:
    """The median is taken over repetitions, and nothing gives nothing."""
    row = records.Row("cold", tuple(sample(ms) for ms in (3.0, 1.0, 8.0)))
    assert row.ready_ms == records.Spread(3.0, 1.0, 8.0)
    assert records.Row("cold", ()).ready_ms is None


def test_the_parts_of_an_attach_are_medians() -> None:
    """Only of rows that tell them; a part that a start hadn't took it no time."""
    parts = ({"open": 1.0}, {"open": 3.0, "guards": 8.0})
    started = tuple(
        dataclasses.replace(sample(9.0), attach_phases_ms=one)
        for one in reversed(parts)
    )
    rows = (records.Row("eager", (sample(1.0),)), records.Row("cache", started))
    table = bench.parts_table(rows)
    assert table is not None
    assert [(row, part, number.value) for row, part, number in table.rows] == [
        ("cache", "open", 2.0),
        ("cache", "guards", 4.0),
    ]
    assert bench.parts_table(rows[:1]) is None


def test_the_order_of_rows_comes_from_the_seed() -> None:
    """Every repetition holds every row once, and the same seed gives the same order."""
    rows = tuple(startup.ROWS)
    orders = startup._orders(rows, 4, 11)
    assert orders == startup._orders(rows, 4, 11)
    assert orders != startup._orders(rows, 4, 12)
    assert all(sorted(order) == sorted(rows) for order in orders)


def test_the_cache_rows_share_one_preparation() -> None:
    """The three cache rows come out of one compile; a given artifact needs none."""
    made = startup._preparations(tuple(startup.ROWS), None)
    assert list(made) == [
        "caches",
        "functions",
        "packages",
        "artifact",
        "cache-artifact",
    ]
    given = startup._preparations(("eager", "compilekit"), Path("artifact"))
    assert given == {}


@pytest.mark.parametrize(
    ("rows", "repeat", "message"),
    [
        (("eager", "clod"), 1, "unknown row 'clod'"),
        ((), 1, "no row"),
        (("eager", "eager"), 1, "named twice"),
        (("eager",), 0, "repeat must be at least 1, not 0"),
    ],
)
def test_wrong_arguments_are_refused(
    small: Callable[..., Config], rows: tuple[str, ...], repeat: int, message: str
) -> None:
    """A row that doesn't exist, is missing or doubled, and a zero, are named."""
    with pytest.raises(ConfigError, match=message):
        start(small(), *rows, repeat=repeat)


def test_a_child_gets_nothing_that_steers_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Variables of torch, OpenMP and compilers are dropped and PATH can be emptied."""
    for name in ("TORCH_LOGS", "TORCHINDUCTOR_FREEZING", "CXX", "OMP_PROC_BIND"):
        monkeypatch.setenv(name, "1")
    found = process.environment(3, tmp_path, tmp_path / "cache", compiler=False)
    assert not {"TORCH_LOGS", "TORCHINDUCTOR_FREEZING", "CXX"} & set(found)
    assert "OMP_PROC_BIND" not in found
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache")
    assert list(Path(found["PATH"]).iterdir()) == []


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """A process past its limit is killed and says how long it had."""
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(60)")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    outcome = process.spawn("sleeper", {}, variables, 0.5)
    assert outcome.error == "no result within 0.5 s"
    assert outcome.seconds < 30


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('what happened')", "ValueError: what happened"),
        ("raise ValueError('what\\nand what to do')", "ValueError: what"),
        ("import os; os.write(2, b'one\\ntwo\\n'); os._exit(1)", "two"),
        ("import os, signal; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise SystemExit(3)", "exit code 3, nothing on stderr"),
    ],
)
def test_a_child_that_fails_says_why(tmp_path: Path, code: str, error: str) -> None:
    """Exception, signal, last line or exit code becomes the row's error."""
    (tmp_path / "failing.py").write_text(code)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert process.spawn("failing", {}, variables, 60).error == error


def test_output_that_libraries_print_is_not_the_result(tmp_path: Path) -> None:
    """A child's result line has a descriptor of its own: prints can't damage it."""
    (tmp_path / "noisy.py").write_text(
        "import json, os\n"
        "from compilekit.bench import _startup_child as child\n"
        "def reference(spec):\n"
        "    print('from Python'); os.system('echo from a program')\n"
        "    return {'ok': 1}\n"
        "child.reference = reference\n"
        "child.main()\n"
    )
    root = str(Path(process.__file__).parents[2])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    outcome = process.spawn("noisy", {"task": "reference"}, variables, 60)
    assert outcome.data == {"ok": 1}


def test_started_processes_are_counted_by_program() -> None:
    """The audit hook sees Popen, system, posix_spawn and fork."""
    code = (
        "import os, subprocess, sys\n"
        "from compilekit.bench import _startup_child as child\n"
        "sys.addaudithook(child._count_processes)\n"
        "subprocess.run(['/bin/true'])\n"
        "os.system('true')\n"
        "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(sorted(child._spawned.items()))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip() == "[('os.fork', 1), ('os.system', 1), ('true', 2)]"


def test_outputs_that_can_not_be_compared_differ_infinitely() -> None:
    """Another count, shape, dtype or a NaN is inf, never a small number."""
    import torch

    from compilekit.bench._startup_child import max_abs_diff

    one = torch.ones(2)
    assert max_abs_diff([one], [one + 0.5]) == 0.5
    assert max_abs_diff([one], []) == math.inf
    assert max_abs_diff([one], [torch.ones(3)]) == math.inf
    assert max_abs_diff([one], [one.double()]) == math.inf
    assert max_abs_diff([one * math.nan], [one]) == math.inf
    assert max_abs_diff([torch.ones(0)], [torch.ones(0)]) == 0.0


def test_a_run_reports_every_process_and_writes_strict_json(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    """An eager run: events in order, phases filled in, exact outputs, valid JSON."""
    events: list[process.ProcessEvent] = []
    out = tmp_path / "results" / "startup.json"
    result = start(small(), "eager", out=out, events=events)
    assert [(e.kind, e.row, e.index, e.count) for e in events] == [
        ("started", "reference", 1, 2),
        ("finished", "reference", 1, 2),
        ("started", "eager", 2, 2),
        ("finished", "eager", 2, 2),
    ]
    assert result.buckets == ("forward/b2", "forward/b4")
    (found,) = result.row("eager").samples
    assert found.max_abs_diff == 0.0
    assert found.attach_ms < found.ready_ms < found.wall_ms
    assert found.import_torch_ms > 50
    assert found.peak_rss_bytes >= found.weights_rss_bytes > 0
    assert found.processes == 0
    assert found.compiler_modules == ()
    data = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert data["schema"] == records.SCHEMA
    assert data["seed"] == 7
    assert data["rows"][0]["samples"][0]["buckets"][0]["bucket"] == "b2"
    assert data["rows"][0]["over_repetitions"]["ready_ms"]["median"] == found.ready_ms
    assert not list(out.parent.glob("*.partial"))


class Children:
    """In the place of child processes: answers at once, and notes what was asked.

    Attributes:
        asked: What each child was to do.
        interrupt: Ctrl-C comes when this many were started; 0 = never.
        environment: What the reference says about where it ran.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.interrupt = 0
        self.environment = {"torch": "2.13.0"}

    def spawn(
        self, module: str, spec: dict[str, object], *_: object
    ) -> process.Outcome:
        """As `process.spawn`."""
        self.asked.append(str(spec["what"]))
        if len(self.asked) == self.interrupt:
            raise KeyboardInterrupt
        if spec["task"] == "reference":
            found: dict[str, object] = {
                "buckets": ["forward/b0"],
                "environment": self.environment,
            }
        else:
            found = dataclasses.asdict(sample(10.0 + len(self.asked), (5.0, 1.0)))
            for name in ("repetition", "position", "wall_ms", "run"):
                del found[name]
            found["ready_ms"] = 15.0
        return process.Outcome(found, 1.0)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    """No process is started."""
    made = Children()
    monkeypatch.setattr(startup, "spawn", made.spawn)
    return made


def test_an_interrupted_run_keeps_what_it_measured(
    small: Callable[..., Config], tmp_path: Path, children: Children
) -> None:
    """After every process the file holds all so far, and says what is missing."""
    out = tmp_path / "startup.json"
    children.interrupt = 4
    with pytest.raises(KeyboardInterrupt):
        start(small(), "eager", "cold", repeat=2, out=out)
    found = records.read_result(out)
    assert sum(len(row.samples) for row in found.rows) == 2
    assert len(json.loads(out.read_text())["missing"]) == 2
    shown = tables.markdown(json.loads(out.read_text()))
    assert "| eager" in shown
    assert "| cold" in shown
    assert "not measured yet" in shown or "(1 of 2)" in shown


def test_a_run_adds_to_what_an_earlier_one_left(
    small: Callable[..., Config], tmp_path: Path, children: Children
) -> None:
    """The same setting again: kept processes stay as they are, only others run."""
    out = tmp_path / "startup.json"
    children.interrupt = 3
    with pytest.raises(KeyboardInterrupt):
        start(small(), "eager", "cold", repeat=2, out=out)
    children.interrupt = 0
    before = records.read_result(out)
    (kept,) = [one for row in before.rows for one in row.samples]
    children.asked.clear()
    events: list[process.ProcessEvent] = []
    result = start(small(), "eager", "cold", repeat=2, out=out, events=events)
    assert (events[0].kind, events[0].message) == ("kept", f"1 processes of {out}")
    assert sorted(children.asked) == ["cold", "cold", "eager", "reference"] or sorted(
        children.asked
    ) == ["cold", "eager", "eager", "reference"]
    assert result == records.read_result(out)
    assert result.missing == ()
    assert kept in [one for row in result.rows for one in row.samples]
    assert sorted(one.run for row in result.rows for one in row.samples) == [1, 2, 2, 2]
    assert [len(order) for order in result.started_rows] == [2, 2]
    # Another row and more repetitions; then there is nothing left to do.
    more = start(small(), "eager", "aoti", repeat=3, out=out)
    assert {row.name: len(row.samples) for row in more.rows} == {
        "eager": 3,
        "cold": 2,
        "aoti": 3,
    }
    assert more.missing == (("cold", 3),)
    assert "| cold (2 of 3) |" in tables.markdown(json.loads(out.read_text()))
    assert " from 3 runs," in tables.markdown(json.loads(out.read_text()))
    children.asked.clear()
    assert start(small(), "aoti", repeat=3, out=out) == more
    assert children.asked == []
    # What a complete row shipped was measured when it was there.
    shipped = dataclasses.replace(more.row("aoti"), shipped_bytes=5)
    records.write_json(out, more.with_row(shipped).as_json())
    again = start(small(), "aoti", "cold", repeat=3, out=out)
    assert (again.missing, again.row("aoti").shipped_bytes) == ((), 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.write_text("[]"), "isn't a result of `bench startup`"),
        (lambda out: out.write_text('{"schema": 1}'), "schema 1 instead of 2"),
        (
            lambda out: records.write_json(
                out, {**json.loads(out.read_text()), "threads": 4}
            ),
            "threads: expected 4, found 1",
        ),
        (
            lambda out: records.write_json(
                out, {**json.loads(out.read_text()), "environment": {"cpu": "another"}}
            ),
            "environment: expected {'cpu': 'another'}, found",
        ),
    ],
    ids=["no result", "another schema", "another setting", "another machine"],
)
def test_a_run_adds_to_nothing_else(
    small: Callable[..., Config],
    tmp_path: Path,
    children: Children,
    change: Callable[[Path], object],
    message: str,
) -> None:
    """What can't stand in one table is refused, and the file stays as it is."""
    out = tmp_path / "startup.json"
    start(small(), "eager", out=out)
    change(out)
    text = out.read_text()
    with pytest.raises(ConfigError, match=message):
        start(small(), "eager", repeat=2, out=out)
    assert out.read_text() == text


@pytest.mark.slow
def test_a_model_that_eager_can_not_run_ends_the_bench(
    small: Callable[..., Config],
) -> None:
    """Without a reference there is nothing to compare: the log's end is shown."""
    with pytest.raises(ResourceError, match="no such luck"):
        start(small("broken"), "eager")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(("eager", "mega+kernels", "compilekit"), marks=pytest.mark.slow),
        pytest.param(tuple(startup.ROWS), marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=["some", "all"],
)
def test_every_row_starts_and_equals_eager(
    small: Callable[..., Config], rows: tuple[str, ...]
) -> None:
    """All rows run; only those that claim to need a compiler start one."""
    result = start(small(), *rows)
    assert {row.name: row.error for row in result.rows} == dict.fromkeys(rows, "")
    for row in result.rows:
        (found,) = row.samples
        assert found.max_abs_diff < 1e-5
        assert bool(found.spawned.get("g++")) == (
            row.name in ("cold", "moved", "mega", "aot")
        )
        ships = row.name not in ("eager", "cold")
        assert (row.shipped_bytes > 0, row.build_seconds is not None) == (ships, ships)
    assert result.row("compilekit").samples[0].compiler_modules == ()
    for name in {"moved", "mega", "mega+kernels"} & {*rows}:
        (found,) = result.row(name).samples
        assert found.counters["fxgraph_cache_hit"] == 2
    ready = {row.name: row.ready_ms for row in result.rows}
    assert ready["compilekit"] is not None
    assert ready["mega+kernels"] is not None
    assert ready["compilekit"].median < ready["mega+kernels"].median


@pytest.mark.slow
def test_a_row_that_fails_stays_in_the_result(
    small: Callable[..., Config], zoo_artifact: Path
) -> None:
    """Another model's artifact fails its row alone, with the error as its reason."""
    result = start(small(), "eager", "compilekit", artifact=zoo_artifact)
    row = result.row("compilekit")
    assert row.samples == ()
    assert row.error
    assert "Build again with this source." in row.log
    assert result.row("eager").error == ""
    assert json.dumps(to_json(result.as_json()))


def test_an_artifact_is_refused_before_any_row(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    """Rows of torch would take their minutes first."""
    with pytest.raises(ManifestError, match="no artifact at"):
        start(small(), "eager", "compilekit", artifact=tmp_path / "not-an-artifact")


def test_interleaving_alternates_which_side_comes_first() -> None:
    """Each round starts with another function, and every call is timed."""
    order: list[str] = []
    times = steady.interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(times["a"]), len(times["b"])] == [3, 3]


def test_steady_ratios_are_taken_within_a_process() -> None:
    """A process that is slow as a whole doesn't move the ratio."""

    def pair(factor: float) -> steady.PairSample:
        return steady.PairSample(
            "forward",
            "b2",
            compiled_ms=1.0 * factor,
            compiled_median_ms=1.0 * factor,
            program_ms=1.01 * factor,
            program_median_ms=1.01 * factor,
            dispatch_us=10.0 * factor,
            dispatch_median_us=12.0 * factor,
            dispatch_alone_us=8.0 * factor,
            module_us=3.0 * factor,
            max_abs_diff=0.0,
        )

    bucket = steady.SteadyBucket("forward", "b2", (pair(1.0), pair(3.0), pair(1.0)))
    assert bucket.ratio == pytest.approx(1.01)
    assert bucket.dispatch_us == pytest.approx(12.0)
    assert bucket.dispatch_alone_us == pytest.approx(8.0)
    assert bucket.module_us == pytest.approx(3.0)


@quiet_inductor
@pytest.mark.slow
def test_steady_state_is_measured_against_torch_compile(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    """Two equal models in one process: same outputs, both sides and dispatch timed."""
    from compilekit.compiler.build import build

    config = small()
    built = build(config, tmp_path / "artifact", verify=False)
    assert built.artifact is not None
    out = tmp_path / "steady.json"
    result = steady.run(
        config,
        artifact=built.artifact,
        threads=1,
        weights="",
        on_event=lambda event: None,
        out=out,
        processes=1,
        pairs=50,
        work=tmp_path / "work",
    )
    assert any((tmp_path / "work" / "cache").iterdir())
    assert [bucket.bucket for bucket in result.buckets] == ["b2", "b4"]
    for bucket in result.buckets:
        (found,) = bucket.samples
        assert found.max_abs_diff < 1e-5
        assert 0 < found.dispatch_alone_us < found.program_ms * 1e3
        assert 0 < found.dispatch_us <= found.dispatch_median_us
    assert json.loads(out.read_text())["schema"] == steady.SCHEMA


def test_a_slope_is_the_least_squares_fit() -> None:
    """A straight line gives its slope; equal xs give none."""
    assert growth.slope([1, 3, 8], [5.0, 9.0, 19.0]) == pytest.approx(2.0)
    assert growth.slope([2, 2], [1.0, 5.0]) == 0.0


def test_a_growth_line_reads_as_one_sentence() -> None:
    """The line names what varies, what stays, each median and the slope per unit."""
    points = tuple(
        growth.GrowthPoint(
            value, kernels, 1, records.Spread(ms, ms, ms), records.Spread(0, 0, 0)
        )
        for value, kernels, ms in ((8, 16, 4.0), (32, 64, 16.0))
    )
    assert str(growth.GrowthLine("kernels", "1 bucket", points)) == (
        "overhead by kernels (1 bucket): 16: 4.0 ms, 64: 16.0 ms; +0.25 ms per kernel"
    )
    assert "8: 4.0 ms" in str(growth.GrowthLine("layers", "3 buckets", points))


@pytest.mark.parametrize(("kind", "count"), [("qwen2", 4), ("chain", 8)])
def test_growth_writes_configurations_that_load(
    tmp_path: Path, kind: str, count: int
) -> None:
    """Both kinds of generated configuration pass the strict reader."""
    config = load(growth._write_config(tmp_path, kind, count, 3))
    if kind == "qwen2":
        assert config.model.config == {"num_hidden_layers": 4}
        assert config.axes["s"] == (64, 128, 256)
    else:
        assert config.axes["b"] == (16,)


def test_growth_finds_artifacts_that_are_there(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run in the same place measures without building anything again."""
    from compilekit.compiler import build

    monkeypatch.setattr(build, "build", pytest.fail)
    (tmp_path / "artifact").mkdir()
    there = tmp_path / "artifact"
    assert growth._built(small(), there, lambda event: None) == there


@quiet_inductor
@pytest.mark.slow
@pytest.mark.long
def test_growth_measures_each_point(tmp_path: Path) -> None:
    """A short kernels line: more blocks bring more kernels, each number is real."""
    out = tmp_path / "growth.json"
    result = growth.run(
        buckets=(),
        layers=(),
        kernels=(2, 6),
        repeat=1,
        on_event=lambda event: None,
        out=out,
    )
    (line,) = result.lines
    few, many = line.points
    assert few.kernels < many.kernels
    assert all(point.overhead_ms.median > 0 for point in line.points)
    assert json.loads(out.read_text())["lines"][0]["axis"] == "kernels"


def startup_result() -> records.StartupResult:
    """A result with one row that ran and one that didn't."""
    return records.StartupResult(
        setting=records.Setting(
            config="small/compilekit.toml",
            config_sha256="",
            model="small:make",
            weights="random",
            artifact="",
            threads=1,
            calls=3,
        ),
        buckets=("forward/b2",),
        seed=7,
        repeat=2,
        environment={"cpu": "a processor", "cpus": "2", "torch": "2.13.0"},
        started_rows=(("cold", "aoti"), ("aoti", "cold")),
        rows=(
            records.Row("cold", (sample(10.0, (5.0, 1.0)), sample(10.0, (7.0, 1.0)))),
            records.Row("aoti", (), error="RuntimeError: no export"),
        ),
    )


def test_tables_show_medians_ranges_and_failures() -> None:
    """Median with range, medians of calls, a failed row's reason, and the setting."""
    shown = tables.markdown(json.loads(json.dumps(startup_result().as_json())))
    assert (
        "| cold | 16.0 ms (15.0 ms – 17.0 ms) | 15.0 ms (14.0 ms – 16.0 ms) |" in shown
    )
    assert "| aoti | failed: RuntimeError: no export |" in shown
    assert "| cold | b2 | 6.00 ms | 1.00 ms | 0.0e+00 |" in shown
    assert shown.endswith(
        "small/compilekit.toml, 1 bucket, 1 thread, 2 processes per row, seed 7."
        " a processor (2 CPUs), torch 2.13.0."
    )


def test_results_name_no_path_of_the_machine(small: Callable[..., Config]) -> None:
    """Of the configuration's path only folder and file are kept."""
    config = small()
    assert records.short_path(config) == f"{config.path.parent.name}/compilekit.toml"


def test_the_module_prints_tables_and_short_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m compilekit.bench`` writes tables to stdout and errors to stderr."""
    path = tmp_path / "startup.json"
    records.write_json(path, startup_result().as_json())
    assert command.main(["tables", str(path)]) == 0
    assert capsys.readouterr().out.startswith("| row | ready | overhead |")
    missing = str(tmp_path / "none.toml")
    assert command.main(["steady", missing, "artifact"]) == ConfigError.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "none.toml" in captured.err
