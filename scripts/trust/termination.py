"""SIGTERM as an exception: a script that is ended takes along what it started."""

from __future__ import annotations

import signal
import sys


def exit_on_sigterm() -> None:
    """Have SIGTERM run the script's ``finally`` and ``with`` blocks, then end it."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _: object) -> None:
    # timeout(1) sends it twice.
    signal.signal(number, signal.SIG_IGN)
    sys.exit("ended by SIGTERM")
