"""Put a call's result together: the caller's own classes around the graph outputs."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from compilekit import paths
from compilekit.errors import FOREIGN_ERRORS, AttachError, CompilekitError

Outputs = Sequence[torch.Tensor]
Values = Mapping[str, Any]
Sizes = tuple[int, ...] | None
ResultBuilder = Callable[[Outputs, Values, Sizes], Any]
"""(graph outputs, call arguments, real axis sizes or None if nothing was padded)."""

Cut = tuple[tuple[int, int], ...]


def result_builder(
    tree: Mapping[str, Any],
    cuts: Mapping[str, Mapping[str, str]],
    axes: tuple[str, ...],
    model: torch.nn.Module,
) -> ResultBuilder:
    """Turn a result tree into a function that builds the result.

    Args:
        tree: `Program.result`.
        cuts: Output path → {dimension: axis}.
        axes: The entry's axes, in the order of the sizes given to the builder.
        model: Where tensors that the output passes through are found.
    Raises:
        AttachError: a class of the output can't be imported.
    """
    return _builder(tree, "", cuts, axes, model)


def _builder(
    node: Mapping[str, Any],
    path: str,
    cuts: Mapping[str, Mapping[str, str]],
    axes: tuple[str, ...],
    model: torch.nn.Module,
) -> ResultBuilder:
    # No function that names itself: such a cycle would keep the model after a detach.
    inner = functools.partial(_builder, cuts=cuts, axes=axes, model=model)
    kind = node["kind"]
    if kind == "out":
        return _out(node["index"], _cut(cuts.get(path, {}), axes))
    if kind == "value":
        value = node["value"]
        return lambda outputs, values, sizes: value
    if kind == "argument":
        return _argument(node["path"])
    if kind == "tensor":
        steps = paths.parse(node["path"])
        return lambda outputs, values, sizes: paths.follow(model, steps)
    if kind in ("list", "tuple"):
        parts = [inner(part, f"{path}[{i}]") for i, part in enumerate(node["items"])]
        make = list if kind == "list" else tuple
        return lambda o, v, s: make([part(o, v, s) for part in parts])
    names = [name for name, _ in node["items"]]
    builders = [
        inner(part, paths.join(path, name, kind)) for name, part in node["items"]
    ]
    return _named(kind, node, names, builders)


def _named(
    kind: str,
    node: Mapping[str, Any],
    names: list[str],
    builders: list[ResultBuilder],
) -> ResultBuilder:
    pairs = list(zip(names, builders, strict=True))
    if kind == "dict":
        return lambda o, v, s: {name: part(o, v, s) for name, part in pairs}
    cls: Any = OrderedDict if kind == "mapping" else import_class(node["class"])
    if kind == "mapping":
        return lambda o, v, s: cls((name, part(o, v, s)) for name, part in pairs)
    if _is_model_output(cls, node["items"]):
        return _model_output(cls, [part for _, part in node["items"]], pairs)
    return lambda o, v, s: cls(**{name: part(o, v, s) for name, part in pairs})


_MODEL_OUTPUT = "transformers.utils.generic:ModelOutput"


# What makes one of them, or writes its fields.
_MAKERS = ("__new__", "__post_init__", "__setattr__", "__setitem__")


def _is_model_output(cls: type, items: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """True if making one comes to an attribute and a key for each field.

    So it does for transformers' output classes, unless one of them, or of what they are
    derived from, changes how it is made; and unless only its first field is there and
    isn't a tensor: ModelOutput takes that for all fields in one.

    Source: transformers 5.17 and 5.24, utils/generic.py, ModelOutput.__post_init__.
    """
    names = [class_name(base) for base in cls.__mro__]
    if _MODEL_OUTPUT not in names or not items:
        return False
    above = cls.__mro__[: names.index(_MODEL_OUTPUT)]
    if any(name in vars(base) for base in above for name in _MAKERS):
        return False
    (_, first), *others = items
    return _makes_fields(cls, items) and (
        first["kind"] in ("out", "tensor")
        or (first["kind"] == "value" and first["value"] is None)
        or any(node["kind"] not in ("value", "argument") for _, node in others)
    )


def _makes_fields(cls: Any, items: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether a class that is given its fields by name makes them as they are.

    Fields may be renamed, or be properties, or an ``__init__`` may have been written.
    """
    # dataclass() leaves an __init__ alone that is there; one of its own has no file.
    code = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    if code is None or code.co_filename != "<string>":
        return False
    nothing = {"kind": "value", "value": None}
    given: dict[str, Any] = {
        name: None if node == nothing else torch.ones(1) for name, node in items
    }
    try:
        made = cls(**given)
        found: list[dict[str, Any]] = [vars(made), dict(made.items())]
    except CompilekitError:
        raise
    except FOREIGN_ERRORS:
        return False
    present = {name: value for name, value in given.items() if value is not None}
    return type(made) is cls and all(
        list(one) == list(two) and all(map(operator.is_, one.values(), two.values()))
        for one, two in ((found[0], given), (found[1], present))
    )


def _model_output(
    cls: Any, nodes: list[Mapping[str, Any]], pairs: list[tuple[str, ResultBuilder]]
) -> ResultBuilder:
    """An attribute for each field, and a key for each that isn't None.

    That is what ModelOutput's own ``__init__`` comes to when its fields are given one
    by one, at a fifth of its 20 µs. A call that wasn't padded takes graph outputs, and
    constants, as they are: most fields are None.
    """
    set_item = OrderedDict.__setitem__
    new = cls.__new__
    fields = [
        (name, part, node.get("index"), node["kind"] == "value", node.get("value"))
        for (name, part), node in zip(pairs, nodes, strict=True)
    ]

    def make(outputs: Outputs, values: Values, sizes: Sizes) -> Any:
        result = new(cls)
        attributes = result.__dict__
        for name, part, index, is_constant, value in fields:
            if index is not None and sizes is None:
                value = outputs[index]
            elif not is_constant:
                value = part(outputs, values, sizes)
            attributes[name] = value
            if value is not None:
                set_item(result, name, value)
        return result

    return make


class ModelOutputFields(NamedTuple):
    """A result of transformers' classes that holds graph outputs and constants alone.

    Attributes:
        cls: Its class.
        fields: (name, graph output or None, constant) of each field.
    """

    cls: type
    fields: tuple[tuple[str, int | None, Any], ...]


def model_output_fields(tree: Mapping[str, Any]) -> ModelOutputFields | None:
    """What a call that wasn't padded puts together; None for any other result."""
    if "class" not in tree:
        return None
    cls = import_class(tree["class"])
    if not _is_model_output(cls, tree["items"]):
        return None
    if any(part["kind"] not in ("out", "value") for _, part in tree["items"]):
        return None
    return ModelOutputFields(
        cls,
        tuple(
            (name, part.get("index"), part.get("value")) for name, part in tree["items"]
        ),
    )


def _argument(path: str) -> ResultBuilder:
    name, *below = paths.parse(path)

    def take(outputs: Outputs, values: Values, sizes: Sizes) -> Any:
        # An input that the call left out stands under its whole path.
        if path in values:
            return values[path]
        return paths.follow(values[str(name)], tuple(below))

    return take


def _out(index: int, cut: Cut) -> ResultBuilder:
    if not cut:
        return lambda outputs, values, sizes: outputs[index]

    def take(outputs: Outputs, values: Values, sizes: Sizes) -> torch.Tensor:
        output = outputs[index]
        if sizes is not None:
            for dimension, axis in cut:
                # An input that is passed through has the call's size already.
                if output.shape[dimension] != sizes[axis]:
                    output = output.narrow(dimension, 0, sizes[axis])
        return output

    return take


def _cut(rule: Mapping[str, str], axes: tuple[str, ...]) -> Cut:
    return tuple((int(dimension), axes.index(axis)) for dimension, axis in rule.items())


def class_name(cls: type) -> str:
    """``module:qualname``, as a result tree names a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def import_class(name: str) -> Any:
    """The class that ``module:qualname`` names.

    Raises:
        AttachError: it can't be imported.
    """
    module, _, qualname = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as exc:
        raise AttachError(
            f"the output's class {name} can't be imported: {exc}",
            hint=f"Make {module} importable where the model is served.",
        ) from exc
    return value
