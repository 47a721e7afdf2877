"""Record Dynamo's packages while a build calls every bucket.

Source: torch/_dynamo/package.py, CompilePackage; precompile_context.py (2.11, 2.13).
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import pickle
import types
from typing import Any

import torch._dynamo.config
from torch._dynamo import eval_frame, guards, output_graph, package
from torch._dynamo.exc import PackageError
from torch._dynamo.precompile_context import PrecompileContext

from compilekit._torch.caches import guard_values, operators
from compilekit._torch.caches.packages import (
    Package,
    StoredModule,
    code_id,
    function_id,
    inductor_backend,
    settings,
)


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
        if inductor_backend(context) is None:
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
        unpicklable = guard_values.unpicklable_globals(entries)
        for entry in entries:
            ours = guard_values.is_ours(entry, unpicklable)
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
            operators=dict(operators.seen),
        )


def _names(entry: Any) -> set[str]:
    """Globals that a frame's compiled bytecode reads, but for what torch restores."""
    pending = [guarded.dynamo_code for guarded in entry.guarded_codes]
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [c for c in code.co_consts if isinstance(c, package.SerializedCode)]
    restored = {*entry.backend_ids, *entry.import_sources}
    return {n for n in names - restored if not n.startswith("__builtins_dict__")}


def _by_reference(value: Any) -> bytes | None:
    """Pickle of a value that is the same object, or an equal scalar, in any process."""
    if isinstance(value, types.ModuleType):
        return pickle.dumps(StoredModule(value.__name__))
    try:
        data = pickle.dumps(value)
        same = pickle.loads(data)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    plain = isinstance(value, (bool, int, float, str, bytes)) and same == value
    return data if same is value or plain else None


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
    for code in first.codes:
        for guarded in code.guarded_codes:
            guarded.dynamo_code = sharing(guarded.dynamo_code, list(by_code))
    return first


def sharing(code: Any, known: list[Any]) -> Any:
    """Compiled bytecode that makes its functions from `known` code where it's equal.

    torch 2.11 finds a function that goes on after a graph break by the very code object
    if it has free variables, not by a name.

    Source: torch/_dynamo/package.py, SerializedCode (2.11, 2.13);
    symbolic_convert.py, create_resume (2.11).
    """

    def shared(const: Any) -> Any:
        if not isinstance(const, package.SerializedCode):
            return const
        same = next((one for one in known if one == const), None)
        return sharing(const, known) if same is None else same

    return dataclasses.replace(code, co_consts=tuple(map(shared, code.co_consts)))


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

    eval_frame._TorchDynamoContext.__call__ = call  # type: ignore[method-assign, assignment]
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

    serialize = guards.CheckFunctionManager.serialize_guards

    def stored(self: Any, *args: Any, **kwargs: Any) -> bytes:
        try:
            return serialize(self, *args, **kwargs)
        except (TypeError, AttributeError, pickle.PicklingError) as exc:
            # torch expects this error alone, and then leaves the frame out.
            raise PackageError(f"a guard can't be stored: {exc}") from exc

    guards.CheckFunctionManager.serialize_guards = stored  # type: ignore[method-assign]
    guards.CheckFunctionManager.__init__ = init  # type: ignore[method-assign]
    return recorder
