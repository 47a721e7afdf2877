"""Private torch names that the start-up benchmark's peers need.

compilekit itself uses none of this: these are the other ways to avoid a compile, set up
as well as their users could set them up. Mega-cache's kernels are kept and served by
`caches.kernels`. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def inductor_options(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A mode's options with the configuration's own laid over them.

    ``torch.compile`` takes a mode or options, not both.

    Source: torch 2.11 and 2.13 _inductor/__init__.py, list_mode_options.
    """
    if mode == "default":
        return dict(options)
    inductor = importlib.import_module("torch._inductor")
    return {**inductor.list_mode_options(mode), **options}


def package_with_aoti(
    module: torch.nn.Module,
    kwargs: Mapping[str, Any],
    path: Path,
    options: Mapping[str, Any],
) -> None:
    """Export one bucket and compile it with AOTInductor, weights left outside.

    Source: torch 2.11 and 2.13 _inductor/__init__.py, aoti_compile_and_package.
    """
    inductor = importlib.import_module("torch._inductor")
    exported = torch.export.export(module, (), dict(kwargs), strict=False)
    inductor.aoti_compile_and_package(
        exported,
        package_path=str(path),
        inductor_configs={
            **options,
            "aot_inductor.package_constants_in_so": False,
        },
    )


def load_with_aoti(
    path: Path, weights: Mapping[str, torch.Tensor]
) -> Callable[..., Any]:
    """Load a package with AOTInductor's C++ loader and hand it the live weights.

    ``aoti_load_package`` would first probe the compiler for its instruction sets and
    import the export package; the C++ loader alone does neither, which is AOTInductor
    at its best. The call specs are parsed once, not per call.

    Args:
        path: A package that `package_with_aoti` wrote.
        weights: Every parameter and buffer of the model by name; kept by reference.

    Returns:
        A function that takes the keyword arguments of the export, in any order.

    Source: torch 2.11 and 2.13 export/pt2_archive/_package.py, AOTICompiledModel.
    """
    pytree = torch.utils._pytree
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    names = loader.get_constant_fqns()
    loader.load_constants({name: weights[name] for name in names}, False, True, True)
    in_text, out_text = loader.get_call_spec()
    in_spec, out_spec = pytree.treespec_loads(in_text), pytree.treespec_loads(out_text)
    order = in_spec.children()[1].context

    def call(**kwargs: Any) -> Any:
        inputs = pytree.tree_leaves(((), {name: kwargs[name] for name in order}))
        tensors = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        return pytree.tree_unflatten(loader.boxed_run(tensors), out_spec)

    return call


def save_with_aot_compile(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    path: Path,
    options: Mapping[str, Any],
) -> None:
    """Compile one bucket with Dynamo's ``aot_compile`` and save it.

    Short kernel names keep Inductor's static launcher usable when it is loaded. Guards
    that can't be saved are left out.

    Source: torch 2.11 and 2.13 _dynamo/eval_frame.py, aot_compile, and
    _dynamo/aot_compile.py, AOTCompiledFunction.save_compiled_function.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    config.enable_aot_compile = True
    model, method = _module_and_method(function)
    compiled: Any = torch.compile(
        _entry(method),
        fullgraph=True,
        dynamic=False,
        options={
            **options,
            "triton.descriptive_names": False,
            "guard_filter_fn": lambda guards: [False] * len(guards),
        },
    )
    compiled.aot_compile(((model,), dict(kwargs))).save_compiled_function(str(path))


def load_with_aot_compile(
    function: Callable[..., Any], path: Path, kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Load what `save_with_aot_compile` saved, for the live model.

    Source: torch 2.11 and 2.13 compiler/__init__.py, load_compiled_function.
    """
    config: Any = importlib.import_module("torch._inductor.config")
    config.compile_threads = 1
    model, _ = _module_and_method(function)
    with path.open("rb") as file:
        loaded: Any = torch.compiler.load_compiled_function(file)
    return lambda **given: loaded(model, **given)


def _module_and_method(function: Any) -> tuple[Any, str]:
    if isinstance(function, torch.nn.Module):
        return function, "forward"
    return function.__self__, function.__name__


def call_forward(model: Any, **kwargs: Any) -> Any:
    """What is compiled: a function of a module can be saved, a bound method can't."""
    return model(**kwargs)


def _entry(method: str) -> Callable[..., Any]:
    if method != "forward":
        raise ValueError(f"aot_compile is measured for forward only, not {method}")
    return call_forward


def leaves(value: Any) -> list[Any]:
    """The leaves of a nested output, in torch's own order.

    Source: torch 2.11 and 2.13 utils/_pytree.py, tree_leaves.
    """
    found: list[Any] = torch.utils._pytree.tree_leaves(value)
    return found


def compile_counters() -> dict[str, int]:
    """Inductor's cache hits, misses and bypasses so far; {} if it was never loaded.

    Source: torch 2.11 and 2.13 _dynamo/utils.py, counters.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    return {
        name: int(count)
        for group in ("inductor", "aot_autograd")
        for name, count in utils.counters[group].items()
        if "cache" in name
    }
