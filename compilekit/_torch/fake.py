"""Fake tensors: metadata without memory, for models and for the inputs of one call.

A fake tensor knows its dtype, shape, stride and (pretended) device; no operation on it
computes or allocates anything. Dynamo and Inductor compile from fake parameters exactly
as from real ones, so neither weights nor the target's device have to be there.

Source: torch 2.11 and 2.13, torch/_subclasses/fake_tensor.py.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "UnfakeableTensorError",
    "fake_mode_of",
    "make_fake",
    "new_fake_mode",
]

Value = TypeVar("Value")

# Objects of these packages hold no tensors of the model that we could replace safely:
# their attributes may be shared by the whole process.
_CLOSED_PACKAGES = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "torch",
    "numpy",
}


class UnfakeableTensorError(TypeError):
    """A tensor has a layout or class that a plain fake tensor can't stand for."""


def new_fake_mode() -> FakeTensorMode:
    """Make the mode that a model and its inputs must share.

    It has no ``shape_env``: with one, AOTAutograd would take every input for a dynamic
    shape (``aot_config.dynamic_shapes``) and compute another cache key than a server
    with real tensors does.
    """
    return FakeTensorMode(allow_non_fake_inputs=False)


def fake_mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode of a fake model; a new one for a model that holds no tensor at all."""
    for tensor in _own_tensors(model):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return new_fake_mode()


def make_fake(value: Value, mode: FakeTensorMode, device: torch.device | str) -> Value:
    """Replace every tensor inside `value` by a fake one on `device`.

    Modules, dicts, lists and objects are changed in place, tuples are rebuilt; the
    result is the same object where that is possible. One tensor found twice becomes
    one fake tensor, and tensors that shared a storage still do. Plain attributes of
    modules are followed like parameters and buffers are.

    Raises:
        UnfakeableTensorError: a tensor is sparse or of a tensor subclass.
    """
    converter = _Converter(mode, torch.device(device))
    result: Value = converter.convert(value)
    return result


def _own_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        for value in vars(module).values():
            yield from _plain_tensors(value)


def _plain_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _plain_tensors(item)
    elif isinstance(value, dict):
        yield from _plain_tensors(list(value.values()))


class _Converter:
    """One walk over an object graph; remembers what each object became."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        # The original is kept beside its stand-in so that its id isn't used again.
        self.done: dict[int, tuple[object, object]] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def convert(self, value: Any) -> Any:
        if id(value) in self.done:
            return self.done[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._fake(value))
        if isinstance(value, tuple):
            return self._remember(value, self._rebuilt(value))
        self._remember(value, value)
        if isinstance(value, dict):
            self._convert_items(value, list(value.items()))
        elif isinstance(value, list):
            self._convert_items(value, list(enumerate(value)))
        elif _is_open(value):
            # Not setattr: nn.Module would register the tensor, a frozen dataclass
            # would refuse it.
            self._convert_items(vars(value), list(vars(value).items()))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                old = getattr(value, field.name)
                if (new := self.convert(old)) is not old:
                    object.__setattr__(value, field.name, new)
        return value

    def _remember(self, value: object, result: Any) -> Any:
        self.done[id(value)] = (value, result)
        return result

    def _convert_items(self, container: Any, items: list[tuple[Any, Any]]) -> None:
        for key, old in items:
            if (new := self.convert(old)) is not old:
                container[key] = new

    def _rebuilt(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.convert(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        if not plain or tensor.layout is not torch.strided:
            raise UnfakeableTensorError(
                f"a {type(tensor).__name__} of layout {tensor.layout} can't be stood"
                " for by a plain fake tensor"
            )
        fake: torch.Tensor = FakeTensor(self.mode, self._on_meta(tensor), self.device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            fake.requires_grad_()
        # User attributes of a tensor (weight loaders, plans) stay readable.
        for name, value in vars(tensor).items():
            vars(fake).setdefault(name, value)
        return fake

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's metadata on a meta storage that its aliases share."""
        tensor = tensor.detach()
        if tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        key = storage.data_ptr() or id(tensor)
        if key not in self.storages:
            size_bytes = storage.nbytes()
            self.storages[key] = torch.empty(
                size_bytes, dtype=torch.uint8, device="meta"
            ).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype, device="meta").set_(
            self.storages[key],
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )


def _is_open(value: object) -> bool:
    """True for objects whose attributes are the model's own and may be replaced."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, type | FunctionType | MethodType | ModuleType):
        return False
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and package not in _CLOSED_PACKAGES
