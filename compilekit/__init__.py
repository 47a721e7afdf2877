"""Compile PyTorch models ahead of time, so that a container never compiles anything.

    receipt = compilekit.attach(model)          # the artifact in COMPILEKIT_ARTIFACT

    attach(model, artifact)   run an artifact's programs on a live model
    prepare(artifact)         load its code while the weights are read
    restore(artifact)         start torch.compile from an artifact's caches
    open(path)                an artifact, its digests verified
    check(artifact)           every mismatch between an artifact and this machine
    errors                    the error tree

Importing this module loads nothing but itself; each name loads what it needs when it's
first used, so the command line starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compilekit._version import __version__

if TYPE_CHECKING:
    from compilekit import errors
    from compilekit.artifact import open_artifact as open  # noqa: A004 (users write compilekit.open)
    from compilekit.runtime.attach import attach
    from compilekit.runtime.check import check
    from compilekit.runtime.prepare import prepare
    from compilekit.runtime.restore import restore

__all__ = ["__version__", "attach", "check", "errors", "open", "prepare", "restore"]

# Public name → the module and attribute behind it; "" = the module itself.
_SOURCES = {
    "attach": ("compilekit.runtime.attach", "attach"),
    "check": ("compilekit.runtime.check", "check"),
    "errors": ("compilekit.errors", ""),
    "open": ("compilekit.artifact", "open_artifact"),
    "prepare": ("compilekit.runtime.prepare", "prepare"),
    "restore": ("compilekit.runtime.restore", "restore"),
}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _SOURCES[name]
    loaded = importlib.import_module(module)
    value = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
