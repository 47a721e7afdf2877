"""A child process of a build or a verify: it reads its work, and says how it went.

The work is one JSON document on standard input. What the child has to say goes, line by
line, to what was its standard output; whatever the model prints goes to standard error.
A child that can't go on says why in its last line (`events.ProcessError`).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from compilekit import errors
from compilekit.events import ProcessError, to_line

Say = Callable[[str], None]


def run(work: Callable[[dict[str, Any], Say], None]) -> int:
    """Do the work that standard input names; the process's exit code."""
    spec = json.load(sys.stdin)
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def say(line: str) -> None:
        print(line, file=lines, flush=True)

    try:
        work(spec, say)
    except Exception as exc:  # noqa: BLE001 - the parent reports it
        traceback.print_exception(exc)
        say(to_line(_process_error(exc)))
        return 1
    return 0


def _process_error(exc: Exception) -> ProcessError:
    if isinstance(exc, errors.CompilekitError):
        return ProcessError(type(exc).__name__, exc.message, exc.hint)
    message = f"unexpected {type(exc).__name__}: {exc}"
    hint = "The traceback is in the log; please report it."
    return ProcessError(errors.WorkerCrashedError.__name__, message, hint)


def error_of(said: ProcessError) -> errors.CompilekitError:
    """The error that ended a child, to be raised or reported by its parent."""
    kind = getattr(errors, said.error_type)
    return errors.rebuild(kind, said.message, said.hint, {})
