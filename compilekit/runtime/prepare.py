"""`prepare`: what a start on a GPU can do before the model's weights are there.

Reading weights keeps the disk and the bus busy. Meanwhile a thread loads an artifact's
kernels and runs each program once on memory of its own: PyTorch's libraries read their
kernels from files of 2 GB at the first call that needs them. What `attach` then finds
is loaded already, by digest, whatever model it is given.

Nothing here fails a start: `attach` comes to the same faults and says what they are.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from typing import NamedTuple

import torch

from compilekit.artifact import Artifact
from compilekit.artifact.program import Entry, KernelRef, Program, TensorSpec
from compilekit.errors import CompilekitError
from compilekit.runtime.check import choose_target, demand_target
from compilekit.runtime.place import asked_place
from compilekit.runtime.program import load_kernels, load_program
from compilekit.runtime.requirements import open_required

# What a rehearsal may call: operators of torch that neither draw random numbers nor
# talk to other processes.
_PLAIN = re.compile(r"extern_kernels\.\w+|torch\.\w+|torch\.ops\.aten\.[\w.]+")
_RANDOM = re.compile(r"rand|seed|dropout|bernoulli|normal_|multinomial|exponential")
_ROUND = 512
# Part of the device's memory that a rehearsal leaves to the model's caches.
_LEFT = 0.1
# What a file, a driver, an operator or a program's own checks raise.
_FAULTS = (
    *(CompilekitError, ArithmeticError, AssertionError, AttributeError, EOFError),
    *(ImportError, LookupError, MemoryError, NameError, OSError, RuntimeError),
    *(SyntaxError, TypeError, ValueError),
)


class _Preparation(NamedTuple):
    """One that was begun.

    Attributes:
        enough: Set to have it end where it is.
    """

    thread: threading.Thread
    enough: threading.Event


_running: list[_Preparation] = []
_lock = threading.Lock()


def prepare(
    artifact: Artifact | str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    target: str | None = None,
) -> Artifact:
    """Load an artifact's code beside whatever the process does next.

    The artifact is opened, every byte verified, before this returns. On a CPU that's
    all: nothing else takes time there. On a GPU a thread takes memory for the largest
    of the model's tensors and for what the programs need besides, which it gives back;
    it takes none where the model wouldn't have enough left. Programs that hold folded
    weights, draw random numbers, use operators or kernels from elsewhere, look
    something up by an index or read integers out of the model aren't run, only their
    kernels are loaded; a step of ``[generate]`` may look up tokens.

    Args:
        artifact, target: As for `compilekit.attach`.
        device: Where the model will be; a GPU that the artifact is for, by default.
    Returns:
        The artifact, for `attach`, which does what isn't done by then.
    Raises:
        ArtifactError: the artifact is damaged or incomplete.
        SignatureError: a signature is required, and isn't there or wrong.
        ConfigError: torch knows no such device, or there is no artifact.
        AttachError: no program runs on such a device.

    Example:
        >>> artifact = compilekit.prepare("qwen.artifact")
        >>> model = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda")
        >>> compilekit.attach(model, artifact)
    """
    opened = open_required(artifact)
    if device is None:
        kinds = {one["kind"] for one in opened.manifest.targets.values()}
        device = "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"
    place = asked_place(device)
    if place.type == "cuda":
        enough = threading.Event()
        thread = threading.Thread(
            target=_prepare,
            args=(opened, place, target, enough),
            name="compilekit-prepare",
            daemon=True,
        )
        with _lock:
            thread.start()
            _running.append(_Preparation(thread, enough))
    return opened


def finish() -> bool:
    """Have every preparation end where it is: whoever waits does the rest as fast.

    Returns:
        True if any was still going on.
    """
    here = threading.current_thread()
    with _lock:
        others = [each for each in _running if each.thread is not here]
    waited = False
    for each in others:
        each.enough.set()
        waited |= each.thread.is_alive()
    for each in others:
        each.thread.join()
    with _lock:
        _running[:] = [each for each in _running if each not in others]
    return waited


# A child would wait for ever for a lock that a thread held, and the end of the process
# for the last program.
os.register_at_fork(before=finish)
atexit.register(finish)


def _prepare(
    artifact: Artifact, place: torch.device, wanted: str | None, enough: threading.Event
) -> None:
    try:
        target = (
            choose_target(artifact, place.type, place)
            if wanted is None
            else demand_target(artifact, wanted, place.type, place)
        )
        programs = [
            (artifact.entries[(target, program.entry)], program)
            for (name, _, _), program in artifact.programs.items()
            if name == target
        ]
        _rehearse_all(artifact, programs, place, enough)
    except _FAULTS:
        # Attach comes to the same, and says what it is.
        return


def _rehearse_all(
    artifact: Artifact,
    programs: list[tuple[Entry, Program]],
    gpu: torch.device,
    enough: threading.Event,
) -> None:
    """Run each program once, the largest first, on a stream and memory of its own."""
    stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    # Given back when it goes, after all that was allocated from it.
    pool = torch.cuda.MemPool()
    with (
        torch.inference_mode(),
        torch.cuda.device(gpu),
        torch.cuda.stream(stream),
        torch.cuda.use_mem_pool(pool, gpu),
    ):
        _rehearse(artifact, programs, gpu, enough)
        stream.synchronize()


def _rehearse(
    artifact: Artifact,
    programs: list[tuple[Entry, Program]],
    gpu: torch.device,
    enough: threading.Event,
) -> None:
    for _, program in programs:
        if enough.is_set():
            return
        load_kernels(artifact, program, gpu)
    sizes = {
        path: _bytes(spec)
        for entry, _ in programs
        for path, spec in entry.tensors.items()
    }
    largest = max(sizes.values(), default=0)
    free, total = torch.cuda.mem_get_info(gpu)
    if free < sum(sizes.values()) + largest + total * _LEFT:
        return
    # All the model's tensors look into the same memory: programs only read them.
    shared = torch.zeros(largest, dtype=torch.uint8, device=gpu)
    programs = sorted(programs, key=lambda item: -_bytes_of_arguments(item[1]))
    for entry, program in programs:
        if enough.is_set():
            return
        if not can_rehearse(artifact, entry, program):
            continue
        inputs = _inputs(entry, program, shared, gpu)
        # Whoever makes models without memory patches how tensors are made.
        if all(tensor.device == gpu for tensor in inputs):
            load_program(artifact, program, gpu)(inputs)
            torch.cuda.current_stream(gpu).synchronize()


def can_rehearse(artifact: Artifact, entry: Entry, program: Program) -> bool:
    """Whether a program may run on made-up values without anybody noticing."""
    values = [spec.dtype for spec in entry.tensors.values()]
    return (
        not entry.training
        and not entry.custom_ops
        and not program.constants
        and all(dtype.startswith(("float", "bfloat")) for dtype in values)
        and all(
            _PLAIN.fullmatch(name) and not _RANDOM.search(name)
            for name in program.externs
        )
        # A step of [generate] looks up tokens, and a token 0 there is.
        and (
            bool(entry.role)
            or all(_is_harmless(artifact, k) for k in program.kernels.values())
        )
    )


def _is_harmless(artifact: Artifact, kernel: KernelRef) -> bool:
    """Whether a kernel neither loops as its values say nor checks an index.

    A user's own may loop for ever on values that no call has; a wrong index ends the
    process's use of the GPU.
    """
    if not str(kernel.launch["symbol"]).startswith("triton_"):
        return False
    return b"device_assert" not in artifact.read(f"sources/{kernel.source}.py")


def _bytes_of_arguments(program: Program) -> int:
    """What grows with a bucket."""
    specs = [given.spec for given in program.inputs if given.spec is not None]
    return sum(_bytes(spec) for spec in specs)


def _inputs(
    entry: Entry, program: Program, shared: torch.Tensor, gpu: torch.device
) -> list[torch.Tensor]:
    """Zeros for every graph input, and the lowest sample for integer arguments."""
    inputs = []
    for given in program.inputs:
        spec = given.spec or entry.tensors[given.path]
        memory = shared
        if given.mutated or given.spec is not None:
            memory = torch.zeros(_bytes(spec), dtype=torch.uint8, device=gpu)
        dtype = getattr(torch, spec.dtype)
        tensor = memory[: _bytes(spec)].view(dtype).as_strided(spec.shape, spec.stride)
        rule = entry.inputs.get(given.path)
        if given.spec is not None and rule is not None and rule.low:
            tensor.fill_(rule.low)
        inputs.append(tensor)
    return inputs


def _bytes(spec: TensorSpec) -> int:
    """Bytes from a tensor's first element to its last, rounded up."""
    if 0 in spec.shape:
        return 0
    pairs = zip(spec.shape, spec.stride, strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in pairs)
    size = reach * getattr(torch, spec.dtype).itemsize
    return int(-(-size // _ROUND) * _ROUND)
