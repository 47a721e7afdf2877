"""Compare a live model with what an entry was compiled from: every mismatch at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from compilekit import paths
from compilekit.artifact.program import Entry, Read, TensorSpec
from compilekit.errors import Mismatch
from compilekit.runtime.code import code_digest, find_codes

MISSING = object()


class ModelView:
    """Values below a live model by path; submodules are looked up once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))

    def get(self, path: str) -> Any:
        """The value at a path, or `MISSING`."""
        prefix, _, name = path.rpartition(".")
        module = self.modules.get(prefix)
        try:
            if module is not None and "[" not in name:
                return getattr(module, name)
            return paths.follow(self.model, paths.parse(path))
        except (AttributeError, KeyError, IndexError, TypeError):
            return MISSING


def model_mismatches(
    model: torch.nn.Module, entry: Entry, class_name: str
) -> tuple[Mismatch, ...]:
    """Everything in which a live model differs from the one that was compiled.

    Covers its class, the metadata of every tensor that a graph reads, tied weights,
    Python values that capture depended on, traced functions, custom operators, hooks,
    training mode and ambient state.
    """
    view = ModelView(model)
    return (
        *_class(model, class_name),
        *_tensors(view, entry),
        *_aliases(view, entry),
        *_reads(view, entry),
        *_code(entry),
        *_custom_ops(entry),
        *_modules(model, entry),
        *_ambient(entry),
    )


def _mismatch(factor: str, built: Any, here: Any, why: str, hint: str) -> Mismatch:
    return Mismatch(factor, str(built), str(here), "refuse", why, hint)


def _class(model: torch.nn.Module, expected: str) -> Iterator[Mismatch]:
    found = f"{type(model).__module__}:{type(model).__qualname__}"
    if found != expected:
        yield _mismatch(
            "model.class",
            expected,
            found,
            "Another class computes something else.",
            "Attach to the class that was built, or build for this one"
            ' ([model] class = "…").',
        )


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Metadata of a live tensor."""
    return TensorSpec(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.device.type,
    )


def _tensors(view: ModelView, entry: Entry) -> Iterator[Mismatch]:
    for path, expected in entry.tensors.items():
        tensor = view.get(path)
        if not isinstance(tensor, torch.Tensor):
            what = "nothing" if tensor is MISSING else f"a {type(tensor).__name__}"
            yield _mismatch(
                f"tensor {path}",
                _describe(expected),
                what,
                "The program reads it.",
                "Is this the model that was built?",
            )
            continue
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            yield _mismatch(
                f"tensor {path}",
                "a plain tensor",
                f"a {type(tensor).__module__}.{type(tensor).__qualname__}",
                "Tensor subclasses carry behaviour that the program doesn't know.",
                "Attach before quantising or wrapping it.",
            )
            continue
        found = tensor_spec(tensor)
        if not _fits(found, expected):
            yield _mismatch(
                f"tensor {path}",
                _describe(expected),
                _describe(found),
                "The program would read it wrongly, without an error.",
                _tensor_hint(expected, found),
            )


def _fits(found: TensorSpec, expected: TensorSpec) -> bool:
    if (found.dtype, found.shape, found.device) != (
        expected.dtype,
        expected.shape,
        expected.device,
    ):
        return False
    # The stride of a dimension of size 1 is never used.
    return all(
        size == 1 or have == want
        for size, have, want in zip(
            found.shape, found.stride, expected.stride, strict=True
        )
    )


def _tensor_hint(expected: TensorSpec, found: TensorSpec) -> str:
    if found.dtype != expected.dtype:
        return f'Load it as {expected.dtype}, or build with dtype = "{found.dtype}".'
    if found.device != expected.device:
        return f"Move the model to {expected.device} before attach."
    if found.shape != expected.shape:
        return "Build again from this model's configuration."
    return "Make it contiguous, as it was built."


def _describe(spec: TensorSpec) -> str:
    shape = "×".join(map(str, spec.shape)) or "scalar"
    return f"{spec.dtype} {shape} stride {list(spec.stride)} on {spec.device}"


def _aliases(view: ModelView, entry: Entry) -> Iterator[Mismatch]:
    """Tied weights must be tied here, and nothing else may be."""
    built = {path: group for group in entry.aliases for path in group}
    for group in entry.aliases:
        ids = {id(view.get(path)) for path in group}
        if len(ids) > 1:
            yield _mismatch(
                f"tied weights {', '.join(group)}",
                "one tensor",
                f"{len(ids)} different tensors",
                "The program reads only one of them.",
                "Tie them (model.tie_weights()), or build from the untied model.",
            )
    tied: dict[int, list[str]] = {}
    for path in entry.tensors:
        tensor = view.get(path)
        if isinstance(tensor, torch.Tensor):
            tied.setdefault(id(tensor), []).append(path)
    for names in tied.values():
        if len(names) > 1 and any(n not in built.get(names[0], ()) for n in names):
            yield _mismatch(
                f"weights {', '.join(names)}",
                "different tensors",
                "one tensor",
                "A write to one would change the other.",
                "Build from the tied model.",
            )


def _reads(view: ModelView, entry: Entry) -> Iterator[Mismatch]:
    for read in entry.reads:
        value = _read_value(view, read)
        found = _as_read(value, read.kind)
        expected = read.value
        if isinstance(expected, list):
            found = list(found) if isinstance(found, (list, tuple)) else found
        if found != expected or type(found) is not type(expected):
            shown = "nothing" if value is MISSING else repr(found)
            what = {"value": "", "type": "class of ", "length": "length of "}
            yield _mismatch(
                f"{what.get(read.kind, '')}{read.path}",
                repr(expected),
                shown,
                "The graph was captured with the first value in it.",
                "Build again from this model.",
            )


def _read_value(view: ModelView, read: Read) -> Any:
    if not read.path.startswith("module:"):
        return view.get(read.path)
    _, module, path = read.path.split(":", 2)
    try:
        return paths.follow(sys.modules[module], paths.parse(path))
    except (KeyError, AttributeError, IndexError, TypeError):
        return MISSING


def _as_read(value: Any, kind: str) -> Any:
    if value is MISSING:
        return value
    if kind == "type":
        return f"{type(value).__module__}:{type(value).__qualname__}"
    if kind == "length":
        return len(value) if hasattr(value, "__len__") else MISSING
    return value


def _code(entry: Entry) -> Iterator[Mismatch]:
    for name, expected in entry.code.items():
        found = [code_digest(code) for code in find_codes(name)]
        if expected not in found:
            yield _mismatch(
                f"function {name}",
                f"bytecode {expected[:12]}",
                f"bytecode {found[0][:12]}" if found else "nothing",
                "It was compiled into the program; its code has changed since.",
                "Build again with this source.",
            )


def _custom_ops(entry: Entry) -> Iterator[Mismatch]:
    for name, origin in entry.custom_ops.items():
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is None:
            module = origin["module"]
            yield _mismatch(
                f"operator {name}",
                origin["schema"],
                "no such operator",
                "The program calls it.",
                f"Import {module or 'the library that registers it'} before attach.",
            )
            continue
        from compilekit._torch.runtime import operator_schema

        found = operator_schema(packet)
        if found != origin["schema"]:
            yield _mismatch(
                f"operator {name}",
                origin["schema"],
                found,
                "What it writes or returns has changed.",
                "Build again with this operator.",
            )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _modules(model: torch.nn.Module, entry: Entry) -> Iterator[Mismatch]:
    """Hooks, overridden forwards and the training flag of every submodule."""
    for name, module in model.named_modules():
        if module.training != entry.training:
            words = {True: "training", False: "eval"}
            yield _mismatch(
                f"mode of {name or 'the model'}",
                words[entry.training],
                words[module.training],
                "Dropout and batch norm behave differently.",
                f"Call model.{'train' if entry.training else 'eval'}() before attach.",
            )
            return
        if not name:
            continue
        if any(getattr(module, hooks) for hooks in _HOOKS):
            yield _mismatch(
                f"hooks of {name}",
                "none",
                "a forward hook",
                "A program doesn't call submodules, so the hook would never run.",
                "Remove it before attach.",
            )
        if "forward" in module.__dict__:
            yield _mismatch(
                f"forward of {name}",
                "its class's",
                "replaced on the instance",
                "The program holds what its class computes.",
                "Attach before replacing it.",
            )


def _ambient(entry: Entry) -> Iterator[Mismatch]:
    here = ambient()
    for name, expected in entry.ambient.items():
        if here.get(name) != expected:
            yield _mismatch(
                name,
                expected,
                here.get(name),
                "It changes what the graph computes.",
                _AMBIENT_HINTS.get(name, "Set it as it was at build."),
            )


_AMBIENT_HINTS = {
    "autocast": "Attach and call outside autocast; build with the dtype you want.",
    "float32_matmul_precision": "Call torch.set_float32_matmul_precision at start.",
    "deterministic": "Call torch.use_deterministic_algorithms(False).",
    "default_dtype": "Call torch.set_default_dtype.",
}


def ambient() -> dict[str, Any]:
    """Process-wide state that changes what a graph computes."""
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
