"""Tests of the configuration loader: what it accepts, and every refusal."""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
import pickle
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compilekit import config as config_module
from compilekit.config import (
    FORCED_OPTIONS,
    INPUT_DTYPES,
    MODEL_DTYPES,
    MODES,
    BuildConfig,
    CompileConfig,
    Config,
    EntryConfig,
    InputConfig,
    ModelConfig,
    OutputConfig,
    check_options,
    key_lines,
    load,
)
from compilekit.errors import ConfigError

VALID = """\
[model]
source = "hf:minilm"
dtype = "float32"

[axes]
b = [1, 8]
s = [32, 64]

[entries.forward.inputs.input_ids]
shape = ["b", "s"]
dtype = "int64"
pad = 0

[entries.forward.outputs.last_hidden_state]
cut = { 1 = "s" }
"""

EVERY_KEY = """\
model.source = "hf:some/model"
model.class = "BertModel"
model.config = { num_hidden_layers = 2, text_config.eps = 1e-5, tie = true }
axes = { b = [8, 1], "s" = [32] }

[entries.encode]
method = "forward"
example = "pkg.calls:make"
kwargs = { use_cache = false, scale = 0.5, kind = "x", layers = 3 }
[entries.encode.inputs."batch['x']"]
shape = ["b", "s", 3]
dtype = "float16"
pad = -1
default = 0.5
low = -2.0
high = 2
[entries.encode.inputs."state.h[0]"]
shape = []
dtype = "bool"
default = true
[entries.encode.outputs."['y'][1]"]
cut = { 0 = "b", 1 = "s" }
[entries.encode.outputs.""]
cut = { 0 = "b" }

[compile]
mode = "reduce-overhead"
fullgraph = true
threads = 4
options.epilogue_fusion = false
options.cpp.min_chunk_size = 256
options."cpp.gemm_max_k_slices" = 2
[gates]
graph_breaks = 2
math_attention = "error"
[verify]
atol = 1e-5
rtol = 0
weights = "weights"
[build]
targets = ["cpu-x86_64-v3", "native"]
routes = ["program", "cache"]
jobs = 2
[serve]
on_uncovered = "eager"
over_length = "eager"
"""


def read(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "compilekit.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def refusal(tmp_path: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert caught.value.exit_code == 2
    return caught.value


def problems(tmp_path: Path, text: str) -> list[dict[str, Any]]:
    found = refusal(tmp_path, text).fields["problems"]
    assert isinstance(found, list)
    return found


def one_problem(tmp_path: Path, text: str) -> dict[str, Any]:
    found = problems(tmp_path, text)
    assert len(found) == 1, found
    return found[0]


def line_of(text: str, part: str) -> int:
    """The line on which `part` stands; it must stand on one only."""
    lines = [number for number, line in enumerate(text.split("\n"), 1) if part in line]
    assert len(lines) == 1, (part, lines)
    return lines[0]


def test_smallest_configuration(tmp_path: Path) -> None:
    """A configuration with what is needed gets every default."""
    config = read(tmp_path, VALID)
    assert config.path == tmp_path / "compilekit.toml"
    assert config.model == ModelConfig("hf:minilm", "float32")
    assert config.axes == {"b": (1, 8), "s": (32, 64)}
    assert config.entries == {
        "forward": EntryConfig(
            name="forward",
            method="forward",
            inputs={"input_ids": InputConfig(("b", "s"), "int64", pad=0)},
            outputs={"last_hidden_state": OutputConfig({1: "s"})},
        )
    }
    assert config.compile == CompileConfig()
    assert config.build == BuildConfig()


def test_every_key(tmp_path: Path) -> None:
    """Every key of the format is read into its field."""
    config = read(tmp_path, EVERY_KEY)
    assert config.model == ModelConfig(
        "hf:some/model",
        model_class="BertModel",
        config={"num_hidden_layers": 2, "text_config.eps": 1e-5, "tie": True},
    )
    assert config.axes == {"b": (8, 1), "s": (32,)}
    entry = config.entries["encode"]
    assert (entry.name, entry.method, entry.example) == (
        "encode",
        "forward",
        "pkg.calls:make",
    )
    assert entry.kwargs == {"use_cache": False, "scale": 0.5, "kind": "x", "layers": 3}
    assert entry.inputs == {
        'batch["x"]': InputConfig(("b", "s", 3), "float16", -1, 0.5, -2.0, 2),
        "state.h[0]": InputConfig((), "bool", default=True),
    }
    assert entry.outputs == {
        '["y"][1]': OutputConfig({0: "b", 1: "s"}),
        "": OutputConfig({0: "b"}),
    }
    assert config.compile == CompileConfig(
        "reduce-overhead",
        threads=4,
        options={
            "epilogue_fusion": False,
            "cpp.min_chunk_size": 256,
            "cpp.gemm_max_k_slices": 2,
        },
    )
    assert (config.gates.graph_breaks, config.gates.math_attention) == (2, "error")
    assert (config.verify.atol, config.verify.rtol) == (1e-5, 0.0)
    assert config.verify.weights == "weights"
    assert config.build.targets == ("cpu-x86_64-v3", "native")
    assert config.build.routes == ("program", "cache")
    assert config.build.jobs == 2
    assert (config.serve.on_uncovered, config.serve.over_length) == ("eager", "eager")


GENERATE = """\
model.source = "hf:some/model"
generate = { batch = [1, 8], prompt = [8, 16], cache = [32] }
serve = { over_length = "chunk", cuda_graphs = true }
autotune.from = "tuned.json"
freeze.weights = "model.safetensors"
"""
ODD_VALUES = (
    *(0, -1, 2**63 - 1, 1.5, math.inf, math.nan, True, "", "x", "\0", "a:b", "x" * 400),
    *([], [0], [1.5], [""], [[]], [{}], ["b", "b"], {}, {"x": 1}, {"": {"": ""}}),
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something lies in a document: keys and positions."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, part in items:
        yield (*place, key)
        yield from places(part, (*place, key))


def toml(value: Any) -> str:
    """A value as TOML writes it, tables inline."""
    if isinstance(value, dict):
        items = [f"{json.dumps(key)} = {toml(part)}" for key, part in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


@pytest.mark.parametrize("text", [EVERY_KEY, GENERATE], ids=["every", "generate"])
def test_no_value_is_a_defect(tmp_path: Path, text: str) -> None:
    """Whatever stands in any place, it's read, or refused with its line."""
    whole = tomllib.loads(text)
    found: list[dict[str, Any]] = []
    for *outer, last in places(whole):
        for odd in ODD_VALUES:
            document = copy.deepcopy(whole)
            functools.reduce(operator.getitem, outer, document)[last] = odd
            lines = [f"{key} = {toml(part)}\n" for key, part in document.items()]
            try:
                read(tmp_path, "".join(lines))
            except ConfigError as error:
                found += error.fields["problems"]
    assert len(found) > 300
    assert all(problem["line"] > 0 for problem in found)


def test_configuration_pickles(tmp_path: Path) -> None:
    """A configuration reaches a worker process unchanged."""
    config = read(tmp_path, VALID)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("form", [".", "tmp/../compilekit.toml"])
def test_path_is_absolute(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths in a file keep their meaning when the process moves."""
    (tmp_path / "compilekit.toml").write_text(VALID, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    path = Path(form) / "compilekit.toml" if form == "." else Path(form)
    assert load(path).path.is_absolute()


# --- Unknown keys ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "key", "nearest"),
    [
        ("[modle]\nx = 1", "modle", "model"),
        ("[server]\nx = 1", "server", "serve"),
        ("[compile]\nfullgrph = true", "compile.fullgrph", "fullgraph"),
        (
            "[compile]\non_uncovered = 'jit'",
            "compile.on_uncovered",
            "serve.on_uncovered",
        ),
        ("[gates]\ngraph_brakes = 1", "gates.graph_brakes", "graph_breaks"),
        ("[verify]\natoll = 1", "verify.atoll", "atol"),
        ("[build]\ntarget = ['native']", "build.target", "targets"),
        ("[serve]\nonuncovered = 'jit'", "serve.onuncovered", "on_uncovered"),
        ("[serve]\nqqq = 1", "serve.qqq", ""),
        ("[entries.forward]\nkwarg = {}", "entries.forward.kwarg", "kwargs"),
        (
            "[entries.forward.inputs.mask]\nshape=['b']\ndtype='bool'\npadd = true",
            "entries.forward.inputs.mask.padd",
            "pad",
        ),
        (
            "[entries.forward.outputs.'x[0]']\ncuts = { 0 = 'b' }\ncut = { 0 = 'b' }",
            'entries.forward.outputs."x[0]".cuts',
            "cut",
        ),
    ],
)
def test_unknown_key(tmp_path: Path, extra: str, key: str, nearest: str) -> None:
    """A key that doesn't exist is refused at any level, with line and right name."""
    text = f"{VALID}\n{extra}\n"
    problem = one_problem(tmp_path, text)
    assert problem["key"] == key
    assert "unknown key" in problem["message"]
    assert problem["nearest"] == nearest
    last = key.rsplit(".", 1)[-1]
    assert problem["line"] == line_of(text, f"{last} = " if "." in key else f"[{last}]")


def test_all_problems_at_once(tmp_path: Path) -> None:
    """One error carries every problem of a file, in the order of the lines."""
    text = VALID.replace('dtype = "float32"', 'dtpye = "float32"').replace(
        "pad = 0", "pad = 0.5"
    )
    text += "[serve]\non_uncovered = 'jot'\n"
    error = refusal(tmp_path, text)
    assert [(p["line"], p["key"]) for p in error.fields["problems"]] == [
        (3, "model.dtpye"),
        (12, "entries.forward.inputs.input_ids.pad"),
        (17, "serve.on_uncovered"),
    ]
    path = tmp_path / "compilekit.toml"
    assert error.message.splitlines() == [
        f"{path}: 3 problems",
        "  line 3: model.dtpye: unknown key; [model] takes source, dtype, class,"
        " config; did you mean dtype?",
        "  line 12: entries.forward.inputs.input_ids.pad: expected an integer (int64),"
        " found 0.5",
        '  line 17: serve.on_uncovered: expected one of error, eager, jit, found "jot";'
        " did you mean jit?",
    ]
    assert pickle.loads(pickle.dumps(error)).fields == error.fields


# --- Values ---------------------------------------------------------------------------

INPUT = "[entries.forward.inputs.x]\n"
OUTPUT = "[entries.forward.outputs.y]\n"


@pytest.mark.parametrize(
    ("extra", "key", "message"),
    [
        ("[compile]\nthreads = -1", "compile.threads", "an integer from 0, found -1"),
        ("[compile]\nthreads = true", "compile.threads", "found true"),
        ("[compile]\nthreads = 1.0", "compile.threads", "found 1.0"),
        ("[compile]\nfullgraph = 1", "compile.fullgraph", "expected true or false"),
        ("[compile]\nfullgraph = false", "compile.fullgraph", "one whole graph"),
        ("[compile]\nmode = 3", "compile.mode", "expected a string, found 3"),
        ("[compile]\noptions = 1", "compile.options", "expected a table, found 1"),
        ("[gates]\ngraph_breaks = '0'", "gates.graph_breaks", 'found "0"'),
        ("[verify]\natol = -1", "verify.atol", "from 0, found -1"),
        ("[verify]\nrtol = nan", "verify.rtol", "found nan"),
        ("[verify]\nrtol = inf", "verify.rtol", "found inf"),
        ("[verify]\nweights = []", "verify.weights", "found an array"),
        ("[build]\ntargets = []", "build.targets", "non-empty array"),
        ("[compile]\nmode = 'max-autotune'", "compile.mode", "measures kernels"),
        ("[build]\ntargets = 'native'", "build.targets", 'found "native"'),
        ("[build]\ntargets = ['native', 1]", "build.targets[1]", "found 1"),
        ("[build]\nroutes = ['program', 'program']", "build.routes[1]", "twice"),
        ("[build]\njobs = 1979-05-27", "build.jobs", "found a date or time"),
        ("[build]\njobs = {}", "build.jobs", "found a table"),
        ("[entries]\n'a-b'.inputs = {}", "entries.a-b", "letters, digits"),
        ("[entries.forward]\nmethod = 'a.b'", "entries.forward.method", 'found "a.b"'),
        ("[entries.forward]\nexample = 'f'", "entries.forward.example", ":function"),
        ("[entries.g]", "entries.g.inputs", "missing"),
        (
            "[entries.forward]\nkwargs = { a = [1] }",
            "entries.forward.kwargs.a",
            "found an array",
        ),
        (
            "[entries.forward]\nkwargs = { a = inf }",
            "entries.forward.kwargs.a",
            "found inf",
        ),
        (
            "[entries.forward]\nkwargs = { 'a-b' = 1 }",
            "entries.forward.kwargs.a-b",
            "name of a keyword",
        ),
        (
            "[entries.forward]\nkwargs = { input_ids = 1 }",
            "entries.forward.kwargs.input_ids",
            "also an input",
        ),
        (INPUT + "dtype = 'bool'", "entries.forward.inputs.x.shape", "missing"),
        (INPUT + "shape = ['b']", "entries.forward.inputs.x.dtype", "missing"),
        (
            INPUT + "shape = 'b'\ndtype = 'bool'",
            "entries.forward.inputs.x.shape",
            'found "b"',
        ),
        (
            INPUT + "shape = ['b', 't']\ndtype = 'bool'",
            "entries.forward.inputs.x.shape[1]",
            'axis "t" isn\'t declared; [axes] has b, s',
        ),
        (
            INPUT + "shape = ['b', 0]\ndtype = 'bool'",
            "entries.forward.inputs.x.shape[1]",
            "size from 1, found 0",
        ),
        (
            INPUT + "shape = [[1]]\ndtype = 'bool'",
            "entries.forward.inputs.x.shape[0]",
            "found an array",
        ),
        (
            INPUT + "shape = ['b']\ndtype = 'bool'\npad = 0",
            "entries.forward.inputs.x.pad",
            "true or false (bool), found 0",
        ),
        (
            INPUT + "shape = ['b']\ndtype = 'uint8'\npad = 256",
            "entries.forward.inputs.x.pad",
            "expected 0 to 255 (uint8), found 256",
        ),
        (
            INPUT + "shape = ['b']\ndtype = 'int8'\ndefault = -129",
            "entries.forward.inputs.x.default",
            "found -129",
        ),
        (
            INPUT + "shape = ['b']\ndtype = 'float32'\npad = -inf",
            "entries.forward.inputs.x.pad",
            "found -inf",
        ),
        (
            INPUT + "shape = ['b']\ndtype = 'float16'\npad = 1e5",
            "entries.forward.inputs.x.pad",
            "found 100000.0",
        ),
        (
            INPUT + "shape = ['b']\ndtype = 'float16'\ndefault = true",
            "entries.forward.inputs.x.default",
            "a number (float16), found true",
        ),
        (
            INPUT + "shape = [3]\ndtype = 'int64'\npad = 0",
            "entries.forward.inputs.x.pad",
            "nothing is ever padded",
        ),
        (
            INPUT + "shape = [3]\ndtype = 'int64'\nlow = 5\nhigh = 5",
            "entries.forward.inputs.x.high",
            "more than low (5)",
        ),
        (
            INPUT + "shape = [3]\ndtype = 'int64'\nlow = 2",
            "entries.forward.inputs.x.low",
            "give high",
        ),
        (
            INPUT + "shape = [3]\ndtype = 'bool'\nhigh = true",
            "entries.forward.inputs.x.high",
            "no sample range",
        ),
        (OUTPUT, "entries.forward.outputs.y.cut", "missing"),
        (
            "[compile]\nattention = ['math']\n[build]\nroutes = ['program', 'cache']",
            "compile.attention",
            "for programs; with torch.compile the process",
        ),
        ("[compile]\nattention = []", "compile.attention", "non-empty"),
        (
            OUTPUT + "cut = { -1 = 's' }",
            "entries.forward.outputs.y.cut.-1",
            'dimension from 0, found "-1"',
        ),
        (
            OUTPUT + "cut = { 0 = 's', 1 = 2 }",
            "entries.forward.outputs.y.cut.1",
            "axis name, found 2",
        ),
        (
            OUTPUT + "cut = { 0 = 't' }",
            "entries.forward.outputs.y.cut.0",
            'axis "t"; they use b, s',
        ),
    ],
)
def test_bad_value(tmp_path: Path, extra: str, key: str, message: str) -> None:
    """A value of the wrong type or range is refused with its line, alone."""
    text = f"{VALID}\n{extra}\n"
    problem = one_problem(tmp_path, text)
    assert problem["key"] == key
    assert message in problem["message"]
    name = key.rsplit(".", 1)[-1].partition("[")[0]
    lines = text.splitlines()
    if problem["message"].startswith("missing"):
        assert lines[problem["line"] - 1].startswith("[")
    else:
        assert name in lines[problem["line"] - 1]


@pytest.mark.parametrize(
    ("extra", "key", "nearest"),
    [
        ("[compile]\nmode = 'max-autotun'", "compile.mode", "max-autotune"),
        ("[gates]\nmath_attention = 'warning'", "gates.math_attention", "warn"),
        ("[compile]\nattention = ['flesh']", "compile.attention[0]", "flash"),
        ("[build]\ntargets = ['cpu-x86-64-v3']", "build.targets[0]", "cpu-x86_64-v3"),
        ("[build]\nroutes = ['programs']", "build.routes[0]", "program"),
        ("[serve]\nover_length = 'eagre'", "serve.over_length", "eager"),
        (
            "[entries.forward.inputs.x]\nshape = ['b']\ndtype = 'torch.int64'",
            "entries.forward.inputs.x.dtype",
            "int64",
        ),
        (
            "[entries.forward.inputs.x]\nshape = ['b']\ndtype = 'long'",
            "entries.forward.inputs.x.dtype",
            "int64",
        ),
        (
            "[entries.forward.inputs.x]\nshape = ['b']\ndtype = 'flaot32'",
            "entries.forward.inputs.x.dtype",
            "float32",
        ),
    ],
)
def test_nearest_value(tmp_path: Path, extra: str, key: str, nearest: str) -> None:
    """A misspelt choice is refused with the nearest right one."""
    problem = one_problem(tmp_path, f"{VALID}\n{extra}\n")
    assert (problem["key"], problem["nearest"]) == (key, nearest)


@pytest.mark.parametrize(
    ("model", "key", "message", "nearest"),
    [
        ("dtype = 'float32'", "model.source", "missing", ""),
        ("source = 1", "model.source", "expected a string", ""),
        ("source = ''", "model.source", 'found ""', ""),
        ("source = 'hf:'", "model.source", 'found "hf:"', ""),
        ("source = 'bert-base'", "model.source", "expected", "hf:bert-base"),
        ("source = 'a/b:c'", "model.source", "expected", ""),
        ("source = 'hf:x'\ndtype = 'int8'", "model.dtype", "expected one of", ""),
        ("source = 'hf:x'\ndtype = 'bf16'", "model.dtype", "expected", "bfloat16"),
        ("source = 'hf:x'\nclass = 'a.B'", "model.class", "class name", ""),
        ("source = 'm:f'\nclass = 'B'", "model.class", "factory decide", ""),
        ("source = 'm:f'\nconfig = {}", "model.config", "factory decide", ""),
        ("source = 'hf:x'\nconfig.a.b = []", "model.config.a.b", "found an array", ""),
    ],
)
def test_model(
    tmp_path: Path, model: str, key: str, message: str, nearest: str
) -> None:
    """Each rule on [model] has its refusal."""
    text = VALID.replace('source = "hf:minilm"\ndtype = "float32"', model)
    problem = one_problem(tmp_path, text)
    assert problem["key"] == key
    assert message in problem["message"]
    assert problem["nearest"] == nearest


@pytest.mark.parametrize(
    ("axes", "key", "message"),
    [
        ("b = [1]\ns = 32", "axes.s", "non-empty array of sizes, found 32"),
        ("b = [1]\ns = []", "axes.s", "array of sizes, found an empty one"),
        ("b = [1]\ns = [32, 0]", "axes.s[1]", "integer from 1, found 0"),
        ("b = [1]\ns = [32, 64.0]", "axes.s[1]", "found 64.0"),
        ("b = [1]\ns = [32, 64, 32]", "axes.s[2]", "size 32 is listed twice"),
        ("b = [1]\ns = [32]\nslots = [4]", "axes.slots", 'begins with "s" like axis s'),
        ("b = [1]\ns = [32]\nT = [4]", "axes.T", "lower-case letter"),
        ("b = [1]\ns = [32]\nt = [4]", "axes.t", "no input uses this axis"),
    ],
)
def test_axes(tmp_path: Path, axes: str, key: str, message: str) -> None:
    """Axes whose buckets would be empty, equal or share a name are refused."""
    text = VALID.replace("b = [1, 8]\ns = [32, 64]", axes)
    found = problems(tmp_path, text)
    assert (found[0]["key"], message in found[0]["message"]) == (key, True), found
    name = key.removeprefix("axes.").partition("[")[0]
    assert text.splitlines()[found[0]["line"] - 1].startswith(f"{name} =")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["x y"], "argument path"),
        (["0"], "argument path"),
        (["x[a]"], "argument path"),
        (["x[-1]"], "argument path"),
        (["x."], "argument path"),
        (["batch['x']", 'batch["x"]'], 'overlaps batch["x"]'),
        (["batch", "batch['x']"], "overlaps batch"),
        (["state.h"], "an attribute can't be made"),
    ],
)
def test_input_paths(tmp_path: Path, paths: list[str], message: str) -> None:
    """Malformed, overlapping and unmakeable input paths are refused."""
    text = VALID
    for path in paths:
        quoted = f"'''{path}'''" if "'" in path else f"'{path}'"
        key = tomllib.loads(f"k = {quoted}")["k"].replace('"', '\\"')
        text += f'[entries.forward.inputs."{key}"]\nshape = ["b"]\ndtype = "bool"\n'
    found = problems(tmp_path, text)
    assert message in found[-1]["message"]
    assert found[-1]["key"].startswith("entries.forward.inputs.")


@pytest.mark.parametrize("path", ["a b", "[x]", "y[", ".y"])
def test_output_paths(tmp_path: Path, path: str) -> None:
    """A malformed output path is refused."""
    text = f"{VALID}[entries.forward.outputs.'{path}']\ncut = {{ 0 = 'b' }}\n"
    assert "output path" in one_problem(tmp_path, text)["message"]


def test_same_output_twice(tmp_path: Path) -> None:
    """One output can't be given under two spellings of its path."""
    text = VALID
    for path in ("\"y['a']\"", "'y[\"a\"]'"):
        text += f"[entries.forward.outputs.{path}]\ncut = {{ 0 = 'b' }}\n"
    assert 'the same output as y["a"]' in one_problem(tmp_path, text)["message"]


def test_missing_tables(tmp_path: Path) -> None:
    """An empty file says what it lacks."""
    found = problems(tmp_path, "")
    assert {p["key"] for p in found} == {"model.source", "entries"}
    assert {p["line"] for p in found} == {1}


@pytest.mark.parametrize("table", ["model", "axes", "entries", "compile", "build"])
def test_not_a_table(tmp_path: Path, table: str) -> None:
    """A value or an array of tables where a table belongs is refused."""
    assert any(
        p["key"] == table and "expected a table, found 1" in p["message"]
        for p in problems(tmp_path, f"{table} = 1\n")
    )
    assert any(
        p["key"] == table and "expected a table, found an array" in p["message"]
        for p in problems(tmp_path, f"\n[[{table}]]\nx = 1\n[[{table}]]\n")
    )


# --- Inductor options -----------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORCED_OPTIONS))
def test_forced_option(tmp_path: Path, name: str) -> None:
    """An option that the program route sets itself is refused with the reason."""
    text = f"{VALID}\n[compile.options]\n{name} = 1\n"
    problem = one_problem(tmp_path, text)
    assert problem["key"] == f"compile.options.{name}"
    assert problem["message"].endswith(FORCED_OPTIONS[name])
    assert problem["line"] == line_of(text, f"{name} = 1")


def test_cache_route_keeps_options(tmp_path: Path) -> None:
    """The cache route takes the options that the program route would refuse."""
    text = f"{VALID}\n[compile]\noptions.'triton.cudagraphs' = true\n"
    config = read(tmp_path, text + "[build]\nroutes = ['cache']\n")
    assert config.compile.options == {"triton.cudagraphs": True}


def test_option_given_twice(tmp_path: Path) -> None:
    """Nested and quoted spellings of one option can't both be there."""
    text = f"{VALID}\n[compile.options]\na.b = 1\n'a.b' = 2\n"
    problem = one_problem(tmp_path, text)
    assert problem["message"] == "a.b is given twice"
    assert problem["line"] == line_of(text, "'a.b'")


KNOWN = {"max_autotune": bool, "cpp.cxx": object, "epilogue": float, "a.b": int}


def test_check_options(tmp_path: Path) -> None:
    """Option names and types that torch doesn't know are refused, all at once."""
    text = (
        f"{VALID}\n[compile]\nmode = 'default'\n[compile.options]\nmax_autotun = true\n"
        "epilogue = true\na.b = 'x'\n'a.c' = 1\ncpp.cxx = ['g++']\n"
    )
    config = read(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        check_options(config, KNOWN)
    found = caught.value.fields["problems"]
    assert [(p["line"], p["key"], p["nearest"]) for p in found] == [
        (line_of(text, "max_autotun ="), "compile.options.max_autotun", "max_autotune"),
        (line_of(text, "epilogue ="), "compile.options.epilogue", ""),
        (line_of(text, "a.b ="), "compile.options.a.b", ""),
        (line_of(text, "'a.c'"), 'compile.options."a.c"', "a.b"),
    ]
    assert found[1]["message"] == "expected float, found true"
    assert found[2]["message"] == 'expected int, found "x"'


def test_check_options_accepts(tmp_path: Path) -> None:
    """Right names and types pass; an integer may stand for a float."""
    text = f"{VALID}\n[compile.options]\nmax_autotune = true\nepilogue = 1\na.b = 2\n"
    check_options(read(tmp_path, text), KNOWN)


def test_check_options_without_file() -> None:
    """A configuration made in Python has no lines, and is still checked."""
    config = Config(
        path=Path("nowhere/compilekit.toml"),
        model=ModelConfig("m:f"),
        axes={},
        entries={},
        compile=CompileConfig(options={"max_autotun": True}),
    )
    with pytest.raises(ConfigError, match="did you mean max_autotune"):
        check_options(config, KNOWN)


# --- Syntax and reading ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[model]\nsource = \n", 2),
        ("[model]\nsource = 'x'\nsource = 'y'\n", 3),
        ("[model]\n[model]\n", 2),
        ("x = [1,\n2\n\n", 2),
        ("a = 'unclosed\n", 1),
    ],
)
def test_syntax_error(tmp_path: Path, text: str, line: int) -> None:
    """A file that isn't TOML is refused with the line."""
    problem = one_problem(tmp_path, text)
    assert problem["line"] == line
    assert problem["message"].startswith("not TOML: ")
    assert "at line" not in problem["message"]


def test_not_utf8(tmp_path: Path) -> None:
    """A file in another encoding is refused with the line of the first bad byte."""
    path = tmp_path / "compilekit.toml"
    path.write_bytes(b"[model]\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"line 2: not UTF-8"):
        load(path)


def test_missing_file(tmp_path: Path) -> None:
    """A missing file is refused with the command that writes one."""
    with pytest.raises(ConfigError, match="can't be read") as caught:
        load(tmp_path / "compilekit.toml")
    assert "compilekit init" in caught.value.hint


def test_directory(tmp_path: Path) -> None:
    """A directory in place of the file is refused."""
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path)


# --- Lines ----------------------------------------------------------------------------


def test_key_lines() -> None:
    """Lines are right through every construct of TOML that can hide a line end."""
    text = '''\
# [not.a.table]
top = 1
"quoted key" = "a # no comment = 1" # comment
'lite.ral' = 'C:\\'
a . b."c.d" = { x = 1, y.z = [ {q = 1}, {q = 2} ] }

[ table . "x y" ]  # comment
text = """
key = 1
[fake]
\\"""quotes\\\\"""
after = \'\'\'
fake = 2\'\'\'
five = """""a"""""
none = ""
empty = """"""
items = [
  1, # one
  # two
  "]", [3,
    4],
  1979-05-27 07:32:00,
]
date = 1979-05-27T00:32:00.999999-07:00
"\\u00e9\\"" = inf
last = { }
[[array.of]]
k = 1
[[array.of]]
k = 2
'''
    tomllib.loads(text)
    lines = key_lines(text)
    rows = text.split("\n")

    def expect(path: tuple[str | int, ...], part: str) -> None:
        assert part in rows[lines[path] - 1], (path, lines[path])

    assert lines[("top",)] == 2
    expect(("quoted key",), "quoted key")
    expect(("lite.ral",), "lite.ral")
    for path in [("a",), ("a", "b"), ("a", "b", "c.d"), ("a", "b", "c.d", "y", "z")]:
        assert lines[path] == 5
    assert lines[("a", "b", "c.d", "y", "z", 1, "q")] == 5
    assert lines[("table",)] == lines[("table", "x y")] == 7
    table = ("table", "x y")
    expect((*table, "text"), "text = ")
    expect((*table, "after"), "after = ")
    expect((*table, "five"), "five = ")
    expect((*table, "none"), "none = ")
    expect((*table, "empty"), "empty = ")
    expect((*table, "items"), "items = ")
    expect((*table, "items", 0), "# one")
    expect((*table, "items", 1), '"]"')
    expect((*table, "items", 2), "[3,")
    expect((*table, "items", 2, 1), "4],")
    expect((*table, "items", 3), "07:32:00,")
    expect((*table, "date"), "date = ")
    expect((*table, 'é"'), "u00e9")
    expect((*table, "last"), "last = ")
    expect(("array", "of", "k"), "k = 1")
    assert ("table", "x y", "key") not in lines
    assert not any("fake" in path for path in lines)


def test_key_lines_finds_every_key() -> None:
    """No key that tomllib reads is without a line, with either kind of line end."""
    for text in (VALID, VALID.replace("\n", "\r\n")):
        lines = key_lines(text)

        def walk(value: Any, path: tuple[str | int, ...], lines: Any = lines) -> None:
            if path:
                assert path in lines
            if isinstance(value, dict):
                for name, item in value.items():
                    walk(item, (*path, name))
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    walk(item, (*path, index))

        walk(tomllib.loads(text), ())
        assert (
            lines[("entries", "forward", "outputs", "last_hidden_state", "cut")] == 15
        )


# --- Speed and independence -----------------------------------------------------------


def test_load_is_fast(tmp_path: Path) -> None:
    """Reading a configuration takes less than 10 ms."""
    read(tmp_path, VALID)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        load(tmp_path / "compilekit.toml")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010


def test_standard_library_only(tmp_path: Path) -> None:
    """Loading, refusing and planning import nothing outside the standard library."""
    (tmp_path / "compilekit.toml").write_text(VALID, encoding="utf-8")
    (tmp_path / "bad.toml").write_text("[modle]\n", encoding="utf-8")
    program = """
import sys
from pathlib import Path
from compilekit import buckets, config, init, plan, targets
from compilekit.errors import ConfigError
plan.buckets(config.load(Path(sys.argv[1], "compilekit.toml")), "forward")
init.render("package.module:factory")
try:
    config.load(Path(sys.argv[1], "bad.toml"))
except ConfigError:
    pass
tops = {name.partition(".")[0] for name in sys.modules}
print(sorted(tops - sys.stdlib_module_names - {"compilekit", "__main__"}))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(config_module.__file__).parents[2])},
    )
    assert done.stdout.strip() == "[]"


def test_dtypes_are_torch_dtypes() -> None:
    """Every allowed dtype exists in torch, with the range the loader checks."""
    import torch

    for name in INPUT_DTYPES:
        dtype = getattr(torch, name)
        low, high = config_module.RANGES[name]
        if dtype is torch.bool:
            continue
        info = (
            torch.finfo(dtype)
            if dtype.is_floating_point or dtype.is_complex
            else torch.iinfo(dtype)
        )
        assert (low, high) == (info.min, info.max), name
    assert all(getattr(torch, name).is_floating_point for name in MODEL_DTYPES)


def test_modes_are_torch_modes() -> None:
    """The modes are torch's, apart from lite, which turns fusion off."""
    from torch._inductor import list_mode_options

    assert set(MODES) == set(list_mode_options()) - {"lite"}
