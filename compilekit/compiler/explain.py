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
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn

from compilekit import plan
from compilekit._torch import breaks
from compilekit._torch.breaks import Effect, Place, RawBreak, RawGraph
from compilekit.compiler import models
from compilekit.config import Config, EntryConfig
from compilekit.events import BuildEvent, OnBuildEvent, ignore
from compilekit.plan import Bucket

Values = Literal["auto", "fake", "random"]

# A model up to this size is worth allocating when fake tensors don't carry the
# analysis to its end.
_SMALL_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class DynamoReason:
    """What Dynamo itself says about a break; see `compilekit._torch.breaks.RawBreak`.

    Attributes:
        type: Its name for the kind of break.
        link: A page about this kind; empty if there is none.
    """

    type: str
    explanation: str
    hints: tuple[str, ...]
    context: str
    link: str


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """One place where the graph breaks.

    Attributes:
        kind: A key of `KINDS`.
        file, line, function, source: The innermost line of user code (anything but
            torch and the standard library).
        reason: Why, in plain words.
        fix: What to try.
        effect: ``resumed`` (a new graph begins after it), ``rest_eager`` or
            ``function_eager`` (the rest, or all, of the function isn't compiled).
        consequence: The same in words.
        hidden: True if it shows up only once other breaks are fixed.
        full_graph: True if a build with ``fullgraph = true`` breaks here as well.
        stack: User code from the entry to the break.
        dynamo: Dynamo's own words.
    """

    kind: str
    file: str
    line: int
    function: str
    source: str
    reason: str
    fix: str
    effect: Effect
    consequence: str
    hidden: bool
    full_graph: bool
    stack: tuple[Place, ...]
    dynamo: DynamoReason


@dataclasses.dataclass(frozen=True)
class Graph:
    """One captured graph.

    Attributes:
        ops: Operations in it.
        calls: How often one call of the entry runs it.
        begins: Where its first operation is; None if FX kept no place.
    """

    ops: int
    calls: int
    begins: Place | None


@dataclasses.dataclass(frozen=True)
class EagerFunction:
    """A function that wasn't compiled, or not to its end.

    Attributes:
        extent: ``all`` or ``rest``.
        reason: Why.
    """

    file: str
    line: int
    function: str
    extent: Literal["all", "rest"]
    reason: str


@dataclasses.dataclass(frozen=True)
class Stopped:
    """Where an analysis ended before the call did; breaks after it weren't looked for.

    Attributes:
        error: Class and message of the exception.
        place: The innermost line of user code; None if there is none.
        hint: What to do about it.
    """

    error: str
    place: Place | None
    hint: str


@dataclasses.dataclass(frozen=True)
class BucketExplained:
    """The analysis of one bucket.

    Attributes:
        values: ``fake`` (no weights; values asked for were ones) or ``random``.
        graphs: Captured graphs, in the order Dynamo made them.
        ops: Operations in all graphs together.
        breaks: Breaks by file and line.
        eager: Functions that run eagerly.
        stopped: None if the whole call was analysed.
        counted: Breaks that the gate counts: with ``fullgraph = true`` those that a
            full-graph build meets, otherwise all.
        passed: True if `counted` is allowed and the analysis wasn't stopped.
        notes: What this analysis can't know.
    """

    entry: str
    bucket: str
    values: Literal["fake", "random"]
    graphs: tuple[Graph, ...]
    ops: int
    breaks: tuple[GraphBreak, ...]
    eager: tuple[EagerFunction, ...]
    stopped: Stopped | None
    counted: int
    passed: bool
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExplainResult:
    """The analysis of every bucket that was asked for.

    Attributes:
        allowed: ``[gates] graph_breaks``.
        full_graph: ``[compile] fullgraph``.
        passed: True if every bucket passed.
        torch: The version whose Dynamo was asked.
    """

    buckets: tuple[BucketExplained, ...]
    allowed: int
    full_graph: bool
    passed: bool
    torch: str
    seconds: float


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
    traces = [plain]
    if any(found.effect != "resumed" for found in plain.breaks):
        traces.append(_trace(make, fake=fake, step_over=True))
    whole = plain
    if config.compile.fullgraph and plain.breaks:
        whole = _trace(make, fake=fake, step_over=True, capture_unbacked=True)
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
    config: Config, entry: EntryConfig, bucket: Bucket, *, fake: bool
) -> Callable[[], tuple[Callable[..., Any], dict[str, Any]]]:
    def make() -> tuple[Callable[..., Any], dict[str, Any]]:
        mode = breaks.StandInMode() if fake else None
        if mode is not None:
            model = models.build_fake(config, mode=mode)
        else:
            model = models.build_real(config)
        if mode is not None and entry.role:
            from compilekit.compiler import generate

            causal = generate.describe(model)
            step = functools.partial(generate.STEPS[entry.role], model)
            example = generate.example(config, entry, bucket, causal, mode, "cpu")
            return step, {"kwargs": example}
        kwargs = models.example_kwargs(config, entry, bucket, fake=mode)
        return models.entry_callable(model, entry), kwargs

    return make


def _trace(
    make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]],
    *,
    fake: bool,
    step_over: bool = False,
    capture_unbacked: bool = False,
) -> _Trace:
    function, kwargs = make()
    recorder = breaks.Recorder()
    stopped = None
    with (
        recorder.recording(step_over=step_over, capture_unbacked=capture_unbacked),
        torch.no_grad(),
        # What the model prints is no part of the result.
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            recorder.compile(function)(**kwargs)
        except (*models.FOREIGN_ERRORS, breaks.DynamoError) as exc:
            stopped = _stopped(exc, fake=fake)
    return _Trace(tuple(recorder.graphs), tuple(recorder.breaks), stopped)


def _stopped(exc: Exception, *, fake: bool) -> Stopped:
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


# --- From Dynamo's words to ours ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """Why a kind of break happens, and what to try; ``{name}`` is what it is about."""

    reason: str
    fix: str


_NOT_WHILE_COMPILING = (
    "Remove it, or put it under `if not torch.compiler.is_compiling():`. In a function"
    " marked with torch.compiler.disable it keeps working, but that call still breaks"
    " the graph."
)

KINDS: dict[str, Kind] = {
    "branch": Kind(
        "The code branches on the value of a tensor, which isn't known while the graph"
        " is captured.",
        "Compute both sides and choose with torch.where(condition, a, b), or run one of"
        " two functions with torch.cond. If it never changes while serving, decide by a"
        " Python value instead of a tensor.",
    ),
    "print": Kind(
        "Printing has to happen between two graphs.",
        _NOT_WHILE_COMPILING
        + " torch._dynamo.config.reorderable_logging_functions.add(print) moves prints"
        " behind the graph.",
    ),
    "logging": Kind(
        "A log record or a warning is written between two graphs.",
        _NOT_WHILE_COMPILING
        + " torch._dynamo.config.ignore_logging_functions names functions to leave"
        " out.",
    ),
    "item": Kind(
        "{name} reads a tensor's value into Python.",
        "Keep it a tensor and compute with that. If it is needed as a size, bound it"
        " with torch._check(...): a full-graph build captures it.",
    ),
    "size": Kind(
        "The size of the result of {name} depends on the values in a tensor.",
        "Work at a fixed size: mask with torch.where, or torch.nonzero_static. If the"
        " size must vary, bound it with torch._check(...): a full-graph build captures"
        " it.",
    ),
    "unbacked": Kind(
        "The code decides by a number that was read from a tensor.",
        "State what always holds with torch._check(...) before the decision, or decide"
        " with torch.where.",
    ),
    "c_extension": Kind(
        "{name} is compiled code (C, C++ or a builtin), which Dynamo can't look into.",
        "If it computes on tensors, make it a custom op (torch.library.custom_op with"
        " register_fake) or mark it with torch.compiler.allow_in_graph; otherwise call"
        " it outside the model.",
    ),
    "skipped": Kind(
        "Dynamo doesn't trace {name}, on purpose.",
        "Call it outside the model. If it computes on tensors, make it a custom op"
        " (torch.library.custom_op with register_fake).",
    ),
    "disabled": Kind(
        "The function called here is marked with torch.compiler.disable.",
        "Remove the mark, or call the function before or after the model; as a custom"
        " op (torch.library.custom_op) it stays in the graph unseen.",
    ),
    "explicit": Kind(
        "The code asks for a graph break.", "Remove the call of graph_break()."
    ),
    "builtin": Kind(
        "Python's {name}() can't be captured with these arguments.",
        "Do it outside the model, or compute its result once in __init__.",
    ),
    "context_manager": Kind(
        "Dynamo can't capture this `with` block.",
        "Enter the context outside the model, or leave it out while compiling"
        " (`if not torch.compiler.is_compiling():`).",
    ),
    "autograd": Kind(
        "The code uses autograd in a way that Dynamo can't capture.",
        "Inference needs no gradients: do it under `if torch.is_grad_enabled():` only."
        " A function with its own backward can be a custom op"
        " (torch.library.custom_op with register_autograd).",
    ),
    "raises": Kind(
        "An exception is raised that the captured function doesn't catch.",
        "Check inputs before the model is called. A try/except around a call is"
        " captured only if the exception is raised and caught inside one function.",
    ),
    "text": Kind(
        "A tensor's values are turned into text.",
        "Format numbers outside the model, or only its shape and dtype.",
    ),
    "numpy": Kind(
        "NumPy computes something that Dynamo can't turn into torch operations.",
        "Use the torch operation, or make the step a custom op"
        " (torch.library.custom_op with register_fake).",
    ),
    "other": Kind("{name}", ""),
}

# Kind, Dynamo's type, its context or explanation; the first that matches counts.
_RULES: tuple[tuple[str, str, str], ...] = (
    ("branch", r"Data-dependent (branching|assertion)|DYNAMIC_CONTROL_FLOW", ""),
    ("unbacked", r"ANTI_PATTERN|DYNAMIC_DIM|.*guard on data-dependent", ""),
    ("unbacked", r"", r"Could not (guard on|extract specialized)"),
    ("print", r"Failed to trace builtin operator", r"builtin print\b"),
    ("print", r"Unsupported method call", r"\(\w*(IO|Writer)\w*\) (write|flush)\b"),
    ("print", r".*reorder a debugging function", ""),
    ("logging", r"logging\.Logger", ""),
    ("logging", r"Attempted to call", r"module: (_?warnings|logging)\b"),
    ("logging", r"", r"LoggingLoggerVariable|<(Root)?Logger "),
    ("item", r"Unsupported Tensor\.item|Tensor\.tolist", ""),
    ("item", r"Data dependent operator", r"_local_scalar_dense"),
    ("size", r"Dynamic (shape|slicing)|Data dependent operator|.*one_hot", ""),
    ("disabled", r"Skip (calling|inlining) `torch\.compiler\.disable", ""),
    ("explicit", r"Call to `torch\._dynamo\.(graph_break|skip_frame|step_un)", ""),
    ("autograd", r".*(autograd|[Bb]ackward|requires_grad|grad_fn|retain_grad)", ""),
    ("text", r"repr\(\) on tensor", ""),
    ("text", r"Failed to trace builtin", r"builtin (repr|str|format) .*TensorVar"),
    ("numpy", r".*(numpy|ndarray)", ""),
    ("context_manager", r".*context manager|.*GenericContextWrappingVariable", ""),
    ("raises", r"Observed exception|TypeError from user code", ""),
    ("skipped", r"Attempted to (call|inline) function marked", r"intentionally marked"),
    ("c_extension", r"Attempted to (call|inline) function marked", ""),
    ("c_extension", r"can't handle functions not implemented in python", ""),
    ("builtin", r"Failed to trace builtin operator", ""),
)

# What one kind leads to at the same line, said once.
_FOLLOW_UPS = ("other", "context_manager", "raises")


def _kind(found: RawBreak) -> str:
    details = f"{found.context}\n{found.explanation}"
    # A logging or warnings function that Dynamo entered before it broke.
    if any(re.search(r"\b(logging|warnings)\b", place.file) for place in found.below):
        return "logging"
    for kind, gb_type, detail in _RULES:
        if re.match(gb_type, found.gb_type) and re.search(detail, details):
            return kind
    return "other"


def _name(kind: str, found: RawBreak) -> str:
    """What a break is about, as the user would call it."""
    if kind in {"c_extension", "skipped"}:
        named = re.search(r"module: (\S+), qualname: ([^,]+)", found.context)
        if named and named[1] != "<unknown":
            return f"{named[1]}.{named[2]}"
        return named[2] if named else "The function called here"
    if kind == "builtin":
        named = re.search(r"builtin (\w+)", found.context)
        return named[1] if named else "builtin"
    if kind == "item":
        source = found.stack[-1].source
        reads = re.search(r"\.(item|tolist)\(\)", source)
        reads = reads or re.search(r"\b(int|float|bool)(?=\()", source)
        return f"`{reads[0]}`" if reads else "The code"
    if kind == "size":
        named = re.search(r"(\w+)\.\w+$", found.context)
        return f"`{named[1]}`" if named else "this operation"
    return found.explanation or found.gb_type


def _fix(kind: str, found: RawBreak) -> str:
    if KINDS[kind].fix:
        return KINDS[kind].fix
    # Advice to people who work on Dynamo itself is of no use to its users.
    advice = [h for h in found.hints if not h.startswith("It may be possible to write")]
    return " ".join(advice) or "Call it outside the model, or write it differently."


_Site = tuple[str, int, str]


def _site(found: RawBreak) -> _Site:
    place = found.stack[-1]
    return place.file, place.line, _kind(found)


def _merge(traces: Iterable[_Trace], whole: _Trace) -> tuple[GraphBreak, ...]:
    """One break for each line and kind, from all traces."""
    by_site: dict[_Site, list[tuple[int, RawBreak]]] = {}
    for number, trace in enumerate(traces):
        for found in trace.breaks:
            if found.gb_type in (breaks.GENERATOR, breaks.RECOMPILE_LIMIT):
                continue
            # After a step over nothing is certain; an exception may be made up.
            if number and _kind(found) == "raises":
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
        reason=KINDS[kind].reason.format(name=_name(kind, first)),
        fix=_fix(kind, first),
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
