"""Calls that pass a bucket's very tensors, by torch's guards and by the artifact's C++.

Both must take the same calls: what one let through by mistake, a program would run on.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils.generic import ModelOutput

from compilekit.artifact.program import Entry, InputRule, Parameter, TensorSpec
from compilekit.runtime.arguments import Arguments
from compilekit.runtime.exact import (
    MISSED,
    ExactCall,
    ExactCalls,
    ExactProgram,
    can_be_exact,
    native_call,
)
from compilekit.runtime.model import ModelView, ambient
from compilekit.runtime.program import Native
from compilekit.runtime.result import model_output_fields, result_builder
from compilekit.runtime.watch import Watch

SIZES = (2, 4)


class Net(nn.Module):
    """A forward whose flag was baked in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, flag: bool = True
    ) -> torch.Tensor:
        """Never called: programs are."""
        raise NotImplementedError


@dataclasses.dataclass
class Output(ModelOutput):
    """As transformers' models return it."""

    hidden: torch.Tensor | None = None
    skipped: torch.Tensor | None = None
    kind: str | None = None


class Own(torch.Tensor):
    """A class with behaviour of its own."""


def described() -> Entry:
    return Entry(
        name="forward",
        target="cpu-x86_64-v3",
        method="forward",
        axes=("n",),
        signature=tuple(Parameter(n, "positional", True) for n in ("a", "b", "flag")),
        inputs={
            "a": InputRule("float32", ("n", 3), None, None, None, None),
            "b": InputRule("int64", ("n",), None, None, None, None),
        },
        fixed={"flag": True},
        cuts={},
        tensors=("scale",),
        aliases=(),
        reads=(),
        code={},
        ambient=ambient(),
    )


def specs(n: int) -> tuple[TensorSpec, ...]:
    return TensorSpec("float32", (n, 3), (3, 1)), TensorSpec("int64", (n,), (1,))


OUT = {"kind": "out", "index": 0}
TUPLE = {"kind": "tuple", "items": [OUT, {"kind": "argument", "path": "b"}]}
CLASS = {
    "kind": "dataclass",
    "class": f"{__name__}:Output",
    "items": [
        ["hidden", OUT],
        ["skipped", {"kind": "value", "value": None}],
        ["kind", {"kind": "value", "value": "x"}],
    ],
}


class Made:
    """A model with exact calls; its program adds all that it is given."""

    def __init__(self, native: Native, tree: dict[str, Any] = TUPLE) -> None:
        self.model = Net().eval()
        self.entry = described()
        self.arguments = Arguments(
            self.entry, self.model.forward, {}, [], torch.device("cpu")
        )
        self.tree = tree
        self.given: list[list[torch.Tensor]] = []
        self.guards = ExactCalls(self.arguments, {(n,): specs(n) for n in SIZES})
        self.build = result_builder(tree, {}, ("n",), self.model)
        programs = [
            ExactProgram(
                specs(n),
                [None, self.model.scale, None],
                ((0, 0), (2, 1)),
                self.program,
                self.build,
                model_output_fields(tree),
            )
            for n in SIZES
        ]
        self.watch = Watch(ModelView(self.model), self.entry, native.changed)
        call = native_call(native, self.arguments, programs, self.watch, False)
        assert call is not None
        self.native: ExactCall = call

    def program(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a bucket would run."""
        self.given.append(list(inputs))
        return (inputs[0] * inputs[1],)


@pytest.fixture
def made(native: Native) -> Made:
    """A model whose calls are told apart."""
    return Made(native)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Calls are a server's: without gradients."""
    with torch.no_grad():
        yield


def pair(n: int = 2) -> dict[str, Any]:
    return {"a": torch.randn(n, 3), "b": torch.arange(n)}


def positional(**kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(kwargs.values()), {}


def first_by_position(**kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (kwargs.pop("a"),), kwargs


def with_a(
    change: Callable[[torch.Tensor], Any],
) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    """A call whose first tensor is another one."""
    return lambda: ((), {**pair(), "a": change(torch.randn(2, 3))})


EXACT: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "names": lambda: ((), pair()),
    "another bucket": lambda: ((), pair(4)),
    "positions": lambda: positional(**pair()),
    "what was built in": lambda: ((), {**pair(), "flag": True}),
    "that by position": lambda: positional(**pair(), flag=True),
    "from numpy": with_a(lambda a: torch.from_numpy(a.numpy())),
    "a view": with_a(lambda a: torch.zeros(3, 3)[1:]),
    "detached": with_a(lambda a: a.detach()),
    "memory that was something else": with_a(lambda a: torch.ones(99)[:6].view(2, 3)),
}
# Only C++ takes these: the guards hold a tensor to wanting no gradients.
MORE: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "by position and name": lambda: first_by_position(**pair()),
    "wants gradients": with_a(lambda a: a.requires_grad_()),
}
OTHERS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "size": lambda: ((), pair(3)),
    "sizes of two buckets": lambda: ((), {**pair(2), "b": torch.arange(4)}),
    "rank": with_a(lambda a: a[0]),
    "dtype": with_a(lambda a: a.double()),
    "same width": with_a(lambda a: a.to(torch.int32)),
    "stride": with_a(lambda a: a.t().contiguous().t()),
    "expanded": with_a(lambda a: a[:, :1].expand(2, 3)),
    "device": with_a(lambda a: a.to("meta")),
    "class": with_a(lambda a: a.as_subclass(Own)),
    "parameter": with_a(lambda a: nn.Parameter(a, requires_grad=False)),
    "negated": with_a(lambda a: torch._neg_view(a)),
    "sparse": with_a(lambda a: a.to_sparse()),
    "nested": with_a(lambda a: torch.nested.nested_tensor([a[0], a[1]])),
    "no tensor": with_a(lambda a: a.tolist()),
    "nothing": with_a(lambda a: None),
    "left out": lambda: ((), {"a": torch.randn(2, 3)}),
    "all left out": lambda: ((), {}),
    "unknown": lambda: ((), {**pair(), "more": True}),
    "unknown for known": lambda: ((), {"a": torch.randn(2, 3), "more": True}),
    "twice": lambda: ((torch.randn(2, 3),), {"a": torch.randn(2, 3)}),
    "twice with all": lambda: ((torch.randn(2, 3),), pair()),
    "another value": lambda: ((), {**pair(), "flag": False}),
    "an equal value": lambda: ((), {**pair(), "flag": 1}),
    "too many": lambda: ((*pair().values(), True, True), {}),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_exact_calls(name: str, made_inside: bool, inside: bool, made: Made) -> None:
    """Whatever mode its tensors were made in, a call runs its bucket's program."""
    with torch.inference_mode(made_inside):
        args, kwargs = EXACT[name]()
    values = {**dict(zip("ab", args, strict=False)), **kwargs}
    with torch.inference_mode(inside), torch.no_grad():
        found = made.native(args, kwargs)
        assert found is not MISSED
        assert made.guards.match(args, kwargs) is not None
    inputs = made.given.pop()
    assert inputs[0] is values["a"]
    assert inputs[1] is made.model.scale
    assert inputs[2] is values["b"]
    assert found[1] is values["b"]
    torch.testing.assert_close(found[0], values["a"])


@pytest.mark.parametrize("name", MORE)
def test_calls_that_only_one_way_takes(name: str, made: Made) -> None:
    """As good as the others, with gradients off."""
    args, kwargs = MORE[name]()
    assert made.guards.match(args, kwargs) is None
    assert made.native(args, kwargs) is not MISSED


def test_a_thousand_new_tensors(made: Made) -> None:
    """Whatever lay in their memory before, padding between their fields included."""
    rest = []
    for i in range(1000):
        rest.append(torch.empty(i % 7, 3, dtype=torch.int16))
        if i % 3 == 0:
            rest.clear()
        assert made.native((), pair()) is not MISSED


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_calls(name: str, inside: bool, made: Made) -> None:
    """Anything else is for the checks of the long way: no program ran."""
    args, kwargs = OTHERS[name]()
    with torch.inference_mode(inside), torch.no_grad():
        assert made.native(args, kwargs) is MISSED
        if name != "nested":
            # torch's guard would crash, and `ExactCalls` doesn't get so far.
            assert made.guards.match(args, kwargs) is None
    assert not made.given


class Mode(TorchDispatchMode):
    """Sees every operator."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As it is."""
        return function(*args, **(kwargs or {}))


def in_vmap(call: Callable[[], Any]) -> None:
    torch.vmap(lambda x: (call(), x)[1])(torch.ones(2))


def in_functionalize(call: Callable[[], Any]) -> None:
    torch.func.functionalize(lambda x: (call(), x)[1])(torch.ones(2))


def in_trace(call: Callable[[], Any]) -> None:
    torch.jit.trace(lambda x: (call(), x + 1)[1], (torch.ones(2),), check_trace=False)


def in_make_fx(call: Callable[[], Any]) -> None:
    make_fx(lambda x: (call(), x + 1)[1])(torch.ones(2))


def in_mode(call: Callable[[], Any]) -> None:
    with Mode():
        call()


def in_autocast(call: Callable[[], Any]) -> None:
    with torch.autocast("cpu"):
        call()


def in_dual_level(call: Callable[[], Any]) -> None:
    with torch.autograd.forward_ad.dual_level():
        call()


def with_gradients(call: Callable[[], Any]) -> None:
    with torch.enable_grad():
        call()


def deterministic(call: Callable[[], Any]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "around",
    [
        *(in_vmap, in_functionalize, in_trace, in_make_fx, in_mode),
        *(in_autocast, with_gradients, deterministic, in_dual_level),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_where_no_call_is_exact(
    around: Callable[[Callable[[], Any]], None], made: Made
) -> None:
    """Where operators mean something else, calls are checked one part after another."""
    kwargs = pair()
    assert made.native((), kwargs) is not MISSED
    made.given.clear()
    results: list[Any] = []
    around(lambda: results.append(made.native((), kwargs)))
    assert results
    assert all(result is MISSED for result in results)
    assert not made.given
    # make_fx writes into nn.Module while it traces: such a model is compared again.
    missed = made.native((), kwargs) is MISSED
    assert missed == made.watch.changed() == (around is in_make_fx)


def test_tables_of_a_thread_with_modes(native: Native) -> None:
    """Made inside autocast and a transform, they hold for calls outside of both."""
    found: list[Made] = []
    kwargs = pair()

    def make(x: torch.Tensor) -> torch.Tensor:
        found.append(Made(native))
        assert found[0].native((), kwargs) is MISSED
        return x

    with torch.autocast("cpu"):
        torch.vmap(make)(torch.ones(2))
    assert found[0].native((), kwargs) is not MISSED


def test_a_change_is_for_the_long_way(made: Made) -> None:
    """Words that differ: the model is compared first."""
    assert made.native((), pair()) is not MISSED
    made.model.more = 1  # type: ignore[assignment]
    made.given.clear()
    assert made.native((), pair()) is MISSED
    assert not made.given


class Name(str):
    """A name that makes itself equal to others, and does what it likes meanwhile."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        gc.collect()
        return str(self) == other

    __hash__ = str.__hash__


def test_names_of_another_class(made: Made) -> None:
    """What they run could free the call's tensors: they are for the long way."""
    kwargs = {Name(name): value for name, value in pair().items()}
    assert made.native((), kwargs) is MISSED
    assert made.native((kwargs.pop("a"),), kwargs) is MISSED


def test_a_class_that_makes_something_else(native: Native) -> None:
    """Its ``__new__`` was written after attach, say: an error, not a crash."""

    class Mine(Output):
        pass

    made = Made(native, CLASS)
    fields = model_output_fields(CLASS)
    assert fields is not None
    program = ExactProgram(
        specs(2),
        [None, made.model.scale, None],
        ((0, 0), (2, 1)),
        made.program,
        made.build,
        fields._replace(cls=Mine),
    )
    call = native_call(native, made.arguments, [program], made.watch, False)
    assert call is not None
    assert type(call((), pair())) is Mine
    Mine.__new__ = lambda cls: {}  # type: ignore[assignment, method-assign, misc]
    with pytest.raises(TypeError, match=r"Mine.__new__ made a dict"):
        call((), pair())


def test_a_program_that_returns_a_list(native: Native) -> None:
    """As good as a tuple, in Python and in C++."""
    made = Made(native, CLASS)
    made.program = lambda inputs: [inputs[0] * 2]  # type: ignore
    made.__init__(native, CLASS)  # type: ignore[misc]
    kwargs = pair()
    torch.testing.assert_close(made.native((), kwargs).hidden, kwargs["a"] * 2)


def test_transformers_output(native: Native) -> None:
    """Attributes, keys and class are those that Python code puts together."""
    made = Made(native, CLASS)
    kwargs = pair()
    found = made.native((), kwargs)
    expected = made.build((kwargs["a"] * 1,), kwargs, None)
    assert type(found) is type(expected) is Output
    assert list(found) == list(expected) == ["hidden", "kind"]
    assert list(vars(found).items())[1:] == list(vars(expected).items())[1:]
    assert found.hidden is found["hidden"] is found[0]
    assert found.skipped is None
    torch.testing.assert_close(found.hidden, expected.hidden)


@pytest.mark.parametrize("tree", [TUPLE, CLASS], ids=["tuple", "class"])
def test_errors_come_through(tree: dict[str, Any], native: Native) -> None:
    """A program's own error, and one that returns less than it should."""
    made = Made(native, tree)
    outputs: list[tuple[torch.Tensor, ...]] = []
    made.program = lambda inputs: outputs.pop()  # type: ignore[method-assign]
    made.__init__(native, tree)  # type: ignore[misc]
    for each in ((), (torch.ones(1),)):
        outputs[:] = [each]
        if each:
            assert made.native((), pair()) is not MISSED
        else:
            with pytest.raises(IndexError):
                made.native((), pair())
    with pytest.raises(IndexError, match="pop from empty list"):
        made.native((), pair())


@pytest.mark.parametrize("tree", [TUPLE, CLASS], ids=["tuple", "class"])
def test_no_reference_is_left(tree: dict[str, Any], native: Native) -> None:
    """Nor one too few: counts are what they were, whatever way a call took."""
    made = Made(native, tree)
    kwargs = pair()
    watched = [*kwargs.values(), *kwargs, made.model.scale, None, MISSED, Output, True]
    watched += [made.build, made.program.__func__, torch.Tensor, "hidden", "x"]
    calls: list[Callable[[], Any]] = [
        lambda: made.native((), kwargs),
        lambda: made.native(tuple(kwargs.values()), {}),
        lambda: made.native((), {**kwargs, "flag": True}),
        lambda: made.native((), {"a": kwargs["a"]}),
        lambda: made.native((), {**kwargs, "flag": None}),
        lambda: made.native((), {**kwargs, "a": kwargs["b"]}),
    ]
    for call in calls:
        call()
    made.given.clear()
    gc.collect()
    before = [sys.getrefcount(value) for value in watched]
    for call in calls:
        for _ in range(200):
            call()
    made.given.clear()
    gc.collect()
    after = [sys.getrefcount(value) for value in watched]
    for value, one, two in zip(watched, before, after, strict=True):
        assert abs(one - two) < 50, value


def test_a_result_dies_with_its_last_name(native: Native) -> None:
    """No cycle and no hidden reference keeps what a call returned."""
    made = Made(native, CLASS)
    found = made.native((), pair())
    hidden = weakref.ref(found.hidden)
    made.given.clear()
    gc.disable()
    try:
        del found
        assert hidden() is None
    finally:
        gc.enable()


def test_threads_call_side_by_side(made: Made) -> None:
    """Each gets what it passed; the table is only read."""
    wrong: list[int] = []

    def work(n: int) -> None:
        with torch.no_grad():
            for _ in range(300):
                kwargs = pair(n)
                found = made.native((), kwargs)
                if found[1] is not kwargs["b"] or not found[0].equal(kwargs["a"]):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 4, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "arguments", [(), (b"", (), ()), ("", (), (), {}), (b"", (), [], {})]
)
def test_a_table_must_be_one(arguments: tuple[Any, ...], native: Native) -> None:
    """Anything else is an error of ours, not a crash."""
    with pytest.raises(TypeError, match="expected a table"):
        native.call(*arguments)


def test_what_a_call_reads_outlives_a_rebind(native: Native) -> None:
    """Another thread may bind again, and drop the old watch, just before it."""
    made = Made(native)
    kept = weakref.ref(made.watch)
    call = made.native
    del made
    gc.collect()
    assert kept() is not None
    del call
    gc.collect()
    assert kept() is None


def test_what_was_built_in_below_an_argument(made: Made) -> None:
    """It can't be told by name, and must be there: no call is an exact one."""
    entry = made.entry._replace(fixed={'options["x"]': 1})
    arguments = Arguments(entry, made.model.forward, {}, [], torch.device("cpu"))
    assert ExactCalls(arguments, {(2,): specs(2)}).match((), pair()) is None
    assert not can_be_exact(arguments)


def test_what_needs_the_guards(native: Native) -> None:
    """More dimensions or arguments than a table has room for."""
    made = Made(native)
    flat = TensorSpec("float32", (1,) * 6, (1,) * 6), specs(2)[1]
    program = ExactProgram(flat, [], (), made.program, made.build, None)
    assert native_call(native, made.arguments, [program], made.watch, False) is None
    rule = made.entry.inputs["b"]
    many = {f"x{i}": rule for i in range(17)}
    made.entry = made.entry._replace(inputs=many, fixed={})
    made.arguments = Arguments(
        made.entry, made.model.forward, {}, [], torch.device("cpu")
    )
    assert native_call(native, made.arguments, [], made.watch, False) is None
