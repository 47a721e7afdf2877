"""Notice cheaply, at every call, that a live model isn't what it was."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from compilekit import paths
from compilekit._torch.layout import metadata_addresses, tensor_layout
from compilekit._torch.runtime import (
    HookHandle,
    forward_hooks,
    global_forward_hooks,
    registries,
    tensor_guard,
    write_counts,
)
from compilekit.artifact.program import Entry
from compilekit.runtime.model import MISSING, AttachedMethod, ModelView
from compilekit.runtime.overlap import storages
from compilekit.runtime.words import (
    Words,
    attributes_address,
    class_address,
    class_version_address,
    version_address,
    word_at,
)


class Watch:
    """What a model looks like, to notice cheaply that it changed.

    Looks at the identity of every parameter, buffer and submodule, at what the graphs
    read of modules (training flags and replaced methods among it) and of the files of
    traced functions, at every attribute of other objects that they read something of,
    at classes and what is written into them, at forward hooks and at the metadata of
    every tensor that a program reads. Values of tensors may change, except those that
    were folded into a program, and so may what lies in lists.

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
        self._owners = (*view.distinct, *_owners(view, entry))
        self._dicts = tuple(_watched_dicts(self._owners, view, entry))
        self._classes = (HookHandle, *_watched_classes(self._owners, entry))
        self._parts: tuple[_Known | _Hooks, ...] = (
            *_names(view, entry),
            _Hooks(view, entry),
        )
        self._slots = tuple(_slots(self._owners))
        self.tensors: list[torch.Tensor] = [view.get(path) for path in entry.tensors]
        self.complete = all(map(_is_dense, self.tensors))
        layout = tensor_layout() if changed is not None else None
        owners = [each for each in self._owners if _has_attributes(each)]
        pointers = [attributes_address(each) for each in owners]
        levels: list[list[int]] = [
            [
                *map(version_address, self._dicts),
                *map(class_version_address, self._classes),
                *map(class_address, self._owners),
                *[address for address in pointers if address is not None],
            ]
        ]
        self._attributes = [
            (each, vars(each))
            for each, address in zip(owners, pointers, strict=True)
            if address is None
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
        within: set[int] = set()
        for each in self._dicts:
            within.update(map(id, each.values()))
        self._unheld = tuple(
            (tensor, view.model, paths.parse(path))
            for path, tensor in zip(entry.tensors, self.tensors, strict=True)
            if id(tensor) not in within
        )
        others = self._unheld, self._frozen, self._attributes, self._slots
        self.all_words = not (self._guards or any(others))
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
        return (self.words.changed() and not self._only_other_names()) or (
            not self.all_words and self._more_changed()
        )

    def _only_other_names(self) -> bool:
        """Whether nothing moved but what no program depends on.

        Names, as a counter of requests on a model or in its class's file is one; and
        hooks of something else. They are accepted.
        """
        for part in self._parts:
            address = part.address
            # Read first: a change from here on gives another one.
            version = word_at(address)
            if self.words.expects(address, version):
                continue
            if part.moved():
                return False
            self.words.accept(address, version)
        return not self.words.changed()

    def _more_changed(self) -> bool:
        return (
            (bool(self._guards) and not self._guards[_inference()](*self.tensors))
            or any(_moved(*item) for item in self._unheld)
            or any(vars(each) is not before for each, before in self._attributes)
            or any(getattr(each, n, MISSING) is not v for each, n, v in self._slots)
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


def _owners(view: ModelView, entry: Entry) -> Iterator[Any]:
    """What values that the graphs read, and traced functions, are found in, each once.

    Dicts, objects with a dict of their own or with slots, Python modules; the model's
    own modules aside, and whatever lies in lists.
    """
    seen = set(map(id, view.distinct))
    # A module, or a scalar in one: most are.
    reads = [
        read.path
        for read in entry.reads
        if read.path not in view.modules
        and not (read.kind in _SCALARS and _owner(read.path) in view.modules)
    ]
    places = [_split(path) for path in reads]
    places += [(name.partition(":")[0], ()) for name in entry.code]
    for module, steps in places:
        value: Any = sys.modules.get(module) if module else view.model
        for step in (None, *steps):
            value = value if step is None else _below(value, step)
            if id(value) not in seen and (
                _has_attributes(value) or _is_dict(value) or _slot_names(value)
            ):
                seen.add(id(value))
                yield value


# Kinds of reads of what has no attributes of its own.
_SCALARS = ("value", "absent", "inherited")


def _owner(path: str) -> str:
    """What a name at the end of a path is an attribute of; no path if it is none."""
    owner, _, name = path.rpartition(".")
    return owner if "[" not in name else path


class _Known:
    """Names of a dict that programs depend on, and what they stood for.

    Args:
        values: Attributes of an object, or globals of a Python module.
    Attributes:
        address: Of the word that tells that something of it moved.
    """

    def __init__(self, values: dict[str, Any], names: tuple[str, ...]) -> None:
        self.address = version_address(values)
        self._values = values
        self._names = names
        found = self._found()
        self._ids = tuple(map(id, found))
        # An id is one thing's as long as it lives; what we put there holds this watch.
        self._kept = [each for each in found if not isinstance(each, AttachedMethod)]

    def moved(self) -> bool:
        """True if any of them stands for something else."""
        return tuple(map(id, self._found())) != self._ids

    def _found(self) -> tuple[Any, ...]:
        return tuple(map(self._values.get, self._names, itertools.repeat(MISSING)))


class _Hooks:
    """Hooks of a model's modules: none when a model fits.

    One word tells that torch made a hook somewhere. The root's own hooks run around a
    program.

    Attributes:
        address: Of that word.
    """

    def __init__(self, view: ModelView, entry: Entry) -> None:
        self.address = class_version_address(HookHandle)
        hooked = view.distinct[1:] if entry.method == "forward" else view.distinct
        self._dicts = [each for module in hooked for each in forward_hooks(module)]
        self._found = [*map(tuple, self._dicts)]

    def moved(self) -> bool:
        """True if there are others, whose numbers nothing else has."""
        return [*map(tuple, self._dicts)] != self._found


def _names(view: ModelView, entry: Entry) -> Iterator[_Known]:
    """What programs depend on of the attributes of modules and the globals of files.

    Of other objects any change counts.
    """
    own: dict[int, set[str]] = {}
    files: dict[str, set[str]] = {}
    tied = [path for group in entry.aliases for path in group]
    for path in (*entry.tensors, *tied, *[read.path for read in entry.reads]):
        if path.startswith("module:"):
            module, steps = _split(path)
            files.setdefault(module, set()).add(str(steps[0]))
        else:
            owner, name = _attribute(path, view)
            own.setdefault(id(owner), set()).add(name)
    for name in entry.code:
        module, _, qualname = name.partition(":")
        files.setdefault(module, set()).add(qualname.partition(".")[0])
    standing = tuple({*_STANDING, entry.method})
    for each in view.distinct:
        yield _Known(vars(each), (*standing, *own.get(id(each), ())))
    for module, read in files.items():
        if _has_attributes(sys.modules.get(module)):
            yield _Known(vars(sys.modules[module]), tuple(read))


# Of every module: its flag, its method and what it holds; hooks lie in dicts, which an
# assignment would replace.
_STANDING = (
    *("training", "forward", "_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks"),
)


def _attribute(path: str, view: ModelView) -> tuple[torch.nn.Module, str]:
    """The module that a path leads through last, and what it goes on with."""
    owner, _, name = path.partition("[")[0].rpartition(".")
    while owner not in view.modules:
        owner, _, name = owner.rpartition(".")
    return view.modules[owner], name


def _split(path: str) -> tuple[str, tuple[paths.Step, ...]]:
    """A read's Python module, empty for the model, and the steps below it."""
    if not path.startswith("module:"):
        return "", paths.parse(path)
    _, module, below = path.split(":", 2)
    return module, paths.parse(below)


def _below(value: Any, step: paths.Step) -> Any:
    try:
        return paths.follow(value, (step,))
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _watched_dicts(
    owners: Sequence[Any], view: ModelView, entry: Entry
) -> Iterator[dict[Any, Any]]:
    """The dicts that hold what a program depends on, each once."""
    seen: set[int] = set()
    found = [each for each in owners if _is_dict(each)]
    found += [vars(each) for each in owners if _has_attributes(each)]
    # An empty registry holds nothing that a program reads. Filling one changes a
    # forward that asked whether there is something.
    asking = {_owner(read.path) for read in entry.reads if read.kind == "absent"}
    asking &= view.modules.keys()
    found += [each for module in view.distinct for each in registries(module) if each]
    found += [each for path in asking for each in registries(view.modules[path])]
    found += global_forward_hooks()
    for each in found:
        if id(each) not in seen:
            seen.add(id(each))
            yield each


def _watched_classes(owners: Sequence[Any], entry: Entry) -> Iterator[type]:
    """Classes of modules and other objects, of traced methods, and those read from."""
    found = dict.fromkeys(map(type, owners))
    places = [name.split(":", 1) for name in entry.code]
    for read in entry.reads:
        if read.path.startswith("module:"):
            places.append(read.path.split(":", 2)[1:])
    for module, path in places:
        value: Any = sys.modules.get(module)
        for part in path.split(".")[:-1]:
            value = getattr(value, part, None)
            if isinstance(value, type):
                found[value] = None
    yield from found


def _slots(owners: Sequence[Any]) -> Iterator[tuple[Any, str, Any]]:
    """What lies in the slots of objects, of which no word tells that they changed."""
    for each in owners:
        for name in _slot_names(each):
            yield each, name, getattr(each, name, MISSING)


def _slot_names(value: Any) -> list[str]:
    if isinstance(value, (torch.nn.Module, type)):
        return []
    return [
        name
        for cls in type(value).__mro__
        if "__slots__" in vars(cls)
        for name, member in vars(cls).items()
        if isinstance(member, MemberDescriptorType)
    ]


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _has_attributes(value: Any) -> bool:
    """Whether an object (a model's configuration, say) has a dict of its own."""
    if isinstance(value, (type, FunctionType, MethodType)):
        return False
    if isinstance(value, ModuleType) and value.__name__.split(".")[0] == "torch":
        # Fixed by its version; importing a part of it writes into it.
        return False
    return type(getattr(value, "__dict__", None)) is dict
