"""Twelve architectures with random weights: built, loaded in a fresh process, verified.

Each is a configuration in tests/architectures; ``build`` ends with ``verify``, which
replays a bucket in a process of its own at 1, N and 4N threads, padded where the rules
allow it, and compares output, arguments, parameters and buffers with eager's.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import compilekit
from compilekit import config as configuration
from compilekit.artifact import Artifact, open_artifact
from compilekit.compiler.build import build
from compilekit.results import BuildResult

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "architectures"

pytestmark = [
    pytest.mark.slow,
    # What torch warns of while it compiles isn't ours.
    pytest.mark.filterwarnings("ignore"),
]

ARCHITECTURES = {
    **{path.parent.name: path for path in sorted(FOLDER.glob("*/compilekit.toml"))},
    **{
        name: FOLDER / f"{name}.toml"
        for name in ("mutated_buffers", "tied_weights", "nested_arguments", "views")
    },
}
CONFIGURATIONS = {**ARCHITECTURES, "carried": FOLDER / "carried.toml"}
CARRIED = configuration.load(CONFIGURATIONS["carried"]).entries

Results = Mapping[str, "Future[BuildResult]"]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """Name → its build, for the tests that run; two at once keep two cores busy."""
    folder = tmp_path_factory.mktemp("architectures")
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
    }

    def run(name: str, path: Path) -> BuildResult:
        return build(configuration.load(path), folder / name, jobs=1)

    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        yield {
            name: pool.submit(run, name, path)
            for name, path in CONFIGURATIONS.items()
            if name in wanted
        }


def opened(results: Results, name: str) -> Artifact:
    """The artifact of a build that went well."""
    result = results[name].result()
    problems = [f"{b.entry}: {b.error}" for b in result.buckets if b.error]
    assert result.exit_code == 0, problems
    assert result.artifact is not None
    return open_artifact(result.artifact)


def record(artifact: Artifact) -> list[dict[str, Any]]:
    """What verify wrote beside the artifact."""
    text = artifact.root.with_name(f"{artifact.root.name}.verified.json").read_text()
    (target,) = json.loads(text)["targets"].values()
    buckets: list[dict[str, Any]] = target["buckets"]
    return buckets


def test_there_are_twelve() -> None:
    """The list is the one that the README and the issue speak of."""
    assert sorted(ARCHITECTURES) == [
        "bert",
        "gpt2",
        "llama",
        "mutated_buffers",
        "nested_arguments",
        "qwen2",
        "resnet",
        "t5",
        "tied_weights",
        "views",
        "vit",
        "whisper",
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_carried(name: str, results: Results) -> None:
    """It equals eager at 1, N and 4N threads; nothing compiles, nothing is spawned."""
    artifact = opened(results, name)
    rows = record(artifact)
    cpus = os.cpu_count() or 1
    threads = sorted({1, cpus, 4 * cpus})
    assert [row["threads"] for row in rows] == threads * len(artifact.entries)
    for row in rows:
        assert row["passed"], row["message"]
        assert (row["compiles"], row["spawned"]) == (0, 0)
        assert float(row["max_abs_error"]) <= 1e-5


@pytest.mark.parametrize("name", ["bert"])
def test_a_model_that_collected_outputs_is_attached(
    name: str, results: Results
) -> None:
    """The hooks that transformers leaves on a model once it gave hidden states."""
    import transformers

    artifact = opened(results, name)
    config = transformers.BertConfig.from_pretrained(FOLDER / name)
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, 97, (2, 16))
    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True)
        receipt = compilekit.attach(model, artifact, entry="hidden_states")
        found = model(ids, output_hidden_states=True)
    receipt.detach()
    assert receipt.finish().uncovered == ()
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)


@pytest.mark.parametrize("name", ["carried"])
@pytest.mark.parametrize("entry", CARRIED)
def test_a_call_that_looks_odd_is_carried(
    entry: str, name: str, results: Results
) -> None:
    """What docs/unsupported.md lists as carried equals eager in a fresh process."""
    rows = [row for row in record(opened(results, name)) if row["entry"] == entry]
    assert rows
    for row in rows:
        assert row["passed"], row["message"]
        assert (row["compiles"], row["spawned"]) == (0, 0)
        assert float(row["max_abs_error"]) <= 1e-6


@pytest.mark.parametrize("name", ["mutated_buffers"])
def test_buffers_are_written_in_place(name: str, results: Results) -> None:
    """The program writes both buffers, and gives back the live one itself."""
    artifact = opened(results, name)
    (entry,) = artifact.entries.values()
    (program,) = artifact.programs.values()
    assert entry.mutates_model
    assert {g.path for g in program.inputs if g.mutated} == {"calls", "mean"}
    assert program.result["items"][1] == {"kind": "tensor", "path": "mean"}


@pytest.mark.parametrize("name", ["tied_weights"])
def test_tied_weights_are_one_input(name: str, results: Results) -> None:
    """The graph takes the matrix once, and both of its names are on record."""
    artifact = opened(results, name)
    (entry,) = artifact.entries.values()
    (program,) = artifact.programs.values()
    assert entry.aliases == (("embedding.weight", "head.weight"),)
    assert sum(g.kind == "tensor" for g in program.inputs) == 1


@pytest.mark.parametrize("name", ["views"])
def test_views_are_made_from_the_live_input(name: str, results: Results) -> None:
    """Outputs that are inputs, or views of them, aren't computed by the program."""
    artifact = opened(results, name)
    (program,) = artifact.programs.values()
    kinds = [item["kind"] for item in program.result["items"]]
    assert kinds == ["argument", "out", "out", "out", "out", "out"]
    sources = [output.source for output in program.outputs]
    assert sources == ["view", "view", "view", "program", "program"]


@pytest.mark.parametrize("name", ["nested_arguments"])
def test_containers_keep_their_classes(
    name: str, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataclass comes back as itself, and a dict passed through as the same dict."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import small_models

    artifact = opened(results, name)
    model = small_models.NestedArguments().eval()
    receipt = compilekit.attach(model, artifact, require="program")
    call = small_models.nested_call({"b": 4})
    with torch.inference_mode():
        found = model(**call)
    receipt.detach()
    assert isinstance(found["state"], small_models.State)
    assert found["batch"] is call["batch"]
    assert found["state"].history[0] is call["state"].history[0]
    assert found["scores"]["parts"][1:] == (None, "ready")


@pytest.mark.parametrize("name", ["carried"])
def test_an_assertion_on_values_still_holds(
    name: str, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program raises where eager's ``assert`` does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import carried_models

    artifact = opened(results, name)
    model = carried_models.Carried().eval()
    receipt = compilekit.attach(model, artifact, entry="asserted")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="x holds NaN"):
        model.asserted(torch.full((4, 8), math.nan))
    receipt.detach()


def test_the_page_lists_what_is_carried() -> None:
    """Each row about something carried has its entry, or its architecture."""
    page = (ROOT / "docs" / "unsupported.md").read_text()
    _, _, carried = page.partition("## What is carried")
    rows = re.findall(r"^\| (?!what |---)", carried, re.MULTILINE)
    assert len(rows) == len(CARRIED)
