"""Dynamo packages: what lets a process skip tracing, and the names of things in them.

Lifecycle, build::

    recorder = package_record.record()     before the first torch.compile
    …                                      every bucket is called
    recorder.packages()                    one `Package` per compiled function

Lifecycle, start::

    package_install.install_with(find)     before the first torch.compile
    …                                      each torch.compile(f) asks `find`

torch's own switch for this (``caching_precompile``) is on during a build only. At start
the functions are installed without it: a frame that no package covers is then traced
and looked up in the other caches as usual. Four faults of torch's packages are mended:
guards that it drops (`guard_values`), globals that it leaves out, names that collide
with the process's own, and options that it doesn't compare.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
from torch._dynamo import eval_frame

from compilekit._torch.caches import guard_values

# Settings that don't change what is traced or compiled.
_IGNORED_SETTINGS = frozenset(
    {
        "compiler.force_cudagraph_gc",
        "compiler.force_disable_caches",
        "compiler.job_id",
        "compiler.pgo_extra_read_key",
        "compiler.pgo_extra_write_key",
        "dynamo.caching_precompile",
        "dynamo.recompile_limit",
        "dynamo.accumulated_recompile_limit",
        "dynamo.cache_size_limit",
        "dynamo.accumulated_cache_size_limit",
        "dynamo.cprofile",
        "dynamo.dynamo_profiler",
        "dynamo.pt2_compile_id_prefix",
        "dynamo.run_gc_after_compile",
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


# Functions of the user's that rewrite graphs; torch's portable settings leave them out.
_PASSES = frozenset(
    {
        "joint_custom_pre_pass",
        "joint_custom_post_pass",
        "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass",
        "pre_grad_custom_pass",
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
        operators: Custom operators in the build's graphs → schema and functions.
    """

    function: str
    settings: Mapping[str, str]
    content: bytes
    extra_guards: Mapping[str, tuple[tuple[str, str], ...]]
    sources: Mapping[str, str]
    codes: Mapping[str, str]
    globals: Mapping[str, Mapping[str, bytes]]
    operators: Mapping[str, str]


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
    """Everything a ``torch.compile`` is set to: options, and the four config modules.

    ``fullgraph`` isn't among them: it decides what is an error, not what is compiled.

    Source: torch/_dynamo/eval_frame.py, _TorchDynamoContext and innermost_backend;
    torch/__init__.py, _TorchCompileInductorWrapper.get_compiler_config;
    torch/utils/_config_module.py, save_config_portable (2.11, 2.13).
    """
    backend: Any = inductor_backend(context)
    inductor = backend.get_compiler_config()
    compiler: Any = torch.compiler.config
    groups: dict[str, Mapping[str, Any]] = {
        "compiler": compiler.save_config_portable(),
        "dynamo": torch._dynamo.config.save_config_portable(),
        "functorch": torch._functorch.config.save_config_portable(),
        "inductor": inductor,
        # Without automatic dynamic shapes, None means False.
        "compile": {"dynamic": bool(context._dynamic)},
    }
    kept = torch._inductor.config.save_config_portable()
    found = {}
    for group, values in groups.items():
        for name, value in values.items():
            full = f"{group}.{name}"
            if full in _IGNORED_SETTINGS:
                continue
            if group == "inductor" and name not in kept and name not in _PASSES:
                continue
            if callable(value) and not isinstance(value, type):
                value = guard_values.describe(value)
            found[full] = _text(value)
    return found


def inductor_backend(context: Any) -> Any:
    """The Inductor wrapper behind a context; None if another backend compiles."""
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


class StoredModule(NamedTuple):
    """Stands for a module, which pickle refuses."""

    name: str
