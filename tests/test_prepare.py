"""`prepare`: an artifact's code is there before the model is."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compilekit
from compilekit.artifact import open_artifact
from compilekit.artifact.program import Entry, GraphInput, InputRule, KernelRef, Program
from compilekit.artifact.program import TensorSpec as Spec
from compilekit.errors import AttachError, ConfigError, DigestError, MismatchError
from compilekit.runtime import prepare as preparing
from compilekit.runtime import program as programs
from compilekit.runtime.prepare import can_rehearse, finish

MakeZoo = Callable[..., Any]


def test_attach_takes_what_was_prepared(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel is loaded without a model; attach loads none again."""
    monkeypatch.setattr(programs, "_kernels", {})
    opened = compilekit.prepare(zoo_artifact)
    for thread in list(preparing._running):
        thread.join()
    known = {k.digest for p in opened.programs.values() for k in p.kernels.values()}
    assert programs._kernels.keys() == known

    def load(artifact: Any, digest: str) -> Any:
        raise AssertionError(f"{digest} is loaded again")

    monkeypatch.setattr(programs, "_load", load)
    model = make_zoo()
    receipt = compilekit.attach(model, opened, entry="held")
    assert "wait" in receipt.milliseconds
    receipt.detach()
    receipt = compilekit.attach(model, opened, entry="held")
    assert "wait" not in receipt.milliseconds
    receipt.detach()


def test_attach_ends_it_where_it_is(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What isn't loaded yet, attach loads by itself."""
    started, load = threading.Event(), preparing.load_program
    count = 0

    def slowly(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        started.set()
        assert preparing._enough.wait(30)
        return load(*arguments)

    monkeypatch.setattr(preparing, "load_program", slowly)
    opened = compilekit.prepare(zoo_artifact)
    assert started.wait(30)
    receipt = compilekit.attach(make_zoo(), opened, entry="held")
    assert count == 1
    assert not preparing._enough.is_set()
    receipt.detach()


def test_a_fork_waits(zoo_artifact: Path) -> None:
    """No child inherits a lock that the thread held."""
    compilekit.prepare(zoo_artifact)
    assert preparing._running
    child = os.fork()
    if child == 0:
        os._exit(len(preparing._running))
    assert os.waitpid(child, 0)[1] == 0
    assert not preparing._running


def test_a_damaged_artifact_is_refused_at_once(
    zoo_artifact: Path, tmp_path: Path
) -> None:
    """Nothing is loaded, and nothing is left running."""
    copy = tmp_path / "copy"
    shutil.copytree(zoo_artifact, copy)
    kernel = next(copy.glob("kernels/*.so"))
    kernel.write_bytes(kernel.read_bytes()[:-1] + b"?")
    with pytest.raises(DigestError, match=kernel.name):
        compilekit.prepare(copy)
    assert not preparing._running


@pytest.mark.parametrize(
    ("device", "error"), [("gpu", ConfigError), ("meta", AttachError)]
)
def test_unknown_places_are_refused(
    zoo_artifact: Path, device: str, error: type[Exception]
) -> None:
    """As attach refuses them."""
    with pytest.raises(error, match=device):
        compilekit.prepare(zoo_artifact, device=device)


def test_what_doesnt_fit_is_attachs_to_say(
    zoo_artifact: Path, make_zoo: MakeZoo
) -> None:
    """The thread ends without a word; attach names both sides."""
    opened = compilekit.prepare(zoo_artifact, target="nvidia-h200")
    assert finish()
    with pytest.raises((MismatchError, ConfigError), match="nvidia-h200"):
        compilekit.attach(make_zoo(), opened, target="nvidia-h200")


ENTRY = Entry(
    name="forward",
    target="nvidia-h200",
    method="forward",
    axes=("s",),
    signature=(),
    inputs={"ids": InputRule("int64", ("s",), low=3)},
    fixed={},
    cuts={},
    tensors={
        "w": Spec("bfloat16", (4, 8), (1, 4), "cuda"),
        "state": Spec("float32", (5,), (1,), "cuda"),
    },
    aliases=(),
    reads=(),
    code={},
    ambient={},
)
PROGRAM = Program(
    target="nvidia-h200",
    entry="forward",
    bucket="s6",
    axes={"s": 6},
    inputs=(
        GraphInput("tensor", "w"),
        GraphInput("argument", "ids", Spec("int64", (6,), (2,), "cuda")),
        GraphInput("tensor", "state", mutated=True),
    ),
    outputs=(),
    result={},
    kernels={},
    constants={},
    externs=("extern_kernels.mm", "torch.ops.aten.index_copy_.default", "torch.bool"),
)


def test_a_rehearsals_inputs() -> None:
    """Layouts as the program has them; only what is read shares memory."""
    shared = torch.zeros(512, dtype=torch.uint8)
    weight, ids, state = preparing._inputs(ENTRY, PROGRAM, shared, torch.device("cpu"))
    assert (weight.dtype, tuple(weight.shape)) == (torch.bfloat16, (4, 8))
    assert weight.stride() == (1, 4)
    assert weight.data_ptr() == shared.data_ptr()
    assert (ids.tolist(), ids.stride()) == ([3] * 6, (2,))
    assert (state.tolist(), state.dtype) == ([0.0] * 5, torch.float32)
    assert len({t.untyped_storage().data_ptr() for t in (weight, ids, state)}) == 3


def kernel(symbol: str) -> KernelRef:
    """A GPU's kernel of that name."""
    return KernelRef("", "", {"symbol": symbol})


def test_empty_tensors_take_no_memory() -> None:
    """A dimension of size 0, with any stride."""
    empty = Spec("float32", (0, 8), (8, 1), "cuda")
    entry = ENTRY._replace(tensors={"w": empty})
    program = PROGRAM._replace(inputs=(GraphInput("tensor", "w"),))
    shared = torch.zeros(0, dtype=torch.uint8)
    (tensor,) = preparing._inputs(entry, program, shared, torch.device("cpu"))
    assert (tuple(tensor.shape), tensor.dtype) == ((0, 8), torch.float32)


def test_what_may_be_rehearsed() -> None:
    """Nothing random, nothing of strangers, no integers that the model holds."""
    assert can_rehearse(ENTRY, PROGRAM)
    change = ENTRY._replace
    assert not can_rehearse(change(training=True), PROGRAM)
    assert not can_rehearse(change(custom_ops={"my::op": {}}), PROGRAM)
    assert not can_rehearse(ENTRY, PROGRAM._replace(kernels={"k": kernel("mine")}))
    assert can_rehearse(ENTRY, PROGRAM._replace(kernels={"k": kernel("triton_poi")}))
    step = PROGRAM._replace(kernels={"k": kernel("one_row")})
    assert can_rehearse(change(role="decode"), step)
    places = {**ENTRY.tensors, "places": Spec("int64", (4,), (1,), "cuda")}
    assert not can_rehearse(change(tensors=places), PROGRAM)
    for name in (
        "torch.ops.mine.op.default",
        "torch.ops._c10d_functional.all_reduce.default",
        "torch.ops.aten.bernoulli_.float",
        "torch.ops.aten.rand.default",
        "inductor_ops.seed",
        "torch.ops.inductor.seeds",
    ):
        assert not can_rehearse(ENTRY, PROGRAM._replace(externs=(name,))), name


def test_the_opened_artifact_comes_back(zoo_artifact: Path) -> None:
    """An artifact that is open already is taken as it is."""
    opened = open_artifact(zoo_artifact)
    assert compilekit.prepare(opened) is opened
    finish()
