"""Kinds of graph breaks: from Dynamo's words to a reason and a fix in plain ones."""

from __future__ import annotations

import dataclasses
import re

from compilekit._torch.breaks import RawBreak


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
    "recurrent": Kind(
        "torch.compile leaves nn.LSTM, nn.GRU and nn.RNN to eager code.",
        "Nothing: a program's build captures them. For torch.compile itself, set"
        " torch._dynamo.config.allow_rnn = True before the first call.",
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
    ("recurrent", r"Attempted to wrap RNN", ""),
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


def kind_of(found: RawBreak) -> str:
    """The key in `KINDS` of a break."""
    details = f"{found.context}\n{found.explanation}"
    # A logging or warnings function that Dynamo entered before it broke.
    if any(re.search(r"\b(logging|warnings)\b", place.file) for place in found.below):
        return "logging"
    for kind, gb_type, detail in _RULES:
        if re.match(gb_type, found.gb_type) and re.search(detail, details):
            return kind
    return "other"


def subject(kind: str, found: RawBreak) -> str:
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


def fix(kind: str, found: RawBreak) -> str:
    """What to try: ours, or Dynamo's own advice."""
    if KINDS[kind].fix:
        return KINDS[kind].fix
    # Advice to people who work on Dynamo itself is of no use to its users.
    advice = [h for h in found.hints if not h.startswith("It may be possible to write")]
    return " ".join(advice) or "Call it outside the model, or write it differently."
