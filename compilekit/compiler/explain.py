"""Where a model breaks its graph: each break with its reason, its line and the fix.

Lifecycle of one bucket (`_analyse`); every trace starts with a new model and a clean
Dynamo, and runs the whole call, graph by graph, on fake tensors:

    1. as ``torch.compile`` traces it. No break: that is the answer.
    2. stepping over breaks that make a function run eagerly, to see what they hide.
    3. as a full-graph build traces it, which captures some of the breaks (``.item()``,
       sizes that depend on data).

No weights are read and nothing is allocated. If code between the graphs can't go on
without values (NumPy, a C extension), a small model is traced again with random ones.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import io
import linecache
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn

from compilekit import plan
from compilekit._torch import breaks
from compilekit._torch.breaks import Effect, Place, RawBreak, RawGraph
from compilekit.compiler import examples, hugging_face, models
from compilekit.compiler.break_kinds import KINDS, fix, kind_of, subject
from compilekit.compiler.explained import (
    BucketExplained,
    DynamoReason,
    EagerFunction,
    ExplainResult,
    Graph,
    GraphBreak,
    Stopped,
)
from compilekit.config import Config, EntryConfig
from compilekit.errors import FOREIGN_ERRORS, CompilekitError
from compilekit.events import BuildEvent, OnBuildEvent, ignore
from compilekit.plan import Bucket

Values = Literal["auto", "fake", "random"]

# A model up to this size is worth allocating when fake tensors don't carry the
# analysis to its end.
_SMALL_BYTES = 1 << 30


def explain(
    config: Config,
    *,
    every_bucket: bool = False,
    values: Values = "auto",
    on_event: OnBuildEvent = ignore,
) -> ExplainResult:
    """Find every graph break of the configured entries.

    Dynamo's caches in this process are cleared before and after.

    Args:
        config: The configuration.
        every_bucket: Analyse all buckets of each entry; otherwise the first, as
            breaks rarely depend on a shape.
        values: ``fake`` never allocates, ``random`` runs the code between the graphs
            on randomly initialised weights; ``auto`` does so only where fake tensors
            don't reach the end and the model is small.
        on_event: Told when a bucket begins and ends.
    Raises:
        ConfigError: the model or its example inputs can't be made.
    """
    begun = time.perf_counter()
    jobs = [
        (entry, bucket)
        for entry in config.entries.values()
        for bucket in plan.buckets(config, entry.name)[: None if every_bucket else 1]
    ]
    explained = []
    for index, (entry, bucket) in enumerate(jobs, 1):
        event = BuildEvent(
            "started",
            entry=entry.name,
            bucket=bucket.name,
            stage="capture",
            index=index,
            count=len(jobs),
        )
        on_event(event)
        started = time.perf_counter()
        explained.append(_explain_bucket(config, entry, bucket, values))
        seconds = time.perf_counter() - started
        on_event(dataclasses.replace(event, kind="stage", seconds=seconds))
    return ExplainResult(
        buckets=tuple(explained),
        allowed=config.gates.graph_breaks,
        full_graph=config.compile.fullgraph,
        passed=all(bucket.passed for bucket in explained),
        torch=torch.__version__,
        seconds=time.perf_counter() - begun,
    )


def _explain_bucket(
    config: Config, entry: EntryConfig, bucket: Bucket, values: Values
) -> BucketExplained:
    if entry.role:
        # A step of a language model has no arguments to draw at random.
        return _analyse(config, entry, bucket, fake=True)
    if values == "random":
        return _analyse(config, entry, bucket, fake=False)
    result = _analyse(config, entry, bucket, fake=True)
    if result.stopped is None or values == "fake":
        return result
    if _size_bytes(models.build_fake(config)) <= _SMALL_BYTES:
        return _analyse(config, entry, bucket, fake=False)
    return result


def _size_bytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- Tracing --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Trace:
    graphs: tuple[RawGraph, ...]
    breaks: tuple[RawBreak, ...]
    stopped: Stopped | None


def _analyse(
    config: Config, entry: EntryConfig, bucket: Bucket, *, fake: bool
) -> BucketExplained:
    make = _call_maker(config, entry, bucket, fake=fake)
    plain = _trace(make, fake=fake)
    program = "program" in config.build.routes
    if program and any(
        hugging_face.installs_output_hooks(found.stack[-1]) for found in plain.breaks
    ):
        # A program's capture installs them, too, and goes on.
        make = _call_maker(config, entry, bucket, fake=fake, hooked=True)
        plain = _trace(make, fake=fake)
    traces = [plain]
    if any(found.effect != "resumed" for found in plain.breaks):
        traces.append(_trace(make, fake=fake, step_over=True))
    whole = plain
    if config.compile.fullgraph and plain.breaks:
        whole = _trace(
            make, fake=fake, step_over=True, capture_unbacked=True, recurrent=program
        )
        traces.append(whole)
    found = _merge(traces, whole)
    counted = sum(b.full_graph or not config.compile.fullgraph for b in found)
    stopped = plain.stopped
    return BucketExplained(
        entry=entry.name,
        bucket=bucket.name,
        values="fake" if fake else "random",
        graphs=tuple(Graph(g.ops, g.calls, g.begins) for g in plain.graphs),
        ops=sum(graph.ops for graph in plain.graphs),
        breaks=found,
        eager=_eager_functions(plain.breaks),
        stopped=stopped,
        counted=counted,
        passed=counted <= config.gates.graph_breaks and stopped is None,
        notes=_notes(found, plain.breaks, traces, fake=fake),
    )


def _call_maker(
    config: Config,
    entry: EntryConfig,
    bucket: Bucket,
    *,
    fake: bool,
    hooked: bool = False,
) -> Callable[[], tuple[Callable[..., Any], dict[str, Any]]]:
    def make() -> tuple[Callable[..., Any], dict[str, Any]]:
        mode = breaks.StandInMode() if fake else None
        if mode is not None:
            model = models.build_fake(config, mode=mode)
        else:
            model = models.build_real(config)
        if hooked:
            hugging_face.install_output_hooks(model)
        if mode is not None and entry.role:
            from compilekit.compiler import generate

            causal = generate.describe(model)
            step = functools.partial(generate.STEPS[entry.role], model)
            example = generate.example(config, entry, bucket, causal, mode, "cpu")
            return step, {"kwargs": example}
        kwargs = examples.example_kwargs(config, entry, bucket, fake=mode)
        return models.entry_callable(model, entry), kwargs

    return make


def _trace(
    make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]],
    *,
    fake: bool,
    step_over: bool = False,
    capture_unbacked: bool = False,
    recurrent: bool = False,
) -> _Trace:
    function, kwargs = make()
    recorder = breaks.Recorder()
    stopped = None
    with (
        recorder.recording(
            step_over=step_over, capture_unbacked=capture_unbacked, recurrent=recurrent
        ),
        torch.no_grad(),
        # What the model prints is no part of the result.
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            recorder.compile(function)(**kwargs)
        except CompilekitError:
            raise
        except FOREIGN_ERRORS as exc:
            stopped = _stopped(exc, fake=fake)
    return _Trace(tuple(recorder.graphs), tuple(recorder.breaks), stopped)


def _stopped(exc: BaseException, *, fake: bool) -> Stopped:
    hint = (
        "The code ran on fake tensors, which have no values; that alone can be the"
        ' cause. Analyse it with values = "random" (allocates the weights).'
        if fake
        else "The call fails in eager mode as well, or the inputs drawn for it aren't"
        " valid: check the entry's inputs (low, high), or give an example function."
    )
    message = str(exc).strip().partition("\n")[0]
    return Stopped(
        error=f"{type(exc).__name__}: {message}" if message else type(exc).__name__,
        place=breaks.place_of_error(exc),
        hint=hint,
    )


# --- One answer from all traces -----------------------------------------------------

_Site = tuple[str, int, str]

# What one kind leads to at the same line, said once.
_FOLLOW_UPS = ("other", "context_manager", "raises")


def _site(found: RawBreak) -> _Site:
    place = found.stack[-1]
    return place.file, place.line, kind_of(found)


def _merge(traces: Iterable[_Trace], whole: _Trace) -> tuple[GraphBreak, ...]:
    """One break for each line and kind, from all traces."""
    by_site: dict[_Site, list[tuple[int, RawBreak]]] = {}
    for number, trace in enumerate(traces):
        for found in trace.breaks:
            if found.gb_type in (breaks.GENERATOR, breaks.RECOMPILE_LIMIT):
                continue
            # After a step over nothing is certain; an exception may be made up.
            if number and kind_of(found) == "raises":
                continue
            by_site.setdefault(_site(found), []).append((number, found))
    lines = {site[:2] for site in by_site if site[2] not in _FOLLOW_UPS}
    full = {_site(found) for found in whole.breaks}
    return tuple(
        _graph_break(site, seen, full_graph=site in full or whole.stopped is not None)
        for site, seen in sorted(by_site.items())
        if site[2] not in _FOLLOW_UPS or site[:2] not in lines
    )


def _graph_break(
    site: _Site, seen: list[tuple[int, RawBreak]], *, full_graph: bool
) -> GraphBreak:
    first = seen[0][1]
    plain = [found for number, found in seen if number == 0]
    worst = max(plain, key=lambda f: breaks.EFFECTS.index(f.effect), default=first)
    effect: Effect = worst.effect if plain else "resumed"
    place, kind = first.stack[-1], site[2]
    return GraphBreak(
        kind=kind,
        file=place.file,
        line=place.line,
        function=place.function,
        source=place.source,
        reason=KINDS[kind].reason.format(name=subject(kind, first)),
        fix=fix(kind, first),
        effect=effect,
        consequence=_consequence(worst, effect, hidden=not plain),
        hidden=not plain,
        full_graph=full_graph,
        stack=first.stack,
        dynamo=DynamoReason(
            first.gb_type, first.explanation, first.hints, first.context, first.link
        ),
    )


def _consequence(found: RawBreak, effect: Effect, *, hidden: bool) -> str:
    if hidden:
        return "It shows up only once breaks before it are fixed."
    if effect == "resumed":
        return "The graph is cut in two here."
    block = _block_around(found.function.file, found.at)
    why = f", because a graph can't be resumed inside {block}" if block else ""
    extent = "All" if effect == "function_eager" else "The rest"
    return f"{extent} of {found.function.function}() runs eagerly{why}."


def _syntax(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


_BLOCKS: dict[type[ast.AST], str] = {
    ast.For: "a loop",
    ast.While: "a loop",
    ast.AsyncFor: "a loop",
    ast.Try: "a try block",
    ast.With: "a with block",
}


def _around(file: str, line: int, kinds: Iterable[type[ast.AST]]) -> Any:
    """The innermost syntax of one of these kinds that holds a line, or None."""
    found = [
        node
        for node in ast.walk(_syntax(file))
        if type(node) in kinds and node.lineno <= line <= node.end_lineno  # type: ignore[attr-defined]
    ]
    return max(found, key=lambda node: node.lineno, default=None)  # type: ignore[attr-defined]


def _block_around(file: str, line: int) -> str:
    block = _around(file, line, _BLOCKS)
    return f"{_BLOCKS[type(block)]} (line {block.lineno})" if block else ""


def _definition(function: Place, line: int) -> int:
    """Where a function begins, also for one that goes on after a break."""
    found = _around(function.file, line, (ast.FunctionDef, ast.AsyncFunctionDef))
    return found.lineno if found and found.name == function.function else function.line


def _eager_functions(found: Iterable[RawBreak]) -> tuple[EagerFunction, ...]:
    functions: dict[tuple[str, int, str], EagerFunction] = {}
    for one in found:
        function = one.function
        if one.effect == "resumed" or function.function.startswith("<"):
            continue
        if one.gb_type == breaks.RECOMPILE_LIMIT:
            reason = (
                "It was compiled for more cases than Dynamo keeps; calls that differ in"
                " a Python value (a layer's index, a flag) are cases of their own."
            )
        elif one.gb_type == breaks.GENERATOR:
            reason = "It is a generator that is called from code which isn't compiled."
        else:
            place = one.stack[-1]
            reason = f"The graph breaks at {place.file}:{place.line}."
        line = _definition(function, one.at)
        extent: Literal["all", "rest"] = (
            "all" if one.effect == "function_eager" else "rest"
        )
        key = (function.file, line, function.function)
        if key not in functions or extent == "all":
            functions[key] = EagerFunction(*key[:2], key[2], extent, reason)
    return tuple(functions.values())


def _notes(
    found: tuple[GraphBreak, ...],
    plain: tuple[RawBreak, ...],
    traces: list[_Trace],
    *,
    fake: bool,
) -> tuple[str, ...]:
    notes = []
    if any(one.kind in {"branch", "item", "size", "unbacked"} for one in found):
        used = "ones" if fake else "random ones"
        notes.append(
            f"Values that the code asked of tensors were {used}: code that only other"
            " values reach wasn't looked at."
        )
    stepped = {_site(one) for t in traces for one in t.breaks if one.stepped_over}
    for one in plain:
        if one.effect == "resumed" or _site(one) in stepped:
            continue
        if one.gb_type in (breaks.GENERATOR, breaks.RECOMPILE_LIMIT):
            continue
        notes.append(
            f"{one.function.function}() in {one.function.file} can hold more breaks"
            f" after line {one.at}: they show up once that one is fixed."
        )
    return tuple(dict.fromkeys(notes))
