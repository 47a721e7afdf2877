"""Write a file that a command was asked for: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from compilekit.errors import ResourceError


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step; what was there stays until then.

    Raises:
        ResourceError: The place can't be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ResourceError(
            f"{path} can't be written: {exc.strerror}",
            hint="Choose another place, or free some space.",
            path=str(path),
        ) from exc
