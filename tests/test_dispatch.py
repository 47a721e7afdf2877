"""One call: what it may pass, what comes back, and a model that changes meanwhile.

tests/test_serving.py has the common cases on a padded tower; here are those that need
other entries (tests/runtime_models.py).
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import inspect
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runtime_models
import torch
from runtime_models import Pair, State, Zoo, spread_call
from torch import nn

import compilekit
from compilekit._torch.runtime import same_layout
from compilekit.artifact.program import TensorSpec
from compilekit.errors import CallRefusedError, MismatchError, NoBucketError
from compilekit.runtime import program as programs
from compilekit.runtime.exact import ExactCalls, _guards

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Attached = Callable[..., Zoo]
MakeZoo = Callable[..., Zoo]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    """Calls are a server's: without gradients."""
    with torch.no_grad():
        yield


def ids(b: int = 4, s: int = 8) -> torch.Tensor:
    """Token ids."""
    return torch.arange(b * s).reshape(b, s) % 16


def refused(call: Callable[[], Any]) -> CallRefusedError:
    """The error of a call that breaks the convention, whose exit code is 7."""
    with pytest.raises(CallRefusedError) as caught:
        call()
    assert caught.value.exit_code == 7
    return caught.value


# --- Which bucket -----------------------------------------------------------------


@pytest.mark.parametrize(("b", "s"), [(4, 8), (4, 16), (1, 3), (3, 9), (4, 1)])
def test_axes_keep_their_order(
    attached: Attached, make_zoo: MakeZoo, b: int, s: int
) -> None:
    """Axes that the configuration lists as s, b aren't mixed up by a file's order."""
    x, y = torch.randn(b, s), torch.randn(b)
    # Rows are padded by zeros, which a softmax would see: only full rows are equal.
    expected = make_zoo().rows(y, x)
    found = attached("rows").rows(y, x)
    assert found.shape == expected.shape
    if s in (8, 16):
        torch.testing.assert_close(found, expected)


def test_the_error_names_the_axes_right(attached: Attached) -> None:
    """What a call asked for is reported by axis, in the entry's order."""
    with pytest.raises(NoBucketError, match="s = 17, b = 2") as caught:
        attached("rows").rows(torch.randn(2), torch.randn(2, 17))
    assert caught.value.exit_code == 10


def test_an_axis_must_be_known(attached: Attached) -> None:
    """A call that passes nothing to take an axis from is refused by the axis."""
    model = attached("forward")
    error = refused(lambda: model(mask=torch.ones(4, 8)))
    assert "needs input ids" in error.message


# --- Arguments --------------------------------------------------------------------


def test_a_left_out_input_is_passed_through_as_filled(
    attached: Attached, make_zoo: MakeZoo
) -> None:
    """An input with a default comes back at the call's own size, full of it."""
    found = attached("forward")(ids(3, 7))
    expected = make_zoo()(ids(3, 7), torch.ones(3, 7))
    torch.testing.assert_close(found, expected)


def test_an_input_passed_through_is_the_callers(attached: Attached) -> None:
    """Padded or not, an argument that is returned is the same object."""
    model = attached("forward")
    for b, s in ((4, 8), (3, 7)):
        mask = torch.ones(b, s)
        assert model(ids(b, s), mask)["mask"] is mask


@pytest.mark.parametrize(
    "extra",
    [{"gain": 1.0}, {"verbose": False}, {"flags": ()}, {"mask": None}],
    ids=lambda extra: next(iter(extra)),
)
def test_a_default_may_be_passed(
    attached: Attached, make_zoo: MakeZoo, extra: dict[str, Any]
) -> None:
    """A keyword that equals the forward's default changes nothing."""
    expected = make_zoo()(ids(), torch.ones(4, 8))["logits"]
    torch.testing.assert_close(attached("forward")(ids(), **extra)["logits"], expected)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"gain": 2.0}, "argument gain was built with the default, 1.0, got 2.0"),
        ({"gain": 1}, "argument gain was built with the default, 1.0, got 1"),
        ({"verbose": True}, "argument verbose was built with the default, False"),
        ({"flags": None}, "argument flags was built with the default, ()"),
        ({"flags": (1,)}, "argument flags was built with the default, ()"),
        ({"other": 1}, "wasn't built with argument other"),
        ({"more": None}, "wasn't built with argument more"),
        ({"gain": torch.ones(2)}, "got a float32 tensor [2]"),
    ],
)
def test_anything_else_is_refused(
    attached: Attached, extra: dict[str, Any], message: str
) -> None:
    """A value that would change the result is named, with what was baked in."""
    model = attached("forward")
    assert message in refused(lambda: model(ids(), **extra)).message


def test_positions_and_names(attached: Attached) -> None:
    """Arguments are bound as Python does: too many, or one twice, is an error."""
    model = attached("forward")
    error = refused(lambda: model(ids(), None, 1.0, (), False))
    assert "takes 4 positional arguments, got 5" in error.message
    error = refused(lambda: model(ids(), ids=ids()))
    assert "got argument ids twice" in error.message


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: nn.Parameter(x, requires_grad=False),
        lambda x: x.t().contiguous().t(),
        lambda x: x[:3],
    ],
    ids=["exact", "parameter", "strided", "padded"],
)
def test_every_way_to_a_bucket(
    attached: Attached,
    make_zoo: MakeZoo,
    inside: bool,
    made_inside: bool,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Exact calls take a short way; all ways agree, by position and by name."""
    model, twin = attached("rows"), make_zoo()
    with torch.inference_mode(made_inside):
        x = change(torch.randn(4, 8))
        y = torch.randn(len(x))
    with torch.inference_mode(inside):
        expected = twin.rows(y, x)
        for found in (model.rows(y, x), model.rows(y, x=x), model.rows(x=x, y=y)):
            torch.testing.assert_close(found, expected)
            assert found.is_inference() == inside


def test_the_short_way_takes_what_was_built_in(attached: Attached) -> None:
    """Passed or left out; any other value is for the checks of the long way."""
    dispatcher = attached("rows").__dict__["rows"]
    dispatcher.arguments.fixed = {"flag": True}
    specs = {sizes: b.specs for sizes, b in dispatcher.by_sizes.items()}
    match = ExactCalls(dispatcher.arguments, specs).match
    call = {"x": torch.randn(4, 8), "y": torch.randn(4)}
    with torch.no_grad():
        for given in (call, call | {"flag": True}):
            found = match((), given)
            assert found is not None
            assert found[0] == given
        for other in ({"flag": False}, {"flag": 1}, {"more": True}):
            assert match((), call | other) is None
        assert match((), {"x": call["x"], "flag": True}) is None


def test_the_artifact_brings_its_own_calls(attached: Attached) -> None:
    """C++ runs exact calls of programs that only read what a watch can follow."""
    assert attached("rows").__dict__["rows"].native_call is not None
    for entry in ("held", "counted", "aliases", "spread"):
        dispatcher = attached(entry).__dict__[entry]
        assert dispatcher.native is not None
        assert dispatcher.native_call is None


@pytest.mark.parametrize("entry", ["rows", "held", "tables", "spread"])
def test_a_detached_model_goes_with_its_last_name(
    entry: str, zoo_artifact: Path, make_zoo: MakeZoo
) -> None:
    """Nothing of ours keeps its weights until the next collection."""
    model = make_zoo()
    gone = weakref.ref(model)
    receipt = compilekit.attach(model, zoo_artifact, entry=entry)
    gc.disable()
    try:
        receipt.detach()
        del model, receipt
        assert gone() is None
    finally:
        gc.enable()


def test_calls_of_another_version_are_not_used(
    attached: Attached, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact whose C++ reads other tables than ours works without it."""
    monkeypatch.setattr(programs, "_TABLES", 0)
    monkeypatch.setattr(programs, "_natives", {})
    model = attached("rows")
    assert model.__dict__["rows"].native is None
    x, y = torch.randn(4, 8), torch.randn(4)
    torch.testing.assert_close(model.rows(y, x), make_zoo().rows(y, x))
    model.plain = torch.zeros(8)
    torch.testing.assert_close(model.rows(y, x), make_zoo().rows(y, x))


def test_axes_must_agree(attached: Attached) -> None:
    """Two inputs of different size along one axis are named."""
    model = attached("forward")
    error = refused(lambda: model(ids(4, 8), torch.ones(4, 7)))
    assert "axis s is 8 in one input and 7 in mask" in error.message


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: torch.ones(4, 4),
        "must be complex64 [b, 4] on cpu, got float32 [4, 4]",
    ),
    "rank": (lambda: torch.ones(4, dtype=torch.complex64), "got complex64 [4] on cpu"),
    "sparse": (
        lambda: torch.ones(4, 4, dtype=torch.complex64).to_sparse(),
        "layout sparse_coo",
    ),
    "meta": (lambda: torch.ones(4, 4, dtype=torch.complex64, device="meta"), "on meta"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(4)] * 4),
        "a nested tensor",
    ),
    "list": (lambda: [1j], "must be a tensor, got a list"),
    "numpy": (
        lambda: torch.ones(4, 4, dtype=torch.complex64).numpy(),
        "must be a tensor, got a ndarray",
    ),
    "none": (lambda: None, "needs input z"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_tensor_is_refused(attached: Attached, name: str) -> None:
    """A tensor whose memory isn't what it stands for never reaches a kernel."""
    make, message = ODD[name]
    model = attached("waves")
    assert message in refused(lambda: model.waves(make())).message


def test_a_lazy_conjugate_is_resolved(attached: Attached, make_zoo: MakeZoo) -> None:
    """A kernel reads memory; the conjugate's bit is applied before."""
    z = torch.randn(4, 4, dtype=torch.complex64)
    found = attached("waves").waves(z.conj())
    torch.testing.assert_close(found, make_zoo().waves(z.conj()))


def test_a_lazy_negative_is_resolved(attached: Attached, make_zoo: MakeZoo) -> None:
    """The imaginary part of a lazy conjugate is a lazy negative."""
    x = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(attached("held").held(x), make_zoo().held(x))


def test_torch_func_is_refused(attached: Attached) -> None:
    """vmap's wrappers look like tensors; their memory is another tensor's."""
    model = attached("held")
    error = refused(lambda: torch.func.vmap(model.held)(torch.randn(2, 4, 8)))
    assert "a lazy or wrapped one" in error.message


@pytest.mark.parametrize("offset", range(5))
def test_misaligned_memory(attached: Attached, make_zoo: MakeZoo, offset: int) -> None:
    """An input that starts at any element is read right."""
    x = torch.randn(4 * 8 + 8)[offset : offset + 32].view(4, 8)
    torch.testing.assert_close(attached("held").held(x), make_zoo().held(x))


def test_strides_of_single_rows(attached: Attached, make_zoo: MakeZoo) -> None:
    """Strides of a dimension of size 1 mean nothing, and no copy is made for them."""
    weights = [torch.rand(4, 1).as_strided((4, 1), (1, 99))]
    call = spread_call({"b": 4})
    call["batch"]["weights"] = weights
    found, expected = attached("spread").spread(**call), make_zoo().spread(**call)
    torch.testing.assert_close(found["hidden"], expected["hidden"])


def test_a_default_device_changes_nothing(attached: Attached) -> None:
    """Padding and defaults are made on the CPU, whatever torch's default device."""
    model, tokens = attached("forward"), ids(3, 7)
    expected = model(tokens)
    with torch.device("meta"):
        found = model(tokens)
    torch.testing.assert_close(found, expected)


# --- Nested arguments and classes of outputs ---------------------------------------


def test_nested_arguments_and_output_classes(
    attached: Attached, make_zoo: MakeZoo
) -> None:
    """Dicts, lists and dataclasses in; named tuples and ordered dicts out."""
    call = spread_call({"b": 4})
    found, expected = attached("spread").spread(**call), make_zoo().spread(**call)
    assert type(found) is OrderedDict
    assert list(found) == list(expected)
    assert type(found["pair"]) is Pair
    assert found["pair"].right is None
    assert type(found["state"]) is State
    assert found["state"].history[0] is call["state"].history[0]
    assert found["state"].history[1] is found["hidden"]
    torch.testing.assert_close(found["hidden"], expected["hidden"])
    torch.testing.assert_close(found["pair"].left, expected["pair"].left)
    torch.testing.assert_close(found["state"].hidden, expected["state"].hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["batch"].update(more=1), 'wasn\'t built with batch["more"]'),
        (lambda c: c["batch"]["weights"].append(1), 'with batch["weights"][1]'),
        (lambda c: c["batch"].pop("x"), 'needs input batch["x"]'),
        (lambda c: setattr(c["state"], "scale", 2.0), "state.scale was built with 0.5"),
        (lambda c: c["state"].history.clear(), "needs input state.history[0]"),
        (lambda c: c.pop("state"), "state.scale was built with 0.5, got None"),
    ],
)
def test_a_nested_argument_that_differs(
    attached: Attached, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """A key, an item or a value that the program wasn't built with is named."""
    model = attached("spread")
    call = spread_call({"b": 4})
    change(call)
    assert message in refused(lambda: model.spread(**call)).message


# --- Aliases and writes -----------------------------------------------------------


def test_outputs_share_memory_with_inputs(
    attached: Attached, make_zoo: MakeZoo
) -> None:
    """Views are views of the live inputs, and writes are seen through them."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    twin_x, twin_y = x.clone(), y.clone()
    found = attached("aliases").aliases(x, y)
    expected = make_zoo().aliases(twin_x, twin_y)
    for mine, its in zip(found, expected, strict=True):
        assert mine.shape == its.shape
        assert mine.stride() == its.stride()
        torch.testing.assert_close(mine, its)
    assert found[0] is x
    assert found[3] is y
    torch.testing.assert_close(y, twin_y)
    found[1].zero_()
    assert not x[:, 1:].any()
    found[4].zero_()
    assert not y.any()
    found[6].fill_(7.0)
    assert (found[5][0] == 7.0).all()


def test_a_written_argument_bumps_its_version(attached: Attached) -> None:
    """autograd sees the write, so a stale saved tensor is noticed."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    before = y._version
    attached("aliases").aliases(x, y)
    assert y._version > before


def test_views_of_an_offset_input(attached: Attached, make_zoo: MakeZoo) -> None:
    """A view of an input that starts inside its storage starts there too."""
    base = torch.randn(6, 4)
    found = attached("aliases").aliases(base[2:], torch.randn(4, 4))
    assert found[1].data_ptr() == base[2:, 1:].data_ptr()
    torch.testing.assert_close(found[2], base[2:].t())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: (torch.randn(4, 4), torch.randn(4, 4).t()), "writes y"),
        (lambda: (torch.randn(4, 4).t(), torch.randn(4, 4)), "returns a view of x"),
        (lambda: (torch.randn(4, 8)[:, ::2], torch.randn(4, 4)), "a view of x"),
    ],
)
def test_a_live_argument_is_never_copied(
    attached: Attached,
    make: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    what: str,
) -> None:
    """Writing to a copy would be lost, so another layout is refused."""
    model = attached("aliases")
    x, y = make()
    kept = y.clone()
    error = refused(lambda: model.aliases(x, y))
    assert what in error.message
    assert "b4" in error.hint
    torch.testing.assert_close(y, kept)


@pytest.mark.parametrize(
    ("make", "second"),
    [
        (lambda model, y: y, "input x"),
        (lambda model, y: y[:], "input x"),
        (lambda model, y: y.view(-1).view(4, 4), "input x"),
    ],
)
def test_a_written_argument_shares_no_memory(
    attached: Attached,
    make: Callable[[Zoo, torch.Tensor], torch.Tensor],
    second: str,
) -> None:
    """The program reads x after it wrote y; eager would have read the new values."""
    model = attached("aliases")
    y = torch.randn(4, 4)
    kept = y.clone()
    error = refused(lambda: model.aliases(make(model, y), y))
    assert f"input y shares memory with {second}" in error.message
    assert "Pass a copy" in error.hint
    torch.testing.assert_close(y, kept)


def test_neighbours_in_one_storage_are_apart(
    attached: Attached, make_zoo: MakeZoo
) -> None:
    """Two halves of one tensor share a storage and no byte."""
    base = torch.randn(8, 4)
    twin = base.clone()
    attached("aliases").aliases(base[:4], base[4:])
    make_zoo().aliases(twin[:4], twin[4:])
    torch.testing.assert_close(base, twin)


def test_the_model_is_never_written_through_an_argument(attached: Attached) -> None:
    """A written argument may be no parameter or buffer, and no view of one."""
    model = attached("aliases")
    kept = model.table.clone()
    for y in (model.table, model.table.view(-1).view(4, 4)):
        error = refused(functools.partial(model.aliases, torch.randn(4, 4), y))
        assert "input y shares memory with a tensor of the model" in error.message
    torch.testing.assert_close(model.table, kept)


def test_a_viewed_argument_is_never_padded(attached: Attached) -> None:
    """A view of the padded copy wouldn't share memory with the caller's tensor."""
    model = attached("views")
    x = torch.randn(4, 4)
    found = model.views(x)
    assert found["same"] is x
    assert found["tail"].data_ptr() == x[:, 1:].data_ptr()
    error = refused(lambda: model.views(torch.randn(3, 4)))
    assert "returns a view of x" in error.message


def test_buffers_as_outputs(attached: Attached, make_zoo: MakeZoo) -> None:
    """A buffer that is returned is the live one, also after it was replaced."""
    model, x = attached("tables"), torch.randn(4, 4)
    total, table, part = model.tables(x)
    assert table is model.table
    part.zero_()
    assert not model.table[1:].any()
    model.table = torch.ones(4, 4)
    total, table, part = model.tables(x)
    assert table is model.table
    torch.testing.assert_close(total, x + 1)
    torch.testing.assert_close(part, torch.ones(3, 4))


def test_a_buffer_is_written_in_place(attached: Attached, make_zoo: MakeZoo) -> None:
    """Each call counts, in the live buffer, whose version moves."""
    model, twin, x = attached("counted"), make_zoo(), torch.randn(4, 4)
    calls, version = model.calls, model.calls._version
    for _ in range(3):
        torch.testing.assert_close(model.counted(x), twin.counted(x))
    assert model.calls is calls
    assert model.calls == 3
    assert model.calls._version == version + 3


def test_a_write_is_never_padded(attached: Attached) -> None:
    """A padded call would write what eager doesn't: refused before anything runs."""
    model = attached("counted")
    error = refused(lambda: model.counted(torch.randn(3, 4)))
    assert "writes calls" in error.message
    assert model.calls == 0


def test_writes_in_inference_mode(attached: Attached) -> None:
    """Buffers made in inference mode can be written there."""
    with torch.inference_mode():
        model = attached("counted")
        model.calls = torch.zeros((), dtype=torch.int64)
        model.counted(torch.randn(4, 4))
        assert model.calls == 1


def test_writes_from_many_threads(attached: Attached) -> None:
    """Calls that write the model take turns: none is lost."""
    model = attached("counted")
    x = torch.ones(4, 4)
    seen: list[float] = []

    def work() -> None:
        with torch.no_grad():
            seen.extend(float(model.counted(x)[0, 0]) for _ in range(50))

    run_all([work] * 8)
    assert model.calls == 400
    assert sorted(seen) == list(range(1, 401))


def run_all(works: list[Callable[[], object]]) -> None:
    """Run functions in threads of their own; the first error is raised here."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- Gradients --------------------------------------------------------------------


def test_no_gradient_is_ever_pretended(attached: Attached) -> None:
    """Results carry no gradient; a call that would need one is refused."""
    model = attached("held")
    with torch.enable_grad():
        assert not model.held(torch.randn(4, 8)).requires_grad
        x = torch.randn(4, 8, requires_grad=True)
        error = refused(lambda: model.held(x))
        assert "x requires gradients" in error.message
    assert not model.held(x).requires_grad


# --- A model that changes after attach ----------------------------------------------


CHANGES: dict[str, Callable[[Zoo], object]] = {
    "weights in place": lambda m: m.steps[0].linear.weight.mul_(0.5),
    "a parameter": lambda m: setattr(
        m.steps[0].linear, "weight", nn.Parameter(torch.ones(8, 8))
    ),
    "a submodule": lambda m: m.steps.__setitem__(1, runtime_models.Step().eval()),
    "both tied": lambda m: retie(m, nn.Parameter(torch.ones(16, 8))),
    "state dict": lambda m: m.load_state_dict(doubled(m)),
    "state dict assigned": lambda m: m.load_state_dict(doubled(m), assign=True),
    "to and back": lambda m: m.double().float(),
    "unused buffer": lambda m: setattr(m, "table", torch.ones(2, 2)),
    "unread attribute": lambda m: setattr(m, "note", "hello"),
    "data": lambda m: setattr(m.steps[0].linear.weight, "data", torch.ones(8, 8)),
    "gradients off": lambda m: m.requires_grad_(False),
    "eval again": lambda m: m.eval(),
}


def retie(model: Zoo, weight: nn.Parameter) -> None:
    """Replace both names of the tied weight."""
    model.embedding.weight = model.head.weight = weight


def doubled(model: Zoo) -> dict[str, torch.Tensor]:
    """Its state dict with other values; tied names stay one tensor."""
    done: dict[int, torch.Tensor] = {}
    return {
        name: done.setdefault(tensor.data_ptr(), tensor * 2)
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_fits_is_used(
    attached: Attached, make_zoo: MakeZoo, name: str
) -> None:
    """What still fits is bound again: the next call uses it."""
    model, twin = attached("forward"), make_zoo()
    model(ids())
    torch.manual_seed(1)
    if name == "state dict assigned":
        # load_state_dict makes a parameter of each name: the tie is gone.
        CHANGES[name](model)
        model.head.weight = model.embedding.weight
    else:
        CHANGES[name](model)
    torch.manual_seed(1)
    CHANGES[name](twin)
    expected = twin(ids(), torch.ones(4, 8))
    for _ in range(2):
        torch.testing.assert_close(model(ids()), expected)


MISFITS: dict[str, tuple[Callable[[Zoo], object], str]] = {
    "dtype": (lambda m: m.double(), "tensor embedding.weight"),
    "one dtype": (
        lambda m: setattr(
            m.steps[0].linear.weight, "data", torch.ones(8, 8, dtype=torch.float64)
        ),
        "tensor steps.0.linear.weight",
    ),
    "shape behind": (
        lambda m: setattr(m.steps[0].linear.weight, "data", torch.ones(4, 8)),
        "float32 4×8",
    ),
    "stride behind": (
        lambda m: setattr(m.steps[0].linear.weight, "data", torch.rand(8, 8).t()),
        "stride [1, 8]",
    ),
    "transposed": (
        lambda m: setattr(
            m.steps[0].linear, "weight", nn.Parameter(torch.rand(8, 8).t())
        ),
        "stride [1, 8]",
    ),
    "meta": (lambda m: m.to("meta"), "on meta"),
    "untied": (
        lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.clone())),
        "tied weights embedding.weight, head.weight",
    ),
    "tied": (
        lambda m: setattr(m.steps[1].linear, "weight", m.steps[0].linear.weight),
        "weights steps.0.linear.weight, steps.1.linear.weight",
    ),
    "missing": (lambda m: delattr(m.steps[0].linear, "weight"), "nothing"),
    "subclass": (
        lambda m: m.steps[0].linear._parameters.update(weight=Fancy(torch.ones(8, 8))),
        "test_dispatch.Fancy",
    ),
    "attribute": (lambda m: setattr(m.settings, "bias", 0.5), "settings.bias"),
    "dict item": (lambda m: m.options.update(factor=1.0), 'options["factor"]'),
    "new attribute": (lambda m: setattr(m, "extra", 1.0), "extra: the artifact has no"),
    "another class": (
        lambda m: setattr(m.steps[0], "__class__", OtherStep),
        "class of steps.0",
    ),
    "layer added": (lambda m: m.steps.append(runtime_models.Step()), "keys of steps"),
    "layer removed": (lambda m: m.steps.__delitem__(1), "steps.1"),
    "submodule": (
        lambda m: m.steps.__setitem__(0, nn.Identity()),
        "class of steps.0",
    ),
    "forward of a submodule": (
        lambda m: setattr(m.steps[0], "forward", lambda x: x),
        "forward of steps.0",
    ),
    "hook": (
        lambda m: m.steps[0].register_forward_hook(lambda *_: None),
        "hooks of steps.0",
    ),
    "pre-hook": (
        lambda m: m.steps[0].linear.register_forward_pre_hook(lambda *_: None),
        "hooks of steps.0.linear",
    ),
    "training": (lambda m: m.steps[0].train(), "mode of steps.0"),
    "parametrised": (
        lambda m: nn.utils.parametrize.register_parametrization(
            m.steps[0].linear, "weight", nn.Identity()
        ),
        "class of steps.0.linear",
    ),
    "weight norm": (
        lambda m: nn.utils.weight_norm(m.steps[0].linear),
        "hooks of steps.0.linear",
    ),
    "all attributes": (
        lambda m: setattr(m.settings, "__dict__", {"bias": 0.5}),
        "settings.bias",
    ),
    "all attributes of a submodule": (
        lambda m: setattr(
            m.steps[0], "__dict__", {**vars(m.steps[0]), "training": True}
        ),
        "mode of steps.0",
    ),
}


class Fancy(nn.Parameter):
    """A parameter of a class that a program knows nothing about."""


class OtherStep(runtime_models.Step):
    """The same parameters, another forward."""

    def forward(self, x: torch.Tensor, gain: float = 2.0) -> torch.Tensor:
        """Nothing at all."""
        return x


@pytest.mark.parametrize("name", MISFITS)
def test_a_change_that_does_not_fit_is_refused(attached: Attached, name: str) -> None:
    """The next call names it and runs nothing; so does every call after it."""
    model = attached("forward")
    model(ids())
    change, message = MISFITS[name]
    change(model)
    for _ in range(2):
        with pytest.raises(MismatchError, match="changed after attach") as caught:
            model(ids())
        assert message in caught.value.message
        assert caught.value.exit_code == 6


KINDS: dict[str, tuple[Callable[[Zoo], object], str]] = {
    "a class's attribute": (lambda m: setattr(m, "factor", 3.0), "factor"),
    "enum": (lambda m: setattr(m, "mode", runtime_models.Mode.SLOW), "mode"),
    "dtype": (lambda m: setattr(m, "kind", torch.float32), "kind"),
    "frozenset": (lambda m: setattr(m, "tags", frozenset("b")), "tags"),
    "bytes": (lambda m: setattr(m, "key", b"q"), "key"),
    "torch's function": (lambda m: setattr(m, "act", torch.sigmoid), "act"),
    "function": (lambda m: setattr(m, "second", runtime_models.doubled), "second"),
    "method": (lambda m: setattr(m, "helper", lambda x: x), "helper"),
    "slot": (lambda m: setattr(m.slotted, "gain", 4.0), "slotted.gain"),
    "key": (lambda m: m.options.update(late=2.0), 'options["late"]'),
    "value of a key that no path holds": (
        lambda m: m.by_mode.update({runtime_models.Mode.FAST: 3.0}),
        "by_mode",
    ),
    "class": (lambda m: setattr(m, "layer_class", nn.Sigmoid), "layer_class"),
    "function of the same name": (
        lambda m: setattr(m, "second", runtime_models.tripled),
        "second",
    ),
    "mode of a module in a dict": (
        lambda m: m.loose["gate"].eval(),
        'loose["gate"].training',
    ),
    "forward of a module in a dict": (
        lambda m: setattr(m.loose["gate"], "forward", lambda x: x),
        'loose["gate"].forward',
    ),
    "hook of a module in a dict": (
        lambda m: m.loose["gate"].register_forward_hook(lambda *_: None),
        'length of loose["gate"]._forward_hooks',
    ),
    "torch's method": (
        lambda m: setattr(m.conv, "_conv_forward", lambda x, *_: x),
        "conv._conv_forward",
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", KINDS)
def test_values_of_all_kinds(
    zoo_artifact: Path, make_zoo: MakeZoo, name: str, when: str
) -> None:
    """Whatever a graph was made for is compared at attach, and watched from then on."""
    change, what = KINDS[name]
    model, x = make_zoo(), torch.randn(4, 4)
    if when == "before":
        change(model)
        with pytest.raises(MismatchError) as caught:
            compilekit.attach(model, zoo_artifact, entry="kinds")
    else:
        expected = model.kinds(x)
        compilekit.attach(model, zoo_artifact, entry="kinds")
        torch.testing.assert_close(model.kinds(x), expected)
        change(model)
        with pytest.raises(MismatchError) as caught:
            model.kinds(x)
    assert f"{what}: the artifact has" in caught.value.message


def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method as those who patch it leave it: the old one, and something more."""
    return lambda *args: method(*args) * 2


ELSEWHERE: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "value of a class": (
        lambda patch: patch.setattr(runtime_models.Zoo, "factor", 3.0),
        "factor: the artifact has 2.0",
    ),
    "value of a base class": (
        lambda patch: patch.setattr(runtime_models.Base, "offset", 3.0),
        "offset: the artifact has 0.5",
    ),
    "dict of a class": (
        lambda patch: patch.setitem(runtime_models.Gains.table, "kinds", torch.abs),
        'gains.__class__.table["kinds"]',
    ),
    "torch's function by a name of the file": (
        lambda patch: patch.setattr(runtime_models, "relu", torch.sigmoid),
        "module:runtime_models:relu",
    ),
    "method in another one": (
        lambda patch: patch.setattr(
            runtime_models.Zoo, "helper", wrapped(runtime_models.Zoo.helper)
        ),
        "function runtime_models:Zoo.helper",
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_values_outside_the_model(
    zoo_artifact: Path,
    make_zoo: MakeZoo,
    name: str,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a graph was made for in classes and files, before attach and later."""
    change, what = ELSEWHERE[name]
    model, x = make_zoo(), torch.randn(4, 4)
    if when == "before":
        change(monkeypatch)
        with pytest.raises(MismatchError) as caught:
            compilekit.attach(model, zoo_artifact, entry="kinds")
    else:
        expected = model.kinds(x)
        compilekit.attach(model, zoo_artifact, entry="kinds")
        torch.testing.assert_close(model.kinds(x), expected)
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(MismatchError) as caught:
                model.kinds(x)
        torch.testing.assert_close(model.kinds(x), expected)
    assert what in caught.value.message


def test_loading_another_model_meanwhile(attached: Attached) -> None:
    """transformers writes into classes and sets the default dtype for a moment."""
    model = attached("forward")
    expected = model(ids())
    torch.set_default_dtype(torch.bfloat16)
    try:
        nn.Module.more = 1  # type: ignore[attr-defined]
        torch.testing.assert_close(model(ids()), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        del nn.Module.more  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["attribute", "class"])
def test_a_model_that_never_rests(attached: Attached, what: str) -> None:
    """A thread that writes all the time doesn't hold calls up."""
    model = attached("forward")
    expected = model(ids())
    receipt = model.__dict__["forward"].on_rebind.__self__
    ended = threading.Event()

    def write() -> None:
        owner: Any = model if what == "attribute" else type(model)
        while not ended.is_set():
            owner.last_seen = object()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            torch.testing.assert_close(model(ids()), expected)
    finally:
        ended.set()
        writer.join()
        if what == "class":
            del type(model).last_seen
    # A comparison for each call at most; of a name that nobody reads, none.
    assert receipt.rebinds <= (20 if what == "class" else 0)


def test_a_patched_class_is_noticed(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method written into a class, after it was compiled into programs."""
    model = attached("forward")
    expected = model(ids())
    with monkeypatch.context() as patched:
        patched.setattr(runtime_models.Step, "forward", OtherStep.forward)
        with pytest.raises(MismatchError, match="changed after attach") as caught:
            model(ids())
        assert "function runtime_models:Step.forward" in caught.value.message
    torch.testing.assert_close(model(ids()), expected)


def test_calls_leave_nothing_to_compare(attached: Attached) -> None:
    """Whatever a call looks up, or a library imports: the model is as it was."""
    model = attached("forward")
    receipt = model.__dict__["forward"].on_rebind.__self__
    for _ in range(3):
        model(ids())
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")
        runtime_models.Zoo()
    assert receipt.rebinds == 0


def test_tangents_are_refused(attached: Attached) -> None:
    """Forward-mode AD follows a call also with gradients off; a program doesn't."""
    model, x = attached("held"), torch.randn(4, 8)
    expected = model.held(x)
    ad = torch.autograd.forward_ad
    with ad.dual_level():
        torch.testing.assert_close(model.held(x), expected)
        dual = ad.make_dual(x, torch.ones_like(x))
        error = refused(lambda: model.held(dual))
        assert "input x carries a tangent" in error.message
        model.plain = ad.make_dual(model.plain.clone(), torch.ones(8))
        error = refused(lambda: model.held(x))
        assert "parameters carry tangents" in error.message
    torch.testing.assert_close(model.held(x), expected)


def test_putting_it_back_is_enough(attached: Attached, make_zoo: MakeZoo) -> None:
    """A refused model that fits again is served again, and the receipt counts it."""
    model = attached("forward")
    expected = model(ids())
    receipt = model.__dict__["forward"].on_rebind.__self__
    model.settings.bias = 1.0
    with pytest.raises(MismatchError):
        model(ids())
    assert receipt.rebinds == 0
    model.settings.bias = 0.25
    torch.testing.assert_close(model(ids()), expected)
    assert receipt.rebinds == 1


def test_a_global_hook_is_noticed(attached: Attached) -> None:
    """A hook on every module of the process would never run either."""
    model = attached("forward")
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(MismatchError, match="hooks of every module"):
            model(ids())
    finally:
        handle.remove()
    model(ids())


def test_the_models_own_hooks_run(attached: Attached) -> None:
    """Hooks on the attached module itself run around the program."""
    model = attached("forward")
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    model(ids())
    assert seen == ["before", "after"]


def test_tensors_that_no_registry_holds(attached: Attached, make_zoo: MakeZoo) -> None:
    """Plain attributes and list items are followed to their live value."""
    model, x = attached("held"), torch.randn(4, 8)
    torch.testing.assert_close(model.held(x), make_zoo().held(x))
    model.plain = torch.full((8,), 2.0)
    model.listed[0] = torch.full((8,), 1.0)
    torch.testing.assert_close(model.held(x), x * 2 + 1)
    model.listed.clear()
    with pytest.raises(MismatchError, match=r"tensor listed\[0\]"):
        model.held(x)


def test_functional_call(attached: Attached, make_zoo: MakeZoo) -> None:
    """torch.func.functional_call swaps parameters for one call, and they are used."""
    model, twin = attached("forward"), make_zoo()
    swapped = {"steps.0.linear.weight": torch.zeros(8, 8)}
    call = torch.func.functional_call
    expected = call(twin, swapped, (ids(), torch.ones(4, 8)))
    torch.testing.assert_close(call(model, swapped, (ids(),)), expected)
    torch.testing.assert_close(model(ids()), twin(ids(), torch.ones(4, 8)))


def test_threads_while_the_model_changes(attached: Attached, make_zoo: MakeZoo) -> None:
    """Parameters replaced by equal ones while eight threads call: all results right."""
    model = attached("forward")
    expected = {s: make_zoo()(ids(4, s), torch.ones(4, s)) for s in (8, 16, 5)}
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for step in model.steps:
                step.linear.weight = nn.Parameter(step.linear.weight.clone())
            model.load_state_dict(model.state_dict())

    def work() -> None:
        with torch.no_grad():
            for i in range(30):
                s = (8, 16, 5)[i % 3]
                torch.testing.assert_close(model(ids(4, s)), expected[s])

    changer = threading.Thread(target=change)
    changer.start()
    try:
        run_all([work] * 8)
    finally:
        done.set()
        changer.join()


# --- Copies, introspection, tracing -------------------------------------------------


def copies(model: Zoo) -> dict[str, Zoo]:
    """The model, copied in every way."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
        "copy of a copy": copy.deepcopy(copy.deepcopy(model)),
    }


def test_a_copy_is_not_attached(
    attached: Attached, zoo_artifact: Path, make_zoo: MakeZoo
) -> None:
    """A copy runs its class's forward on its own weights, and can be attached."""
    model, twin = attached("forward"), make_zoo()
    for parameter in twin.parameters():
        parameter.zero_()
    expected = twin(ids(), torch.ones(4, 8))
    for way, other in copies(model).items():
        for parameter in other.parameters():
            parameter.zero_()
        torch.testing.assert_close(other(ids(), torch.ones(4, 8)), expected, msg=way)
        assert inspect.ismethod(other.forward)
        assert other.forward.__self__ is other
        compilekit.attach(other, zoo_artifact, entry="forward")
        torch.testing.assert_close(other(ids()), expected, msg=way)
    torch.testing.assert_close(model(ids()), make_zoo()(ids(), torch.ones(4, 8)))


def test_a_copy_of_an_outer_module(attached: Attached, make_zoo: MakeZoo) -> None:
    """The attached model may be part of another: copies are its copies still."""
    outer = nn.ModuleDict({"zoo": attached("forward")})
    other = copy.deepcopy(outer)
    assert other["zoo"].forward.__self__ is other["zoo"]


def test_the_state_dict_is_the_models(attached: Attached, make_zoo: MakeZoo) -> None:
    """Attach adds nothing to what is saved."""
    assert list(attached("forward").state_dict()) == list(make_zoo().state_dict())


def test_the_forward_looks_like_its_own(attached: Attached) -> None:
    """Signature, name and documentation are those of the class's method."""
    forward = attached("forward").forward
    assert inspect.signature(forward) == inspect.signature(Zoo().forward)
    assert forward.__name__ == "forward"
    assert forward.__doc__ == Zoo.forward.__doc__


def test_torch_compile_leaves_programs_alone(
    attached: Attached, make_zoo: MakeZoo
) -> None:
    """Dynamo calls the program as it is, or says why it can't be one graph."""
    model = attached("forward")
    expected = make_zoo()(ids(), torch.ones(4, 8))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def outer(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return model(tokens + 0)

    for function in (model, outer):
        compiled = torch.compile(function, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(ids()), expected)
    assert len(graphs) == 1  # tokens + 0
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"receipt\.detach\(\)"):
        torch.compile(outer, backend=backend, fullgraph=True)(ids())
    torch._dynamo.reset()


def test_tracing_is_refused(attached: Attached) -> None:
    """torch.jit.trace would record nothing of a kernel."""
    model = attached("held")
    holder = nn.Module()
    holder.forward = model.held  # type: ignore[method-assign]
    with pytest.raises(CallRefusedError, match="is being traced"):
        torch.jit.trace(lambda x: model.held(x), torch.randn(4, 8))


def test_make_fx_is_refused(attached: Attached) -> None:
    """It would keep the first call's result as a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model = attached("held")
    model.held(torch.ones(4, 8))
    with torch.no_grad(), pytest.raises(CallRefusedError, match="is being traced"):
        make_fx(lambda x: model.held(x))(torch.ones(4, 8))


def test_a_change_is_bound_inside_functionalize(
    attached: Attached, make_zoo: Callable[..., Any]
) -> None:
    """Where torch's operators make other tensors; later calls go on."""
    model, reference = attached("held"), make_zoo()
    x = torch.ones(4, 8)
    with torch.no_grad():
        model.plain, reference.plain = torch.full((8,), 0.5), torch.full((8,), 0.5)
        torch.func.functionalize(lambda y: model.held(x) * y)(torch.ones(1))
        torch.testing.assert_close(model.held(x), reference.held(x))


def test_guards_hold_outside_autocast_wherever_they_are_made() -> None:
    """A call inside autocast is never an exact one."""
    specs = [TensorSpec("float32", (2, 2), (2, 1))]
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guards = _guards(specs, torch.device("cpu"))[False]
        assert not any(guard(x) for guard in guards)
    assert any(guard(x) for guard in guards)


def test_export_is_refused(attached: Attached) -> None:
    """torch.export passes fake tensors, whose memory is nowhere."""
    model = attached("forward")
    with pytest.raises(CallRefusedError, match="is being traced"):
        torch.export.export(model, (ids(),), strict=False)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3, 4), (4, 1)), ((4, 3), (1, 4)), ((2, 3), (1, 0)), ((), ())],
)
def test_a_copy_keeps_the_layout(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    """A misaligned argument is copied with its strides, expanded ones included."""
    tensor = torch.arange(13.0)[1:].as_strided(shape, stride, 1)
    copy = same_layout(tensor)
    assert (copy.shape, copy.stride()) == (tensor.shape, tensor.stride())
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
