"""attach and its receipt: what is compared, what is refused, and what is left behind.

tests/test_serving.py has the common cases on one entry; here are several entries,
damaged programs, what only some models have, and policies.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import golden
import pytest
import runtime_models
import torch
from runtime_models import Step, Zoo
from torch import nn

import compilekit
from compilekit import targets
from compilekit.artifact import (
    Artifact,
    Serve,
    TargetVerified,
    canonical,
    open_artifact,
    write_artifact,
    write_verification,
)
from compilekit.errors import (
    AttachError,
    CallRefusedError,
    ConfigError,
    ManifestError,
    MismatchError,
    NoBucketError,
    PolicyError,
)
from compilekit.results import BucketVerified
from compilekit.runtime.model import shown
from compilekit.runtime.receipt import Receipt

ROOT = Path(__file__).parents[1]
TARGET = "cpu-x86_64-v3"
ENTRIES = [
    "aliases",
    "counted",
    "forward",
    "held",
    "kinds",
    "rows",
    "spread",
    "tables",
    "views",
    "waves",
]

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore")

MakeZoo = Callable[..., Zoo]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Calls are a server's: without gradients."""
    with torch.no_grad():
        yield


def ids(b: int = 4, s: int = 8) -> torch.Tensor:
    """Token ids."""
    return torch.arange(b * s).reshape(b, s) % 16


def mismatch(model: nn.Module, artifact: Path, entry: str = "forward") -> MismatchError:
    """The error of an attach that must not happen; it leaves the model as it was."""
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(MismatchError) as caught:
        compilekit.attach(model, artifact, entry=entry)
    assert caught.value.exit_code == 6
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert after == before
    return caught.value


# --- Entries ----------------------------------------------------------------------


@slow
def test_every_entry_is_attached(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """Each method is replaced, each bucket is on the receipt, detach undoes it all."""
    model = make_zoo()
    receipt = compilekit.attach(model, zoo_artifact)
    assert sorted(n for n in vars(model) if n in ENTRIES) == ENTRIES
    routes = [(r.entry, r.bucket, r.route) for r in receipt.routes]
    assert ("forward", "s8_b4", "program") in routes
    assert ("forward", "s16_b4", "program") in routes
    assert len(routes) == 12
    assert receipt.serialised == ("counted",)
    assert "12 buckets by program, 0 compiles" in repr(receipt)
    receipt.detach()
    assert not [n for n in vars(model) if n in ENTRIES]


@slow
def test_one_entry_is_attached(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """``entry`` leaves the other methods alone; another one can follow."""
    model = make_zoo()
    first = compilekit.attach(model, zoo_artifact, entry="held")
    assert [n for n in vars(model) if n in ENTRIES] == ["held"]
    second = compilekit.attach(model, zoo_artifact, entry="rows")
    first.detach()
    assert [n for n in vars(model) if n in ENTRIES] == ["rows"]
    second.detach()


@slow
def test_an_unknown_entry(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """The known ones are listed; exit code 2."""
    with pytest.raises(ConfigError, match=r"expected one of .*forward") as caught:
        compilekit.attach(make_zoo(), zoo_artifact, entry="forwards")
    assert caught.value.exit_code == 2


@slow
def test_twice_is_refused_by_entry(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """What is attached already is named; exit code 7; the first stays."""
    model = make_zoo()
    receipt = compilekit.attach(model, zoo_artifact, entry="held")
    with pytest.raises(AttachError, match="held is a program's") as caught:
        compilekit.attach(model, zoo_artifact)
    assert caught.value.exit_code == 7
    assert [n for n in vars(model) if n in ENTRIES] == ["held"]
    receipt.detach()


def test_values_are_shown_alike_in_each_process() -> None:
    """No address, no order of a set; what holds itself comes to an end."""
    value: dict[Any, Any] = {"b": {"y", "x"}, None: object(), "f": len}
    value["self"] = [value]
    text = shown(value)
    assert text.startswith("dict {'b': set [\"'x'\", \"'y'\"], None: builtins:object,")
    assert "builtins:len" in text
    assert "0x" not in text
    assert text.count("'self'") == 2


def test_what_is_no_model(zoo_artifact: Path) -> None:
    """Attach says what it takes."""
    with pytest.raises(AttachError, match=r"expected a torch\.nn\.Module, found a str"):
        compilekit.attach("bert", zoo_artifact)  # type: ignore[arg-type]


def test_an_artifact_of_caches_alone(
    zoo_artifact: Path, make_zoo: MakeZoo, tmp_path: Path
) -> None:
    """It is sent to restore, which reads what it has."""
    opened = open_artifact(zoo_artifact)
    manifest = opened.manifest._replace(routes=("cache",))
    caches = write_artifact(tmp_path / "caches", manifest, {})
    with pytest.raises(AttachError, match="has no programs, only caches") as caught:
        compilekit.attach(make_zoo(), caches)
    assert "compilekit.restore()" in caught.value.hint


def test_attach_in_a_fake_mode_is_refused(
    zoo_artifact: Path, make_zoo: MakeZoo
) -> None:
    """There is no memory to watch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = make_zoo()
    with FakeTensorMode(), pytest.raises(AttachError, match="inside a trace"):
        compilekit.attach(model, zoo_artifact)


@slow
def test_whoever_replaced_a_method_later_keeps_it(
    zoo_artifact: Path, make_zoo: MakeZoo
) -> None:
    """detach takes away what attach put there, nothing else."""
    model = make_zoo()
    receipt = compilekit.attach(model, zoo_artifact, entry="held")
    later = model.held = lambda x: x
    receipt.detach()
    assert model.held is later


@slow
def test_the_artifact_may_go_after_attach(
    zoo_artifact: Path, make_zoo: MakeZoo, tmp_path: Path
) -> None:
    """Once attached, nothing is read any more: every first call works without it."""
    place = tmp_path / "zoo"
    shutil.copytree(zoo_artifact, place)
    model, twin = make_zoo(), make_zoo()
    receipt = compilekit.attach(model, place)
    shutil.rmtree(place)
    for s in (8, 16):
        mask = torch.ones(4, s)
        torch.testing.assert_close(model(ids(4, s), mask), twin(ids(4, s), mask))
    receipt.detach()


@slow
def test_a_model_can_be_freed(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """Neither the programs nor torch's guards keep an attached model alive."""
    model = make_zoo()
    compilekit.attach(model, zoo_artifact)
    model(ids())
    gone = weakref.ref(model)
    weight = weakref.ref(model.steps[0].linear.weight)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None


# --- What is compared ---------------------------------------------------------------


class Doubled(nn.Module):
    """A parametrisation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice."""
        return x * 2


class Fancy(nn.Parameter):
    """A parameter of a class that a program knows nothing about."""


CHANGES: dict[str, tuple[Callable[[Zoo], object], str]] = {
    "layer added": (lambda m: m.steps.append(Step()), "keys of steps"),
    "layer removed": (lambda m: m.steps.__delitem__(1), "tensor steps.1.linear.weight"),
    "untied": (
        lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.clone())),
        "tied weights embedding.weight, head.weight: the artifact has one tensor, this"
        " has 2 different tensors",
    ),
    "tied": (
        lambda m: setattr(m.steps[1].linear, "weight", m.steps[0].linear.weight),
        "weights steps.0.linear.weight, steps.1.linear.weight",
    ),
    "object attribute": (lambda m: setattr(m.settings, "bias", 1.0), "settings.bias"),
    "object class": (
        lambda m: setattr(m, "settings", type("Other", (), {"bias": 0.25})()),
        "class of settings",
    ),
    "dict item": (lambda m: m.options.update(factor=4.0), 'options["factor"]'),
    "dict item's type": (lambda m: m.options.update(factor=3), 'options["factor"]'),
    "new attribute": (lambda m: setattr(m, "extra", 1.0), "extra: the artifact has no"),
    "embedding": (
        lambda m: setattr(m.embedding, "padding_idx", 3),
        "embedding.padding_idx",
    ),
    "subclass": (
        lambda m: m.steps[0].linear._parameters.update(weight=Fancy(torch.ones(8, 8))),
        "Tensor subclasses carry behaviour",
    ),
    "lazy": (
        lambda m: m.steps[0].linear._parameters.update(
            weight=nn.Parameter(torch._neg_view(torch.ones(8, 8)))
        ),
        "a lazy or wrapped one",
    ),
    "sparse": (
        lambda m: m.embedding._parameters.update(
            weight=nn.Parameter(m.embedding.weight.detach().to_sparse())
        ),
        "sparse_coo layout",
    ),
    "parametrised": (
        lambda m: nn.utils.parametrize.register_parametrization(
            m.steps[0].linear, "weight", Doubled()
        ),
        "class of steps.0.linear",
    ),
    "forward of the model": (
        lambda m: setattr(m, "forward", lambda ids: ids),
        "forward of the model",
    ),
    "forward of a layer": (
        lambda m: setattr(m.steps[1], "forward", lambda x: x),
        "forward of steps.1",
    ),
    "hook": (
        lambda m: m.steps[1].register_forward_hook(lambda *_: None),
        "hooks of steps.1",
    ),
    "training": (lambda m: m.train(), "mode of the model and"),
}


@slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_is_named(
    zoo_artifact: Path, make_zoo: MakeZoo, name: str
) -> None:
    """What would make a program wrong is refused before anything is replaced."""
    change, message = CHANGES[name]
    model = make_zoo()
    change(model)
    assert message in mismatch(model, zoo_artifact).message


@slow
def test_differences_of_all_kinds_come_together(
    zoo_artifact: Path, make_zoo: MakeZoo
) -> None:
    """Layers, attribute, tensor, tie, hook and mode: one error, each of them once."""
    model = make_zoo(3)
    model.settings.bias = 1.0
    model.steps[0].linear.double()
    model.head.weight = nn.Parameter(torch.ones(16, 8))
    model.steps[1].register_forward_hook(lambda *_: None)
    model.train()
    error = mismatch(model, zoo_artifact)
    factors = [item["factor"] for item in error.fields["mismatches"]]
    assert len(factors) == len(set(factors))
    for factor in (
        "keys of steps._modules",
        "settings.bias",
        "tensor steps.0.linear.weight",
        "tensor steps.0.linear.bias",
        "tied weights embedding.weight, head.weight",
        "hooks of steps.1",
        "mode of the model and 10 more",
    ):
        assert factor in factors
    assert f"{len(factors)} factors differ" in error.message


@slow
@pytest.mark.parametrize("entry", ["forward", None])
def test_entries_are_compared_together(
    zoo_artifact: Path, make_zoo: MakeZoo, entry: str | None
) -> None:
    """Without ``entry`` each one's differences are in the same error."""
    model = make_zoo()
    model.settings.bias = 1.0
    model.table = torch.ones(2, 2)
    with pytest.raises(MismatchError) as caught:
        compilekit.attach(model, zoo_artifact, entry=entry)
    assert "settings.bias" in caught.value.message
    assert ("tensor table" in caught.value.message) == (entry is None)


@slow
def test_the_signature_is_compared(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another default of the method means another result for the same call."""
    monkeypatch.setattr(Zoo.forward, "__defaults__", (None, 3.0, ()))
    message = mismatch(make_zoo(), zoo_artifact).message
    assert "signature of forward: the artifact has ids, mask=None, gain=1.0" in message
    assert "this has ids, mask=None, gain=3.0" in message


@slow
def test_defaults_of_inner_methods_are_compared(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default that a traced call used is baked in; its bytecode doesn't show it."""
    monkeypatch.setattr(Step.forward, "__defaults__", (5.0,))
    error = mismatch(make_zoo(), zoo_artifact)
    assert "function runtime_models:Step.forward" in error.message


@contextmanager
def reloaded(old: str, new: str) -> Iterator[Zoo]:
    """A zoo of the module as it would be after an edit and a reload."""
    source = inspect.getsource(runtime_models)
    assert old in source
    before = dict(vars(runtime_models))
    code = compile(source.replace(old, new), "runtime_models.py", "exec")
    try:
        exec(code, vars(runtime_models))
        yield runtime_models.Zoo().eval()
    finally:
        # Not a second reload: other tests hold the classes that were there.
        vars(runtime_models).update(before)


@slow
def test_edited_source(zoo_artifact: Path) -> None:
    """A traced function with another bytecode is named."""
    with reloaded("torch.tanh(self.linear", "torch.relu(self.linear") as model:
        error = mismatch(model, zoo_artifact)
    assert "function runtime_models:Step.forward" in error.message


@slow
def test_moved_source(zoo_artifact: Path) -> None:
    """The same code on other lines, below a comment, is the same code."""
    with reloaded("class Step(", "# A comment.\n\n\nclass Step(") as model:
        compilekit.attach(model, zoo_artifact, entry="forward").detach()


@slow
def test_hooks_of_the_model_itself_are_fine(
    zoo_artifact: Path, make_zoo: MakeZoo
) -> None:
    """They run around a program as around its forward; another method has no say."""
    model = make_zoo()
    model.register_forward_hook(lambda *_: None)
    compilekit.attach(model, zoo_artifact, entry="forward").detach()
    assert "hooks of the model" in mismatch(model, zoo_artifact, "held").message


@slow
def test_hooks_of_the_process_are_not(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """A global forward hook would never see a submodule."""
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        assert "hooks of every module" in mismatch(make_zoo(), zoo_artifact).message
    finally:
        handle.remove()


# --- Artifacts that can't be bound ----------------------------------------------------


def rewritten(
    artifact: Path, out: Path, change: Callable[[str, dict[str, Any]], object]
) -> Artifact:
    """A copy of an artifact, sealed again, with its program files changed."""
    opened = open_artifact(artifact)
    files = {path: opened.read(path) for path in opened.manifest.files}
    for path in files:
        if path.endswith(".json") and path.startswith("programs/"):
            fields = json.loads(files[path])
            change(path, fields)
            files[path] = canonical.encode(fields)
    return write_artifact(out, opened.manifest, files)


def broken_kernel(artifact: Path, out: Path, entry: str) -> tuple[Artifact, str]:
    """A copy whose kernel of one entry is no shared object; and that file's digest."""
    opened = open_artifact(artifact)
    files = {path: opened.read(path) for path in opened.manifest.files}
    (program,) = (p for k, p in opened.programs.items() if k[1] == entry)
    kernel = next(iter(program.kernels.values()))
    rubbish = b"no shared object"
    digest = canonical.sha256(rubbish)
    files[f"kernels/{digest}.so"] = rubbish
    path = f"programs/{TARGET}/{entry}/{program.bucket}/program.json"
    text = files[path].replace(kernel.digest.encode(), digest.encode())
    files[path] = canonical.encode(json.loads(text))
    return write_artifact(out, opened.manifest, files), digest


@slow
def test_a_kernel_that_does_not_load(
    zoo_artifact: Path,
    make_zoo: MakeZoo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is named (exit 7), and no other entry was attached before it."""
    # Inductor sets it for good, and may have run in this process.
    monkeypatch.delenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", raising=False)
    artifact, digest = broken_kernel(zoo_artifact, tmp_path / "broken", "waves")
    model = make_zoo()
    with pytest.raises(AttachError, match="can't be loaded") as caught:
        compilekit.attach(model, artifact)
    assert digest in caught.value.message
    assert "compilekit doctor" in caught.value.hint
    assert caught.value.exit_code == 7
    assert not [n for n in vars(model) if n in ENTRIES]
    assert "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR" not in os.environ
    compilekit.attach(model, zoo_artifact).detach()


@slow
def test_a_class_of_the_output_that_is_gone(
    zoo_artifact: Path, make_zoo: MakeZoo, tmp_path: Path
) -> None:
    """It is named at attach, not at the first call, and nothing stays half-attached."""

    def change(path: str, fields: dict[str, Any]) -> None:
        if "/spread/" not in path:
            return
        for _, part in fields.get("result", {}).get("items", []):
            if part.get("class") == "runtime_models:Pair":
                part["class"] = "runtime_models:Gone"

    artifact = rewritten(zoo_artifact, tmp_path / "gone", change)
    model = make_zoo()
    with pytest.raises(AttachError, match="runtime_models:Gone can't be imported"):
        compilekit.attach(model, artifact)
    assert not [n for n in vars(model) if n in ENTRIES]


@slow
@pytest.mark.parametrize(
    ("name", "edit", "place"),
    [
        ("entry.json", {"tensors": []}, "tensors: expected object, found []"),
        ("entry.json", {"compare": {"digest": "0"}}, "found 'compare'"),
        ("program.json", {"inputs": 1}, "inputs: expected array, found 1"),
        ("program.json", {"kernels": {"k": 1}}, "kernels.k: expected object, found 1"),
        ("program.json", {"result": {"kind": "pickle"}}, 'expected one of "out"'),
    ],
)
def test_a_malformed_file_is_named_at_the_start(
    zoo_artifact: Path,
    make_zoo: MakeZoo,
    tmp_path: Path,
    name: str,
    edit: dict[str, Any],
    place: str,
) -> None:
    """A start doesn't hold each file to its schema, and still says what is wrong."""
    root = tmp_path / "copy"
    shutil.copytree(zoo_artifact, root)
    shutil.rmtree(root / "reports")
    path = next(root.glob(f"programs/*/forward/**/{name}"))
    path.write_bytes(canonical.encode({**json.loads(path.read_text()), **edit}))
    listing = json.loads((root / "manifest.json").read_text())
    del listing["digest"]
    data = path.read_bytes()
    listing["files"][str(path.relative_to(root))] = {
        "sha256": canonical.sha256(data),
        "size": len(data),
    }
    (root / "manifest.json").write_bytes(canonical.seal(listing)[0])
    model = make_zoo()
    with pytest.raises(ManifestError) as caught:
        compilekit.attach(model, root)
    assert place in caught.value.message
    assert str(path.relative_to(root)) in caught.value.message
    assert not [n for n in vars(model) if n in ENTRIES]


@slow
def test_the_machine_comes_first(
    zoo_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine mismatches are reported before the model is even looked at."""
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(MismatchError, match=r"a CPU without .*avx2") as caught:
        compilekit.attach(nn.Identity(), zoo_artifact)
    assert "model.class" not in caught.value.message


# --- Policies and requirements --------------------------------------------------------


@slow
def test_on_uncovered_error(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """The call's own error reaches the caller, and the receipt counts it."""
    model = make_zoo()
    receipt = compilekit.attach(
        model, zoo_artifact, entry="forward", on_uncovered="error"
    )
    for _ in range(3):
        with pytest.raises(NoBucketError):
            model(ids(5))
    (one,) = receipt.uncovered
    assert (one.entry, one.route, one.calls) == ("forward", "error", 3)
    assert "no bucket holds s = 8, b = 5" in one.reason
    assert receipt.finish() is receipt
    receipt.detach()


@slow
def test_over_length(
    zoo_artifact: Path,
    make_zoo: MakeZoo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call longer than the largest bucket may run eagerly where others may not."""
    opened = open_artifact(zoo_artifact)
    files = {path: opened.read(path) for path in opened.manifest.files}
    serve = Serve(on_uncovered="error", over_length="eager")
    artifact = write_artifact(
        tmp_path / "a", opened.manifest._replace(serve=serve), files
    )
    model = make_zoo()
    receipt = compilekit.attach(model, artifact, entry="forward")
    expected = make_zoo()(ids(4, 32))["logits"]
    torch.testing.assert_close(model(ids(4, 32))["logits"], expected)
    with pytest.raises(CallRefusedError):
        model(ids(4, 8), surprise=1)
    assert [(one.route, one.calls) for one in receipt.uncovered] == [
        ("eager", 1),
        ("error", 1),
    ]
    receipt.detach()
    # What the operator asks for has the last word.
    monkeypatch.setenv("COMPILEKIT_ON_UNCOVERED", "error")
    receipt = compilekit.attach(model, artifact, entry="forward")
    with pytest.raises(NoBucketError):
        model(ids(4, 32))
    receipt.detach()


@slow
def test_on_uncovered_eager(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """The model's own method runs, for calls and for a model that no longer fits."""
    model, twin = make_zoo(), make_zoo()
    receipt = compilekit.attach(
        model, zoo_artifact, entry="forward", on_uncovered="eager"
    )
    torch.testing.assert_close(model(ids(5)), twin(ids(5)))
    torch.testing.assert_close(model(ids(), gain=2.0), twin(ids(), gain=2.0))
    for each in (model, twin):
        each.settings.bias = 2.0
    torch.testing.assert_close(model(ids()), twin(ids()))
    assert [(one.route, one.calls) for one in receipt.uncovered] == [("eager", 1)] * 3
    reasons = [one.reason for one in receipt.uncovered]
    assert "argument gain" in reasons[1]
    assert "settings.bias" in reasons[2]
    assert receipt.compiles == 0
    receipt.detach()


@slow
def test_on_uncovered_jit(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """torch.compile takes the call, once for all of them, and the receipt says so."""
    model, twin = make_zoo(), make_zoo()
    receipt = compilekit.attach(model, zoo_artifact, entry="held", on_uncovered="jit")
    torch._dynamo.reset()
    for b in (5, 5, 4):
        x = torch.randn(b, 8)
        torch.testing.assert_close(model.held(x), twin.held(x))
    assert [(one.route, one.calls) for one in receipt.uncovered] == [("jit", 2)]
    assert receipt.compiles >= 1
    assert f"{receipt.compiles} compiles" in repr(receipt)
    assert receipt.as_json()["compiles"] == receipt.compiles
    receipt.detach()
    torch._dynamo.reset()


@slow
@pytest.mark.parametrize(
    ("policy", "kind"), [("error", NoBucketError), ("eager", PolicyError)]
)
def test_require_program(
    zoo_artifact: Path, make_zoo: MakeZoo, policy: str, kind: type[Exception]
) -> None:
    """No other route is taken, whatever the policy; finish ends with exit code 9."""
    model = make_zoo()
    receipt = compilekit.attach(
        model, zoo_artifact, entry="forward", require="program", on_uncovered=policy
    )
    model(ids())
    assert receipt.finish() is receipt
    with pytest.raises(kind, match="no bucket holds"):
        model(ids(5))
    with pytest.raises(PolicyError, match="calls took no program: forward") as caught:
        receipt.finish()
    assert caught.value.exit_code == 9
    assert caught.value.fields["uncovered"][0]["calls"] == 1
    receipt.detach()


@slow
def test_the_policy_of_the_artifact_is_the_last_word(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument before environment before artifact, and each must be known."""
    model = make_zoo()
    monkeypatch.setenv("COMPILEKIT_ON_UNCOVERED", "eager")
    receipt = compilekit.attach(model, zoo_artifact, on_uncovered="error")
    with pytest.raises(NoBucketError):
        model(ids(5))
    receipt.detach()
    receipt = compilekit.attach(model, zoo_artifact)
    model(ids(5))
    receipt.detach()
    monkeypatch.setenv("COMPILEKIT_ON_UNCOVERED", "retry")
    with pytest.raises(ConfigError, match="expected error, eager, jit, found retry"):
        compilekit.attach(model, zoo_artifact)
    monkeypatch.delenv("COMPILEKIT_ON_UNCOVERED")
    receipt = compilekit.attach(model, zoo_artifact)
    with pytest.raises(NoBucketError):
        model(ids(5))
    receipt.detach()


@slow
def test_an_empty_requirement_overrides_the_environment(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``require=()`` requires nothing, though the environment does."""
    monkeypatch.setenv("COMPILEKIT_REQUIRE", "verified")
    model = make_zoo()
    assert compilekit.attach(model, zoo_artifact, require=()).require == ()


def replayed(artifact: Artifact, passed: bool = True) -> tuple[BucketVerified, ...]:
    """What verify would have found."""
    return tuple(
        BucketVerified(name, bucket.name, 1, 0.0, 1e-5, 1e-5, 0, 0, passed, "", TARGET)
        for name, entry in artifact.manifest.entries.items()
        for bucket in entry.buckets
    )


@slow
def test_require_verified(
    zoo_artifact: Path, make_zoo: MakeZoo, tmp_path: Path
) -> None:
    """A record of this artifact in which every bucket passed, and nothing less."""
    place = tmp_path / "zoo"
    shutil.copytree(zoo_artifact, place)
    artifact, model = open_artifact(place), make_zoo()

    def reason() -> str:
        with pytest.raises(PolicyError) as caught:
            compilekit.attach(model, place, require="verified,program")
        assert caught.value.exit_code == 9
        assert "compilekit verify" in caught.value.hint
        return caught.value.message

    assert "there is no record" in reason()
    write_verification(artifact, {TARGET: TargetVerified({}, replayed(artifact)[1:])})
    assert "wasn't replayed" in reason()
    bad = replayed(artifact, passed=False)
    write_verification(artifact, {TARGET: TargetVerified({}, bad)})
    assert "didn't pass" in reason()
    write_verification(artifact, {TARGET: TargetVerified({}, replayed(artifact))})
    receipt = compilekit.attach(model, place, require=["verified", "program"])
    assert receipt.require == ("verified", "program")
    receipt.detach()


@slow
def test_require_cache(zoo_artifact: Path, make_zoo: MakeZoo) -> None:
    """An artifact of programs can't meet it."""
    with pytest.raises(PolicyError, match="carries no caches") as caught:
        compilekit.attach(make_zoo(), zoo_artifact, require="cache")
    assert caught.value.exit_code == 9


@slow
@pytest.mark.parametrize(
    ("device", "kind", "message"),
    [
        ("toaster", ConfigError, "found toaster"),
        ("meta", AttachError, "device = meta"),
    ],
)
def test_a_device_without_programs(
    zoo_artifact: Path,
    make_zoo: MakeZoo,
    device: str,
    kind: type[Exception],
    message: str,
) -> None:
    """Only where programs can run; ``cpu`` is fine."""
    model = make_zoo()
    with pytest.raises(kind, match=message):
        compilekit.attach(model, zoo_artifact, device=device)
    compilekit.attach(model, zoo_artifact, device="cpu").detach()


# --- The receipt --------------------------------------------------------------------


def receipt(**changes: Any) -> Receipt:
    """A receipt of nothing."""
    fields: dict[str, Any] = {
        "artifact": "0" * 64,
        "path": Path("place"),
        "target": TARGET,
        "routes": (),
        "milliseconds": {"open": 1.23456},
        "warnings": (),
        "serialised": (),
        "require": (),
        "undo": lambda: None,
        **changes,
    }
    return Receipt(**fields)


def test_a_receipt_is_json() -> None:
    """Every field, plainly; milliseconds to the microsecond."""
    document = receipt(require=("program",)).as_json()
    assert json.loads(json.dumps(document)) == {
        "schema": 1,
        "artifact": "0" * 64,
        "path": "place",
        "target": TARGET,
        "routes": [],
        "compiles": 0,
        "milliseconds": {"open": 1.235},
        "warnings": [],
        "serialised": [],
        "require": ["program"],
        "rebinds": 0,
        "calls": {},
        "graphs": {},
        "uncovered": [],
    }


def test_reasons_are_bounded() -> None:
    """A client that tries a new shape each time doesn't fill the memory."""
    one = receipt()
    for size in range(1000):
        one.note_uncovered("forward", f"no bucket holds s = {size}", "error")
    assert len(one.uncovered) == 101
    assert sum(item.calls for item in one.uncovered) == 1000
    assert one.uncovered[-1].reason == "other reasons"


def test_the_receipts_file_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """finish writes the end state over what attach wrote; nothing else stays."""
    place = tmp_path / "receipt.json"
    monkeypatch.setenv("COMPILEKIT_RECEIPT", str(place))
    one = receipt()
    one.write()
    one.note_uncovered("forward", "too long", "eager")
    one.finish()
    assert json.loads(place.read_text())["uncovered"][0]["reason"] == "too long"
    assert list(tmp_path.iterdir()) == [place]


# --- The process's exit code ----------------------------------------------------------


SERVER = """
import torch, compilekit
compilekit.attach(torch.nn.Identity(){argument})
"""


def run(argument: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A server that attaches and doesn't catch what that raises."""
    return subprocess.run(
        [sys.executable, "-c", SERVER.format(argument=argument)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "code", "message"),
    [
        ({"COMPILEKIT_EXPECT_DIGEST": "1" * 64}, 5, "expected digest 1111"),
        ({"COMPILEKIT_REQUIRE": "speed"}, 2, "found speed"),
    ],
)
def test_an_uncaught_error_ends_with_its_code(
    environment: dict[str, str], code: int, message: str
) -> None:
    """Started as ``compilekit load`` does it, the process carries the error's code."""
    done = run(COMPILEKIT_ARTIFACT=str(golden.ARTIFACT), **environment)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" in done.stderr


@slow
def test_a_requirement_that_is_not_met_ends_with_nine(zoo_artifact: Path) -> None:
    """``load --require verified`` of an unverified artifact: exit code 9."""
    done = run(COMPILEKIT_ARTIFACT=str(zoo_artifact), COMPILEKIT_REQUIRE="verified")
    assert done.returncode == 9, done.stderr
    assert "require = verified" in done.stderr


def test_a_plain_script_keeps_pythons_code() -> None:
    """Named by argument, attach changes nothing about how the process ends."""
    done = run(f", {str(golden.ARTIFACT)!r}", COMPILEKIT_REQUIRE="speed")
    assert done.returncode == 1
