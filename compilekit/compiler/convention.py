"""The calling convention of one captured call, recovered by identity.

Lifecycle:
    1. `inputs` turns Dynamo's source of each placeholder into a path below the model or
       the arguments, and the model's other names of the same tensor into aliases.
    2. `outputs` runs the graph on fake tensors and tells fresh results from inputs
       passed through and from views of inputs.
    3. `result` runs Dynamo's own bytecode once around stand-in outputs and describes
       the caller's output object as a tree.
    4. `reads` keeps the Python values that the graph depends on.

What can't be described is refused by name: see docs/unsupported.md.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compilekit import paths
from compilekit._torch import capture as dynamo
from compilekit._torch.runtime import same_storage, storage_id
from compilekit.artifact.program import GraphOutput, Read
from compilekit.errors import UnsupportedByProgramError
from compilekit.runtime.model import FUNCTIONS, is_shown, shown, tensor_spec
from compilekit.runtime.result import class_name, join

MODEL, ARGUMENTS = "model", "kwargs"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a graph input comes from: ``tensor`` (of the model) or ``argument``."""

    kind: str
    path: str


def entry_function(method: str) -> Callable[..., Any]:
    """The function that is traced: it calls one method of the model by keyword."""

    def entry(model: torch.nn.Module, kwargs: dict[str, Any]) -> Any:
        return getattr(model, method)(**kwargs)

    return entry


def inputs(capture: dynamo.Capture) -> tuple[Place, ...]:
    """A place for every placeholder.

    Raises:
        UnsupportedByProgramError: an input isn't a tensor, or lives in a global.
    """
    places = []
    for source, example in zip(capture.sources, capture.example_inputs, strict=True):
        if not isinstance(example, torch.Tensor):
            raise UnsupportedByProgramError(
                f"the graph takes {source} as a {type(example).__name__}, and a program"
                " takes tensors only",
                hint="Make it a fixed argument ([entries.NAME.kwargs]) or a tensor.",
                thing=source,
            )
        place = locate(source)
        if place is None:
            raise UnsupportedByProgramError(
                f"the graph reads the tensor {readable(source)}, which is neither"
                " below the model nor an argument",
                hint="Register it on the model with register_buffer, or pass it in.",
                thing=readable(source),
            )
        places.append(place)
    return tuple(places)


def locate(source: str) -> Place | None:
    """Turn a Dynamo source expression into a place, or None if it lies elsewhere.

    ``L['model']._modules['fc']._parameters['weight']`` is ``fc.weight`` of the model,
    ``L['kwargs']['batch']['x']`` is the argument path ``batch["x"]``.
    """
    steps = _steps(source)
    if steps is None or len(steps) < 3 or steps[0] != "L":
        return None
    root, rest = steps[1], steps[2:]
    if root == (ARGUMENTS,):
        name, *below = rest
        if isinstance(name, str) or not isinstance(name[0], str):
            return None
        return Place("argument", paths.render((name[0], *below)))
    if root == (MODEL,):
        return Place("tensor", paths.render(_without_registries(rest)))
    return None


_REGISTRIES = ("_modules", "_parameters", "_buffers", "__dict__")


def _without_registries(steps: tuple[paths.Step, ...]) -> tuple[paths.Step, ...]:
    """``_modules["fc"]`` → ``fc``: registries are only how nn.Module stores it."""
    kept: list[paths.Step] = []
    index = 0
    while index < len(steps):
        step = steps[index]
        if step in _REGISTRIES and index + 1 < len(steps):
            key = steps[index + 1]
            if isinstance(key, tuple) and isinstance(key[0], str):
                kept.append(key[0])
                index += 2
                continue
        kept.append(step)
        index += 1
    return tuple(kept)


def _steps(source: str) -> tuple[paths.Step, ...] | None:
    """The names and keys of an expression made of attributes and subscripts only."""
    try:
        node: ast.expr = ast.parse(source, mode="eval").body
    except SyntaxError:
        return None
    steps: list[paths.Step] = []
    while True:
        if isinstance(node, ast.Attribute):
            steps.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            key = node.slice
            if not isinstance(key, ast.Constant) or not isinstance(
                key.value, (str, int)
            ):
                return None
            steps.append((key.value,))
            node = node.value
        elif isinstance(node, ast.Name):
            steps.append(node.id)
            return tuple(reversed(steps))
        else:
            return None


def readable(source: str) -> str:
    """A Dynamo source as users write it: ``model.state``, ``x``, ``module:TABLE``."""
    steps = _steps(source)
    if steps is None or len(steps) < 2:
        return source
    root, first, *below = steps
    name = first if isinstance(first, str) else str(first[0])
    rest = _without_registries(tuple(below))
    if root == "L" and name == ARGUMENTS and below:
        keyword, *inner = below
        word = keyword if isinstance(keyword, str) else str(keyword[0])
        return paths.render((word, *inner))
    module = module_of_alias(name)
    if root == "G" and module is not None:
        return f"{module}:{paths.render(rest)}"
    return paths.render((name, *rest))


def module_of_alias(name: str) -> str | None:
    """``__import_a_dot_b`` → ``a.b``; None if it isn't Dynamo's alias of a module."""
    prefix = "__import_"
    if not name.startswith(prefix):
        return None
    return name.removeprefix(prefix).replace("_dot_", ".")


def alias_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names under which the model holds one and the same tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in _all_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return tuple(sorted(tuple(sorted(g)) for g in names.values() if len(g) > 1))


def _all_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def layouts(capture: dynamo.Capture) -> tuple[Any, ...]:
    """Where each graph input's elements lie, to be compared by `refuse_reshaped`."""
    return tuple(
        (storage_id(tensor), tensor_spec(tensor), int(tensor.storage_offset()))
        for tensor in capture.example_inputs
    )


def refuse_reshaped(capture: dynamo.Capture, before: tuple[Any, ...]) -> None:
    """Refuse a graph that gives an input another shape, stride or storage.

    AOTAutograd does this outside the program, or not at all where the graph was run
    on the same fake tensors before.

    Args:
        before: `layouts` before the graph was run on its fake inputs.
    Raises:
        UnsupportedByProgramError: names the inputs.
    """
    changed = [
        readable(source)
        for source, old, new in zip(
            capture.sources, before, layouts(capture), strict=True
        )
        if old != new
    ]
    if changed:
        raise UnsupportedByProgramError(
            f"the call gives {', '.join(changed)} another shape or other storage (t_,"
            " resize_, set_, .data = …), and a program can only write values",
            hint="Write values in place (copy_), or return the new tensor.",
            thing=", ".join(changed),
        )


def outputs(
    capture: dynamo.Capture, stand_ins: tuple[Any, ...], first: int
) -> tuple[GraphOutput, ...]:
    """Tell what each graph output is.

    Args:
        stand_ins: The graph's outputs on fake tensors.
        first: Position in the program's result of graph output 0.
    """
    described = []
    for index, output in enumerate(stand_ins):
        if not isinstance(output, torch.Tensor):
            raise UnsupportedByProgramError(
                f"the graph returns a {type(output).__name__}, and a program returns"
                " tensors only",
                hint="Return it as a tensor, or compute it from the outputs.",
                thing=f"graph output {index}",
            )
        described.append(_output(capture, output, first + index))
    return tuple(described)


def _output(
    capture: dynamo.Capture, output: torch.Tensor, position: int
) -> GraphOutput:
    for index, example in enumerate(capture.example_inputs):
        if output is example:
            return GraphOutput(tensor_spec(output), "input", index)
    for index, example in enumerate(capture.example_inputs):
        if same_storage(output, example):
            _refuse_reinterpreted(output, example, capture.sources[index])
            offset = int(output.storage_offset()) - int(example.storage_offset())
            return GraphOutput(tensor_spec(output), "view", index, offset)
    return GraphOutput(tensor_spec(output), "program", position)


def _refuse_reinterpreted(
    output: torch.Tensor, base: torch.Tensor, source: str
) -> None:
    """A view is rebuilt from shape, stride and offset, which keep what bits mean."""
    if output.dtype != base.dtype:
        how = f"as {str(output.dtype).removeprefix('torch.')}"
    elif output.is_conj() != base.is_conj():
        how = "conjugated"
    elif output.is_neg() != base.is_neg():
        how = "negated"
    else:
        return
    raise UnsupportedByProgramError(
        f"an output is a view of {readable(source)} read {how}, which a program can't"
        " put together",
        hint="Return a copy: .clone() or .resolve_conj().",
        thing=readable(source),
    )


def result(
    value: Any,
    stand_ins: tuple[Any, ...],
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    example_inputs: Mapping[int, Place],
) -> Mapping[str, Any]:
    """Describe the caller's output object as a tree of JSON nodes.

    Args:
        value: What Dynamo's bytecode returned around `stand_ins`.
        example_inputs: id of a live tensor → its place.
    Raises:
        UnsupportedByProgramError: the output holds an object the tree can't express.
    """
    by_id = {id(output): index for index, output in enumerate(stand_ins)}
    places = dict(example_inputs)
    for name, tensor in _all_tensors(model):
        places.setdefault(id(tensor), Place("tensor", name))
    for path, part in _argument_parts(kwargs):
        if isinstance(part, torch.Tensor) or _is_mutable(part):
            places.setdefault(id(part), Place("argument", path))

    def node(item: Any, path: str) -> dict[str, Any]:
        if isinstance(item, torch.Tensor):
            if id(item) in by_id:
                return {"kind": "out", "index": by_id[id(item)]}
            place = places.get(id(item))
            if place is not None:
                return {"kind": place.kind, "path": place.path}
            raise UnsupportedByProgramError(
                f"output {path or 'value'} is a tensor that is neither computed by the"
                " graph nor an input",
                hint="Register constants on the model with register_buffer.",
                thing=path,
            )
        if item is None or isinstance(item, (bool, int, float, str)):
            if type(item) not in (type(None), bool, int, float, str):
                raise _refuse_class(item, path)
            if not is_json(item):
                raise UnsupportedByProgramError(
                    f"output {path or 'value'} is the number {item}, which JSON can't"
                    " hold",
                    hint="Return it as a tensor.",
                    thing=path,
                )
            return {"kind": "value", "value": item}
        if id(item) in places:
            return {"kind": "argument", "path": places[id(item)].path}
        children = _children(item)
        if children is None:
            raise _refuse_class(item, path)
        kind, parts = children
        described: dict[str, Any] = {"kind": kind}
        if kind in ("namedtuple", "dataclass", "mapping"):
            described["class"] = _importable_name(item, path)
        if isinstance(parts, dict):
            described["items"] = [
                [key, node(part, join(path, key, kind))] for key, part in parts.items()
            ]
        else:
            described["items"] = [
                node(part, f"{path}[{index}]") for index, part in enumerate(parts)
            ]
        return described

    return node(value, "")


def output_tensors(value: Any) -> dict[str, torch.Tensor]:
    """Every tensor of an output by its path, as in ``[entries.NAME.outputs]``."""
    found: dict[str, torch.Tensor] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, torch.Tensor):
            found[path] = item
            return
        kind, parts = _children(item) or ("", ())
        if isinstance(parts, dict):
            for key, part in parts.items():
                walk(part, join(path, key, kind))
        else:
            for index, part in enumerate(parts):
                walk(part, f"{path}[{index}]")

    walk(value, "")
    return found


def _children(item: Any) -> tuple[str, Any] | None:
    """Kind and parts of a container, or None for an object of unknown make."""
    if type(item) is list:
        return "list", item
    if type(item) is tuple:
        return "tuple", item
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return "namedtuple", dict(zip(item._fields, item, strict=True))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = [field for field in dataclasses.fields(item) if field.init]
        return "dataclass", {field.name: getattr(item, field.name) for field in fields}
    if type(item) is dict and all(isinstance(key, str) for key in item):
        return "dict", item
    if type(item).__name__ == "OrderedDict" and type(item).__module__ == "collections":
        return "mapping", dict(item)
    return None


def _is_mutable(item: Any) -> bool:
    """A container whose identity a caller can see."""
    return not isinstance(item, tuple) and _children(item) is not None


def _importable_name(item: Any, path: str) -> str:
    """Name of an output's class; refused if it can't be found by that name."""
    cls = type(item)
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        raise UnsupportedByProgramError(
            f"output {path or 'value'} is a {class_name(cls)}, which can't be imported"
            " by that name where the program is loaded",
            hint="Define the class at the top of a module.",
            thing=path,
            type=class_name(cls),
        )
    return class_name(cls)


def _refuse_class(item: Any, path: str) -> UnsupportedByProgramError:
    name = class_name(type(item))
    hint = "Return tensors in tuples, lists, dicts, named tuples or dataclasses."
    if isinstance(item, dynamo.NumpyArray):
        name = "numpy:ndarray"
        hint = "Return the tensor, and call .numpy() on what the model returns."
    elif isinstance(item, dict):
        name = f"{type(item).__name__} with keys that aren't strings"
    elif "Cache" in name:
        hint = (
            "Turn the cache off with `kwargs = { use_cache = false }` below the entry."
        )
    return UnsupportedByProgramError(
        f"output {path or 'value'} is a {name}, which a program can't put together",
        hint=hint,
        thing=path,
        type=name,
    )


def argument_tensors(kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Every tensor below a call's keyword arguments, with its path."""
    return [(p, v) for p, v in argument_leaves(kwargs) if isinstance(v, torch.Tensor)]


def argument_leaves(kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every value below a call's keyword arguments that isn't a container."""
    return [(p, v) for p, v in _argument_parts(kwargs) if _children(v) is None]


def _argument_parts(kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every value below a call's keyword arguments, containers first."""
    found: list[tuple[str, Any]] = []

    def walk(item: Any, steps: tuple[paths.Step, ...]) -> None:
        found.append((paths.render(steps), item))
        kind, parts = _children(item) or ("", ())
        if isinstance(parts, dict):
            for key, part in parts.items():
                by_key = kind in ("dict", "mapping")
                walk(part, (*steps, (key,) if by_key else key))
        else:
            for index, part in enumerate(parts):
                walk(part, (*steps, (index,)))

    for name, value in kwargs.items():
        walk(value, (name,))
    return found


_VALUE_GUARDS = frozenset(
    {"CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH", "BOOL_MATCH", "NONE_MATCH"}
)
_SHOWN_GUARDS = _VALUE_GUARDS | {"SET_CONTAINS"}
_FUNCTION_GUARDS = frozenset(
    {"CLOSURE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "ID_MATCH"}
)
_LENGTH_GUARDS = frozenset({"SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH"})
_KEY_GUARDS = frozenset({"DICT_KEYS_MATCH"})
# What `runtime.model.module_mismatches` looks at itself: the training flag and hooks
# (and any forward), and a mark that transformers leaves on a model with hooks.
_OUR_FLAGS = frozenset(
    {"training", "_is_full_backward_hook", "_output_capturing_hooks_installed"}
)
_NOT_READ = frozenset({"_forward_hooks", "_forward_pre_hooks", "__class__"})
# Guards here are about torch itself, or us; both versions are factors.
_NOT_THE_MODELS = frozenset(
    {"torch", "compilekit", "collections", "inspect", "typing", "functools", "math"}
)


def reads(
    capture: dynamo.Capture, model: torch.nn.Module, kwargs: Mapping[str, Any]
) -> tuple[Read, ...]:
    """The Python values the graph depends on, from Dynamo's guards.

    Only values that JSON can hold are kept, and classes of objects below the model.
    """
    scope = {"L": {MODEL: model, ARGUMENTS: kwargs}, "G": capture.globals}
    found: dict[tuple[str, str], Read] = {}
    for guard in capture.reads:
        steps = _steps(guard.source)
        asked = guard.kind == "HASATTR"
        # The attribute is the class's, as most methods are.
        inherited = guard.kind == "NOT_PRESENT_IN_GENERIC_DICT"
        if steps is not None and guard.attribute and (asked or inherited):
            steps = (*steps, guard.attribute)
        if steps is None or len(steps) < 3:
            continue
        path = _read_path(steps)
        if path is None:
            continue
        try:
            value = paths.follow(scope[str(steps[0])], steps[1:])
        except (AttributeError, KeyError, IndexError, TypeError):
            if asked:
                found[(path, "absent")] = Read(path, "absent", None)
            continue
        if (guard.kind in _VALUE_GUARDS or inherited) and _is_plain(value):
            # Infinity and NaN have no JSON; they are kept as they print.
            read = (
                Read(path, "value", value)
                if is_json(value)
                else Read(path, "repr", shown(value))
            )
        elif ((guard.kind in _SHOWN_GUARDS or inherited) and is_shown(value)) or (
            guard.kind in _FUNCTION_GUARDS and _is_the_models(path, value)
        ):
            read = Read(path, "repr", shown(value))
        elif inherited and _is_own_method(str(steps[-1]), value):
            read = Read(path, "inherited", None)
        elif guard.kind in _KEY_GUARDS and _is_plain(list(value)):
            # What a loop goes through: the layers of a list of modules, a dict's items.
            read = Read(path, "keys", list(value))
        elif guard.kind in _LENGTH_GUARDS and _has_own_length(path, value):
            read = Read(path, "length", len(value))
        elif guard.kind == "TYPE_MATCH" and _names_own_class(path, value):
            read = Read(path, "type", class_name(type(value)))
        else:
            continue
        found[(path, read.kind)] = read
    return tuple(found[key] for key in sorted(found))


def _is_the_models(path: str, value: Any) -> bool:
    """True for a function that an object below the model has as a value.

    Of those in Python modules the code is kept.
    """
    return not path.startswith("module:") and isinstance(value, FUNCTIONS)


def _is_own_method(name: str, value: Any) -> bool:
    """False for a forward, which is looked at anyhow, for what Python looks up in the
    class whatever an instance has, and for torch's own methods."""
    package = str(getattr(value, "__module__", "")).split(".")[0]
    return (
        name != "forward"
        and not (name.startswith("__") and name.endswith("__"))
        and package not in _NOT_THE_MODELS
    )


def _has_own_length(path: str, value: Any) -> bool:
    """False for a module's registry: it grows with each model that a process makes."""
    registry = path.startswith("module:") and isinstance(value, Mapping)
    return hasattr(value, "__len__") and not registry


def _names_own_class(path: str, value: Any) -> bool:
    """True for objects below the model; a builtin's class says nothing new."""
    return not path.startswith("module:") and type(value).__module__ != "builtins"


def _read_path(steps: tuple[paths.Step, ...]) -> str | None:
    if steps[0] == "L" and steps[1] == (MODEL,):
        below = _without_registries(steps[2:])
        if not below or below[-1] in _OUR_FLAGS or not _NOT_READ.isdisjoint(below):
            return None
        return paths.render(below)
    if steps[0] == "G" and isinstance(steps[1], tuple):
        module = module_of_alias(str(steps[1][0]))
        if module is None or module.split(".")[0] in _NOT_THE_MODELS:
            return None
        return f"module:{module}:{paths.render(steps[2:])}"
    return None


def is_json(value: Any) -> bool:
    """False for a number, or a sequence with one, that JSON can't hold."""
    if isinstance(value, (tuple, list)):
        return all(map(is_json, value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_plain(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str):
        return True
    return type(value) in (tuple, list) and all(_is_plain(part) for part in value)


def refuse_side_effects(
    capture: dynamo.Capture,
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    before: Mapping[dynamo.SideEffect, Any],
) -> None:
    """Refuse a call that leaves anything changed besides tensors.

    Args:
        before: `snapshot` taken before the bytecode ran.
    Raises:
        UnsupportedByProgramError: names every object that the call changes.
    """
    after = snapshot(capture, model, kwargs)
    changed: list[str] = []
    for effect, old in before.items():
        if after[effect] != old:
            changed += _changes(effect, old, after[effect])
    if changed:
        raise UnsupportedByProgramError(
            f"the call changes Python state: {'; '.join(changed)}. A program runs the"
            " graph only, so that change would be lost",
            hint="Move it out of the compiled method, or keep the state in a buffer"
            " and write that in place (self.state.copy_(new)).",
            thing="; ".join(changed),
        )


def _changes(effect: dynamo.SideEffect, old: Any, new: Any) -> list[str]:
    """What a side effect changed, by name: ``model.calls``, ``model.state``."""
    name = readable(effect.source)
    if effect.attributes:
        dot = "" if name.endswith(":") else "."
        return [f"{name}{dot}{attribute}" for attribute in effect.attributes]
    owner, _, registry = name.rpartition(".")
    if registry in _REGISTRIES:
        keys = dict.fromkeys(key for key, _ in set(old) ^ set(new))
        return [f"{owner}.{key}" for key in sorted(keys)]
    return [f"the contents of {name}"]


def snapshot(
    capture: dynamo.Capture, model: torch.nn.Module, kwargs: Mapping[str, Any]
) -> dict[dynamo.SideEffect, Any]:
    """What the objects that Dynamo's bytecode writes look like now."""
    scope = {"L": {MODEL: model, ARGUMENTS: kwargs}, "G": capture.globals}
    state: dict[dynamo.SideEffect, Any] = {}
    for effect in capture.side_effects:
        steps = _steps(effect.source)
        if steps is None:
            state[effect] = ("unreadable", object())
            continue
        try:
            target = paths.follow(scope[str(steps[0])], steps[1:])
        except (AttributeError, KeyError, IndexError, TypeError):
            state[effect] = ("missing",)
            continue
        if effect.attributes:
            missing = object
            state[effect] = tuple(
                _identity(getattr(target, name, missing)) for name in effect.attributes
            )
        else:
            state[effect] = _contents(target)
    return state


def _identity(value: Any) -> Any:
    """Scalars by value, everything else by identity."""
    return ("value", value) if _is_plain(value) else ("id", id(value))


def _contents(target: Any) -> Any:
    if isinstance(target, Mapping):
        return tuple((key, _identity(value)) for key, value in target.items())
    if isinstance(target, (list, tuple, set, frozenset)):
        return tuple(_identity(value) for value in target)
    return _identity(target)
