"""Target descriptions: what a program is built for, one JSON file each.

Each value in a file carries a mark that says where it comes from: ``probed`` (read on
a machine that has the hardware), ``datasheet`` (its maker's or torch's documentation
or source) or ``assumed`` (inferred, still to be confirmed).

Standard library only.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from compilekit.errors import ConfigError, ResourceError, nearest_name

SCHEMA = 1
MARKS = ("probed", "datasheet", "assumed")

_FOLDER = Path(__file__).parent
_CPUINFO = Path("/proc/cpuinfo")

# Names this machine's kernel gives the architecture that targets call by one name.
_MACHINES: Mapping[str, str] = {"AMD64": "x86_64", "amd64": "x86_64"}


class Target(NamedTuple):
    """The hardware a program is built for.

    A GPU's description has the CPU fields of its host, for the code that runs there,
    and everything the compiler asks about the device in `device`.

    Attributes:
        name: E.g. ``cpu-x86_64-v3``.
        kind: ``cpu``, or a device type of torch.
        machine: Architecture as ``platform.machine()`` names it.
        march: Value of the C++ compiler's ``-march=``.
        simd_width: Vector width of generated C++ kernels in bits.
        features: CPU features the code needs, by their names in ``/proc/cpuinfo``.
        aten_capability: The least ``torch.backends.cpu.get_cpu_capability()`` that a
            machine with these features has.
        device: Property name → value of a GPU; empty for a CPU.
        marks: Name of each value above → ``probed``, ``datasheet`` or ``assumed``.
    """

    name: str
    kind: str
    machine: str
    march: str
    simd_width: int
    features: tuple[str, ...]
    aten_capability: str
    device: Mapping[str, bool | int | float | str] = {}
    marks: Mapping[str, str] = {}


def list_targets() -> tuple[str, ...]:
    """Names of the targets that come with compilekit or that were added, sorted."""
    return tuple(sorted(_files()))


def _files() -> dict[str, Path]:
    """Name → file; the folder that ``COMPILEKIT_TARGETS`` names comes first."""
    added = os.environ.get("COMPILEKIT_TARGETS", "")
    folders = [_FOLDER, Path(added)] if added else [_FOLDER]
    return {path.stem: path for folder in folders for path in folder.glob("*.json")}


def load_target(name: str) -> Target:
    """Read the description of a target.

    Args:
        name: One of `list_targets`, or ``native`` for `native_target`.

    Raises:
        ConfigError: No target has this name.
        ResourceError: ``native``, and no target fits this machine.
    """
    if name == "native":
        return native_target()
    known = list_targets()
    if name not in known:
        nearest = nearest_name(name, known)
        raise ConfigError(
            f"target {name}: expected native or one of {', '.join(known)}",
            hint=f"Did you mean {nearest}?" if nearest else "",
            target=name,
            nearest=nearest,
        )
    return read_target(_files()[name])


def read_target(path: Path) -> Target:
    """Read a target description from any place.

    Raises:
        ConfigError: The file's schema isn't the one this version knows.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ConfigError(
            f"{path}: expected target schema {SCHEMA}, found {data['schema']}",
            hint="Use the compilekit version that wrote it, or a newer one.",
        )
    marked = {**data["values"], **data.get("device", {})}
    values = {name: entry["value"] for name, entry in data["values"].items()}
    return Target(
        name=data["name"],
        kind=data["kind"],
        machine=values["machine"],
        march=values["march"],
        simd_width=values["simd_width"],
        features=tuple(values["features"]),
        aten_capability=values["aten_capability"],
        device={name: item["value"] for name, item in data.get("device", {}).items()},
        marks={name: entry["mark"] for name, entry in marked.items()},
    )


def machine() -> str:
    """This machine's architecture, e.g. ``x86_64``."""
    name = platform.machine()
    return _MACHINES.get(name, name)


def cpu_flags() -> frozenset[str]:
    """Features of this machine's CPU that the kernel lets programs use.

    Features that only some of its cores have are left out.

    Raises:
        ResourceError: ``/proc/cpuinfo`` can't be read (not Linux, or hidden).
    """
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ResourceError(
            f"{_CPUINFO}: can't read the CPU's features: {error.strerror}",
            hint="compilekit needs Linux with /proc mounted.",
        ) from error
    cores = []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        # x86 says "flags", ARM "Features".
        if name.strip().lower() in ("flags", "features"):
            cores.append(frozenset(value.split()))
    return frozenset.intersection(*cores) if cores else frozenset()


def cpu_name() -> str:
    """What this machine's CPU calls itself; empty where the kernel doesn't say."""
    with suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return ""


def missing_features(target: Target, flags: Collection[str]) -> tuple[str, ...]:
    """CPU features that `target` needs and `flags` lacks, in the target's order."""
    return tuple(name for name in target.features if name not in flags)


def native_target() -> Target:
    """The CPU target with the most features that this machine has.

    Raises:
        ResourceError: None fits; the message names what the closest one lacks.
    """
    here, flags = machine(), cpu_flags()
    cpus = [t for t in map(load_target, list_targets()) if t.kind == "cpu"]
    cpus = [target for target in cpus if target.machine == here]
    cpus.sort(key=lambda target: len(target.features))
    fitting = [target for target in cpus if not missing_features(target, flags)]
    if fitting:
        return fitting[-1]
    if not cpus:
        raise ResourceError(
            f"no target for this machine: expected x86_64, found {here}",
            hint=f"Known targets: {', '.join(list_targets())}.",
            machine=here,
        )
    missing = missing_features(cpus[0], flags)
    raise ResourceError(
        f"no target for this CPU: {cpus[0].name} needs {', '.join(missing)},"
        " which it lacks",
        hint="Run on a CPU with AVX2 (2013 or later), or turn the features on in the"
        " virtual machine.",
        machine=here,
        missing=list(missing),
    )
