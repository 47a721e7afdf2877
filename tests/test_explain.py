"""Graph breaks: `compilekit.compiler.explain` and `compilekit._torch.breaks`."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import convert_frame
from torch._dynamo.symbolic_convert import InstructionTranslator

from compilekit.compiler import explain
from compilekit.compiler.explained import BucketExplained, ExplainResult
from compilekit.config import (
    CompileConfig,
    Config,
    EntryConfig,
    GatesConfig,
    InputConfig,
    ModelConfig,
)
from compilekit.events import BuildEvent
from compilekit.results import to_json

MODULES = Path(__file__).parent / "modules"
SOURCE = MODULES / "breaking_models.py"

# What a model does (a warning, for one) must not end the test.
pytestmark = pytest.mark.filterwarnings("ignore")


def config(name: str, method: str = "forward", **parts: Any) -> Config:
    """A configuration for one of the classes in breaking_models.py."""
    entry = EntryConfig("main", method, {"x": InputConfig(("b", 8), "float32")})
    return Config(
        MODULES / "compilekit.toml",
        ModelConfig(f"breaking_models:{name}"),
        {"b": (4, 5)},
        {"main": entry},
        **parts,
    )


@functools.cache
def run(name: str, **options: Any) -> BucketExplained:
    """Explain the first bucket of a class in breaking_models.py, once."""
    return explain.explain(config(name), **options).buckets[0]


def found(bucket: BucketExplained) -> dict[int, str]:
    """Line → what the file's own comments say about a break there."""
    marks: dict[int, str] = {}
    for one in bucket.breaks:
        hidden = " hidden" if one.hidden else ""
        captured = "" if one.full_graph else " captured"
        assert Path(one.file) == SOURCE
        assert one.line not in marks
        marks[one.line] = f"{one.kind}{hidden}{captured}"
    return marks


def expected(*names: str) -> dict[int, str]:
    """Line → comment, for the source of some classes."""
    sys.path.insert(0, str(MODULES))
    try:
        import breaking_models
    finally:
        sys.path.remove(str(MODULES))
    marks = {}
    for name in names:
        lines, first = inspect.getsourcelines(getattr(breaking_models, name))
        for number, line in enumerate(lines, first):
            if "# break: " in line:
                marks[number] = line.partition("# break: ")[2].strip()
    assert marks
    return marks


def test_a_clean_model_is_one_graph() -> None:
    """Without a break there is one graph with every operation, and the gate passes."""
    result = explain.explain(config("Clean"))
    (bucket,) = result.buckets
    assert result.passed
    assert bucket.passed
    assert (bucket.entry, bucket.bucket) == ("main", "b4")
    assert [(graph.ops, graph.calls) for graph in bucket.graphs] == [(4, 1)]
    assert bucket.ops == 4
    assert (bucket.breaks, bucket.eager, bucket.notes) == ((), (), ())
    assert bucket.stopped is None


@pytest.mark.parametrize(
    "name",
    [
        "Printing",
        "Logging",
        "Warning_",
        "Branch",
        "Loop",
        "Item",
        "Conversion",
        "ToList",
        "Recurrent",
        "Nonzero",
        "Mask",
        "Extension",
        "Clock",
        "TryExcept",
        "CustomAutograd",
        "Disabled",
        "Explicit",
        "File",
        "Two",
        "Endless",
        "Numbers",
        "Failing",
    ],
)
def test_every_break_is_found(name: str) -> None:
    """File, line and kind of every break are those that the source's comments say."""
    assert found(run(name)) == expected(name)


@pytest.mark.parametrize("name", ["Clean", "Guarded"])
def test_what_is_captured_is_no_break(name: str) -> None:
    """An exception caught where it is raised is captured like any other code."""
    assert run(name).breaks == ()


def test_breaks_behind_a_break_are_found() -> None:
    """A break in a loop over layers doesn't hide the ones after it."""
    bucket = run("Nested")
    assert found(bucket) == expected("Nested", "Inner")
    inner = next(one for one in bucket.breaks if one.kind == "print")
    assert inner.effect == "function_eager"
    assert [place.source for place in inner.stack] == [
        "x = layer(x)",
        'print("inner")  # break: print',
    ]
    assert [one.function for one in inner.stack] == ["forward", "forward"]
    assert "can't be resumed inside a loop" in inner.consequence
    assert [(one.function, one.extent) for one in bucket.eager] == [("forward", "all")]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Branch", ("torch.where", "torch.cond")),
        ("Printing", ("Remove", "torch.compiler.disable", "is_compiling")),
        ("Logging", ("Remove", "torch.compiler.disable", "ignore_logging_functions")),
        ("Item", ("torch._check",)),
        ("Nonzero", ("torch._check", "torch.where")),
        ("Clock", ("torch.compiler.allow_in_graph", "custom_op")),
        ("Disabled", ("Remove the mark",)),
        ("Explicit", ("graph_break()",)),
        ("CustomAutograd", ("is_grad_enabled", "custom_op")),
    ],
)
def test_the_fix_follows_the_kind(name: str, advice: tuple[str, ...]) -> None:
    """Each kind of break comes with what to try, and with Dynamo's own words."""
    for one in run(name).breaks:
        assert all(part in one.fix for part in advice)
        assert one.source == SOURCE.read_text().splitlines()[one.line - 1].strip()
        assert one.dynamo.type
        assert one.dynamo.explanation
        assert one.dynamo.link.startswith("https://")


@pytest.mark.parametrize(
    "name",
    [
        "FixedPrint",
        "FixedBranch",
        "FixedCond",
        "FixedSize",
        "FixedExtension",
        "FixedAutograd",
    ],
)
def test_the_advice_works(name: str) -> None:
    """A model changed as the report advises is one graph, and runs to its end."""
    bucket = run(name)
    assert (len(bucket.graphs), bucket.breaks, bucket.stopped) == (1, (), None)


def test_reasons_name_the_thing() -> None:
    """A reason names the function, the method or the operation that it is about."""
    reasons = {
        name: run(name).breaks[0].reason for name in ("Clock", "Item", "Conversion")
    }
    assert reasons["Clock"].startswith("time.time is compiled code")
    assert reasons["Item"].startswith("`.item()` reads")
    assert reasons["Conversion"].startswith("`float` reads")
    assert "`nonzero`" in run("Nonzero").breaks[0].reason


def test_try_names_the_block() -> None:
    """A break inside try makes the whole function eager, and the block is named."""
    bucket = run("TryExcept")
    assert bucket.graphs == ()
    assert "inside a try block (line " in bucket.breaks[0].consequence
    assert bucket.eager[0].extent == "all"


def test_a_function_compiled_too_often_is_reported() -> None:
    """A function beyond the recompile limit is listed as eager, with the reason."""
    bucket = run("Steps")
    assert set(found(bucket).values()) == {"print"}
    assert any("more cases than Dynamo keeps" in one.reason for one in bucket.eager)


def test_the_gate_counts_what_the_build_would_meet() -> None:
    """A full-graph build captures .item(), a plain one doesn't; the gate knows."""
    whole = explain.explain(config("Item"))
    parts = explain.explain(config("Item", compile=CompileConfig(fullgraph=False)))
    assert (whole.passed, whole.buckets[0].counted) == (True, 0)
    assert (parts.passed, parts.buckets[0].counted) == (False, 1)


@pytest.mark.parametrize(("allowed", "passed"), [(1, False), (2, True)])
def test_the_gate_allows_so_many(allowed: int, passed: bool) -> None:
    """[gates] graph_breaks is the number of breaks that still pass."""
    gates = GatesConfig(graph_breaks=allowed)
    assert explain.explain(config("Two", gates=gates)).passed is passed


def test_an_analysis_that_stopped_says_so_and_fails() -> None:
    """A call that raises never passes: breaks behind that line weren't looked for."""
    result = explain.explain(config("Failing", gates=GatesConfig(graph_breaks=9)))
    stopped = result.buckets[0].stopped
    assert stopped is not None
    assert stopped.error == "RuntimeError: broken model"
    assert stopped.place is not None
    assert stopped.place.source == 'raise RuntimeError("broken model")'
    assert not result.passed


def test_code_that_needs_values_gets_random_ones() -> None:
    """Where fake tensors stop, a small model goes on with random weights, if it may."""
    bucket = run("Numbers")
    assert bucket.values == "random"
    assert bucket.stopped is None
    fake = run("Numbers", values="fake")
    assert fake.values == "fake"
    assert fake.stopped is not None
    assert fake.stopped.place is not None
    assert "numpy" in fake.stopped.place.source
    assert "no values" in fake.stopped.hint


def test_random_values_find_the_same_breaks() -> None:
    """Real tensors and fake ones agree on the breaks."""
    bucket = run("Two", values="random")
    assert found(bucket) == expected("Two")
    assert bucket.values == "random"


def test_a_large_model_is_never_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the size that is worth allocating the analysis stays fake and says so."""
    monkeypatch.setattr(explain, "_SMALL_BYTES", 16)
    (bucket,) = explain.explain(config("Numbers")).buckets
    assert bucket.values == "fake"
    assert bucket.stopped is not None


def test_weights_of_any_size_are_fine() -> None:
    """A model of 1 TB is explained in no memory."""
    bucket = run("Huge")
    assert bucket.values == "fake"
    assert [graph.ops for graph in bucket.graphs] == [2, 1]
    assert found(bucket) == expected("Huge")


def test_an_entry_may_be_any_method() -> None:
    """The entry's method is analysed, not forward."""
    bucket = explain.explain(config("Methods", "encode")).buckets[0]
    assert set(found(bucket).values()) == {"print"}


def test_every_bucket_on_request() -> None:
    """By default one bucket of each entry is analysed, on request all; with events."""
    events: list[BuildEvent] = []
    result = explain.explain(config("Clean"), every_bucket=True, on_event=events.append)
    assert [bucket.bucket for bucket in result.buckets] == ["b4", "b5"]
    assert [(e.kind, e.bucket, e.index, e.count) for e in events] == [
        ("started", "b4", 1, 2),
        ("stage", "b4", 1, 2),
        ("started", "b5", 2, 2),
        ("stage", "b5", 2, 2),
    ]


def test_the_result_is_json() -> None:
    """The whole result can be written as JSON."""
    result = explain.explain(config("Nested"))
    assert isinstance(result, ExplainResult)
    data = json.loads(json.dumps(to_json(result)))
    assert data["torch"] == torch.__version__
    assert data["buckets"][0]["breaks"][0]["stack"][0]["line"] > 0


def test_nothing_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """The model's prints stay out of stdout, and Dynamo is as it was before."""
    table = InstructionTranslator.dispatch_table
    format_error_msg = vars(convert_frame)["format_error_msg"]
    log_graph_break = InstructionTranslator.log_graph_break
    scalars = torch._dynamo.config.capture_scalar_outputs
    explain.explain(config("Nested"))
    assert capsys.readouterr().out == ""
    assert InstructionTranslator.dispatch_table is table
    assert vars(convert_frame)["format_error_msg"] is format_error_msg
    assert InstructionTranslator.log_graph_break is log_graph_break
    assert torch._dynamo.config.capture_scalar_outputs is scalars
    assert logging.root.manager.disable == logging.NOTSET
