"""What torch.compile does in this process, one event at a time.

`watch` reports each step that a start from complete caches never takes:

    frame       Dynamo traces a frame
    bypass      a graph can't be looked up in a cache, with torch's reason
    compile     Inductor compiles a graph (after a miss)
    benchmark   a kernel is timed

Kernel builds come from `kernels.serve`, missed keys from `keys.watch`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch._dynamo import convert_frame
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import codecache, compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.runtime import benchmarking

from compilekit.errors import CompilekitError

OnEvent = Callable[[str, str], None]
OnFrame = Callable[[types.CodeType, Any], None]


def watch(
    patches: contextlib.ExitStack,
    on_frame: OnFrame,
    on_event: OnEvent,
    after_frame: Callable[[], None] = lambda: None,
) -> None:
    """Report every step from now on.

    Args:
        patches: Closing it ends the reports.
        on_frame: Called with a frame's code and locals before it's traced.
        on_event: Called with ``bypass``, ``compile`` or ``benchmark`` and a detail.
        after_frame: Called when a frame is done, however it ended: torch swallows or
            wraps what is raised while a graph is compiled.
    Source: torch/_dynamo/convert_frame.py, _compile; torch/_inductor/compile_fx.py,
    fx_codegen_and_compile; codecache.py and autograd_cache.py, the Bypass exceptions;
    runtime/benchmarking.py, Benchmarker (2.11, 2.13).
    """
    compile_frame = convert_frame._compile
    codegen = compile_fx.fx_codegen_and_compile

    def frame(code: types.CodeType, *args: Any, **kwargs: Any) -> Any:
        # Its parameters: code, globals, locals, …
        on_frame(code, kwargs.get("locals", args[1] if len(args) > 1 else {}))
        try:
            return compile_frame(code, *args, **kwargs)
        finally:
            after_frame()

    def compiled(*args: Any, **kwargs: Any) -> Any:
        on_event("compile", "Inductor compiles a graph")
        return codegen(*args, **kwargs)

    def replace(owner: Any, name: str, value: Any) -> None:
        patches.enter_context(mock.patch.object(owner, name, value))

    replace(convert_frame, "_compile", frame)
    replace(compile_fx, "fx_codegen_and_compile", compiled)
    replace(compile_fx, "InductorError", _or_ours(InductorError))
    for kind in (codecache.BypassFxGraphCache, autograd_cache.BypassAOTAutogradCache):
        replace(kind, "__init__", _reporting_init(kind, on_event))
    # A subclass has its own method for a GPU, and the one for both calls it.
    for timer in _and_subclasses(benchmarking.Benchmarker):
        for name in [n for n in vars(timer) if n.startswith("benchmark_")]:
            replace(timer, name, _reported(vars(timer)[name], name, on_event))


def _or_ours(wrapper: Any) -> Callable[[Exception, Any], Exception]:
    """Stands for the error that torch wraps others in; ours stay what they are.

    A frame's end raises ours once more, whatever torch made of it. A backward that is
    compiled when it's first needed has no frame.
    """

    def wrapped(error: Exception, frame: Any) -> Exception:
        if isinstance(error, CompilekitError):
            return error
        made: Exception = wrapper(error, frame)
        return made

    return wrapped


def _reporting_init(kind: type[Exception], on_event: OnEvent) -> Callable[..., None]:
    """Report every exception of a kind: torch catches them and goes on.

    One that is made while another is handled ("Failed to pickle cache key") says
    nothing of what the other names: the object's type.
    """

    def init(self: Exception, *args: Any) -> None:
        Exception.__init__(self, *args)
        # A miss of the FX graph cache is raised as one, too; it has its own reason.
        if type(self) is kind:
            reason = str(args[0]) if args else kind.__name__
            cause = sys.exception()
            if cause is not None:
                reason += f" ({type(cause).__name__}: {cause})"
            on_event("bypass", reason)

    return init


def _and_subclasses(kind: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = [kind]
    for each in kind.__subclasses__():
        found += _and_subclasses(each)
    return found


def _reported(method: Any, name: str, on_event: OnEvent) -> Any:
    def benchmark(*args: Any, **kwargs: Any) -> Any:
        on_event("benchmark", f"Inductor times a kernel ({name})")
        return method(*args, **kwargs)

    return benchmark
