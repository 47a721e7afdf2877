"""`prepare`: an artifact's code is there before the model is."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import compilekit
from compilekit.artifact import Artifact, open_artifact
from compilekit.artifact.program import (
    Constant,
    Entry,
    GraphInput,
    InputRule,
    KernelRef,
    Program,
)
from compilekit.artifact.program import TensorSpec as Spec
from compilekit.errors import AttachError, ConfigError, DigestError, MismatchError
from compilekit.runtime import prepare as preparing
from compilekit.runtime import program as programs
from compilekit.runtime.prepare import can_rehearse, finish

MakeZoo = Callable[..., Any]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine where asking for cuda:0 starts a thread, which takes the CPU's code."""
    place = torch.device("cuda", 0)
    cpu = torch.device("cpu")
    rehearse = preparing._rehearse

    def on_cpu(
        artifact: Artifact, programs: Any, gpu: torch.device, enough: Any
    ) -> None:
        rehearse(artifact, programs, cpu, enough)

    monkeypatch.setattr(preparing, "asked_place", lambda device: place)
    monkeypatch.setattr(
        preparing, "choose_target", lambda a, *_: next(iter(a.manifest.targets))
    )
    monkeypatch.setattr(preparing, "_rehearse_all", on_cpu)
    monkeypatch.setattr(preparing, "_is_harmless", lambda artifact, kernel: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (10**12, 10**12))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: Stream())
    yield
    finish()


class Stream:
    """Everything on it is done."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@pytest.mark.usefixtures("gpu")
def test_programs_are_rehearsed(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are loaded without a model, and attach loads none of them again."""
    monkeypatch.setattr(programs, "_kernels", {})
    # Whether an earlier test of this process loaded it is left to no test's order.
    monkeypatch.setattr(programs, "_natives", {})
    ran = []

    def load_program(artifact: Artifact, program: Program, *rest: Any) -> Any:
        call = programs.load_program(artifact, program, *rest)
        return lambda inputs: ran.append((program.entry, len(call(inputs))))

    monkeypatch.setattr(preparing, "load_program", load_program)
    opened = compilekit.prepare(zoo_artifact, device="cuda")
    for preparation in list(preparing._running):
        preparation.thread.join()
    known = {k.digest for p in opened.programs.values() for k in p.kernels.values()}
    assert programs._kernels.keys() == known
    assert {entry for entry, _ in ran} >= {"forward", "rows", "held"}

    load_kernel = programs._load
    loaded = []

    def load(artifact: Any, digest: str, *names: str) -> Any:
        loaded.append(digest)
        return load_kernel(artifact, digest, *names)

    monkeypatch.setattr(programs, "_load", load)
    receipt = compilekit.attach(make_zoo(), opened, entry="held", device="cpu")
    assert "wait" not in receipt.milliseconds
    assert not preparing._running
    # What matches calls belongs to a CPU's artifact, and isn't a kernel.
    held = [e.native for (_, name), e in opened.entries.items() if name == "held"]
    assert loaded == [native.digest for native in held if native]
    receipt.detach()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_room_is_left_alone(
    zoo_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model wouldn't fit beside it, nothing is run."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (1000, 10**9))
    monkeypatch.setattr(preparing, "load_program", None)
    compilekit.prepare(zoo_artifact)
    preparing._running[0].thread.join()


def test_nothing_is_begun_on_a_cpu(zoo_artifact: Path) -> None:
    """The artifact is opened, and that's all."""
    opened = compilekit.prepare(zoo_artifact)
    assert opened.root == zoo_artifact
    assert not preparing._running
    assert not finish()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, gpu: None) -> Iterator[list[threading.Event]]:
    """Preparations that go on until they are told to end; their events."""
    begun: list[threading.Event] = []

    def prepare(artifact: Any, place: Any, target: Any, enough: Any) -> None:
        begun.append(enough)
        assert enough.wait(30)

    monkeypatch.setattr(preparing, "_prepare", prepare)
    yield begun
    finish()


def test_attach_ends_all_where_they_are(
    zoo_artifact: Path, make_zoo: MakeZoo, slow: list[threading.Event]
) -> None:
    """Of another artifact too; the phase says that it waited."""
    opened = [compilekit.prepare(zoo_artifact) for _ in range(2)]
    receipt = compilekit.attach(make_zoo(), opened[0], entry="held", device="cpu")
    assert "wait" in receipt.milliseconds
    assert not preparing._running
    receipt.detach()


def test_two_may_wait(zoo_artifact: Path, slow: list[threading.Event]) -> None:
    """Both return when it has ended, and the next preparation isn't ended by them."""
    compilekit.prepare(zoo_artifact)
    thread = preparing._running[0].thread
    waiting = [threading.Thread(target=finish) for _ in range(2)]
    for each in waiting:
        each.start()
    for each in waiting:
        each.join()
    assert not thread.is_alive()
    compilekit.prepare(zoo_artifact)
    assert not preparing._running[0].enough.is_set()


def test_a_fork_waits(zoo_artifact: Path, slow: list[threading.Event]) -> None:
    """No child inherits a lock that the thread held."""
    compilekit.prepare(zoo_artifact)
    thread = preparing._running[0].thread
    child = os.fork()
    if child == 0:
        os._exit(len(preparing._running))
    assert os.waitpid(child, 0)[1] == 0
    assert not thread.is_alive()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("error", [OSError, AssertionError, AttributeError])
def test_no_error_leaves_the_thread(
    zoo_artifact: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Nothing is printed either: attach comes to the same."""

    def load(*_: Any) -> None:
        raise error("no such kernel")

    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(preparing, "load_kernels", load)
    compilekit.prepare(zoo_artifact)
    preparing._running[0].thread.join()
    assert not printed


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
    ("device", "error"),
    [("gpu", ConfigError), (5.0, ConfigError), ("meta", AttachError)],
)
def test_unknown_places_are_refused(
    zoo_artifact: Path, device: Any, error: type[Exception]
) -> None:
    """As attach refuses them."""
    with pytest.raises(error, match=str(device)):
        compilekit.prepare(zoo_artifact, device=device)


def test_a_gpu_that_isnt_there_is_attachs_to_refuse(
    zoo_artifact: Path, make_zoo: MakeZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends without a word; attach names both sides."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    opened = compilekit.prepare(zoo_artifact, device="cuda")
    preparing._running[0].thread.join()
    with pytest.raises(MismatchError, match="cuda"):
        compilekit.attach(make_zoo(), opened, device="cuda")


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


def kernel(symbol: str, source: str = "safe") -> KernelRef:
    """A GPU's kernel of that name."""
    return KernelRef("", source, {"symbol": symbol})


class Sources(dict[str, bytes]):
    """An artifact's files."""

    def read(self, path: str) -> bytes:
        """One of them."""
        return self[path]


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
    sources = {"sources/safe.py": b"", "sources/checks.py": b"tl.device_assert(x)"}
    can = functools.partial(can_rehearse, cast(Artifact, Sources(sources)))
    assert can(ENTRY, PROGRAM)
    change = ENTRY._replace
    assert not can(change(training=True), PROGRAM)
    assert not can(change(custom_ops={"my::op": {}}), PROGRAM)
    assert not can(ENTRY, PROGRAM._replace(kernels={"k": kernel("mine")}))
    assert can(ENTRY, PROGRAM._replace(kernels={"k": kernel("triton_poi")}))
    looks_up = PROGRAM._replace(kernels={"k": kernel("triton_poi", "checks")})
    assert not can(ENTRY, looks_up)
    assert can(change(role="prefill"), looks_up)
    step = PROGRAM._replace(kernels={"k": kernel("one_row")})
    assert can(change(role="decode"), step)
    assert not can(ENTRY, PROGRAM._replace(constants={"c": Constant("", "c")}))
    places = {**ENTRY.tensors, "places": Spec("int64", (4,), (1,), "cuda")}
    assert not can(change(tensors=places), PROGRAM)
    for name in (
        "torch.ops.mine.op.default",
        "torch.ops._c10d_functional.all_reduce.default",
        "torch.ops.aten.bernoulli_.float",
        "torch.ops.aten.rand.default",
        "inductor_ops.seed",
        "torch.ops.inductor.seeds",
    ):
        assert not can(ENTRY, PROGRAM._replace(externs=(name,))), name


def test_the_opened_artifact_comes_back(zoo_artifact: Path) -> None:
    """An artifact that is open already is taken as it is."""
    opened = open_artifact(zoo_artifact)
    assert compilekit.prepare(opened) is opened
    finish()
