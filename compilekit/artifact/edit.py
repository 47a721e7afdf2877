"""Make one artifact from others: keep a part (prune), put several together (merge).

Both give a manifest and files for `write_artifact`; programs are taken as they are,
byte for byte. The digest is a new one: verify it and sign it again.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from compilekit.artifact import canonical, manifest
from compilekit.artifact.manifest import Manifest, ManifestEntry
from compilekit.artifact.store import Artifact
from compilekit.errors import ConfigError, Mismatch, MismatchError

Parts = tuple[Manifest, dict[str, bytes]]


def prune(
    artifact: Artifact,
    *,
    targets: Collection[str] = (),
    entries: Collection[str] = (),
    buckets: Collection[str] = (),
) -> Parts:
    """The part of an artifact with these targets, entries and buckets; empty = all.

    Kernels, sources and constants that nothing uses any more are left out.

    Raises:
        ConfigError: One isn't in it, or nothing would be left.
    """
    listing = artifact.manifest
    every = {
        bucket.name for entry in listing.entries.values() for bucket in entry.buckets
    }
    _known("target", targets, listing.targets)
    _known("entry", entries, listing.entries)
    _known("bucket", buckets, every)
    kept_targets = {
        n: t for n, t in listing.targets.items() if not targets or n in targets
    }
    kept_entries = {}
    for name, entry in listing.entries.items():
        chosen = tuple(b for b in entry.buckets if not buckets or b.name in buckets)
        if chosen and (not entries or name in entries):
            kept_entries[name] = ManifestEntry(entry.axes, chosen)
    if not kept_entries:
        raise ConfigError("nothing would be left: no entry has one of these buckets")
    keys = [
        (target, name, bucket.name)
        for target in kept_targets
        for name, entry in kept_entries.items()
        for bucket in entry.buckets
    ]
    used = _used(artifact, keys)
    files = {
        path: artifact.read(path)
        for path in listing.files
        if _stays(path, used, kept_targets, kept_entries, keys)
    }
    return listing._replace(targets=kept_targets, entries=kept_entries), files


def _known(what: str, asked: Iterable[str], known: Collection[str]) -> None:
    for name in asked:
        if name not in known:
            raise ConfigError(
                f"{what} {name}: expected one of {', '.join(sorted(known))}",
                known=sorted(known),
            )


def _used(artifact: Artifact, keys: Sequence[tuple[str, str, str]]) -> set[str]:
    """Digests of what calls and programs run, came from and hold."""
    used = set()
    for target, name in {key[:2] for key in keys}:
        native = artifact.entries[target, name].native
        if native is not None:
            used |= {native.digest, native.source}
    for key in keys:
        program = artifact.programs[key]
        for kernel in program.kernels.values():
            used |= {kernel.digest, kernel.source}
        used |= {constant.digest for constant in program.constants.values()}
    return used


def _stays(
    path: str,
    used: Collection[str],
    targets: Collection[str],
    entries: Collection[str],
    keys: Collection[tuple[str, str, str]],
) -> bool:
    parts = path.split("/")
    if path.startswith(manifest.CONTENT_ADDRESSED):
        return parts[1].partition(".")[0] in used
    if parts[0] == "programs":
        inner = parts[3:]
        if len(inner) == 1:
            return parts[1] in targets and parts[2] in entries
        return (parts[1], parts[2], inner[0]) in keys
    if parts[0] in ("autotune", "caches"):
        return parts[1].removesuffix(".json") in targets
    return True


# --- Merging -----------------------------------------------------------------------


def merge(artifacts: Sequence[Artifact]) -> Parts:
    """One artifact with the targets and buckets of all.

    Raises:
        MismatchError: They contradict each other; all contradictions at once.
    """
    first = artifacts[0]
    found: dict[Mismatch, None] = {}
    for other in artifacts[1:]:
        found.update(dict.fromkeys(_contradictions(first, other)))
    targets: dict[str, Mapping[str, Any]] = {}
    files: dict[str, bytes] = {}
    for one in artifacts:
        for name, target in one.manifest.targets.items():
            if targets.setdefault(name, target) != target:
                found[_contradiction(f"target {name}", targets[name], target)] = None
        for path in one.manifest.files:
            data = one.read(path)
            if files.setdefault(path, data) != data:
                digests = canonical.sha256(files[path]), canonical.sha256(data)
                found[_contradiction(path, *digests)] = None
    entries = _entries(artifacts, found)
    for place in targets:
        for name, entry in entries.items():
            for bucket in entry.buckets:
                path = manifest.program_path(place, name, bucket.name)
                if path not in files:
                    what = f"{place} {name} {bucket.name}"
                    found[
                        _contradiction(what, "a program, as every target has", "none")
                    ] = None
    if found:
        raise MismatchError("these artifacts don't make one", tuple(found))
    return first.manifest._replace(targets=targets, entries=entries), files


def _contradictions(first: Artifact, other: Artifact) -> list[Mismatch]:
    """What must be the same in all: it's said once, for all targets and buckets."""
    a, b = first.manifest, other.manifest
    pairs: list[tuple[str, Any, Any]] = [
        (f"model.{field}", getattr(a.model, field), getattr(b.model, field))
        for field in a.model._fields
        if field != "config"
    ]
    pairs += [
        ("routes", a.routes, b.routes),
        ("serve", a.serve._asdict(), b.serve._asdict()),
        ("layout", a.layout, b.layout),
    ]
    pairs += [
        (name, a.factors.get(name), b.factors.get(name))
        for name in sorted({*a.factors, *b.factors})
    ]
    return [_contradiction(n, one, two) for n, one, two in pairs if one != two]


def _entries(
    artifacts: Sequence[Artifact], found: dict[Mismatch, None]
) -> dict[str, ManifestEntry]:
    axes: dict[str, tuple[str, ...]] = {}
    buckets: dict[str, dict[str, Any]] = {}
    for one in artifacts:
        for name, entry in one.manifest.entries.items():
            if axes.setdefault(name, entry.axes) != entry.axes:
                found[_contradiction(f"axes of {name}", axes[name], entry.axes)] = None
            known = buckets.setdefault(name, {})
            for bucket in entry.buckets:
                if known.setdefault(bucket.name, bucket) != bucket:
                    before = dict(known[bucket.name].axes)
                    what = f"bucket {bucket.name} of {name}"
                    found[_contradiction(what, before, dict(bucket.axes))] = None
    return {
        name: ManifestEntry(axes[name], tuple(buckets[name].values())) for name in axes
    }


def _contradiction(what: str, one: Any, two: Any) -> Mismatch:
    return Mismatch(
        what,
        str(one),
        str(two),
        "refuse",
        "One artifact can only say one of them.",
        "Build both from one configuration with one set of packages.",
    )
