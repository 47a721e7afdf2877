"""Dynamo packages: what lets a process skip tracing, recorded and installed.

Lifecycle, build::

    recorder = record()        before the first torch.compile of the process
    …                          every bucket is called
    recorder.packages()        one `Package` per compiled function

Lifecycle, start::

    install_with(find)         before the first torch.compile of the process
    …                          each torch.compile(f) asks `find`, and installs

torch's own switch for this (``caching_precompile``) is on during a build only. At start
the functions are installed without it: a frame that no package covers is then traced
and looked up in the other caches as usual. Three faults of torch's packages are mended
here: guards that it drops (`guard_values`), names that collide with the process's own,
and options that it doesn't compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import itertools
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch._dynamo import (
    bytecode_transformation,
    eval_frame,
    guards,
    output_graph,
    package,
)
from torch._dynamo.precompile_context import PrecompileContext

from compilekit._torch.caches import guard_values

# A process's own names count up from 0, those of an installed package are its build's.
_NAMES_FROM = 1_000_000

# Settings that don't change what is traced or compiled.
_IGNORED_SETTINGS = frozenset(
    {
        "dynamo.caching_precompile",
        "dynamo.recompile_limit",
        "dynamo.accumulated_recompile_limit",
        "dynamo.cache_size_limit",
        "dynamo.accumulated_cache_size_limit",
        "dynamo.verbose",
        "dynamo.log_file_name",
        "dynamo.log_compilation_metrics",
        "dynamo.reorderable_logging_functions",
        "dynamo.debug_dir_root",
        "inductor.compile_threads",
        "inductor.worker_start_method",
        "inductor.fx_graph_cache",
        "inductor.precompilation_timeout_seconds",
        "inductor.trace.log_url_for_graph_xform",
    }
)


class Package(NamedTuple):
    """Everything compiled for one function that was given to ``torch.compile``.

    Attributes:
        function: `function_id` of it.
        settings: Name → text of everything it was compiled under.
        content: A pickled ``PrecompileCacheEntry``.
        extra_guards: Digest of a stored guard state → expression and text of guards
            that torch can't store.
        sources: ``module:first-last`` of every traced piece of source → its digest.
        codes: `code_id` of each traced frame → why it isn't in the package; "" = it is.
        globals: Module → name → pickled value of what Dynamo's bytecode reads there,
            which torch's package leaves out: classes and modules, by name.
    """

    function: str
    settings: Mapping[str, str]
    content: bytes
    extra_guards: Mapping[str, tuple[tuple[str, str], ...]]
    sources: Mapping[str, str]
    codes: Mapping[str, str]
    globals: Mapping[str, Mapping[str, bytes]]


def function_id(function: Any) -> str:
    """Name of a function that is compiled: module, qualified name, class of its self.

    torch's own key (qualified name and first line) is one for all modules whose
    ``__call__`` is compiled, and for equal names in two files.

    Source: torch/_dynamo/package.py, CompilePackage.source_id_from_fn (2.11, 2.13).
    """
    inner: Any = eval_frame.innermost_fn(function)
    name = f"{inner.__module__}:{inner.__qualname__}"
    owner = getattr(inner, "__self__", None)
    if owner is None:
        return name
    return f"{name} of {type(owner).__module__}:{type(owner).__qualname__}"


def code_id(code: types.CodeType) -> str:
    """Name of a frame's code: module and qualified name."""
    module = inspect.getmodule(code)
    return f"{module.__name__ if module else '?'}:{code.co_qualname}"


def settings(context: Any) -> dict[str, str]:
    """Everything a ``torch.compile`` is set to: options, and the three config modules.

    ``fullgraph`` isn't among them: it decides what is an error, not what is compiled.

    Source: torch/_dynamo/eval_frame.py, _TorchDynamoContext and innermost_backend;
    torch/__init__.py, _TorchCompileInductorWrapper.get_compiler_config;
    torch/utils/_config_module.py, save_config_portable (2.11, 2.13).
    """
    backend: Any = _inductor_backend(context)
    inductor = backend.get_compiler_config()
    groups: dict[str, Mapping[str, Any]] = {
        "dynamo": torch._dynamo.config.save_config_portable(),  # type: ignore[attr-defined]
        "functorch": torch._functorch.config.save_config_portable(),  # type: ignore[attr-defined]
        "inductor": inductor,
        # Without automatic dynamic shapes, None means False.
        "compile": {"dynamic": bool(context._dynamic)},
    }
    kept = torch._inductor.config.save_config_portable()  # type: ignore[attr-defined]
    found = {}
    for group, values in groups.items():
        for name, value in values.items():
            full = f"{group}.{name}"
            if full in _IGNORED_SETTINGS or (group == "inductor" and name not in kept):
                continue
            if callable(value) and not isinstance(value, type):
                value = guard_values.describe(value)
            found[full] = _text(value)
    return found


def _inductor_backend(context: Any) -> Any:
    """The Inductor wrapper behind a context; None if it compiles with something else."""
    if not callable(context.callback):
        return None
    backend: Any = eval_frame.innermost_backend(context.callback)
    return backend if hasattr(backend, "get_compiler_config") else None


def _text(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return repr(sorted(value, key=repr))
    if isinstance(value, dict):
        return repr(dict(sorted(value.items(), key=lambda item: repr(item[0]))))
    return repr(value)


# --- Build -------------------------------------------------------------------------


@dataclasses.dataclass
class _Recorded:
    """One live package of the building process."""

    package: Any
    function: str
    settings: dict[str, str]


class Recorder:
    """Takes the place of torch's package cache: loads nothing, remembers everything."""

    def __init__(self) -> None:
        self._recorded: dict[int, _Recorded] = {}
        self._dropped: list[tuple[str, str]] = []
        self._extra: dict[str, tuple[tuple[str, str], ...]] = {}
        self._codes: dict[str, str] = {}
        self._globals: dict[str, Any] = {}
        self.context: Any = None

    def load(self, function: Any) -> None:
        """Called by torch for every function it compiles: there is nothing yet."""
        context = self.context
        if _inductor_backend(context) is None:
            return
        self._recorded[id(context._package)] = _Recorded(
            context._package, function_id(function), settings(context)
        )

    def record_package(self, changed: Any) -> None:
        """Called by torch after every frame."""

    def note_frame(self, code: types.CodeType) -> None:
        """A frame was traced; whether a package holds it shows at the end."""
        self._codes.setdefault(code_id(code), "nothing in it is compiled")

    def note_global(self, name: str, value: Any) -> None:
        """Dynamo put a value among a module's globals for its bytecode to read."""
        self._globals[name] = value

    def filter_guards(self, entries: Any) -> list[bool]:
        """Split a frame's guards: True = torch stores it; the others are kept here."""
        kept = []
        for entry in entries:
            ours = guard_values.is_ours(entry)
            kept.append(not ours)
            if ours:
                value = entry.value if entry.has_value else None
                text = (
                    guard_values.describe(value)
                    if entry.has_value
                    else guard_values.ABSENT
                )
                self._dropped.append((entry.orig_guard.name, text))
        return kept

    def begin_guards(self) -> None:
        """A frame's guards are about to be built."""
        self._dropped = []

    def end_guards(self, state: bytes | None) -> None:
        """A frame's guards were stored as `state`."""
        if state is not None:
            wanted = tuple(dict.fromkeys(self._dropped))
            self._extra[hashlib.sha256(state).hexdigest()] = wanted

    def packages(self) -> tuple[Package, ...]:
        """One per function; instances of a class share one.

        Two of one function with different settings give none: their frames would be
        mistaken for each other.
        """
        by_function: dict[str, list[_Recorded]] = {}
        for recorded in self._recorded.values():
            by_function.setdefault(recorded.function, []).append(recorded)
        made = []
        for function, group in sorted(by_function.items()):
            if any(one.settings != group[0].settings for one in group):
                self._codes.update(
                    dict.fromkeys(
                        (code_id(code) for one in group for code in one.package._codes),
                        "compiled with different options in one process",
                    )
                )
                continue
            one = self._package(function, group)
            lost = [why for why in one.codes.values() if why]
            if lost:
                # Tracing one of its frames anew makes those behind it anew.
                self._codes.update(dict.fromkeys(one.codes, lost[0]))
                continue
            made.append(one)
        return tuple(made)

    def traced(self, made: tuple[Package, ...]) -> dict[str, str]:
        """Frames that no package holds, which every start traces again → why."""
        reasons = dict(self._codes)
        for one in made:
            reasons.update(one.codes)
        return {code: why for code, why in sorted(reasons.items()) if why}

    def _package(self, function: str, group: list[_Recorded]) -> Package:
        entry = _merged([one.package.cache_entry() for one in group])
        # A decorator copies its function's __module__; what runs reads its own globals.
        inner = group[0].package._innermost_fn
        entry.codes[0].python_module = inner.__globals__["__name__"]
        stored = package.PrecompileCacheEntry.from_cache_entry(
            entry, PrecompileContext._backend_artifacts_by_key
        )
        codes: dict[str, str] = {}
        used: dict[str, tuple[tuple[str, str], ...]] = {}
        read: dict[str, dict[str, bytes]] = {}
        for code in entry.codes:
            name = _stored_code_id(code)
            if code.bypassed:
                codes[name] = "torch can't store its guards or its graph"
                continue
            for guarded in code.guarded_codes:
                digest = hashlib.sha256(guarded.guards_state).hexdigest()
                used[digest] = self._extra[digest]
                codes[name] = ""
            own = {name for other in entry.codes for name in other.function_names}
            for label in sorted((_names(code) - own) & self._globals.keys()):
                value = _by_reference(self._globals[label])
                if value is None:
                    kind = guard_values.describe(self._globals[label])
                    codes[name] = f"its bytecode reads a value of this process ({kind})"
                    code.bypassed = True
                    break
                read.setdefault(code.python_module, {})[label] = value
        sources = {
            f"{s.module}:{s.firstlineno}-{s.lastlineno}": s.checksum
            for s in entry.source_info.inlined_sources
        }
        return Package(
            function=function,
            settings=group[0].settings,
            content=pickle.dumps(stored),
            extra_guards=used,
            sources=dict(sorted(sources.items())),
            codes=codes,
            globals=read,
        )


def _names(entry: Any) -> set[str]:
    """Globals that a frame's compiled bytecode reads, but for what torch restores."""
    pending = [guarded.dynamo_code for guarded in entry.guarded_codes]
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [
            c for c in code.co_consts if isinstance(c, package.SerializedCode)
        ]
    restored = {*entry.backend_ids, *entry.import_sources}
    return {n for n in names - restored if not n.startswith("__builtins_dict__")}


def _by_reference(value: Any) -> bytes | None:
    """Pickle of a value that is the same object, or an equal scalar, in any process."""
    if isinstance(value, types.ModuleType):
        return pickle.dumps(_Module(value.__name__))
    try:
        data = pickle.dumps(value)
        same = pickle.loads(data)  # noqa: S301 - made in the line above
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    plain = isinstance(value, (bool, int, float, str, bytes)) and same == value
    return data if same is value or plain else None


class _Module(NamedTuple):
    """Stands for a module, which pickle refuses."""

    name: str


def _stored_code_id(entry: Any) -> str:
    return f"{entry.python_module}:{entry.python_code.co_qualname}"


def _merged(entries: list[Any]) -> Any:
    """One cache entry from those of several instances of one function.

    Equal code becomes one entry, also within one instance: each recompile makes the
    functions that go on after a graph break anew, and torch's install, which looks
    code up by value, would keep the last one's variants only.
    """
    first = entries[0]
    by_code: dict[Any, Any] = {}
    for entry in entries:
        first.source_info.inlined_sources |= entry.source_info.inlined_sources
        for code in entry.codes:
            known = by_code.setdefault(code.python_code, code)
            if known is code:
                continue
            known.guarded_codes += code.guarded_codes
            known.backend_ids += code.backend_ids
            known.import_sources |= code.import_sources
            known.bypassed |= code.bypassed
            known.has_compile_id |= code.has_compile_id
            known.function_names += [
                name for name in code.function_names if name not in known.function_names
            ]
    first.codes = list(by_code.values())
    return first


def record() -> Recorder:
    """Record every package of this process from now on.

    Source: torch/_dynamo/eval_frame.py, _TorchDynamoContext.__call__ (where a package
    is looked up); guards.py, CheckFunctionManager.__init__; output_graph.py,
    OutputGraph.install_global_unsafe (2.11, 2.13).
    """
    recorder = Recorder()
    install_global = output_graph.OutputGraph.install_global_unsafe

    def note(self: Any, name: str, value: Any) -> None:
        recorder.note_global(name, value)
        install_global(self, name, value)

    output_graph.OutputGraph.install_global_unsafe = note  # type: ignore[method-assign]
    torch._dynamo.config.caching_precompile = True
    package.DynamoCache = recorder  # type: ignore[assignment]
    context_call = eval_frame._TorchDynamoContext.__call__

    def call(self: Any, function: Any) -> Any:
        recorder.context = self
        return context_call(self, function)

    eval_frame._TorchDynamoContext.__call__ = call  # type: ignore[method-assign]
    make_guards = guards.CheckFunctionManager.__init__
    signature = inspect.signature(make_guards)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("guard_filter_fn")

        def keep(entries: Any) -> list[bool]:
            wanted = given(entries) if given else [True] * len(entries)
            chosen = [e for e, want in zip(entries, wanted, strict=True) if want]
            ours = iter(recorder.filter_guards(chosen))
            return [want and next(ours) for want in wanted]

        bound.arguments["guard_filter_fn"] = keep
        recorder.begin_guards()
        make_guards(*bound.args, **bound.kwargs)
        recorder.end_guards(self.guards_state)

    guards.CheckFunctionManager.__init__ = init  # type: ignore[method-assign]
    return recorder


# --- Start -------------------------------------------------------------------------

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


def install_with(find: Find) -> Callable[[], dict[types.CodeType, list[Installed]]]:
    """From now on, install a function's package when ``torch.compile`` is given it.

    Args:
        find: Called with `function_id`, `settings` and the function; the package to
            install, or None.
    Returns:
        Gives what is installed so far: code → its variants.
    Source: torch/_dynamo/eval_frame.py, _TorchDynamoContext.__call__; package.py,
    CompilePackage.initialize and install (2.11, 2.13). Frames look for installed code
    before anything else: torch/csrc/dynamo/extra_state.cpp, lookup.
    """
    bytecode_transformation._unique_id_counter = itertools.count(_NAMES_FROM)
    installed: dict[types.CodeType, list[Installed]] = {}
    done: dict[types.CodeType, Mapping[str, str]] = {}
    context_call = eval_frame._TorchDynamoContext.__call__

    def call(self: Any, function: Any) -> Any:
        # A module's context is called twice, with the module and with its __call__.
        if not getattr(self, "_ck_seen", False) and _inductor_backend(self) is not None:
            self._ck_seen = True
            called = (
                function.forward if isinstance(function, torch.nn.Module) else function
            )
            _install(called, settings(self), find, installed, done)
        return context_call(self, function)

    eval_frame._TorchDynamoContext.__call__ = call  # type: ignore[method-assign]
    return lambda: installed


def _install(
    function: Any,
    set_to: Mapping[str, str],
    find: Find,
    installed: dict[types.CodeType, list[Installed]],
    done: dict[types.CodeType, Mapping[str, str]],
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
    stored = pickle.loads(found.content)  # noqa: S301 - digests were verified
    live = package.CompilePackage(None)
    live.initialize(inner, stored.dynamo)
    for module, values in found.globals.items():
        scope = importlib.import_module(module).__dict__
        for name, data in values.items():
            value = pickle.loads(data)  # noqa: S301 - digests were verified
            if isinstance(value, _Module):
                value = importlib.import_module(value.name)
            scope[name] = value
    with _extra_guards(found.extra_guards, installed):
        live.install(stored.backends)


@contextlib.contextmanager
def _extra_guards(
    extra: Mapping[str, tuple[tuple[str, str], ...]],
    installed: dict[types.CodeType, list[Installed]],
) -> Iterator[None]:
    """While a package is installed, add the guards that torch couldn't store.

    Source: torch/_dynamo/package.py, load_guards_state and load_guard_manager (2.11,
    2.13); torch/csrc/dynamo/guards.cpp, add_lambda_guard: called with a frame's locals.
    """
    load_state, load_manager = package.load_guards_state, package.load_guard_manager
    digests: list[str] = []

    def state(stored: bytes) -> Any:
        digests.append(hashlib.sha256(stored).hexdigest())
        return load_state(stored)

    def manager(loaded: Any, code: types.CodeType, scope: dict[str, Any]) -> Any:
        made = load_manager(loaded, code, scope)
        wanted = tuple(tuple(pair) for pair in extra[digests[-1]])
        if wanted:
            check = guard_values.checker(wanted, scope)  # type: ignore[arg-type]
            made.root.add_lambda_guard(check, ["what torch can't store"], None)
        installed.setdefault(code, []).append(Installed(made, wanted, scope))  # type: ignore[arg-type]
        return made

    with (
        mock.patch.object(package, "load_guards_state", state),
        mock.patch.object(package, "load_guard_manager", manager),
    ):
        yield


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
            reasons.append("; ".join(map(str, info.verbose_code_parts)))
    return reasons
