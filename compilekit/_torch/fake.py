"""Fake tensors: metadata without memory, for models and for the inputs of one call.

A fake tensor knows its dtype, shape, stride and (pretended) device; no operation on it
computes or allocates anything. Dynamo and Inductor compile from fake parameters exactly
as from real ones, so neither weights nor the target's device have to be there.

Source: torch 2.11 and 2.13, torch/_subclasses/fake_tensor.py.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compilekit import paths

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "UnfakeableTensorError",
    "fake_mode_of",
    "make_fake",
    "moved",
    "new_fake_mode",
]

Value = TypeVar("Value")

# Objects of these packages aren't followed: a model's tensors don't hide in them.
_CLOSED_PACKAGES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"numpy"}


class UnfakeableTensorError(TypeError):
    """A tensor has a layout or class that a plain fake tensor can't stand for.

    Attributes:
        place: Steps from the value given to `make_fake` down to the tensor.
        kind: What it is, e.g. ``sparse_coo``.
    """

    def __init__(self, place: tuple[paths.Step, ...], kind: str) -> None:
        super().__init__(f"{paths.render(place) or 'it'} is a {kind} tensor")
        self.place = place
        self.kind = kind


def new_fake_mode() -> FakeTensorMode:
    """Make the mode that a model and its inputs must share.

    It has no ``shape_env``: with one, AOTAutograd would take every input for a dynamic
    shape (``aot_config.dynamic_shapes``) and compute another cache key than a server
    with real tensors does.
    """
    return FakeTensorMode(allow_non_fake_inputs=False)


def fake_mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode of a fake model; a new one for a model that holds no tensor at all."""
    for tensor in _tensors(model, set()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return new_fake_mode()


def make_fake(value: Value, mode: FakeTensorMode, device: torch.device | str) -> Value:
    """Replace every tensor inside `value` by a fake one on `device`.

    Modules are changed in place. Dicts, lists and other objects that hold tensors are
    replaced by copies: user code may keep them in a global as well, where the real
    tensors must stay. One tensor found twice becomes one fake tensor, and tensors that
    shared a storage still do.

    Raises:
        UnfakeableTensorError: a tensor is sparse or of a tensor subclass.
    """
    converter = _Converter(mode, torch.device(device))
    result: Value = converter.convert(value)
    return result


def moved(value: Value, device: torch.device | str) -> Value:
    """The same with every tensor on another device; containers that change are copied.

    Tensors that shared a storage have one each afterwards.
    """
    result: Value = _Mover(torch.device(device)).convert(value)
    return result


class _Converter:
    """One walk over an object graph; remembers what each object became."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        # The original is kept beside its stand-in so that its id isn't used again.
        self.done: dict[int, tuple[object, object]] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.place: list[paths.Step] = []

    def convert(self, value: Any) -> Any:
        if id(value) in self.done:
            return self.done[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._fake(value))
        if isinstance(value, nn.Module):
            return self._convert_module(value)
        if next(_tensors(value, set()), None) is None:
            return self._remember(value, value)
        if isinstance(value, weakref.ref):
            # nn.LSTM asks one whether a weight is still the one it knows.
            return self._remember(value, weakref.ref(self._child("()", value())))
        if isinstance(value, tuple):
            items = [self._child((i,), item) for i, item in enumerate(value)]
            named = hasattr(value, "_fields")
            return self._remember(
                value, type(value)(*items) if named else type(value)(items)
            )
        result = self._remember(value, copy.copy(value))
        for key, child in _children(value):
            if isinstance(value, dict | list):
                step = key if isinstance(key, int | str) else str(key)
                result[key] = self._child((step,), child)
            else:
                # A frozen dataclass refuses setattr.
                object.__setattr__(result, key, self._child(key, child))
        return result

    def _convert_module(self, module: nn.Module) -> nn.Module:
        self._remember(module, module)
        # Not setattr: nn.Module would register a plain tensor attribute as something
        # else than it was.
        attributes = vars(module)
        for name, old in list(attributes.items()):
            if name in ("_parameters", "_buffers", "_modules"):
                for key, child in list(old.items()):
                    old[key] = self._child(key, child)
            else:
                attributes[name] = self._child(name, old)
        return module

    def _child(self, step: paths.Step, value: Any) -> Any:
        self.place.append(step)
        result = self.convert(value)
        self.place.pop()
        return result

    def _remember(self, value: object, result: Any) -> Any:
        self.done[id(value)] = (value, result)
        return result

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        odd = _oddity(tensor)
        if odd:
            raise UnfakeableTensorError(tuple(self.place), odd)
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


class _Mover(_Converter):
    """Moves tensors instead of replacing them by fake ones."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(new_fake_mode(), device)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


def _oddity(tensor: torch.Tensor) -> str:
    """What makes a tensor more than its dtype, shape and stride; "" if nothing does."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return ""


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from `value`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for _, child in _children(value):
            yield from _tensors(child, seen)


def _children(value: object) -> list[tuple[Any, Any]]:
    """Keys and values of a container, or names and values of an object's attributes."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, weakref.ref):
        target = value()
        return [("()", target)] if isinstance(target, torch.Tensor) else []
    if isinstance(value, type | FunctionType | MethodType | ModuleType):
        return []
    if hasattr(value, "__dict__"):
        package = type(value).__module__.partition(".")[0]
        return [] if package in _CLOSED_PACKAGES else list(vars(value).items())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return []
