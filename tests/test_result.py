"""Outputs of transformers' classes: put together fast, or as the class itself does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import modeling_outputs
from transformers.utils.generic import ModelOutput

from compilekit.runtime.result import model_output_fields, result_builder

OUT = {"kind": "out", "index": 0}
NOTHING = {"kind": "value", "value": None}


@dataclasses.dataclass
class Plain(ModelOutput):
    """As most are."""

    first: Any = None
    second: Any = None


class Derived(Plain):
    """Not a dataclass of its own."""


@dataclasses.dataclass
class After(ModelOutput):
    """Does something once its fields are there."""

    first: Any = None
    second: Any = None

    def __post_init__(self) -> None:
        """A key more."""
        super().__post_init__()
        self["more"] = 1


@dataclasses.dataclass
class InheritedAfter(After):
    """So does one that is derived from it."""

    third: Any = None


@dataclasses.dataclass
class Written(ModelOutput):
    """Changes what is written to it."""

    first: Any = None
    second: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Scalars only come as text."""
        super().__setattr__(name, str(value) if isinstance(value, int) else value)


@dataclasses.dataclass
class Own(ModelOutput):
    """Has an ``__init__``, which dataclass() leaves alone."""

    first: Any = None
    second: Any = None

    def __init__(self, first: Any = None, second: Any = None) -> None:
        self.first = first
        self.second = 7 if second is None else second


@dataclasses.dataclass
class Computed(ModelOutput):
    """A field that is a property."""

    first: Any = None
    second: Any = None


def _second(self: Any) -> Any:
    return vars(self).get("kept")


def _keep(self: Any, value: Any) -> None:
    vars(self)["kept"] = value


Computed.second = property(_second, _keep)


@dataclasses.dataclass
class Counted(ModelOutput):
    """Made by a function of its own."""

    first: Any = None
    second: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Counted:
        """A key before all others."""
        made = super().__new__(cls)
        dict.__setitem__(made, "made", 1)
        return made


@dataclasses.dataclass
class Checked(ModelOutput):
    """Takes only numbers of one kind, and says so in its own way."""

    first: Any = None
    second: Any = None

    def __init__(self, first: Any = None, second: Any = None) -> None:
        assert first.dtype is torch.float64
        self.first = first
        self.second = second


def tree(cls: type, **fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": "dataclass",
        "class": f"{__name__}:{cls.__qualname__}",
        "items": [[name, node] for name, node in fields.items()],
    }


def both(described: dict[str, Any]) -> tuple[Any, Any]:
    """What is built, and what the class makes of the same fields."""
    outputs = (torch.ones(2), torch.zeros(2))
    build = result_builder(described, {}, (), nn.Module())
    given = {
        name: result_builder(node, {}, (), nn.Module())(outputs, {}, None)
        for name, node in described["items"]
    }
    cls = globals()[described["class"].partition(":")[2]]
    return build(outputs, {}, None), cls(**given)


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    for one, two in (
        (vars(found), vars(expected)),
        (dict(found.items()), dict(expected.items())),
    ):
        assert list(one) == list(two)
        for name, value in two.items():
            if not isinstance(value, tuple | list):
                assert one[name] is value or one[name] == value


@pytest.mark.parametrize(
    "cls", [After, InheritedAfter, Written, Own, Computed, Counted]
)
@pytest.mark.parametrize("second", [NOTHING, {"kind": "value", "value": 3}])
def test_classes_with_a_way_of_their_own(cls: type, second: dict[str, Any]) -> None:
    """However they change how they are made, the class makes them."""
    described = tree(cls, first=OUT, second=second)
    assert model_output_fields(described) is None
    found, expected = both(described)
    same(found, expected)
    assert list(found) == list(expected)


def test_a_class_that_refuses_what_it_is_tried_with() -> None:
    """It is left alone, whatever it raises."""
    assert model_output_fields(tree(Checked, first=OUT, second=OUT)) is None


@pytest.mark.parametrize("cls", [Plain, Derived])
def test_plain_classes_are_data(cls: type) -> None:
    """They come to their fields, which calls.cpp can write as well."""
    described = tree(cls, first=OUT, second=NOTHING)
    fields = model_output_fields(described)
    assert fields is not None
    assert fields.cls is cls
    same(*both(described))


@pytest.mark.parametrize(
    "first",
    [
        {"kind": "tuple", "items": [OUT, OUT]},
        {"kind": "tuple", "items": []},
        {
            "kind": "list",
            "items": [
                {"kind": "tuple", "items": [{"kind": "value", "value": "second"}, OUT]}
            ],
        },
        {"kind": "dict", "items": [["second", OUT]]},
        {"kind": "value", "value": 3},
        NOTHING,
        OUT,
    ],
    ids=["tuple", "empty", "pairs", "dict", "number", "nothing", "tensor"],
)
@pytest.mark.parametrize("second", [NOTHING, OUT], ids=["alone", "with another"])
def test_a_first_field_that_stands_for_all(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """ModelOutput takes what isn't a tensor for all of its fields, if it is alone."""
    same(*both(tree(Plain, first=first, second=second)))


def test_transformers_own_classes_are_data() -> None:
    """All that models return: nothing about them is unknown."""
    for name, cls in vars(modeling_outputs).items():
        if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
            continue
        described = {
            "kind": "dataclass",
            "class": f"{modeling_outputs.__name__}:{name}",
            "items": [[field.name, OUT] for field in dataclasses.fields(cls)],
        }
        assert model_output_fields(described) is not None, name
