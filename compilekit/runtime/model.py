"""Compare a live model with what an entry was compiled from: every mismatch at once."""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from compilekit import paths
from compilekit._torch.runtime import (
    forward_hooks,
    global_forward_hooks,
    is_plain,
    operator_schema,
    registries,
)
from compilekit.artifact.program import Entry, Parameter, Read, TensorSpec
from compilekit.errors import Mismatch
from compilekit.runtime.code import function_digest, is_fixed, named_digest, written_in
from compilekit.runtime.frozen import frozen_mismatches

MISSING = object()
SCALARS = (type(None), bool, int, float, str)
FUNCTIONS = (FunctionType, BuiltinFunctionType)


class AttachedMethod:
    """What `attach` puts in the place of a model's method."""


class ModelView:
    """Values below a live model by path; submodules are looked up once.

    Attributes:
        modules: Path → module; one that is reached by several paths has them all.
        distinct: Each module once, the model first.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.modules = dict(_submodules(model))
        self.distinct = tuple(dict.fromkeys(self.modules.values()))

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


def _submodules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """As ``named_modules(remove_duplicate=False)``, in a fifth of its time."""
    waiting: list[tuple[str, torch.nn.Module, tuple[torch.nn.Module, ...]]]
    waiting = [("", model, ())]
    while waiting:
        path, module, above = waiting.pop()
        yield path, module
        prefix = f"{path}." if path else ""
        above = (*above, module)
        waiting += [
            (prefix + name, child, above)
            for name, child in reversed(registries(module)[2].items())
            # A child that holds its parent would lead round and round.
            if child is not None and not any(child is each for each in above)
        ]


def model_mismatches(
    view: ModelView, entry: Entry, class_name: str
) -> tuple[Mismatch, ...]:
    """Everything in which a live model differs from the one that was compiled.

    Covers its class, the method's signature, the metadata of every tensor that a graph
    reads, the values of frozen ones, tied weights, Python values that capture depended
    on, traced functions, custom operators, hooks, replaced methods and training mode.
    """
    tensors = {path: view.get(path) for path in entry.tensors}
    return (
        *_class(view.model, class_name),
        *_signature(view.model, entry),
        *_tensors(tensors, entry),
        *_aliases(tensors, view, entry),
        *frozen_mismatches(tensors, entry.frozen),
        *_reads(view, entry),
        *_code(entry),
        *_custom_ops(entry),
        *module_mismatches(view, entry),
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


def own_method(model: torch.nn.Module, name: str) -> Any:
    """The method that a model's class gives it, whatever stands on the instance.

    None if its class has no such method.
    """
    method = getattr(type(model), name, None)
    bind = getattr(method, "__get__", None)
    return method if bind is None else bind(model)


def signature(method: Any) -> tuple[Parameter, ...]:
    """Parameters of a bound method, as an entry records them."""
    parameters = []
    for parameter in inspect.signature(method).parameters.values():
        default = parameter.default
        parameters.append(
            Parameter(
                name=parameter.name,
                kind=_KINDS[parameter.kind],
                required=default is parameter.empty
                and parameter.kind
                not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD),
                default=default if type(default) in SCALARS else None,
            )
        )
    return tuple(parameters)


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "args",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}


def _signature(model: torch.nn.Module, entry: Entry) -> Iterator[Mismatch]:
    method = own_method(model, entry.method)
    found = signature(method) if callable(method) else None
    if found != entry.signature:
        yield _mismatch(
            f"signature of {entry.method}",
            _listed(entry.signature),
            "no such method" if found is None else _listed(found),
            "Arguments that a call leaves out would mean something else.",
            "Build again with this class.",
        )


def _listed(parameters: tuple[Parameter, ...]) -> str:
    stars = {"args": "*", "kwargs": "**"}
    return ", ".join(
        f"{stars.get(p.kind, '')}{p.name}"
        + ("" if p.required or p.kind in stars else f"={p.default!r}")
        for p in parameters
    )


# What Inductor's GPU kernels assume of every address.
ALIGNMENT = 16


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Metadata of a live tensor."""
    return TensorSpec(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.device.type,
    )


def _tensors(tensors: Mapping[str, Any], entry: Entry) -> Iterator[Mismatch]:
    for path, expected in entry.tensors.items():
        tensor = tensors[path]
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
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else str(tensor.layout)
            yield _mismatch(
                f"tensor {path}",
                _describe(expected),
                f"{layout.removeprefix('torch.')} layout",
                "The program would read its memory as if it were dense.",
                "Make it dense (to_dense) before attach.",
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
        elif not is_plain(tensor, found.device):
            yield _mismatch(
                f"tensor {path}",
                "a tensor with memory of its own",
                "a lazy or wrapped one (conjugated, negated, inside torch.func)",
                "The program would read its memory as it is.",
                "Resolve it (resolve_conj, resolve_neg), or call outside torch.func.",
            )
        elif found.device == "cuda" and tensor.data_ptr() % ALIGNMENT:
            yield _mismatch(
                f"tensor {path}",
                f"an address that is a multiple of {ALIGNMENT}",
                f"one that is {tensor.data_ptr() % ALIGNMENT} beyond",
                "GPU kernels read 16 bytes at once, and would fault.",
                "It's a view into another tensor: make it a copy.",
            )


def _fits(found: TensorSpec, expected: TensorSpec) -> bool:
    if (found.dtype, found.shape, found.device) != (
        expected.dtype,
        expected.shape,
        expected.device,
    ):
        return False
    # The stride of a dimension of size 1 is never used.
    return found.stride == expected.stride or all(
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


def _aliases(
    tensors: Mapping[str, Any], view: ModelView, entry: Entry
) -> Iterator[Mismatch]:
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
    for path, tensor in tensors.items():
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
        if found != read.value or type(found) is not type(read.value):
            what = {"type": "class of ", "length": "length of ", "keys": "keys of "}
            none = {"absent": "nothing", "inherited": "its class's"}
            yield _mismatch(
                f"{what.get(read.kind, '')}{read.path}",
                none.get(read.kind, repr(read.value)),
                "nothing" if value is MISSING else repr(found),
                "The graph was captured with the first value in it.",
                "Build again from this model.",
            )


def _read_value(view: ModelView, read: Read) -> Any:
    """What lies there now; of an inherited one, whether an instance replaced it."""
    path, _, name = read.path.rpartition(".")
    inherited = read.kind == "inherited"
    value = value_at(view, path if inherited else read.path)
    return _is_replaced(value, name) if inherited else value


def value_at(view: ModelView, place: str) -> Any:
    """The value at a read's path, or `MISSING`."""
    if not place.startswith("module:"):
        return view.get(place) if place else view.model
    _, module, path = place.split(":", 2)
    try:
        return paths.follow(sys.modules[module], paths.parse(path))
    except (KeyError, AttributeError, IndexError, TypeError):
        return MISSING


def is_shown(value: Any) -> bool:
    """True for what no JSON holds, but whose text says all of it."""
    if isinstance(value, (frozenset, set)):
        return all(type(part) in SCALARS or is_shown(part) for part in value)
    return isinstance(value, (*_SHOWN, enum.Enum))


_SHOWN = (bytes, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


def shown(value: Any, levels: int = 4) -> str:
    """That text, the same in each process; for other objects, that of their class.

    A function's says what it does: all lambdas of a function have one name.

    Args:
        levels: How deep containers are shown; one may hold itself.
    """
    if levels and isinstance(value, (frozenset, set)):
        parts = sorted(shown(part, levels - 1) for part in value)
        return f"{type(value).__name__} {parts}"
    if levels and isinstance(value, Mapping):
        items = [
            f"{shown(key, levels - 1)}: {shown(part, levels - 1)}"
            for key, part in value.items()
        ]
        return f"{type(value).__name__} {{{', '.join(items)}}}"
    if levels and isinstance(value, (list, tuple)):
        parts = [shown(part, levels - 1) for part in value]
        return f"{type(value).__name__} [{', '.join(parts)}]"
    if isinstance(value, ModuleType):
        return value.__name__
    if type(value) in SCALARS or isinstance(value, _SHOWN):
        return repr(value)
    named = value if isinstance(value, (*FUNCTIONS, type)) else type(value)
    name = f"{named.__module__}:{named.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if isinstance(value, FunctionType) and not is_fixed(written_in(value)):
        return f"{name} {function_digest(value)[:12]}"
    return name


def _as_read(value: Any, kind: str) -> Any:
    """What of a value was recorded, as JSON gives it back."""
    if kind == "inherited":
        return "replaced on the instance" if value else None
    if kind == "absent":
        return None if value is MISSING else type(value).__name__
    if value is MISSING:
        return value
    if kind == "type":
        return f"{type(value).__module__}:{type(value).__qualname__}"
    if kind == "repr":
        return shown(value)
    if kind == "length":
        return len(value) if hasattr(value, "__len__") else MISSING
    if kind == "keys":
        return _without_tuples(list(value)) if isinstance(value, Mapping) else MISSING
    return _without_tuples(value)


def _without_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_tuples(part) for part in value]
    return value


def _code(entry: Entry) -> Iterator[Mismatch]:
    for name, expected in entry.code.items():
        found = named_digest(name)
        if found != expected:
            yield _mismatch(
                f"function {name}",
                f"code {expected[:12]}",
                f"code {found[:12]}" if found else "nothing",
                "It, a default or a decorator of it changed since it was compiled in.",
                "Build again with this source.",
            )


def _custom_ops(entry: Entry) -> Iterator[Mismatch]:
    for name, origin in entry.custom_ops.items():
        module = origin["module"]
        packet = _operator(name, module)
        if packet is None:
            yield _mismatch(
                f"operator {name}",
                origin["schema"],
                "no such operator",
                "The program calls it.",
                f"Make {module} importable here."
                if module
                else "Import the library that registers it before attach.",
            )
            continue
        found = operator_schema(packet)
        if found != origin["schema"]:
            yield _mismatch(
                f"operator {name}",
                origin["schema"],
                found,
                "What it writes or returns has changed.",
                "Build again with this operator.",
            )


def _operator(name: str, module: str) -> Any:
    """A custom operator, its module imported if need be; None if there is none."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None and module:
        try:
            importlib.import_module(module)
        except ImportError:
            return None
        packet = getattr(getattr(torch.ops, namespace), operator, None)
    return packet


def module_mismatches(view: ModelView, entry: Entry) -> Iterator[Mismatch]:
    """Hooks, replaced forwards and the training flag of every module.

    The root's own hooks run around a program as they do around its forward.
    """
    first = {module: path for path, module in reversed(view.modules.items())}
    modules = {
        path: module for path, module in view.modules.items() if first[module] == path
    }
    yield from _modes(modules, entry)
    if any(global_forward_hooks()):
        yield _hook("every module")
    for name, module in modules.items():
        around = not name and entry.method == "forward"
        if not around and any(h and _acts(h) for h in forward_hooks(module)):
            yield _hook(name or "the model")
        for method in {"forward", "forward" if name else entry.method}:
            if _is_replaced(module, method):
                yield _mismatch(
                    f"{method} of {name or 'the model'}",
                    "its class's",
                    "replaced on the instance",
                    "The program holds what its class computes.",
                    "Attach before replacing it.",
                )


def _modes(modules: Mapping[str, torch.nn.Module], entry: Entry) -> Iterator[Mismatch]:
    """One mismatch for the mode, which is set for all modules at once."""
    others = [n for n, module in modules.items() if module.training != entry.training]
    if others:
        words = {True: "training", False: "eval"}
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        yield _mismatch(
            f"mode of {others[0] or 'the model'}{more}",
            words[entry.training],
            words[not entry.training],
            "Dropout and batch norm behave differently.",
            f"Call model.{'train' if entry.training else 'eval'}() before attach.",
        )


def _acts(hooks: Mapping[int, Any]) -> bool:
    """True if there are hooks that would do something.

    Those of transformers, which any call that wanted hidden states has left behind,
    only collect outputs; a program that was asked for these computes them itself.

    Source: transformers 5.17 and 5.24, utils/output_capturing.py.
    """
    modules = {getattr(hook, "__module__", "") for hook in hooks.values()}
    return not modules <= {"transformers.utils.output_capturing"}


def _hook(where: str) -> Mismatch:
    return _mismatch(
        f"hooks of {where}",
        "none",
        "a forward hook",
        "A program doesn't call submodules, so the hook would never run.",
        "Remove it before attach.",
    )


def _is_replaced(owner: Any, name: str) -> bool:
    """True if an instance has a method that neither its class nor `attach` gave it.

    A copy of an attached model has its class's own method on the instance.
    """
    method = getattr(owner, "__dict__", {}).get(name, MISSING)
    if method is MISSING or isinstance(method, AttachedMethod):
        return False
    return not (
        isinstance(method, MethodType)
        and method.__self__ is owner
        and method.__func__ is getattr(type(owner), name, None)
    )


def ambient_mismatches(entry: Entry) -> Iterator[Mismatch]:
    """Process-wide state in which a start differs from the build.

    Not compared again after attach: loading another model changes some of it for a
    moment. What a program would notice, each call asks for.
    """
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
    "deterministic": "Call torch.use_deterministic_algorithms at start.",
    "default_dtype": "Call torch.set_default_dtype at start.",
}


def ambient() -> dict[str, Any]:
    """Process-wide state that changes what a graph computes."""
    return {
        "autocast": any(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
