"""Factories that fail in ways of their own."""

import sys
from typing import NoReturn


class OwnError(Exception):
    """As libraries define them: below nothing but Exception."""


def own_error() -> NoReturn:
    """A factory whose library has its own errors."""
    raise OwnError("no luck")


def leave() -> NoReturn:
    """A factory that was a script's main function."""
    sys.exit(3)
