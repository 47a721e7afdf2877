"""Attach, call, drift and detach, on a plain module with real programs."""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tower
from torch import nn
from tower import Tower, call, live_model

import compilekit
from compilekit import targets
from compilekit.errors import (
    ArtifactError,
    AttachError,
    CallRefusedError,
    CompilekitError,
    ConfigError,
    MismatchError,
    NoBucketError,
    PolicyError,
    ResourceError,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def artifact() -> Path:
    """The tower's artifact."""
    return tower.artifact()


@pytest.fixture
def model(artifact: Path) -> Iterator[Tower]:
    """An attached tower, under no_grad."""
    live = live_model()
    receipt = compilekit.attach(live, artifact)
    with torch.no_grad():
        yield live
    receipt.detach()


def eager(**kwargs: Any) -> dict[str, torch.Tensor]:
    """What the class itself computes."""
    with torch.no_grad():
        result: dict[str, torch.Tensor] = live_model()(**kwargs)
    return result


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to the order of sums."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=1e-4)


# --- Calls -------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "s"), [(1, 64), (4, 256), (3, 100), (1, 1), (2, 64)])
def test_a_call_equals_eager(model: Tower, b: int, s: int) -> None:
    """Exact or padded, by keyword or position, the result is eager's own."""
    kwargs = call(b, s)
    same(model(**kwargs), eager(**kwargs))
    same(model(kwargs["x"], kwargs["mask"]), eager(**kwargs))
    same(model(kwargs["x"], mask=kwargs["mask"], scale=1.0), eager(**kwargs))


def test_a_left_out_input_gets_its_default(model: Tower) -> None:
    """``default = 1`` fills the mask over the real size only."""
    x = call(2, 50)["x"]
    same(model(x=x), eager(x=x, mask=torch.ones(2, 50, dtype=torch.int64)))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat([x, x], -1)[..., :16],
        lambda x: x[:, :1].expand_as(x),
        lambda x: x.flip(1),
    ],
    ids=["transposed", "sliced", "expanded", "flipped"],
)
def test_any_stride(model: Tower, change: Callable[[Any], Any]) -> None:
    """An input in another layout is copied, never misread."""
    kwargs = call(4, 64)
    kwargs["x"] = change(kwargs["x"])
    same(model(**kwargs), eager(**kwargs))


def bad(**changes: Any) -> dict[str, Any]:
    """A call with something wrong."""
    return {**call(), **changes}


X, MASK = call()["x"], call()["mask"]
REFUSED: dict[str, tuple[dict[str, Any], type[CompilekitError], str]] = {
    "too long": (call(1, 300), NoBucketError, "no bucket holds b = 1, s = 300"),
    "too many": (call(5, 64), NoBucketError, "largest bucket is b4_s256"),
    "unknown": (bad(scales=2), CallRefusedError, "scales"),
    "another default": (bad(scale=2.0), CallRefusedError, "scale"),
    "missing": ({"mask": MASK}, CallRefusedError, "needs input x"),
    "dtype": (bad(x=X.double()), CallRefusedError, "must be float32 [b, s, 16]"),
    "rank": (bad(x=X[0]), CallRefusedError, "must be float32 [b, s, 16]"),
    "fixed size": (bad(x=X[..., :8]), CallRefusedError, "must be float32 [b, s, 16]"),
    "device": (bad(x=X.to("meta")), CallRefusedError, "x must be"),
    "no tensor": (bad(x=[1.0]), CallRefusedError, "must be a tensor, got a list"),
    "axes differ": (
        bad(mask=MASK[:, :9]),
        CallRefusedError,
        "axis s is 9 in one input and 64 in x",
    ),
    "sparse": (bad(x=X.to_sparse()), CallRefusedError, "x must be a dense tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call(model: Tower, name: str) -> None:
    """Whatever breaks the convention is named, with its exit code; nothing runs."""
    kwargs, kind, message = REFUSED[name]
    with pytest.raises(kind) as caught:
        model(**kwargs)
    assert message in caught.value.message
    assert caught.value.exit_code == {NoBucketError: 10, CallRefusedError: 7}[kind]


def test_gradients_are_refused(artifact: Path) -> None:
    """With gradients on, parameters that want them make a call an error."""
    live = live_model()
    compilekit.attach(live, artifact)
    with pytest.raises(CallRefusedError, match="gradients on"):
        live(**call())
    live.requires_grad_(False)
    same(live(**call()), eager(**call()))
    with pytest.raises(CallRefusedError, match="x requires gradients"):
        live(**bad(x=X.clone().requires_grad_()))


def test_autocast_is_refused(model: Tower) -> None:
    """Inside autocast eager would compute something else."""
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CallRefusedError, match="autocast"),
    ):
        model(**call())


def test_inference_mode_and_its_tensors(model: Tower) -> None:
    """Inputs made in inference mode, calls in and out of it: all the same."""
    with torch.inference_mode():
        kwargs = {name: tensor.clone() for name, tensor in call().items()}
        same(model(**kwargs), eager(**call()))
    same(model(**kwargs), eager(**call()))


# --- Attach ------------------------------------------------------------------------


def edited(change: Callable[[Tower], object]) -> Tower:
    """A tower with something changed before attach."""
    live = live_model()
    change(live)
    return live


class Other(Tower):
    """Another class with the same parameters."""


def hook(*_: Any) -> None:
    """A forward hook."""


MISFITS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "class": (Other, "model.class"),
    "dtype": (lambda: live_model().to(torch.bfloat16), "tensor blocks.0.weight"),
    "one buffer's dtype": (
        lambda: edited(lambda m: m._buffers.update(shift=m.shift.double())),
        "tensor shift",
    ),
    "shape": (
        lambda: edited(
            lambda m: setattr(m.blocks[1], "bias", nn.Parameter(X[0, 0, :8]))
        ),
        "tensor blocks.1.bias",
    ),
    "device": (lambda: live_model().to("meta"), "on meta"),
    "missing": (lambda: edited(lambda m: m.__delattr__("shift")), "tensor shift"),
    "more layers": (lambda: live_model(3), "blocks"),
    "fewer layers": (lambda: live_model(1), "tensor blocks.1.weight"),
    "attribute": (lambda: edited(lambda m: setattr(m, "gain", 2.0)), "gain"),
    "epsilon": (lambda: edited(lambda m: setattr(m.norm, "eps", 1e-3)), "norm.eps"),
    "tied": (
        lambda: edited(lambda m: setattr(m.blocks[1], "weight", m.blocks[0].weight)),
        "one tensor",
    ),
    "hook": (lambda: edited(lambda m: m.norm.register_forward_hook(hook)), "hook"),
    "forward": (
        lambda: edited(lambda m: setattr(m.norm, "forward", lambda x: x)),
        "norm",
    ),
    "training": (lambda: live_model().train(), "mode of"),
    "one module trains": (lambda: edited(lambda m: m.blocks[0].train()), "blocks.0"),
    "parametrised": (
        lambda: edited(
            lambda m: nn.utils.parametrize.register_parametrization(
                m.blocks[0], "weight", nn.Identity()
            )
        ),
        "blocks.0",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_model_that_does_not_fit(artifact: Path, name: str) -> None:
    """Each difference is named with both values (exit 6), and nothing was replaced."""
    make, message = MISFITS[name]
    live = make()
    before = dict(live.__dict__)
    with pytest.raises(MismatchError) as caught:
        compilekit.attach(live, artifact)
    assert message in caught.value.message
    assert caught.value.exit_code == 6
    assert live.__dict__ == before


def test_all_mismatches_come_at_once(artifact: Path) -> None:
    """Three differences are one error that lists three."""
    live = edited(lambda m: (setattr(m, "gain", 2.0), setattr(m.norm, "eps", 1e-3)))
    live.train()
    with pytest.raises(MismatchError) as caught:
        compilekit.attach(live, artifact)
    assert len(caught.value.fields["mismatches"]) >= 3


def test_a_global_that_was_read(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module constant that the graph holds is compared too."""
    monkeypatch.setattr("tower_model.SCALE", 0.25)
    with pytest.raises(MismatchError, match="tower_model:SCALE"):
        compilekit.attach(live_model(), artifact)


def test_edited_source(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced function whose code changed is named."""
    source = inspect.getsource(Tower.forward).replace("clamp(min=1)", "clamp(min=2)")
    namespace: dict[str, Any] = dict(vars(inspect.getmodule(Tower)))
    exec(inspect.cleandoc(source), namespace)
    monkeypatch.setattr(Tower, "forward", namespace["forward"])
    with pytest.raises(MismatchError, match=r"tower_model:Tower\.forward"):
        compilekit.attach(live_model(), artifact)


@pytest.mark.parametrize(
    ("change", "undo", "factor"),
    [
        (
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
            "float32_matmul_precision",
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
            "deterministic",
        ),
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
            "default_dtype",
        ),
    ],
)
def test_ambient_state(
    artifact: Path,
    change: Callable[[], None],
    undo: Callable[[], None],
    factor: str,
) -> None:
    """Process-wide state that capture saw is compared."""
    live = live_model()
    change()
    try:
        with pytest.raises(MismatchError, match=factor):
            compilekit.attach(live, artifact)
    finally:
        undo()


def test_a_lower_isa_is_refused(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without AVX2 gets a refusal that says so, not an illegal instruction."""
    flags = targets.cpu_flags() - {"avx2", "fma"}
    monkeypatch.setattr(targets, "cpu_flags", lambda: flags)
    with pytest.raises(MismatchError) as caught:
        compilekit.attach(live_model(), artifact)
    assert "isa" in caught.value.message
    assert "avx2" in caught.value.message
    assert caught.value.exit_code == 6


def test_another_machine_is_refused(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine code for x86-64 isn't offered to an ARM."""
    monkeypatch.setattr(targets, "machine", lambda: "aarch64")
    with pytest.raises(MismatchError, match="machine"):
        compilekit.attach(live_model(), artifact)


def test_another_torch_is_refused(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another minor is refused with both versions; a patch release warns."""
    opened = compilekit.open(artifact)
    built = opened.manifest.factors["torch.version"]
    major, minor = map(int, built.split(".")[:2])
    monkeypatch.setattr(torch, "__version__", f"{major}.{minor + 1}.0")
    with pytest.raises(MismatchError) as caught:
        compilekit.attach(live_model(), artifact)
    assert built in caught.value.message
    monkeypatch.setattr(torch, "__version__", f"{major}.{minor}.99")
    receipt = compilekit.attach(live_model(), artifact)
    assert [warning.factor for warning in receipt.warnings] == ["torch.version"]


def test_settings_come_from_argument_then_environment(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an argument the environment names artifact, requirement and policy."""
    with pytest.raises(ConfigError, match="no artifact") as caught:
        compilekit.attach(live_model())
    assert caught.value.exit_code == 2
    monkeypatch.setenv("COMPILEKIT_ARTIFACT", str(artifact))
    monkeypatch.setenv("COMPILEKIT_ON_UNCOVERED", "eager")
    live = live_model()
    receipt = compilekit.attach(live)
    with torch.no_grad():
        same(live(**call(1, 300)), eager(**call(1, 300)))
    assert [(item.route, item.calls) for item in receipt.uncovered] == [("eager", 1)]
    monkeypatch.setenv("COMPILEKIT_REQUIRE", "verified")
    with pytest.raises(PolicyError) as refused:
        compilekit.attach(live_model())
    assert refused.value.exit_code == 9
    monkeypatch.setenv("COMPILEKIT_REQUIRE", "speed")
    with pytest.raises(ConfigError, match="speed"):
        compilekit.attach(live_model())
    monkeypatch.delenv("COMPILEKIT_REQUIRE")
    monkeypatch.setenv("COMPILEKIT_EXPECT_DIGEST", "0" * 64)
    with pytest.raises(ArtifactError, match="expected digest"):
        compilekit.attach(live_model())


def test_require_program_makes_an_uncovered_call_a_miss(artifact: Path) -> None:
    """Under ``require`` no other route is taken (exit 9), and the receipt says why."""
    live = live_model()
    receipt = compilekit.attach(live, artifact, require="program", on_uncovered="eager")
    with torch.no_grad(), pytest.raises(PolicyError, match="no bucket holds"):
        live(**call(1, 300))
    with pytest.raises(PolicyError):
        receipt.finish()


def test_the_receipt_is_written(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COMPILEKIT_RECEIPT names the file; a place that can't be written is refused."""
    monkeypatch.setenv("COMPILEKIT_RECEIPT", str(tmp_path / "receipt.json"))
    receipt = compilekit.attach(live_model(), artifact)
    receipt.finish()
    written = json.loads((tmp_path / "receipt.json").read_text())
    assert written["artifact"] == compilekit.open(artifact).digest
    assert {route["route"] for route in written["routes"]} == {"program"}
    assert written["compiles"] == 0
    monkeypatch.setenv("COMPILEKIT_RECEIPT", str(tmp_path / "no" / "receipt.json"))
    live = live_model()
    with pytest.raises(ResourceError) as caught:
        compilekit.attach(live, artifact)
    assert caught.value.exit_code == 13
    assert "forward" not in live.__dict__


def test_twice_and_detach(artifact: Path) -> None:
    """A second attach is refused; detach gives the class's method back."""
    live = live_model()
    receipt = compilekit.attach(live, artifact)
    assert inspect.signature(live.forward) == inspect.signature(live_model().forward)
    with pytest.raises(AttachError, match="attached already"):
        compilekit.attach(live, artifact)
    receipt.detach()
    receipt.detach()
    assert "forward" not in live.__dict__
    compilekit.attach(live, artifact)


def test_a_copy_runs_its_own_weights(model: Tower) -> None:
    """deepcopy of an attached model never runs the original's tensors."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not torch.equal(twin(**call())["hidden"], model(**call())["hidden"])
    same(model(**call()), eager(**call()))


# --- After attach ------------------------------------------------------------------


def test_weights_written_in_place_are_seen(model: Tower) -> None:
    """Programs read the live tensors: a fine-tune loaded later is used."""
    other = edited(lambda m: [p.data.mul_(0.5) for p in m.parameters()])
    with torch.no_grad():
        expected = other(**call())
    model.load_state_dict(other.state_dict())
    same(model(**call()), expected)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    same(model(**call()), expected)


def test_a_replaced_parameter_or_module_is_used(model: Tower) -> None:
    """A good replacement is bound again, by identity."""
    torch.manual_seed(7)
    replacement = nn.Linear(16, 16).eval()
    other = edited(lambda m: m.blocks.__setitem__(1, copy.deepcopy(replacement)))
    with torch.no_grad():
        expected = other(**call())
    model.blocks[1] = replacement
    same(model(**call()), expected)


DRIFT: dict[str, tuple[Callable[[Tower], object], str]] = {
    "to": (lambda m: m.to(torch.float64), "tensor blocks.0.weight"),
    "replaced": (
        lambda m: setattr(m.blocks[0], "weight", nn.Parameter(torch.zeros(4, 4))),
        "tensor blocks.0.weight",
    ),
    "adapter": (
        lambda m: m.blocks.__setitem__(0, nn.Sequential(nn.Linear(16, 16))),
        "blocks.0",
    ),
    "hook": (lambda m: m.norm.register_forward_pre_hook(hook), "hook"),
    "train": (lambda m: m.blocks[1].train(), "blocks.1"),
    "gain": (lambda m: setattr(m, "gain", 3.0), "gain"),
    "layers": (lambda m: m.blocks.append(nn.Linear(16, 16)), "blocks"),
}


@pytest.mark.parametrize("name", DRIFT)
def test_drift_is_noticed(model: Tower, name: str) -> None:
    """What no longer fits is refused by name at the next call, not run wrongly."""
    change, message = DRIFT[name]
    same(model(**call()), eager(**call()))
    change(model)
    with pytest.raises(MismatchError, match="changed after attach") as caught:
        model(**call())
    assert message in caught.value.message


def test_threads_at_once(model: Tower) -> None:
    """Eight threads call four buckets side by side; every result is right."""
    shapes = [(1, 64), (4, 64), (1, 256), (3, 200)]
    expected = {shape: eager(**call(*shape)) for shape in shapes}
    wrong: list[BaseException] = []

    def work(start: int) -> None:
        try:
            with torch.no_grad():
                for step in range(20):
                    shape = shapes[(start + step) % len(shapes)]
                    same(model(**call(*shape)), expected[shape])
        except BaseException as exc:  # noqa: BLE001 - reported by the test itself
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
