"""What torch.compile does in this process, one event at a time.

``watch(on_event)`` reports each step that a start from complete caches never takes:

    frame       Dynamo traces a frame
    bypass      a graph can't be looked up in a cache, with torch's reason
    compile     Inductor compiles a graph (after a miss)
    benchmark   a kernel is timed

Kernel builds come from `kernels.serve`, missed keys from `keys.watch`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch._dynamo.config
import torch._functorch.config
import torch._inductor.compile_fx
import torch._inductor.config
from torch._dynamo import convert_frame
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import codecache
from torch._inductor.runtime import benchmarking

OnEvent = Callable[[str, str], None]
OnFrame = Callable[[types.CodeType, Any], None]


def watch(
    on_frame: OnFrame, on_event: OnEvent, after_frame: Callable[[], None] = lambda: None
) -> None:
    """Report every step from now on.

    Args:
        on_frame: Called with a frame's code and locals before it's traced.
        on_event: Called with ``bypass``, ``compile`` or ``benchmark`` and a detail.
        after_frame: Called when a frame is done, however it ended: torch swallows or
            wraps what is raised while a graph is compiled.
    Source: torch/_dynamo/convert_frame.py, _compile; torch/_inductor/compile_fx.py,
    fx_codegen_and_compile; codecache.py and autograd_cache.py, the Bypass exceptions;
    runtime/benchmarking.py, Benchmarker (2.11, 2.13).
    """
    compile_frame = convert_frame._compile

    def frame(code: types.CodeType, *args: Any, **kwargs: Any) -> Any:
        # Its parameters: code, globals, locals, …
        on_frame(code, kwargs.get("locals", args[1] if len(args) > 1 else {}))
        try:
            return compile_frame(code, *args, **kwargs)
        finally:
            after_frame()

    convert_frame._compile = frame
    codegen = torch._inductor.compile_fx.fx_codegen_and_compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        on_event("compile", "Inductor compiles a graph")
        return codegen(*args, **kwargs)

    torch._inductor.compile_fx.fx_codegen_and_compile = compiled
    for kind in (codecache.BypassFxGraphCache, autograd_cache.BypassAOTAutogradCache):
        _report_made(kind, on_event)
    for name in ("benchmark", "benchmark_cpu", "benchmark_gpu"):
        method = getattr(benchmarking.Benchmarker, name, None)
        if method is not None:
            setattr(benchmarking.Benchmarker, name, _reported(method, name, on_event))


def _report_made(kind: type[Exception], on_event: OnEvent) -> None:
    """Report every exception of a kind: torch catches them and goes on."""

    def init(self: Exception, *args: Any) -> None:
        Exception.__init__(self, *args)
        # A miss of the FX graph cache is raised as one, too; it has its own reason.
        if type(self) is kind:
            on_event("bypass", str(args[0]) if args else kind.__name__)

    kind.__init__ = init  # type: ignore[method-assign, assignment]


def _reported(method: Any, name: str, on_event: OnEvent) -> Any:
    def benchmark(*args: Any, **kwargs: Any) -> Any:
        on_event("benchmark", f"Inductor times a kernel ({name})")
        return method(*args, **kwargs)

    return benchmark


def settings(recompile_limit: int) -> None:
    """What build and start set alike, so that every bucket is compiled, and once.

    Shapes stay static (with automatic dynamic shapes the graphs depend on the order of
    calls); more buckets than Dynamo's limit are compiled all; every cache is on.
    """
    dynamo: Any = torch._dynamo.config
    dynamo.automatic_dynamic_shapes = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, recompile_limit)
    dynamo.accumulated_recompile_limit = max(
        dynamo.accumulated_recompile_limit, 8 * recompile_limit
    )
    inductor: Any = torch._inductor.config
    inductor.fx_graph_cache = True
    inductor.fx_graph_remote_cache = False
    functorch: Any = torch._functorch.config
    functorch.enable_autograd_cache = True
    functorch.enable_remote_autograd_cache = False
