"""Where Dynamo breaks the graph, and a way to see the breaks behind a break.

Dynamo says what it broke on to its own log only, through one method
(`InstructionTranslatorBase.log_graph_break`); frames that it gives up pass through one
function (`format_error_msg` in convert_frame.py). `Recorder` listens at both.

Two kinds of stand-ins let an analysis go on where it would otherwise end:

- `StandInMode`: code between the graphs runs on fake tensors; where it asks for a value
  (``.item()``, ``nonzero``), the operation is done on ones.
- ``step_over=True``: a break that Dynamo can't resume after (in a loop, ``try`` or
  ``with``) makes it run the whole function eagerly, which hides what comes after. For
  prints, logging, branches and ``.item()`` tracing goes on as if the statement had run.

Source: torch 2.11 and 2.13, torch/_dynamo/{symbolic_convert,convert_frame,exc}.py,
torch/_subclasses/fake_tensor.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import linecache
import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Literal
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo import convert_frame
from torch._dynamo.exc import (
    RestartAnalysis,
    Unsupported,
    UserError,
)
from torch._dynamo.symbolic_convert import (
    InliningInstructionTranslator,
    InstructionTranslator,
    InstructionTranslatorBase,
)
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map_only

Effect = Literal["resumed", "rest_eager", "function_eager"]
EFFECTS: tuple[Effect, ...] = ("resumed", "rest_eager", "function_eager")
"""What a break does to the function it is in, from mild to severe."""


RECOMPILE_LIMIT = "Dynamo recompile limit exceeded"
GENERATOR = "Attempt to trace generator"
NO_BREAKS = frozenset({RECOMPILE_LIMIT, GENERATOR})
"""Kinds that make a function run eagerly without being a break of their own."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of code.

    Attributes:
        file: Path as Python knows it.
        line: Line number, from 1.
        function: Name of the function the line is in.
        source: The line itself, stripped; empty if it can't be read.
    """

    file: str
    line: int
    function: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class RawBreak:
    """One break as Dynamo described it.

    Attributes:
        gb_type: Dynamo's name for the kind of break.
        explanation: Dynamo's explanation.
        hints: Dynamo's advice.
        context: Dynamo's note for developers; names functions and values.
        link: Page about this kind of break; empty if there is none.
        stack: User code from the entry (first) to the break (last).
        below: Library code that the break's line called and that Dynamo entered.
        function: The function that is cut or given up; its line is where it begins,
            or where an earlier break made it go on.
        at: The line in `function` that breaks, or whose call does.
        effect: What happens to `function`.
        stepped_over: True if tracing went on as if there were no break.
    """

    gb_type: str
    explanation: str
    hints: tuple[str, ...]
    context: str
    link: str
    stack: tuple[Place, ...]
    below: tuple[Place, ...]
    function: Place
    at: int
    effect: Effect
    stepped_over: bool = False


@dataclasses.dataclass
class RawGraph:
    """One captured graph: number of operations, calls, and where it begins."""

    ops: int
    calls: int
    begins: Place | None


class Recorder:
    """Collects graphs and breaks of the calls made while `recording` is active.

    Lifecycle: ``with recorder.recording(): recorder.compile(function)(**kwargs)``.
    Graphs run as captured (no AOTAutograd, no Inductor), so the code after a break
    runs as well, and is analysed.
    """

    def __init__(self) -> None:
        self.graphs: list[RawGraph] = []
        self.breaks: list[RawBreak] = []
        self._depth = 0

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Hand `function` to Dynamo with a backend that counts."""
        return torch.compile(function, backend=self._count, dynamic=False)

    @contextlib.contextmanager
    def recording(
        self,
        *,
        capture_unbacked: bool = False,
        recurrent: bool = False,
        step_over: bool = False,
    ) -> Iterator[None]:
        """Listen to Dynamo, from a clean state; log records are muted meanwhile.

        Args:
            capture_unbacked: Capture scalars and data-dependent sizes, as Dynamo does
                under ``fullgraph=True`` (``one_graph`` in output_graph.py).
            recurrent: Capture nn.LSTM and its like, as a program's capture does.
            step_over: Go on past breaks that can't be resumed, where that is possible.
        """
        torch._dynamo.reset()
        depth = _depth_of_caller()
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                torch._dynamo.config.patch(
                    capture_scalar_outputs=capture_unbacked,
                    capture_dynamic_output_shape_ops=capture_unbacked,
                    allow_rnn=recurrent,
                )
            )
            stack.enter_context(self.listening())
            self._depth = depth
            if step_over:
                stack.enter_context(self._stepping_over())
            if "TORCH_LOGS" not in os.environ:
                # Dynamo warns of some breaks; they are in the result.
                stack.callback(logging.disable, logging.root.manager.disable)
                logging.disable(logging.CRITICAL)
            stack.callback(torch._dynamo.reset)
            yield

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note the breaks of whatever is compiled meanwhile, by any backend."""
        self._depth = _depth_of_caller()
        base_log = InstructionTranslatorBase.log_graph_break
        # It looks the function up in its own namespace, not in exc.py.
        base_format = vars(convert_frame)["format_error_msg"]

        def log_graph_break(
            tx: InstructionTranslatorBase,
            code_options: Any,
            reason: str,
            exc: Any,
        ) -> None:
            if not exc.logged:
                rest = reason.startswith(
                    "Encountered graph break that we cannot resume"
                )
                self._add(exc, tx.f_code, "rest_eager" if rest else "resumed")
            base_log(tx, code_options, reason, exc)

        def format_error_msg(exc: Exception, code: CodeType, *args: Any) -> str:
            self._add(exc, code, "function_eager")
            text: str = base_format(exc, code, *args)
            return text

        with (
            mock.patch.object(
                InstructionTranslatorBase, "log_graph_break", log_graph_break
            ),
            mock.patch.object(convert_frame, "format_error_msg", format_error_msg),
        ):
            yield

    def _count(
        self, module: torch.fx.GraphModule, example_inputs: list[Any]
    ) -> Callable[..., Any]:
        calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
        traces = [n.meta["stack_trace"] for n in calls if n.meta.get("stack_trace")]
        graph = RawGraph(len(calls), 0, _parse_place(traces[0]) if traces else None)
        self.graphs.append(graph)

        def run(*inputs: Any) -> Any:
            graph.calls += 1
            fake = next((i for i in inputs if isinstance(i, FakeTensor)), None)
            # Tensors that the graph makes itself are to be fake as well.
            with fake.fake_mode if fake is not None else contextlib.nullcontext():
                return module.forward(*inputs)

        return run

    def _add(
        self, exc: Any, code: CodeType, effect: Effect, *, stepped_over: bool = False
    ) -> None:
        start = (code.co_filename, code.co_firstlineno, code.co_name)
        traced = [(f.filename, f.lineno or 0, f.name) for f in _real_stack(exc)]
        message = _parse_message(exc)
        limit = message["gb_type"] == RECOMPILE_LIMIT
        if all(_is_library(file) for file, _, _ in (start, *traced)) and not limit:
            # A library's own frame, met on its own: the caller's break is the user's.
            return
        callers = traceback.extract_stack()[self._depth :]
        lines = [(f.filename, f.lineno or 0, f.name) for f in callers]
        lines += traced or [start]
        # Dynamo's own frames lie between the callers and what it traces: library code.
        last = max(
            (i for i, f in enumerate(lines) if not _is_library(f[0])), default=-1
        )
        if effect == "function_eager" and _RESUMED.fullmatch(code.co_name):
            effect = "rest_eager"
        self.breaks.append(
            RawBreak(
                **message,
                stack=_user_stack(lines) or (_place(*start),),
                below=tuple(_place(*line) for line in lines[last + 1 :] if last >= 0),
                function=_place(*start),
                at=(traced or [start])[0][1],
                effect=effect,
                stepped_over=stepped_over,
            )
        )

    @contextlib.contextmanager
    def _stepping_over(self) -> Iterator[None]:
        # Instruction → what to pretend, and how often it was; by code and offset,
        # because a restarted analysis makes new instruction objects.
        points: dict[tuple[CodeType, int], _Pretence] = {}

        def wrapped(original: Any) -> Callable[[Any, Any], None]:
            def step(tx: Any, inst: Any) -> None:
                point = (tx.f_code, inst.offset)
                if point in points:
                    points[point].apply(tx, inst, original)
                    return
                try:
                    original(tx, inst)
                except (Unsupported, UserError) as exc:
                    pretence = None if exc.logged else _find_pretence(tx, inst, exc)
                    if pretence is None:
                        raise
                    points[point] = pretence
                    self._add(exc, tx.f_code, "function_eager", stepped_over=True)
                    # The log's entries hold only for an analysis that takes the same
                    # way. It comes to an end all the same: `points` only grows.
                    tx.speculation_log.clear()
                    raise RestartAnalysis(
                        restart_reason="compilekit steps over a graph break"
                    ) from exc

            return step

        with contextlib.ExitStack() as stack:
            for translator in (InstructionTranslator, InliningInstructionTranslator):
                table = list(translator.dispatch_table)
                for opcode, handler in enumerate(table):
                    name = dis.opname[opcode]
                    if handler is not None and (name in _CALLS or "JUMP" in name):
                        table[opcode] = wrapped(handler)
                stack.enter_context(
                    mock.patch.object(translator, "dispatch_table", table)
                )
            yield


def _depth_of_caller() -> int:
    """Frames below whoever entered the context manager that asks."""
    # This function, its generator and contextlib's frame are not the caller's.
    return len(traceback.extract_stack()) - 3


class StandInError(RuntimeError):
    """Code asked for values of fake tensors too often or for too large a tensor."""


class StandInMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode whose tensors have values when asked: ones, then zeros, in turns.

    Operations that need values run on real tensors of ones. After every
    `_TURN` of them the ones become zeros and back, so that a loop whose end depends on
    data comes to an end.
    """

    _TURN = 256
    _MAX_OPS = 20_000
    _MAX_ELEMENTS = 1 << 27

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.stand_ins = 0

    def dispatch(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run one operation; FakeTensorMode's hook."""
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except (DataDependentOutputException, DynamicOutputShapeException) as exc:
            self.stand_ins += 1
            if self.stand_ins > self._MAX_OPS:
                raise StandInError(
                    f"more than {self._MAX_OPS} values were asked of tensors that have"
                    " none"
                ) from exc
            real_args, real_kwargs = tree_map_only(
                FakeTensor, self._stand_in, (args, kwargs or {})
            )
            result = func(*real_args, **real_kwargs)
            return tree_map_only(torch.Tensor, self._faked, result)

    def _stand_in(self, fake: FakeTensor) -> torch.Tensor:
        if fake.numel() > self._MAX_ELEMENTS:
            raise StandInError(f"a value was asked of a tensor of shape {fake.shape}")
        fill = 1 - self.stand_ins // self._TURN % 2
        return torch.full(fake.shape, fill, dtype=fake.dtype)

    def _faked(self, real: torch.Tensor) -> torch.Tensor:
        return FakeTensor(self, real.to("meta"), torch.device("cpu"))


# --- Stepping over --------------------------------------------------------------------

_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")

# Calls whose result is known well enough to go on with it: kind of break, context,
# result.
_KNOWN_RESULTS: tuple[tuple[str, str, object], ...] = (
    ("Failed to trace builtin operator", r"builtin print\b", None),
    ("logging.Logger method not supported for non-export cases", r"", None),
    ("Attempted to call function marked as skipped", r"\b_?warnings, .*: warn", None),
    ("Unsupported Tensor.item() call with capture_scalar_outputs=False", r"", 1),
)


@dataclasses.dataclass
class _Pretence:
    """Stands in for one instruction: a call's result, or a branch's condition."""

    result: object
    visits: int = 0

    def apply(self, tx: Any, inst: Any, original: Callable[..., None]) -> None:
        self.visits += 1
        if inst.opname in _CALLS:
            # As handle_graph_break in symbolic_convert.py counts; in Python 3.11 the
            # arguments belong to PRECALL.
            effect = dis.stack_effect(inst.opcode, inst.arg)
            if inst.opname == "CALL" and "PRECALL" in dis.opmap:
                effect += dis.stack_effect(dis.opmap["PRECALL"], inst.arg)
            tx.popn(1 - effect)
            tx.kw_names = None
            tx.push(ConstantVariable.create(self.result))
            return
        if isinstance(tx.stack[-1], TensorVariable):
            # In turns, so that a `while` ends; a loop's body takes both branches.
            tx.stack[-1] = ConstantVariable.create(self.visits % 2 == 1)
        original(tx, inst)


def _find_pretence(tx: Any, inst: Any, exc: Any) -> _Pretence | None:
    """What to pretend if the break is this instruction's own; None if unknown."""
    stack = _real_stack(exc)
    here = (tx.f_code.co_filename, tx.lineno)
    if inst.offset is None or not stack:
        return None
    if (stack[-1].filename, stack[-1].lineno) != here:
        return None
    text = _parse_message(exc)
    if inst.opname not in _CALLS:
        branching = text["gb_type"] == "Data-dependent branching"
        return _Pretence(None) if branching else None
    for gb_type, context, result in _KNOWN_RESULTS:
        if text["gb_type"] == gb_type and re.search(context, text["context"]):
            return _Pretence(result)
    return None


# --- Reading Dynamo's messages --------------------------------------------------------

_ANOTHER = "*** While handling this graph break, another graph break occurred: ***"
_PART = re.compile(
    r"^ +(?P<name>Explanation|Hint|Developer debug context|Higher Order Operator): "
    r"(?P<text>.*(?:\n    .*)*)",
    re.MULTILINE,
)


def _parse_message(exc: Any) -> dict[str, Any]:
    """Take apart what `format_graph_break_message` (exc.py) put together.

    Where one break led to another, the first is meant.
    """
    message = str(getattr(exc, "msg", exc)).split(_ANOTHER)[0].strip()
    if isinstance(exc, UserError):
        return {
            "gb_type": exc.error_type.name,
            "explanation": message.splitlines()[0] if message else "",
            "hints": (),
            "context": "",
            "link": "",
        }
    body, _, link = message.partition("For more details about this graph break,")
    parts = [(p["name"], " ".join(p["text"].split())) for p in _PART.finditer(body)]
    found = dict(reversed(parts))
    return {
        "gb_type": body.splitlines()[0].strip() if body else type(exc).__name__,
        "explanation": found.get("Explanation", ""),
        "hints": tuple(text for name, text in parts if name == "Hint"),
        "context": found.get("Developer debug context", ""),
        "link": link.removeprefix(" please visit:").strip(),
    }


def _real_stack(exc: Any) -> list[traceback.FrameSummary]:
    return list(getattr(exc, "real_stack", None) or ())


# A function that Dynamo made to go on after a break.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_\d+")


def _place(file: str, line: int, function: str) -> Place:
    resumed = _RESUMED.fullmatch(function)
    source = linecache.getline(file, line).strip()
    return Place(file, line, resumed["name"] if resumed else function, source)


def _user_stack(lines: Iterable[tuple[str, int, str]]) -> tuple[Place, ...]:
    """Leave out library code; a function and what it goes on in are one entry."""
    stack: list[Place] = []
    for file, line, function in lines:
        if _is_library(file):
            continue
        place = _place(file, line, function)
        if _RESUMED.fullmatch(function) and stack:
            before = stack[-1]
            if (before.file, before.function) == (place.file, place.function):
                stack.pop()
        stack.append(place)
    return tuple(stack)


_LIBRARIES = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
    )
)


@functools.cache
def _is_library(file: str) -> bool:
    """True for torch, the standard library and compilekit; packages are user code."""
    if file.startswith("<"):
        return True
    path = str(Path(file).resolve())
    packages = f"{os.sep}site-packages{os.sep}"
    return any(
        path.startswith(folder) and packages not in path[len(folder) - 1 :]
        for folder in _LIBRARIES
    )


def place_of_error(exc: BaseException) -> Place | None:
    """The innermost line of user code in an exception's traceback."""
    frames = [*traceback.extract_tb(exc.__traceback__), *_real_stack(exc)]
    stack = _user_stack((f.filename, f.lineno or 0, f.name) for f in frames)
    return stack[-1] if stack else None


_TRACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def _parse_place(stack_trace: str) -> Place | None:
    """The innermost user code in the text that FX keeps for a node."""
    found = _TRACE.finditer(stack_trace)
    stack = _user_stack((m["file"], int(m["line"]), m["function"]) for m in found)
    return stack[-1] if stack else None


def describe_break(exc: BaseException) -> str:
    """What Dynamo broke on, why, and at which line of user code, in one line."""
    message = _parse_message(exc)
    text = f"{message['gb_type']}: {message['explanation']}".removesuffix(": ")
    place = place_of_error(exc)
    return f"{text} ({describe_place(place)})" if place is not None else text


def describe_raw_break(found: RawBreak) -> str:
    """The same for a break that was recorded."""
    return f"{found.gb_type} ({describe_place(found.stack[-1])})"


def describe_place(place: Place | None) -> str:
    """``model.py:12, in forward: print(x)``; "" for no place."""
    if place is None:
        return ""
    line = f"{place.file}:{place.line}, in {place.function}"
    return f"{line}: {place.source}" if place.source else line


def place_in(stack_trace: str) -> Place | None:
    """The innermost user code in the text that FX keeps for a node."""
    return _parse_place(stack_trace)
