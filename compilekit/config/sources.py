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


def model_directory(folder: Path, location: str) -> Path | None:
    """Find the local directory (or file) that a source or ``weights`` value means.

    Args:
        folder: Of the configuration; relative paths are relative to it.
        location: A path, a Hugging Face id, or ``package:NAME/DIR`` for data that an
            installed Python package ships (the package isn't imported).
    Returns:
        The directory, or None if `location` can only be a Hugging Face id.
    Raises:
        ConfigError: there is no such directory or package, or it can't be looked at.
    """
    if location.startswith(PACKAGE):
        return package_data(location)
    path = folder / os.path.expanduser(location)
    try:
        os.stat(path)
    except OSError as exc:
        if is_hub_id(location) and not os.path.isdir(location):
            return None
        raise ConfigError(
            f"{path} can't be read: {exc.strerror}",
            hint="A relative path counts from the configuration's folder.",
        ) from exc
    return path.resolve()
