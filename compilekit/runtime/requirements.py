"""What is asked of an artifact before anything of it runs, by argument or environment.

Needs no torch, so that ``compilekit load`` and ``check`` answer at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from compilekit.artifact import Artifact, open_artifact
from compilekit.errors import ConfigError, PolicyError
from compilekit.runtime.check import installed
from compilekit.trust.places import keep_from_others

REQUIREMENTS = ("program", "cache", "verified")


def open_required(artifact: Artifact | str | os.PathLike[str] | None) -> Artifact:
    """Open what the caller, or else COMPILEKIT_ARTIFACT, names.

    Kernels that somebody else could change after this are loaded from memory.

    Raises:
        ConfigError: neither names one.
        ArtifactError: it isn't the artifact that COMPILEKIT_EXPECT_DIGEST names.
        SignatureError: it isn't signed as COMPILEKIT_REQUIRE_SIGNATURE demands.
    """
    if artifact is None:
        artifact = os.environ.get("COMPILEKIT_ARTIFACT") or None
    if artifact is None:
        raise ConfigError(
            "no artifact: neither an argument nor COMPILEKIT_ARTIFACT names one",
            hint='attach(model, "DIR"), or start with `compilekit load DIR -- …`.',
        )
    if not isinstance(artifact, Artifact):
        artifact = _found(artifact)
    if is_demanding():
        from compilekit.trust.policy import from_environment, open_trusted

        # What was opened before wasn't opened under these demands: do it again.
        path = artifact.root if isinstance(artifact, Artifact) else artifact
        return open_trusted(path, from_environment())
    if not isinstance(artifact, Artifact):
        artifact = open_artifact(artifact)
    keep_from_others(artifact)
    return artifact


def _found(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The same path, or the artifact in it for this machine (the layout of a Hub)."""
    if os.path.exists(os.path.join(path, "manifest.json")):
        return path
    from compilekit.artifact import parts

    folder = Path(path)
    if not parts.is_hub(folder):
        return path
    capability = ""
    if parts.capabilities(folder):
        from compilekit.runtime.gpu import gpu_here

        gpu = gpu_here()
        capability = f"{gpu.major}{gpu.minor}" if gpu else ""
    return parts.choose_hub(folder, installed("torch"), capability)


_TRUST = (
    "COMPILEKIT_EXPECT_DIGEST",
    "COMPILEKIT_REQUIRE_SIGNATURE",
    "COMPILEKIT_MIN_SERIAL",
)


def is_demanding() -> bool:
    """True if a start holds the artifact's origin to anything."""
    return any(os.environ.get(name) for name in _TRUST)


def requirements(require: str | Iterable[str] | None) -> tuple[str, ...]:
    """The requirements by argument, or else by COMPILEKIT_REQUIRE.

    Raises:
        ConfigError: one of them isn't known.
    """
    if require is None:
        require = os.environ.get("COMPILEKIT_REQUIRE", "")
    names = require.split(",") if isinstance(require, str) else list(require)
    names = [name.strip() for name in names if name.strip()]
    unknown = [name for name in names if name not in REQUIREMENTS]
    if unknown:
        raise ConfigError(
            f"require: expected {', '.join(REQUIREMENTS)}, found {', '.join(unknown)}"
        )
    return tuple(names)


def check_requirements(
    required: tuple[str, ...], artifact: Artifact, target: str
) -> None:
    """Hold an artifact to what is required of it before anything runs.

    Raises:
        PolicyError: a requirement isn't met.
    """
    if "cache" in required and "cache" not in artifact.manifest.routes:
        raise PolicyError(
            "require = cache, and the artifact carries no caches",
            hint='Build it with routes = ["cache"], or require program instead.',
        )
    if "verified" in required:
        from compilekit.artifact import why_unverified

        reason = why_unverified(artifact, target)
        if reason:
            raise PolicyError(
                f"require = verified: {reason}",
                hint=f"Run `compilekit verify {artifact.root}` on such a machine.",
            )
