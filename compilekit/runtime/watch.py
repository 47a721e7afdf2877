"""Notice cheaply, at every call, that a live model isn't what it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from compilekit import paths
from compilekit._torch.layout import metadata_addresses, tensor_layout
from compilekit._torch.runtime import (
    forward_hooks,
    global_forward_hooks,
    registries,
    tensor_guard,
    write_counts,
)
from compilekit.artifact.program import Entry
from compilekit.runtime.model import ModelView
from compilekit.runtime.overlap import storages
from compilekit.runtime.words import Words, class_address, version_address


class Watch:
    """What a model looks like, to notice cheaply that it changed.

    Looks at the identity of every parameter, buffer and submodule, at every attribute
    of every module (training flags and replaced methods among them) and of every
    object whose attributes the graphs read, at the classes of modules, at forward hooks
    and at the metadata of every tensor that a program reads. Values of tensors may
    change, except those that were folded into a program, and so may what lies in lists.

    A watch is made before the model is compared with its entry: what changes in between
    is noticed at the next call.

    Args:
        changed: See `Words`; with it the tensors' metadata are words like any other.
    Attributes:
        complete: False if there is no tensor where a program reads one, or one of
            another kind: such a model doesn't fit, and its tensors aren't watched.
        tensors: The tensors that programs read, in the entry's order.
        words: What is watched, or most of it.
        all_words: True if that is all.
    """

    def __init__(
        self, view: ModelView, entry: Entry, changed: Callable[[int], bool] | None
    ) -> None:
        self._modules = tuple(dict.fromkeys(view.modules.values()))
        self._dicts = tuple(_watched_dicts(view, self._modules, entry))
        self.tensors: list[torch.Tensor] = [view.get(path) for path in entry.tensors]
        self.complete = all(map(_is_dense, self.tensors))
        layout = tensor_layout() if changed is not None else None
        levels: list[list[int]] = [
            [*map(version_address, self._dicts), *map(class_address, self._modules)]
        ]
        self._guards: dict[bool, Callable[..., bool]] = {}
        if layout is None:
            changed = None
            self._guard_tensors()
        elif self.complete:
            levels += [[], []]
            for tensor in self.tensors:
                for level, more in zip(
                    levels, metadata_addresses(tensor, layout), strict=True
                ):
                    level += more
        self.words = Words(levels, changed)
        # Inference tensors don't count what is written to them.
        self._frozen = [
            tensor
            for path, tensor in zip(entry.tensors, self.tensors, strict=True)
            if path in entry.frozen
            and isinstance(tensor, torch.Tensor)
            and not tensor.is_inference()
        ]
        self._writes = write_counts(self._frozen)
        held = {id(value) for each in self._dicts for value in each.values()}
        self._unheld = tuple(
            (tensor, view.model, paths.parse(path))
            for path, tensor in zip(entry.tensors, self.tensors, strict=True)
            if id(tensor) not in held
        )
        self.all_words = not (self._guards or self._unheld or self._frozen)
        self._storages: frozenset[int] | None = None
        self._inputs: dict[str, list[Any]] = {}

    def inputs(self, bucket: str, order: Sequence[int]) -> list[Any]:
        """A program's graph inputs, with None in the place of every argument.

        Args:
            bucket: The program's bucket.
            order: Graph input → its place in `tensors`, or beyond for an argument.
        """
        kept = self._inputs.get(bucket)
        if kept is None:
            tensors = [*self.tensors, *[None] * len(order)]
            kept = self._inputs[bucket] = [tensors[place] for place in order]
        return kept.copy()

    def requires_grad(self) -> bool:
        """True if any of the tensors does."""
        return any(map(_requires_grad, self.tensors))

    def storages(self) -> frozenset[int]:
        """Where the memory of the tensors that programs read begins."""
        if self._storages is None:
            self._storages = storages(self.tensors)
        return self._storages

    def changed(self) -> bool:
        """True if anything moved since."""
        return self.words.changed() or (not self.all_words and self._more_changed())

    def _more_changed(self) -> bool:
        return (
            (bool(self._guards) and not self._guards[_inference()](*self.tensors))
            or any(_moved(*item) for item in self._unheld)
            or write_counts(self._frozen) != self._writes
        )

    def _guard_tensors(self) -> None:
        """Have torch look at the tensors' metadata, in the place of their words."""
        if self.complete:
            for inference in (False, True):
                with torch.inference_mode(inference):
                    self._guards[inference] = tensor_guard(self.tensors)


_inference = torch.is_inference_mode_enabled
_requires_grad = operator.attrgetter("requires_grad")


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
    )


def _moved(
    tensor: torch.Tensor, model: torch.nn.Module, steps: tuple[paths.Step, ...]
) -> bool:
    try:
        return paths.follow(model, steps) is not tensor
    except (AttributeError, KeyError, IndexError, TypeError):
        return True


def _watched_dicts(
    view: ModelView, modules: Sequence[torch.nn.Module], entry: Entry
) -> Iterator[dict[Any, Any]]:
    """The dicts that hold what a program depends on, each once.

    Those of hooks are empty when a model fits; the root's own run around a program.
    """
    seen: set[int] = set()
    owners: list[dict[Any, Any]] = [vars(module) for module in modules]
    # An empty registry holds nothing a program reads; filling one changes no forward.
    owners += [each for module in modules for each in registries(module) if each]
    owners += global_forward_hooks()
    hooked = modules[1:] if entry.method == "forward" else modules
    owners += [each for module in hooked for each in forward_hooks(module)]
    for read in entry.reads:
        if read.path.startswith("module:"):
            continue
        parent, _, name = read.path.rpartition(".")
        if parent in view.modules and "[" not in name:
            continue
        steps = paths.parse(read.path)[:-1]
        owners += _attributes(view.get(paths.render(steps)))
    for owner in owners:
        if id(owner) not in seen:
            seen.add(id(owner))
            yield owner


def _attributes(owner: Any) -> list[dict[Any, Any]]:
    """The dict behind an object (a model's configuration, say) if it has one."""
    if type(owner) is dict:
        return [owner]
    if isinstance(owner, (type, FunctionType, MethodType, ModuleType)):
        return []
    found = getattr(owner, "__dict__", None)
    return [found] if type(found) is dict else []
