"""`attach`: bind an artifact's programs to a live model.

Lifecycle of one start::

    open      every byte verified against the manifest
    wait      until `compilekit.prepare`, if it is still loading, has ended where it is
    check     machine and versions, all mismatches at once
    compare   the live model with each entry, all mismatches at once
    load      host code and kernels of every bucket, or nothing if they load lazily
    bind      the model's methods are replaced; nothing was changed before this line

docs/runtime.md describes policies, requirements and environment variables.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from compilekit._torch.runtime import is_tracing
from compilekit.artifact import Artifact
from compilekit.artifact.program import Entry, Program
from compilekit.errors import (
    AttachError,
    CompilekitError,
    ConfigError,
    Mismatch,
    MismatchError,
    PolicyError,
)
from compilekit.runtime.check import (
    check_device,
    choose_target,
    demand_target,
    refuse,
)
from compilekit.runtime.dispatch import Dispatcher
from compilekit.runtime.model import (
    AttachedMethod,
    ModelView,
    ambient_mismatches,
    model_mismatches,
)
from compilekit.runtime.place import asked_place, model_place
from compilekit.runtime.program import Call, lazy_program, load_native, load_program
from compilekit.runtime.receipt import Receipt, Route
from compilekit.runtime.requirements import (
    check_requirements,
    open_required,
    requirements,
)

if TYPE_CHECKING:
    from compilekit.runtime.generate import Generation

POLICIES = ("error", "eager", "jit")


def attach(
    model: torch.nn.Module,
    artifact: Artifact | str | os.PathLike[str] | None = None,
    *,
    entry: str | None = None,
    require: str | Iterable[str] | None = None,
    on_uncovered: str | None = None,
    device: str | torch.device | None = None,
    target: str | None = None,
    loading: str | None = None,
) -> Receipt:
    """Make a model run compiled programs, with nothing left to compile.

    Args:
        model: The live model, weights loaded, in the mode it was built for.
        artifact: Its directory (or an open one); ``COMPILEKIT_ARTIFACT`` by default.
        entry: Only this entry; all of them by default.
        require: ``"program"`` (every call must take a program), ``"verified"`` (a
            verification record must be there), or several; ``COMPILEKIT_REQUIRE``
            (comma-separated) by default. ``()`` requires nothing.
        on_uncovered: What happens to a call that no program covers: ``"error"``,
            ``"eager"`` (the model's own method) or ``"jit"`` (``torch.compile``);
            ``COMPILEKIT_ON_UNCOVERED``, then the artifact's own setting by default.
        device: Where the programs run; where the model is, by default.
        target: Whose code runs; the best that fits this machine, by default.
        loading: ``"eager"`` (every bucket's code and kernels now) or ``"lazy"`` (at a
            bucket's first call); ``COMPILEKIT_LOADING``, then eager by default.
    Returns:
        The receipt; ``receipt.detach()`` undoes it.
    Raises:
        ArtifactError: the artifact is damaged or incomplete.
        SignatureError: a signature is required, and isn't there or wrong.
        ConfigError: an argument, or a variable in its place, says nothing known.
        MismatchError: machine or model don't fit; all mismatches at once.
        PolicyError: a requirement isn't met.
        AttachError: the model is attached already, a kernel can't be loaded, or this is
            inside a trace.
        ResourceError: the receipt can't be written.
        In every case the model is as it was.

    Example:
        >>> model = BertModel.from_pretrained(folder).eval()
        >>> receipt = compilekit.attach(model, "minilm.artifact")
        >>> with torch.inference_mode():
        ...     model(input_ids=ids, attention_mask=mask)
    """
    # What is parsed here would set off full collections, 100 ms each with torch loaded.
    collecting = gc.isenabled()
    gc.disable()
    clock = _Clock()
    try:
        if artifact is None and "COMPILEKIT_ARTIFACT" in os.environ:
            carry_exit_codes()
        required = requirements(require)
        if is_tracing():
            raise AttachError(
                "attach was called inside a trace, make_fx or FakeTensorMode, where"
                " tensors are recorded or made up",
                hint="Attach outside of it.",
            )
        if not isinstance(model, torch.nn.Module):
            raise AttachError(
                f"attach: expected a torch.nn.Module, found a {type(model).__name__}"
            )
        load = lazy_program if _is_lazy(loading) else load_program
        opened = open_required(artifact)
        clock.lap("open")
        # A start that prepared nothing doesn't pay for the import.
        preparing = sys.modules.get("compilekit.runtime.prepare")
        if preparing is not None and preparing.finish():
            clock.lap("wait")
        try:
            return _attach(
                model,
                opened,
                entry,
                required,
                on_uncovered,
                device,
                target,
                load,
                clock,
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            # If it was a malformed file, this names it and the place.
            opened.parse_all()
            raise
    finally:
        if collecting:
            gc.enable()


def _attach(
    model: torch.nn.Module,
    opened: Artifact,
    entry: str | None,
    required: tuple[str, ...],
    on_uncovered: str | None,
    device: str | torch.device | None,
    wanted: str | None,
    load: Callable[[Artifact, Program, torch.device], Call],
    clock: _Clock,
) -> Receipt:
    place = model_place(model) if device is None else asked_place(device)
    gpu = place if place.type == "cuda" else None
    found = check_device(opened, gpu, libraries=False)
    warnings = refuse(f"artifact {opened.root} doesn't fit this machine", found)
    target = (
        choose_target(opened, place.type, gpu)
        if wanted is None
        else demand_target(opened, wanted, place.type, gpu)
    )
    policies = _policies(on_uncovered, opened)
    check_requirements(required, opened, target)
    entries = _entries(opened, target, entry, model)
    clock.lap("check")
    class_name = opened.manifest.model.class_name
    view = ModelView(model)
    mismatches: dict[Mismatch, None] = {}
    for item in entries:
        mismatches.update(dict.fromkeys(model_mismatches(view, item, class_name)))
        mismatches.update(dict.fromkeys(ambient_mismatches(item)))
    if mismatches:
        raise MismatchError(
            f"the model doesn't fit artifact {opened.root}", tuple(mismatches)
        )
    clock.lap("compare")
    loaded = {
        item.name: {
            program.bucket: (program, load(opened, program, place))
            for program in _programs(opened, item)
        }
        for item in entries
    }
    clock.lap("load")
    undo = _Undo(model)
    receipt = Receipt(
        artifact=opened.digest,
        path=opened.root,
        target=target,
        routes=tuple(
            Route(item.name, bucket, "program", len(program.kernels))
            for item in entries
            for bucket, (program, _) in loaded[item.name].items()
        ),
        milliseconds=clock.laps,
        warnings=warnings,
        serialised=tuple(item.name for item in entries if item.mutates_model),
        require=required,
        undo=undo,
    )
    lock = threading.RLock()
    dispatchers = [
        Dispatcher(
            model,
            item,
            class_name,
            place,
            loaded[item.name],
            load_native(opened, item),
            _refusal(receipt, item.name, getattr(model, item.method), *policies),
            receipt.note_rebind,
            lock,
        )
        for item in entries
    ]
    steps = {d.entry.role: d for d in dispatchers if d.entry.role}
    for dispatcher in dispatchers:
        if not dispatcher.entry.role:
            undo.replace(dispatcher.entry.method, dispatcher)
    with contextlib.ExitStack() as stack:
        stack.callback(undo)
        generation = (
            _replace_generation(undo, model, opened, steps, receipt, policies)
            if steps
            else None
        )
        for dispatcher in dispatchers:
            dispatcher.start_watching(view)
        clock.lap("bind")
        if generation is not None and load is load_program:
            generation.capture()
            clock.lap("capture")
        receipt.write()
        stack.pop_all()
    return receipt


def _replace_generation(
    undo: _Undo,
    model: torch.nn.Module,
    artifact: Artifact,
    steps: dict[str, Dispatcher],
    receipt: Receipt,
    policies: tuple[str, str],
) -> Generation:
    """Put a language model's steps behind its forward, and their caches in reach."""
    # A model without [generate] doesn't pay for this import.
    from compilekit.runtime.generate import MAKES_CACHE, CacheMaker, Generation

    generation = Generation(
        steps["prefill"],
        steps["decode"],
        artifact.manifest.serve.over_length == "chunk",
        _uses_graphs(artifact, steps["decode"].device),
        _refusal(receipt, "generate", model.forward, *policies),
        receipt.note_call,
        receipt.note_graph,
    )
    eagerly = tuple("eager" if policy == "jit" else policy for policy in policies)
    make_cache = getattr(model, MAKES_CACHE)
    refusal = _refusal(receipt, "generate", make_cache, *eagerly)
    undo.replace("forward", generation)
    undo.replace(MAKES_CACHE, CacheMaker(generation, refusal))
    return generation


def _uses_graphs(artifact: Artifact, device: torch.device) -> bool:
    asked = os.environ.get("COMPILEKIT_CUDA_GRAPHS", "")
    if asked not in ("", "0", "1"):
        raise ConfigError(f"COMPILEKIT_CUDA_GRAPHS: expected 0 or 1, found {asked}")
    wanted = asked == "1" if asked else artifact.manifest.serve.cuda_graphs
    return wanted and device.type == "cuda"


class _Clock:
    """Milliseconds per phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.laps[phase] = (now - self._last) * 1e3
        self._last = now


class _Undo:
    """Puts the model's own methods back, where they are still replaced."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._replaced: dict[str, AttachedMethod] = {}

    def replace(self, method: str, value: AttachedMethod) -> None:
        self._replaced[method] = value
        # Straight into the instance: nn.Module.__setattr__ would look for parameters.
        self._model.__dict__[method] = value

    def __call__(self) -> None:
        for method, value in self._replaced.items():
            # Whoever replaced the method after us keeps it.
            if self._model.__dict__.get(method) is value:
                del self._model.__dict__[method]
        self._replaced.clear()


def _is_lazy(loading: str | None) -> bool:
    chosen = loading or os.environ.get("COMPILEKIT_LOADING") or "eager"
    if chosen not in ("eager", "lazy"):
        raise ConfigError(f"loading: expected eager or lazy, found {chosen}")
    return chosen == "lazy"


def _policies(on_uncovered: str | None, artifact: Artifact) -> tuple[str, str]:
    """What happens to a call that no program covers, and to one longer than all."""
    serve = artifact.manifest.serve
    asked = on_uncovered or os.environ.get("COMPILEKIT_ON_UNCOVERED")
    policy = asked or serve.on_uncovered
    if policy not in POLICIES:
        raise ConfigError(
            f"on_uncovered: expected {', '.join(POLICIES)}, found {policy}"
        )
    longer = serve.over_length == "eager" and policy == "error" and not asked
    return policy, "eager" if longer else policy


def _entries(
    artifact: Artifact, target: str, only: str | None, model: torch.nn.Module
) -> tuple[Entry, ...]:
    if "program" not in artifact.manifest.routes:
        raise AttachError(
            f"artifact {artifact.root} has no programs, only caches for torch.compile",
            hint="Call compilekit.restore() before torch.compile instead, or build it"
            ' with routes = ["program"].',
        )
    known = tuple(artifact.manifest.entries)
    if only is not None and only not in known:
        raise ConfigError(f"entry: expected one of {', '.join(known)}, found {only}")
    described = {name: artifact.entries[(target, name)] for name in known}
    # Either step of a language model needs the other.
    steps = only is not None and described[only].role
    entries = tuple(
        entry
        for name, entry in described.items()
        if only in (None, name) or (steps and entry.role)
    )
    for item in entries:
        if isinstance(model.__dict__.get(item.method), AttachedMethod):
            raise AttachError(
                f"the model is attached already: {item.method} is a program's",
                hint="Call receipt.detach() first.",
            )
    return entries


def _programs(artifact: Artifact, entry: Entry) -> list[Program]:
    buckets = artifact.manifest.entries[entry.name].buckets
    return [
        artifact.programs[(entry.target, entry.name, bucket.name)] for bucket in buckets
    ]


def _refusal(
    receipt: Receipt,
    entry: str,
    original: Callable[..., Any],
    on_uncovered: str,
    over_length: str,
) -> Callable[[CompilekitError, tuple[Any, ...], dict[str, Any]], Any]:
    """What to do with an uncovered call, by policy."""
    strict = "program" in receipt.require
    compiled: list[Callable[..., Any]] = []

    def refuse_call(
        error: CompilekitError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        policy = over_length if error.fields.get("too_long") else on_uncovered
        receipt.note_uncovered(entry, error.message, "error" if strict else policy)
        if policy == "error":
            raise error
        if strict:
            raise PolicyError(
                f"require = program, and a call takes none: {error.message}",
                hint="Add the missing bucket, or lower the requirement.",
            ) from error
        if policy == "eager":
            return original(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(original))
        return compiled[0](*args, **kwargs)

    return refuse_call


def carry_exit_codes() -> None:
    """Let a process that ``compilekit load`` started end with an error's exit code.

    Python ends with 1 after any exception that nobody catches; SystemExit from the hook
    that prints it is the way to another code.
    """
    if not isinstance(sys.excepthook, _ExitCodes):
        sys.excepthook = _ExitCodes(sys.excepthook)


class _ExitCodes:
    """An ``excepthook`` around the one that prints."""

    def __init__(self, printing: Callable[..., Any]) -> None:
        self._printing = printing

    def __call__(
        self,
        kind: type[BaseException],
        exc: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self._printing(kind, exc, trace)
        if isinstance(exc, CompilekitError):
            raise SystemExit(exc.exit_code)
