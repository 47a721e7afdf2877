"""The calling convention of one captured call, recovered by identity.

Lifecycle:
    1. `inputs` turns Dynamo's source of each placeholder into a path below the model or
       the arguments (sources.py).
    2. `outputs` runs the graph on fake tensors and tells fresh results from inputs
       passed through and from views of inputs.
    3. `result` runs Dynamo's own bytecode once around stand-in outputs and describes
       the caller's output object as a tree.

What can't be described is refused by name: see docs/unsupported.md.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compilekit import paths
from compilekit._torch import capture as dynamo
from compilekit._torch.runtime import same_storage, storage_id
from compilekit.artifact.program import GraphOutput
from compilekit.compiler.reads import is_json
from compilekit.compiler.sources import Place, locate, readable
from compilekit.errors import UnsupportedByProgramError
from compilekit.runtime.model import tensor_spec
from compilekit.runtime.result import class_name


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
    capture: dynamo.Capture, stand_ins: tuple[Any, ...]
) -> tuple[GraphOutput, ...]:
    """Tell what each graph output is.

    Args:
        stand_ins: The graph's outputs on fake tensors.
    Raises:
        UnsupportedByProgramError: one of them isn't a tensor, or reads an input's
            memory in a way that no program can.
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
        described.append(_output(capture, output, index))
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
    for name, tensor in named_tensors(model):
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
                [key, node(part, paths.join(path, key, kind))]
                for key, part in parts.items()
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
                walk(part, paths.join(path, key, kind))
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


def named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a model, under each of their names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
