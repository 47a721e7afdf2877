"""What torch or a model raises while a bucket is compiled, as our own errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from compilekit._torch import capture as dynamo
from compilekit._torch.breaks import describe_place, place_of_error
from compilekit.errors import (
    FOREIGN_ERRORS,
    CaptureError,
    CompilekitError,
    UnsupportedByProgramError,
)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what torch or the model raises into an error that says what failed.

    A graph break passes: it has a class of its own.
    """
    try:
        yield
    except (CompilekitError, *dynamo.CaptureUnsupported):
        raise
    except FOREIGN_ERRORS as exc:
        place = describe_place(place_of_error(exc))
        where = f" ({place})" if place else ""
        message = summary(exc)
        if re.search(r"\bdevices?\b.*\bmeta\b", message):
            # Models are made on the meta device; what make_fake found isn't there now.
            raise UnsupportedByProgramError(
                f"the call uses a tensor that was made with the model and that isn't"
                f" below it{where}",
                hint="A closure or another object holds it: use register_buffer.",
                thing=place,
            ) from exc
        raise CaptureError(
            f"{what}: {type(exc).__name__}: {message}{where}",
            hint="The bucket's log holds the traceback.",
        ) from exc


def summary(exc: BaseException | None) -> str:
    """The first lines of a message: torch's go on with advice and developer notes."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400] or "no message"


def nothing_compiled() -> CaptureError:
    """For a call without a single tensor operation."""
    return CaptureError(
        "the call compiled to nothing: no tensor operation was captured",
        hint="Is the method right? A forward that torch.compiler.disable covers, or"
        " that only returns its inputs, has nothing to compile.",
    )
