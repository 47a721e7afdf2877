"""What differs between two artifacts, from the model down to the kernel.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from compilekit.artifact import canonical, manifest
from compilekit.artifact.store import Artifact


class Change(NamedTuple):
    """One difference.

    Attributes:
        kind: ``model``, ``factor``, ``serve``, ``target``, ``entry``, ``bucket``,
            ``program``, ``kernel``, ``size`` or ``time``.
        name: Of what.
        a: Value in the first artifact; None = it isn't there.
        b: Value in the second.
    """

    kind: str
    name: str
    a: Any
    b: Any


def compare(a: Artifact, b: Artifact) -> tuple[Change, ...]:
    """Every difference; empty exactly if the digests are equal.

    Reports, which hold build times, aren't part of an artifact's identity.
    """
    if a.digest == b.digest:
        return ()
    return tuple(_changes(a, b))


def times_path(target: str) -> str:
    """The report of how many seconds each bucket took: ``entry bucket`` → seconds."""
    return f"reports/{target}/times.json"


def compare_times(a: Artifact, b: Artifact) -> tuple[Change, ...]:
    """Seconds that the build of each bucket took, as far as reports say."""
    return tuple(_pairs("time", _times(a), _times(b)))


def _times(artifact: Artifact) -> dict[str, float]:
    found: dict[str, float] = {}
    for target in artifact.manifest.targets:
        path = times_path(target)
        if path in artifact.reports:
            seconds = canonical.decode(artifact.read(path), path)
            found |= {f"{target} {bucket}": took for bucket, took in seconds.items()}
    return found


def _changes(a: Artifact, b: Artifact) -> Iterator[Change]:
    one, two = a.manifest, b.manifest
    yield from _pairs("model", one.model._asdict(), two.model._asdict())
    yield from _pairs("factor", one.factors, two.factors)
    yield from _pairs("serve", one.serve._asdict(), two.serve._asdict())
    yield from _pairs("manifest", _rest(a), _rest(b))
    for name in _union(one.targets, two.targets):
        yield from _presence("target", name, name in one.targets, name in two.targets)
        if name in one.targets and name in two.targets:
            flat = (_flat(one.targets[name]), _flat(two.targets[name]))
            prefixed = [{f"{name} {k}": v for k, v in part.items()} for part in flat]
            yield from _pairs("target", *prefixed)
    for pair in _union(a.entries, b.entries):
        name = " ".join(pair)
        yield from _presence("entry", name, pair in a.entries, pair in b.entries)
        if pair in a.entries and pair in b.entries:
            fields = (a.entries[pair]._asdict(), b.entries[pair]._asdict())
            named = [{f"{name} {k}": v for k, v in part.items()} for part in fields]
            yield from _pairs("entry", *named)
    for key in _union(a.programs, b.programs):
        name = " ".join(key)
        yield from _presence("bucket", name, key in a.programs, key in b.programs)
        if key in a.programs and key in b.programs:
            yield from _program(a, b, key)
    yield from _files(a, b)
    yield from _pairs("size", {"bytes": _size(a)}, {"bytes": _size(b)})


def _program(a: Artifact, b: Artifact, key: tuple[str, str, str]) -> Iterator[Change]:
    """A bucket that both have: host code, calling convention, kernels and configs."""
    name = " ".join(key)
    path = manifest.call_path(*key)
    code = [x.manifest.files[path].sha256 for x in (a, b)]
    yield from _pairs(
        "program", {f"{name} call.py": code[0]}, {f"{name} call.py": code[1]}
    )
    fields = [x.programs[key]._asdict() for x in (a, b)]
    kernels = [part.pop("kernels") for part in fields]
    named = [{f"{name} {k}": v for k, v in part.items()} for part in fields]
    yield from _pairs("program", *named)
    for label in _union(*kernels):
        found = [_flat(k[label]._asdict()) if label in k else {} for k in kernels]
        prefixed = [{f"{name} {label} {k}": v for k, v in x.items()} for x in found]
        yield from _pairs("kernel", *prefixed)


def _files(a: Artifact, b: Artifact) -> Iterator[Change]:
    """Files that neither a program nor a kernel above stands for."""
    shown = ("programs/", "kernels/")
    listed = [
        {p: f.sha256 for p, f in x.manifest.files.items() if not p.startswith(shown)}
        for x in (a, b)
    ]
    yield from _pairs("file", *listed)
    extra = [
        {
            p: f.sha256
            for p, f in x.manifest.files.items()
            if p.startswith("programs/") and p.endswith(".pyc")
        }
        for x in (a, b)
    ]
    common = [{p: d for p, d in x.items() if all(p in y for y in extra)} for x in extra]
    yield from _pairs("file", *common)


def _rest(artifact: Artifact) -> dict[str, Any]:
    listing = artifact.manifest
    return {"routes": listing.routes, "layout": listing.layout}


def _size(artifact: Artifact) -> int:
    return sum(file.size for file in artifact.manifest.files.values())


def _presence(kind: str, name: str, a: bool, b: bool) -> Iterator[Change]:
    if a != b:
        yield Change(kind, name, "present" if a else None, "present" if b else None)


def _pairs(kind: str, a: Any, b: Any) -> Iterator[Change]:
    for name in _union(a, b):
        if a.get(name) != b.get(name):
            yield Change(kind, name, a.get(name), b.get(name))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _union(a: Any, b: Any) -> list[Any]:
    return list(dict.fromkeys([*a, *b]))
