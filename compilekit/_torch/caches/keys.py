"""Cache keys with everything that went into them, for FX graphs and AOTAutograd.

torch looks a graph up by one hash, and a miss says nothing. Here each key comes with
its components, so that two can be compared; and what torch leaves out of the hash
although the compiled code depends on it (the CPU's vector instructions, the schemas and
fake implementations of custom operators) is put in.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
from torch._inductor import codecache
from torch._subclasses import FakeTensor

from compilekit._torch.caches.kernels import capability
from compilekit._torch.caches.operators import custom_operators

_LINE = re.compile(r"\[([0-9a-z]+)\] (.*?): (.*)", re.DOTALL)


class Component(NamedTuple):
    """One part of a key: the hash that counts, and a text for people."""

    hash: str
    text: str


class Key(NamedTuple):
    """A cache key and its components.

    Attributes:
        kind: ``FX graph`` or ``AOTAutograd``.
        key: What torch looks up; also the name of the entry's folder.
        subclasses: Tensor subclasses among the graph's inputs, by name.
    """

    kind: str
    key: str
    components: dict[str, Component]
    subclasses: tuple[str, ...]


def watch(
    patches: contextlib.ExitStack,
    wanted: Callable[[str, str], bool],
    on_key: Callable[[Key], None],
) -> None:
    """From now on, pass every cache key that is `wanted` to `on_key`.

    Args:
        patches: Closing it ends this; keys are torch's own again.
        wanted: Called with kind and key; components are worked out only if it's true.
    Source: torch/_inductor/codecache.py, compiled_fx_graph_hash, which calls
    FxGraphCachePickler.get_hash (2.11) or get_key (2.13) with a graph's details;
    torch/_functorch/_aot_autograd/autograd_cache.py, autograd_cache_key: get_hash.
    """
    for name in ("get_hash", "get_key"):
        method = getattr(codecache.FxGraphCachePickler, name, None)
        if method is not None:
            # The callers of get_hash put a letter before it, get_key does so itself.
            watched = _watched(method, name == "get_hash", wanted, on_key)
            patches.enter_context(
                mock.patch.object(codecache.FxGraphCachePickler, name, watched)
            )


def _watched(
    method: Callable[[Any, Any], str],
    bare: bool,
    wanted: Callable[[str, str], bool],
    on_key: Callable[[Key], None],
) -> Callable[[Any, Any], str]:
    """The pickler's method, for a graph's details with our components among them."""

    def made(self: Any, value: Any) -> str:
        if not isinstance(value, codecache.FxGraphHashDetails):
            return method(self, value)
        value.cpu_capability = _cpu_capability(value)  # type: ignore[attr-defined]
        value.custom_operators = custom_operators(value.gm)  # type: ignore[attr-defined]
        text = method(self, value)
        autograd = isinstance(value, AOTAutogradCacheDetails)
        kind = "AOTAutograd" if autograd else "FX graph"
        key = ("a" if autograd else "f") + text if bare else text
        if wanted(kind, key):
            on_key(Key(kind, key, _components(self, value), _subclasses(value)))
        return text

    return made


def _cpu_capability(details: Any) -> str:
    """The vector instructions a graph is compiled for; "" if it's another device's.

    A graph for a GPU may be compiled on a host with another CPU. What C++ kernels it
    has all the same are found by their own keys, which hold the instructions.
    """
    inputs = details.example_inputs
    devices = {one.device.type for one in inputs if isinstance(one, torch.Tensor)}
    return "" if devices - {"cpu"} else capability()


def _subclasses(details: Any) -> tuple[str, ...]:
    """Kinds of input that are more than their data, such as a distributed tensor."""
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    kinds = {type(one) for one in details.example_inputs}
    names = [
        k.__name__ for k in kinds if issubclass(k, torch.Tensor) and k not in plain
    ]
    return tuple(sorted(names))


def _components(pickler: Any, details: Any) -> dict[str, Component]:
    """Each attribute of a key's details; lists and dicts item by item.

    Source: torch/_inductor/codecache.py, FxGraphCachePickler.debug_lines (2.11, 2.13):
    lines of the form ``[HASH] NAME: VALUE``; AOTAutogradCacheDetails holds all options
    of AOTAutograd as one pickle.
    """
    found = {}
    for line in pickler.debug_lines(details):
        match = _LINE.fullmatch(line)
        if match is not None:
            hashed, name, text = match.groups()
            found[name] = Component(hashed[:16], text)
    stored = getattr(details, "autograd_config", None)
    if isinstance(stored, bytes):
        found.pop("autograd_config", None)
        for option, value in pickle.loads(stored).items():
            found[f"autograd_config[{option}]"] = Component("", repr(value))
    return found
