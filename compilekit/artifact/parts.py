"""The artifact of some targets of another: a registry's layers, a Hub repository.

A Hub repository holds plain files, one artifact for each torch and architecture, so
that a machine downloads one folder:

    torch2.13/cpu-x86_64-v3/manifest.json …    its records beside: cpu-x86_64-v3.*.json
    torch2.11/sm90/manifest.json …             every target of compute capability 9.0

Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from compilekit import targets
from compilekit.artifact import archive, edit
from compilekit.artifact.manifest import MANIFEST
from compilekit.artifact.store import Artifact
from compilekit.artifact.verification import read_verification, write_verification
from compilekit.artifact.write import write_artifact
from compilekit.errors import Mismatch, MismatchError

_TORCH = re.compile(r"torch(\d+\.\d+)")
_CAPABILITY = re.compile(r"sm(\d+)")


def write_part(artifact: Artifact, chosen: Collection[str], place: Path) -> Artifact:
    """Write the artifact of some targets; what is known of them goes along.

    The verification record does, for the programs are the same byte for byte; the
    signature does where the digest is the same, with all targets chosen.
    """
    part = write_artifact(place, *edit.prune(artifact, targets=chosen))
    if part.digest == artifact.digest:
        archive.write_records(part.root, archive.read_records(artifact))
        return part
    record, _ = read_verification(artifact)
    verified = {
        name: record.targets[name]
        for name in chosen
        if record is not None and name in record.targets
    }
    if verified:
        write_verification(part, verified)
    return part


def write_hub(artifact: Artifact, folder: Path) -> tuple[Artifact, ...]:
    """Write an artifact in the layout of a Hub repository; what else is there stays."""
    places: dict[str, list[str]] = {}
    for name in artifact.manifest.targets:
        places.setdefault(hub_place(artifact, name), []).append(name)
    return tuple(
        write_part(artifact, chosen, folder / place)
        for place, chosen in sorted(places.items())
    )


def hub_place(artifact: Artifact, target: str) -> str:
    """Where a target's artifact lies in a Hub repository."""
    version = ".".join(str(artifact.manifest.factors["torch.version"]).split(".")[:2])
    described = artifact.manifest.targets[target]
    if described["kind"] != "cuda":
        return f"torch{version}/{target}"
    device = described["device"]
    return f"torch{version}/sm{device['major']}{device['minor']}"


def is_hub(folder: Path) -> bool:
    """True if a folder is no artifact and has artifacts in a Hub's layout."""
    if os.path.isfile(folder / MANIFEST) or not os.path.isdir(folder):
        return False
    found = [place for place in folder.glob("*") if _TORCH.fullmatch(place.name)]
    return any(map(os.path.isdir, found))


def capabilities(folder: Path) -> set[str]:
    """Compute capabilities that a Hub repository has artifacts for: ``90``."""
    found = (_CAPABILITY.fullmatch(p.name) for p in folder.glob("torch*/sm*"))
    return {match[1] for match in found if match}


def choose_hub(folder: Path, version: str, capability: str = "") -> Path:
    """The artifact of a Hub repository for this machine.

    Args:
        version: torch's, ``2.13.0``.
        capability: The GPU's compute capability, ``90``; empty without a GPU.
    Raises:
        MismatchError: There is none; it names all that are there.
    """
    own = folder / f"torch{'.'.join(version.split('.')[:2])}"
    if capability and os.path.isfile(own / f"sm{capability}" / MANIFEST):
        return own / f"sm{capability}"
    known, flags = set(targets.list_targets()), targets.cpu_flags()
    fitting = [
        target
        for place in own.glob("*")
        if place.name in known and os.path.isfile(place / MANIFEST)
        for target in [targets.load_target(place.name)]
        if target.kind == "cpu"
        and target.machine == targets.machine()
        and not targets.missing_features(target, flags)
    ]
    if fitting:
        return own / max(fitting, key=lambda target: len(target.features)).name
    there = sorted(
        f"{place.parent.name}/{place.name}"
        for place in folder.glob("torch*/*")
        if os.path.isfile(place / MANIFEST)
    )
    here = f"sm{capability} or " if capability else ""
    raise MismatchError(
        f"no artifact below {folder} fits this machine",
        (
            Mismatch(
                "hub",
                ", ".join(there) or "none",
                f"{own.name}, {here}{targets.machine()}",
                "refuse",
                "An artifact belongs to one torch minor and one architecture.",
                "Download the folder for this machine, or build for it.",
            ),
        ),
    )
