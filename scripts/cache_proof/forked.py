"""Run a function in a forked process that shares this one's imports, and nothing else.

Importing what torch.compile needs takes seconds, and what a row or a round does takes
fractions of one. `prepare` imports it and compiles nothing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple


class Child(NamedTuple):
    """A forked process: its number, and the pipe that its answer comes through."""

    number: int
    answer: int


def prepare() -> None:
    """Import what every child needs."""
    import torch._inductor.compile_fx
    import torch._inductor.select_algorithm  # noqa: F401

    import compilekit.runtime.restore  # noqa: F401


def start(function: Callable[[], Any]) -> Child:
    """Fork a process that calls `function`; its JSON value is the answer."""
    answer, its_end = os.pipe()
    number = os.fork()
    if number:
        os.close(its_end)
        return Child(number, answer)
    code = 1
    try:
        os.close(answer)
        data = json.dumps(function()).encode()
        with os.fdopen(its_end, "wb") as pipe:
            pipe.write(data)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(child: Child) -> tuple[int, Any]:
    """How the process ended, and its answer; None without one."""
    with os.fdopen(child.answer, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child.number, 0)
    return status, json.loads(data) if data else None
