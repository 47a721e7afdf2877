"""What an analysis of graph breaks says; `compilekit.compiler.explain` makes it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from compilekit._torch.breaks import Effect, Place


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
