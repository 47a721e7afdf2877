"""What libraries log and warn about, as narration of the command line."""

from __future__ import annotations

import logging

from compilekit.console import Console, Tone


class Narrator(logging.Handler):
    """Turns log records into narration.

    compilekit's warnings are always said, its info with ``-v`` and its debug with
    ``-vv``; another library's warnings need ``-v``, its info ``-vv``.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Say it, if the verbosity asks for it."""
        ours = record.name.partition(".")[0] == "compilekit"
        needed = (record.levelno < logging.WARNING) + (record.levelno < logging.INFO)
        if self.console.verbosity < needed + (not ours):
            return
        tone: Tone = "warn" if record.levelno >= logging.WARNING else "faint"
        level = record.levelname.lower()
        self.console.note(f"{level}: {record.getMessage()}", tone)


def narrate(console: Console) -> None:
    """Send every log record and Python warning of this process to the console."""
    logging.captureWarnings(True)
    logger = logging.getLogger()
    # A second run in one process (tests) replaces the first one's console.
    logger.handlers = [h for h in logger.handlers if not isinstance(h, Narrator)]
    logger.addHandler(Narrator(console))
    logging.getLogger("compilekit").setLevel(logging.DEBUG)
