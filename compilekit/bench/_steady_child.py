"""One process of ``bench steady``: two equal models, their calls interleaved.

Run with ``python -m``; the JSON spec comes on stdin, one JSON line goes to stdout.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError
from . import _startup_child as child

if TYPE_CHECKING:
    import torch

    from ..runtime.dispatch import Dispatcher
    from ..runtime.program import Call

# Calls of each side before any is timed: the first ones compile, bind and allocate.
_WARM_UP = 5
# Microseconds each: enough to find one call that nothing interrupted.
_ALONE_CALLS = 2000


class Moments(NamedTuple):
    """When a call of an attached model was where, in seconds.

    Attributes:
        called: The dispatcher was called.
        entered: It called the program.
        left: The program returned.
        returned: The dispatcher did.
    """

    called: float
    entered: float
    left: float
    returned: float

    @property
    def dispatch_us(self) -> float:
        """Time in the dispatcher, the program's left out."""
        return ((self.returned - self.called) - (self.left - self.entered)) * 1e6


@dataclasses.dataclass
class Watch:
    """What the programs behind an attached model do.

    Attributes:
        calls: Each call's moments.
        replay: What a program returns instead of running, if anything; None = it runs.
    """

    calls: list[Moments] = dataclasses.field(default_factory=list)
    replay: tuple[torch.Tensor, ...] | None = None


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Time every bucket: ``torch.compile``, the attached model, the program in it."""
    compiled, attached = _load(spec), _load(spec)
    import torch

    import compilekit

    compilekit.attach(attached.model, Path(spec["artifact"]))
    with torch.no_grad():
        # Compiled first, all of it, so that nothing is measured beside a compiler.
        functions = child.start("cold", compiled, Path())
        for call, function in zip(compiled.calls, functions, strict=True):
            function(**call.kwargs)
        watch = Watch()
        for method in {call.method for call in attached.calls}:
            watch_programs(attached.model.__dict__[method], watch)
        buckets = [
            _measure_bucket(function, attached, call, spec["pairs"], watch)
            for call, function in zip(compiled.calls, functions, strict=True)
        ]
    return {"buckets": buckets, "environment": child.versions()}


def _load(spec: Mapping[str, Any]) -> child.Loaded:
    """A live model, with the calls of the buckets that were asked for."""
    loaded = child.load(spec)
    wanted = spec["buckets"] or [call.bucket.name for call in loaded.calls]
    calls = [call for call in loaded.calls if call.bucket.name in wanted]
    if not calls:
        raise ConfigError(f"bench steady: no bucket is named {', '.join(wanted)}")
    return loaded._replace(calls=calls)


def _measure_bucket(
    compiled: Callable[..., Any],
    attached: child.Loaded,
    call: child.Call,
    pairs: int,
    watch: Watch,
) -> dict[str, Any]:
    from . import steady

    kwargs = call.kwargs
    program = child.eager(attached, call)
    sides: dict[str, Callable[[], object]] = {
        "compiled": lambda: compiled(**kwargs),
        "program": lambda: program(**kwargs),
    }
    for side in sides.values():
        for _ in range(_WARM_UP):
            side()
    wanted = child.tensors(sides["compiled"]())
    diff = child.max_abs_diff(child.tensors(sides["program"]()), wanted)
    watch.calls.clear()
    times = steady.interleave(sides, pairs)
    dispatch_us = [moments.dispatch_us for moments in watch.calls]
    module_us = [
        whole * 1e3 - (moments.returned - moments.called) * 1e6
        for whole, moments in zip(times["program"], watch.calls, strict=True)
    ]
    watch.calls.clear()
    watch.replay = ()
    child.call_ms(program, kwargs, _ALONE_CALLS)
    alone_us = min(moments.dispatch_us for moments in watch.calls)
    watch.replay = None
    return {
        "entry": call.entry,
        "bucket": call.bucket.name,
        "compiled_ms": min(times["compiled"]),
        "compiled_median_ms": statistics.median(times["compiled"]),
        "program_ms": min(times["program"]),
        "program_median_ms": statistics.median(times["program"]),
        "dispatch_us": min(dispatch_us),
        "dispatch_median_us": statistics.median(dispatch_us),
        "dispatch_alone_us": alone_us,
        "module_us": statistics.median(module_us),
        # As text: JSON has no infinity.
        "max_abs_diff": str(diff),
    }


def watch_programs(dispatcher: Dispatcher, watch: Watch) -> None:
    """From now on, note when a call begins and ends, and the program itself within it.

    Two calls subtracted from each other would drown the dispatcher's microseconds in
    the noise of a program that runs for milliseconds. What is noted is put away when
    the call is over, and nothing is kept of a result: giving its memory back isn't part
    of the call.
    """
    from ..runtime.dispatch import Dispatcher

    dispatch, clock = Dispatcher.__call__, time.perf_counter
    entered = left = 0.0

    class Timed(Dispatcher):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called = clock()
            result = dispatch(self, *args, **kwargs)
            returned = clock()
            watch.calls.append(Moments(called, entered, left, returned))
            return result

    dispatcher.__class__ = Timed

    def watched(program: Call) -> Call:
        def call(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            nonlocal entered, left
            if watch.replay is not None:
                entered = left = 0.0
                watch.replay = watch.replay or program(inputs)
                return watch.replay
            entered = clock()
            outputs = program(inputs)
            left = clock()
            return outputs

        return call

    for sizes, bound in dispatcher.by_sizes.items():
        dispatcher.by_sizes[sizes] = bound._replace(call=watched(bound.call))
    dispatcher.follow(dispatcher.watch)


if __name__ == "__main__":
    child.answer(measure)
