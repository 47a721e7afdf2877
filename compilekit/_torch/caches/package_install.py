"""Install stored Dynamo packages into a process, with the guards torch dropped.

Source: torch/_dynamo/package.py, CompilePackage.install (2.11, 2.13).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import itertools
import pickle
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.config
from torch._dynamo import bytecode_transformation, eval_frame, package
from torch.utils import _traceback

from compilekit._torch.caches import guard_values
from compilekit._torch.caches.operators import describe_operator
from compilekit._torch.caches.packages import (
    Package,
    StoredModule,
    function_id,
    inductor_backend,
    settings,
)
from compilekit.runtime.garbage import uncollected

# A process's own names count up from 0, those of an installed package are its build's.
_NAMES_FROM = 1_000_000

Find = Callable[[str, Mapping[str, str], Any], Package | None]


class Installed(NamedTuple):
    """One compiled variant of a frame, installed.

    Attributes:
        manager: torch's guards.
        extra: Guards that torch can't store.
        scope: The globals that both read.
    """

    manager: Any
    extra: tuple[tuple[str, str], ...]
    scope: dict[str, Any]


def install_with(
    patches: contextlib.ExitStack, find: Find, milliseconds: dict[str, float]
) -> dict[types.CodeType, list[Installed]]:
    """From now on, install a function's package when ``torch.compile`` is given it.

    Args:
        patches: Closing it ends this and takes out what was installed.
        find: Called with `function_id`, `settings` and the function; the package to
            install, or None.
        milliseconds: ``guards`` and ``packages`` grow by what it takes to make guards,
            and to install the rest.
    Returns:
        What is installed, as it grows: code → its variants.
    Source: torch/_dynamo/eval_frame.py, _TorchDynamoContext.__call__; package.py,
    CompilePackage.initialize and install (2.11, 2.13). Frames look for installed code
    before anything else: torch/csrc/dynamo/extra_state.cpp, lookup.
    """
    bytecode_transformation._unique_id_counter = itertools.count(_NAMES_FROM)
    installed: dict[types.CodeType, list[Installed]] = {}
    done: dict[types.CodeType, Mapping[str, str]] = {}
    patches.callback(_take_out, installed)
    context_call = eval_frame._TorchDynamoContext.__call__

    def call(self: Any, function: Any) -> Any:
        # A module's context is called twice, with the module and with its __call__.
        if not getattr(self, "_ck_seen", False) and inductor_backend(self) is not None:
            self._ck_seen = True
            called = (
                function.forward if isinstance(function, torch.nn.Module) else function
            )
            options = inductor_backend(self).get_compiler_config()
            began, guards = time.perf_counter(), milliseconds.get("guards", 0.0)
            with torch._inductor.config.patch(_changed(options)), uncollected():
                _install(called, settings(self), find, installed, done, milliseconds)
            guards = milliseconds.get("guards", 0.0) - guards
            rest = (time.perf_counter() - began) * 1e3 - guards
            milliseconds["packages"] = milliseconds.get("packages", 0.0) + rest
        return context_call(self, function)

    patches.enter_context(
        mock.patch.object(eval_frame._TorchDynamoContext, "__call__", call)
    )
    return installed


def _take_out(installed: dict[types.CodeType, list[Installed]]) -> None:
    """Give the frames back to Dynamo's own cache."""
    for code in installed:
        torch._C._dynamo.eval_frame._reset_precompile_entries(code)
    installed.clear()


def _changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of one ``torch.compile`` that differ from the process's: kernels are
    loaded while a package is installed, and their keys hold options."""
    here = torch._inductor.config.get_config_copy()
    return {name: value for name, value in options.items() if here[name] != value}


def _install(
    function: Any,
    set_to: Mapping[str, str],
    find: Find,
    installed: dict[types.CodeType, list[Installed]],
    done: dict[types.CodeType, Mapping[str, str]],
    milliseconds: dict[str, float],
) -> None:
    inner: Any = eval_frame.innermost_fn(function)
    code = getattr(inner, "__code__", None)
    if code is None or done.get(code) == set_to:
        return
    if code in done:
        # Installed code doesn't look at options: with other ones it must go.
        torch._C._dynamo.eval_frame._reset_precompile_entries(code)
    done[code] = set_to
    found = find(function_id(function), set_to, inner)
    if found is None:
        return
    stored = pickle.loads(found.content)
    live = package.CompilePackage(None)
    live.initialize(inner, stored.dynamo)
    for module, values in found.globals.items():
        scope = importlib.import_module(module).__dict__
        for name, data in values.items():
            value = pickle.loads(data)
            if isinstance(value, StoredModule):
                value = importlib.import_module(value.name)
            scope[name] = value
    with _extra_guards(found.extra_guards, installed, milliseconds):
        live.install(stored.backends)


@contextlib.contextmanager
def _extra_guards(
    extra: Mapping[str, tuple[tuple[str, str], ...]],
    installed: dict[types.CodeType, list[Installed]],
    milliseconds: dict[str, float],
) -> Iterator[None]:
    """While a package is installed, add the guards that torch couldn't store.

    Source: torch/_dynamo/package.py, load_guards_state and load_guard_manager (2.11,
    2.13); torch/csrc/dynamo/guards.cpp, add_lambda_guard: called with a frame's locals;
    torch/utils/_traceback.py, shorten_filename: called for every guard, with a few
    names.
    """
    load_state, load_manager = package.load_guards_state, package.load_guard_manager
    digests: list[str] = []

    def spent(began: float) -> None:
        took = (time.perf_counter() - began) * 1e3
        milliseconds["guards"] = milliseconds.get("guards", 0.0) + took

    def state(stored: bytes) -> Any:
        began = time.perf_counter()
        digests.append(hashlib.sha256(stored).hexdigest())
        loaded = load_state(stored)
        spent(began)
        return loaded

    def manager(loaded: Any, code: types.CodeType, scope: dict[str, Any]) -> Any:
        began = time.perf_counter()
        made = load_manager(loaded, code, scope)
        wanted = tuple(tuple(pair) for pair in extra[digests[-1]])
        if wanted:
            check = guard_values.checker(wanted, scope)  # type: ignore[arg-type]
            made.root.add_lambda_guard(check, ["what torch can't store"], None)
        installed.setdefault(code, []).append(Installed(made, wanted, scope))  # type: ignore[arg-type]
        spent(began)
        return made

    short = functools.cache(_traceback.shorten_filename)

    with (
        mock.patch.object(package, "load_guards_state", state),
        mock.patch.object(package, "load_guard_manager", manager),
        mock.patch.object(_traceback, "shorten_filename", short),
    ):
        yield


def changed_operators(stored: Mapping[str, str]) -> list[str]:
    """Custom operators that aren't what they were, with both texts."""
    found = []
    for name, text in stored.items():
        now = describe_operator(name)
        if now != text:
            found.append(f"operator {name} was {text}, is {now}")
    return found


def changed_sources(stored: Mapping[str, str]) -> list[str]:
    """Pieces of traced source that aren't what they were, with both digests.

    Source: torch/_dynamo/package.py, SourceInfo.add_code and _hash_sourcelines (2.11,
    2.13): lines of a module's file, counted from 1, the last one left out.
    """
    lines: dict[str, list[str]] = {}
    found = []
    for name, digest in stored.items():
        module, _, numbers = name.rpartition(":")
        first, _, last = numbers.partition("-")
        if module not in lines:
            lines[module] = _source_lines(module)
        text = "".join(lines[module][int(first) - 1 : int(last) - 1])
        now = hashlib.sha256(text.encode()).hexdigest()
        if now != digest:
            found.append(
                f"source of {module}, lines {first} to {int(last) - 1}, was"
                f" {digest[:16]}, is {now[:16]}"
            )
    return found


def _source_lines(module: str) -> list[str]:
    try:
        return inspect.getsourcelines(importlib.import_module(module))[0]
    except (ImportError, OSError, TypeError):
        return []


def why_not(variants: list[Installed], frame_locals: Mapping[str, Any]) -> list[str]:
    """For each installed variant of a frame, the guard that kept it from being used.

    Source: torch/_dynamo/guards.py, GuardManagerWrapper.check_verbose (2.11, 2.13).
    """
    reasons = []
    for variant in variants:
        differing = guard_values.differing(variant.extra, frame_locals, variant.scope)
        if differing:
            expression, was, now = differing[0]
            reasons.append(f"{expression} was {was}, is {now}")
            continue
        info = variant.manager.check_verbose(frame_locals)
        if not info.result:
            parts = map(str, info.verbose_code_parts)
            reasons.append(
                "; ".join(_with_value(p, frame_locals, variant.scope) for p in parts)
            )
    return reasons


# A guard as torch shows it: an expression, what it must be, a comment with its place.
_EQUAL = re.compile(r"(?P<what>.+?) (?:==|!=) (?P<value>\S+) *(?:#.*)?")


def _with_value(
    part: str, frame_locals: Mapping[str, Any], scope: dict[str, Any]
) -> str:
    """A failed guard with the present value: torch shows the wanted one only."""
    match = _EQUAL.fullmatch(part)
    if match is None:
        return part
    what, value = match["what"].strip(), match["value"]
    return f"{what} was {value}, is {guard_values.text_of(what, frame_locals, scope)}"
