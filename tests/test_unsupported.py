"""docs/unsupported.md: each of its rows is refused, with its message and exit code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compilekit
from compilekit import config as configuration
from compilekit import errors, plan
from compilekit.artifact.program import Program
from compilekit.compiler import models
from compilekit.compiler.build import build
from compilekit.errors import CompilekitError, ConfigError
from compilekit.results import BucketResult
from compilekit.targets import load_target

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "architectures"

pytestmark = [
    pytest.mark.slow,
    # What torch warns of while it compiles isn't ours.
    pytest.mark.filterwarnings("ignore"),
]


def tables() -> dict[str, dict[str, str]]:
    """Heading → what → message, from the page."""
    found: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for line in (ROOT / "docs" / "unsupported.md").read_text().splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line.removeprefix("## "), {})
        elif line.startswith("| ") and not line.startswith(("| what |", "| ---")):
            what, message, *_ = line.strip("| ").split(" | ")
            rows[what] = message
    return found


BY_CALL, BY_MODEL, BY_CONFIGURATION, AT_VERIFY, AT_CALL, _ = tables().values()


def check_row(what: str, message: str, found: str, exit_code: int) -> None:
    """Hold an error against its row."""
    code = re.search(r"\(exit code (\d+)\)", what)
    assert exit_code == (int(code[1]) if code else 3)
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    first = found.splitlines()[0] if "\n  " not in found else found
    assert re.fullmatch(pattern, first, re.DOTALL), found


# --- By what the call does ------------------------------------------------------------

# One entry of refused.toml per row, in the same order.
ENTRIES = [
    "attribute_written",
    "list_changed",
    "buffer_replaced",
    "global_written",
    "process_state",
    "grad_mode",
    "global_tensor",
    "closure_tensor",
    "other_device",
    "subclass_argument",
    "sparse_argument",
    "object_argument",
    "variadic",
    "positional_only",
    "misnamed",
    "shared_memory",
    "reshaped_in_place",
    "storage_replaced",
    "cache",
    "own_object",
    "size",
    "topk",
    "integer_keys",
    "numpy_array",
    "generator",
    "unimportable_class",
    "other_dtype_view",
    "infinity",
    "nonzero",
    "mask_index",
    "item",
    "branch",
    "printing",
    "own_generator",
    "backward",
    "gradients",
    "sparse_inside",
    "raises",
    "wrong_shape",
    "nothing",
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BucketResult]:
    """Entry → what one real build of refused.toml said about it."""
    out = tmp_path_factory.mktemp("refused") / "artifact"
    result = build(configuration.load(FOLDER / "refused.toml"), out)
    assert result.artifact is None
    assert not out.exists()
    assert result.exit_code == 3
    return {bucket.entry: bucket for bucket in result.buckets}


@pytest.mark.parametrize(
    ("what", "entry"), list(zip(BY_CALL, ENTRIES, strict=True)), ids=ENTRIES
)
def test_a_call_is_refused(
    what: str, entry: str, refused: dict[str, BucketResult]
) -> None:
    """The bucket fails, by name, without keeping others from compiling."""
    bucket = refused[entry]
    assert bucket.status == "failed"
    assert Path(bucket.log).is_file()
    error = getattr(errors, bucket.error_type)
    check_row(what, BY_CALL[what], bucket.error, error.exit_code)


def test_every_refused_entry_has_a_row(refused: dict[str, BucketResult]) -> None:
    """The configuration and the page list the same."""
    assert sorted(refused) == sorted(ENTRIES)


# --- By what the model is, by the configuration ---------------------------------------


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules beside the configurations can be imported, and are forgotten."""
    monkeypatch.syspath_prepend(str(FOLDER))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name in ("refused_models", "small_models", "carried_models"):
            del sys.modules[name]


def compiled(
    source: str,
    *,
    pad: float | None = None,
    outputs: str = "",
    sizes: tuple[int, ...] = (4,),
) -> None:
    """Do what a worker does with the buckets of a one-method model."""
    # Imports Dynamo and Inductor, which collecting the tests needn't.
    from compilekit.compiler.compile import compile_bucket
    from compilekit.compiler.cuts import check_cuts
    from compilekit.compiler.tuning import Tuning

    rule = configuration.InputConfig(("b", 8), "float32", pad=pad)
    cut = {outputs.partition("@")[0]: configuration.OutputConfig({0: "b"})}
    if outputs.endswith("@1"):
        cut = {"": configuration.OutputConfig({1: "b"})}
    entry = configuration.EntryConfig(
        "forward", "forward", {"x": rule}, cut if outputs else {}
    )
    config = configuration.Config(
        FOLDER / "compilekit.toml",
        configuration.ModelConfig(f"refused_models:{source}"),
        {"b": sizes},
        {"forward": entry},
    )
    model = models.build_fake(config)
    target = load_target("cpu-x86_64-v3")
    programs: list[Program] = []
    for bucket in plan.buckets(config, "forward"):
        made = compile_bucket(
            model, config, entry, bucket, target, lambda *stage: None, Tuning()
        )
        check_cuts(model, config, entry, made.program, programs)
        programs.append(made.program)


def unknown_name() -> None:
    """Output code as Inductor writes it for torch's print operator."""
    from compilekit.compiler.harvest import host_code

    code = "class Runner:\n    def call(self, args):\n        print('x')\n"
    host_code(code, ())


MODELS: list[Callable[[], None]] = [
    lambda: compiled("subclass_parameter"),
    lambda: compiled("sparse_buffer"),
    lambda: compiled("hooked"),
    lambda: compiled("forward_replaced"),
    unknown_name,
]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("what", "case"), list(zip(BY_MODEL, MODELS, strict=True)), ids=list(BY_MODEL)
)
def test_a_model_is_refused(what: str, case: Callable[[], None]) -> None:
    """A model that can't be compiled whatever the call is names the part."""
    with pytest.raises(CompilekitError) as caught:
        case()
    check_row(what, BY_MODEL[what], str(caught.value), caught.value.exit_code)


CONFIGURATIONS: list[Callable[[], None]] = [
    lambda: compiled("Linear", pad=0.0),
    lambda: compiled("Doubled", pad=0.0),
    lambda: compiled("Linear", pad=0.0, outputs="logit"),
    lambda: compiled("Linear", pad=0.0, outputs="@1"),
]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("what", "case"),
    list(zip(BY_CONFIGURATION, CONFIGURATIONS, strict=True)),
    ids=list(BY_CONFIGURATION),
)
def test_a_configuration_is_refused(what: str, case: Callable[[], None]) -> None:
    """Cut rules that would let padding through, or name nothing, are refused."""
    with pytest.raises(CompilekitError) as caught:
        case()
    check_row(what, BY_CONFIGURATION[what], str(caught.value), caught.value.exit_code)


def test_buckets_are_compared_with_each_other(
    importable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten cut is found without an eager run, once two sizes are compiled."""
    from compilekit.compiler import cuts

    monkeypatch.setattr(cuts, "_probes", lambda *call: ())
    compiled("Linear", pad=0.0, sizes=(4,))
    with pytest.raises(ConfigError, match="get its padding back") as caught:
        compiled("Linear", pad=0.0, sizes=(4, 8))
    assert caught.value.hint.splitlines() == [
        "Add:",
        '[entries.forward.outputs.""]',
        'cut = { 0 = "b" }',
    ]


# --- At verify ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "name"),
    list(zip(AT_VERIFY, ["mean_pooled", "nested_encoder"], strict=True)),
    ids=["padding", "path"],
)
def test_a_result_that_differs_is_refused(what: str, name: str, tmp_path: Path) -> None:
    """Verify also makes calls that are padded, with masks as padding makes them."""
    config = configuration.load(FOLDER / f"{name}.toml")
    result = build(config, tmp_path / "artifact")
    (bucket,) = result.buckets
    assert bucket.error_type == "VerifyError"
    check_row(what, AT_VERIFY[what], bucket.error, result.exit_code)


# --- At attach, and at each call ------------------------------------------------------


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TiedWeights, built."""
    out = tmp_path_factory.mktemp("tied") / "artifact"
    config = configuration.load(FOLDER / "tied_weights.toml")
    assert build(config, out, verify=False).exit_code == 0
    return out


class Subclass(torch.Tensor):
    """A tensor with behaviour of its own."""


def wrapped(model: Any) -> None:
    weight = model.head.weight.detach().as_subclass(Subclass)
    model.head.weight = model.embedding.weight = torch.nn.Parameter(weight)


def untied(model: Any) -> None:
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())


def hooked(model: Any) -> None:
    model.head.register_forward_hook(lambda *call: None)


def with_gradients(model: Any, ids: torch.Tensor) -> None:
    with torch.inference_mode(mode=False), torch.enable_grad():
        model(ids)


def under_autocast(model: Any, ids: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(ids)


Step = Callable[..., Any]
CALLS: list[tuple[Step | None, Step | None]] = [
    (lambda model: model.train(), None),
    (wrapped, None),
    (lambda model: model.half(), None),
    (untied, None),
    (hooked, None),
    (None, with_gradients),
    (None, under_autocast),
    (None, lambda model, ids: model(ids, mask=ids)),
    (None, lambda model, ids: model(torch.zeros(2, 9, dtype=torch.int64))),
]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("what", "before", "call"),
    [(what, *steps) for what, steps in zip(AT_CALL, CALLS, strict=True)],
    ids=list(AT_CALL),
)
def test_an_attach_or_a_call_is_refused(
    what: str, before: Step | None, call: Step | None, artifact: Path
) -> None:
    """A model or a call that doesn't fit the program is refused before it runs."""
    import small_models

    model = small_models.TiedWeights().eval()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    if before is not None:
        before(model)

    def attach_and_call() -> None:
        compilekit.attach(model, artifact)
        if call is not None:
            call(model, ids)

    with pytest.raises(CompilekitError) as caught, torch.inference_mode():
        attach_and_call()
    check_row(what, AT_CALL[what], str(caught.value), caught.value.exit_code)
