"""Where a model's files are that a source or ``weights`` value names."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from compilekit.errors import ConfigError

PACKAGE = "package:"


def is_hub_id(location: str) -> bool:
    """Whether a name can be a Hugging Face id: ``bert-base-uncased``, ``org/model``."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", location) is not None


def package_data(location: str) -> Path:
    """The path behind ``package:NAME/DIR``: data that an installed package ships.

    The package isn't imported.

    Raises:
        ConfigError: there is no such package, or nothing there in it.
    """
    name, _, inside = location.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        raise ConfigError(
            f"{location!r}: no Python package {name!r} is installed",
            hint="Install it, or name a directory.",
        )
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, inside)
        if os.path.exists(path):
            return path.resolve()
    raise ConfigError(f"{location!r}: package {name!r} has no {inside!r}")
