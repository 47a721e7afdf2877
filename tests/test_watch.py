"""`Watch` alone, on a plain module: what it notices between two calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compilekit._torch.layout import tensor_layout
from compilekit.artifact.program import Entry, Read, TensorSpec
from compilekit.runtime.model import ModelView, ambient, tensor_spec
from compilekit.runtime.program import Native
from compilekit.runtime.watch import Watch

Changed = Callable[[int], bool] | None


class Other(torch.Tensor):
    """A class with behaviour of its own."""


class Settings:
    """An object whose attribute a graph reads."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.inner = Inner()


class Inner:
    """One below it."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.kinds = {"a": 1}


def helper() -> None:
    """A function that was traced."""


class Net(nn.Module):
    """Parameters, a buffer, a plain tensor, a list, an object and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.register_buffer("shift", torch.zeros(2))
        self.plain = torch.zeros(2)
        self.listed = [torch.zeros(2)]
        self.settings = Settings()
        self.options = {"a": 1}


TENSORS = ("layers.0.weight", "layers.0.bias", "shift", "plain", "listed[0]")
READS = (
    Read("settings.scale", "value", 2.0),
    Read("settings.inner.scale", "value", 2.0),
    Read("settings.inner.kinds", "keys", ["a"]),
    Read('options["a"]', "value", 1),
    Read("layers.1.extra", "absent", None),
    Read("layers.1.p", "value", 0.5),
    Read(f"module:{__name__}:SHARED.scale", "value", 2.0),
)
SHARED = Inner()


def entry(model: nn.Module, method: str = "forward") -> Entry:
    """An entry that reads everything there is."""
    view = ModelView(model)
    tensors: dict[str, TensorSpec] = {p: tensor_spec(view.get(p)) for p in TENSORS}
    return Entry(
        name="forward",
        target="cpu-x86_64-v3",
        method=method,
        axes=(),
        signature=(),
        inputs={},
        fixed={},
        cuts={},
        tensors=tensors,
        aliases=(),
        reads=READS,
        code={f"{__name__}:helper": "", f"{__name__}:Other.forward": ""},
        ambient=ambient(),
    )


def watched(changed: Changed, method: str = "forward") -> tuple[Net, Watch]:
    """A model in eval mode, and its watch."""
    model: Net = type("Own", (Net,), {})().eval()
    watch = Watch(ModelView(model), entry(model, method), changed)
    assert watch.complete
    assert not watch.changed()
    return model, watch


def swapped(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Put other memory behind a tensor; its identity stays."""
    tensor.data = value


NOTICED: dict[str, Callable[[Net], object]] = {
    "parameter": lambda m: setattr(
        m.layers[0], "weight", nn.Parameter(torch.zeros(2, 2))
    ),
    "parameter gone": lambda m: setattr(m.layers[0], "bias", None),
    "buffer": lambda m: setattr(m, "shift", torch.zeros(2)),
    "plain tensor": lambda m: setattr(m, "plain", torch.zeros(2)),
    "item": lambda m: m.listed.__setitem__(0, torch.zeros(2)),
    "items gone": lambda m: m.listed.clear(),
    "submodule": lambda m: m.layers.__setitem__(1, nn.Dropout().eval()),
    "submodule added": lambda m: m.layers.append(nn.ReLU()),
    "shape": lambda m: swapped(m.layers[0].weight, torch.zeros(3, 2)),
    "stride": lambda m: swapped(m.layers[0].weight, torch.zeros(2, 4)[:, ::2]),
    "dtype": lambda m: swapped(m.layers[0].weight, torch.zeros(2, 2).double()),
    "device": lambda m: m.to("meta"),
    "the class of a tensor": lambda m: setattr(m.plain, "__class__", Other),
    "another tensor inside": lambda m: torch.utils.swap_tensors(
        m.layers[0].weight, nn.Parameter(torch.zeros(3, 3))
    ),
    "transposed in place": lambda m: torch.no_grad()(m.layers[0].weight.t_)(),
    "attribute": lambda m: setattr(m.layers[1], "p", 0.1),
    "attribute of an item": lambda m: setattr(m, "listed", list(m.listed)),
    "what wasn't there": lambda m: m.layers[1].register_buffer("extra", None),
    "mode": lambda m: m.layers[1].train(),
    "forward": lambda m: setattr(m.layers[1], "forward", lambda x: x),
    "class": lambda m: setattr(m.layers[1], "__class__", nn.AlphaDropout),
    "hook": lambda m: m.layers[0].register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.layers[1].register_forward_pre_hook(lambda *_: None),
    "object": lambda m: setattr(m.settings, "scale", 3.0),
    "dict": lambda m: m.options.update(a=2),
    "object below": lambda m: setattr(m.settings.inner, "scale", 3.0),
    "another object below": lambda m: setattr(m.settings, "inner", Inner()),
    "a key more": lambda m: m.settings.inner.kinds.update(b=1),
    "all attributes": lambda m: setattr(m, "__dict__", {**vars(m)}),
    "all of a submodule's": lambda m: setattr(
        m.layers[1], "__dict__", {**vars(m.layers[1]), "p": 0.1}
    ),
    "all of an object's": lambda m: setattr(m.settings, "__dict__", {"scale": 3.0}),
    "the class of an object": lambda m: setattr(m.settings, "__class__", Inner),
    "a method of the class": lambda m: setattr(type(m), "forward", helper),
    "a method of a base": lambda m: setattr(Net, "more", helper),
    "a method of a submodule's class": lambda m: setattr(nn.Dropout, "more", helper),
    "a method of another class": lambda m: setattr(Other, "more", helper),
    "a global function": lambda m: globals().update(helper=lambda: None),
    "a global object": lambda m: globals().update(SHARED=Inner()),
    "what a global holds": lambda m: setattr(SHARED, "more", object()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", NOTICED)
def test_a_change_is_noticed(name: str, inference: bool, changed: Changed) -> None:
    """Whatever could make a program wrong, in both modes."""
    model, watch = watched(changed)
    with torch.inference_mode(inference):
        assert not watch.changed()
    NOTICED[name](model)
    with torch.inference_mode(inference):
        assert watch.changed()
    for cls in (Net, nn.Dropout, Other):
        if "more" in vars(cls):
            delattr(cls, "more")


QUIET: dict[str, Callable[[Net], object]] = {
    "values": lambda m: m.layers[0].weight.data.mul_(2),
    "state dict": lambda m: m.load_state_dict(m.state_dict()),
    "the same values again": lambda m: m.eval(),
    "the same dtype": lambda m: m.float(),
    "other memory of the same kind": lambda m: swapped(m.shift, torch.ones(2)),
    "the model's own hook": lambda m: m.register_forward_hook(lambda *_: None),
    "zero_grad": lambda m: m.zero_grad(),
    "another model's hook": lambda m: nn.ReLU().register_forward_hook(print),
    "a hook that came and went": lambda m: (
        m.layers[0].register_forward_hook(print).remove()
    ),
    "an attribute that nobody reads": lambda m: setattr(m, "count", object()),
    "one of a submodule": lambda m: setattr(m.layers[1], "inplace", object()),
    "another global": lambda m: globals().update(MORE=object()),
    "many globals": lambda m: globals().update({f"M{i}": object() for i in range(99)}),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_changes_nothing_costs_nothing(name: str, changed: Changed) -> None:
    """Calls go on without a comparison."""
    model, watch = watched(changed)
    for _ in range(2):
        QUIET[name](model)
        assert not watch.changed()
    # And what counts still does.
    model.settings.scale = 3.0
    assert watch.changed()


def test_the_models_hook_counts_for_other_methods(changed: Changed) -> None:
    """Hooks of the root run around forward only."""
    model, watch = watched(changed, "encode")
    model.register_forward_hook(lambda *_: None)
    assert watch.changed()


def test_tensors_are_the_live_ones(changed: Changed) -> None:
    """In the entry's order, with what gradients they want."""
    model, watch = watched(changed)
    assert watch.tensors[0] is model.layers[0].weight
    assert watch.tensors[4] is model.listed[0]
    assert watch.requires_grad()
    model.requires_grad_(False)
    assert not watch.requires_grad()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: delattr(m, "shift"),
        lambda m: m._buffers.update(shift=torch.zeros(2).to_sparse()),
    ],
    ids=["missing", "sparse"],
)
def test_what_cannot_be_guarded(
    change: Callable[[Any], object], changed: Changed
) -> None:
    """A tensor that is missing, or has no strides, is left to the comparison."""
    model, _ = watched(changed)
    described = entry(model)
    change(model)
    assert not Watch(ModelView(model), described, changed).complete


def test_the_layout_of_tensors_is_known() -> None:
    """On every torch that is supported; else each call costs 50 µs more."""
    assert tensor_layout() is not None


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5, 6), (2, 1, 3, 1, 2, 1, 2)])
def test_every_dimension_is_watched(shape: tuple[int, ...], native: Native) -> None:
    """More than five of them lie elsewhere; a size and a stride of each counts."""
    model = Net().eval()
    model.plain = torch.zeros(shape)
    watch = Watch(ModelView(model), entry(model), native.changed)
    assert not watch.changed()
    for dimension in range(len(shape)):
        other = [*shape]
        other[dimension] += 1
        swapped(model.plain, torch.zeros(other))
        assert watch.changed()
        stride = [*torch.zeros(shape).stride()]
        stride[dimension] += 1
        swapped(model.plain, torch.empty_strided(shape, stride))
        assert watch.changed()
        swapped(model.plain, torch.zeros(shape))
        assert not watch.changed()
    swapped(model.plain, torch.zeros(*shape, 1, 1, 1, 1, 1, 1))
    assert watch.changed()


def test_what_was_watched_goes_with_its_watch(changed: Changed) -> None:
    """Replaced weights are freed at once: on a GPU they are half of what there is."""
    model, watch = watched(changed)
    weight = weakref.ref(model.layers[0].weight)
    model.layers[0].weight = nn.Parameter(torch.zeros(2, 2))
    gc.disable()
    try:
        assert watch.changed()
        del watch
        assert weight() is None
    finally:
        gc.enable()
