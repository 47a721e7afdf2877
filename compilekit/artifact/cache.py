"""``caches/<target>/cache.json``: what the cache route restores, as named tuples.

Contents lie beside it, each once and named by its digest (``blobs/``); compiled C++
kernels share ``kernels/`` with the program route. ``docs/format.md`` describes it.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from compilekit.artifact import canonical, schema
from compilekit.artifact.manifest import refuse

SCHEMA = 1

# Stands in stored files for the directory that they're restored to. JSON must not
# escape it, and no path of a real machine can look like it.
PLACE = "[compilekit:cache]"


class CacheKey(NamedTuple):
    """One key that a bucket looked up while it was compiled.

    Attributes:
        kind: ``FX graph``, ``AOTAutograd`` or ``Triton``.
        key: What the compiler looks up.
        bucket: ``entry/bucket`` that asked for it first.
        components: Blob with everything that went into it: name → hash and text.
    """

    kind: str
    key: str
    bucket: str
    components: str


class StoredPackage(NamedTuple):
    """The Dynamo package of one function.

    Attributes:
        function: Module, qualified name, and the class it's bound to.
        content: Blob with torch's part, a pickle.
        facts: Blob with ours: settings, sources, extra guards, globals.
    """

    function: str
    content: str
    facts: str


class Cache(NamedTuple):
    """``cache.json``.

    Attributes:
        target: As in the path.
        files: Path below the restored directory → blob.
        relocated: Those of `files` in which `PLACE` stands for that directory.
        kernels: Kernel key → digest of the shared object in ``kernels/``.
        keys: Every key that was looked up, sorted.
        packages: Sorted by function.
        traced: Frames that torch traces again at every start → why.
        factors: What the caches depend on beyond the manifest's factors.
        recompile_limit: Variants of one function that Dynamo must allow.
        layout: ``rank`` and ``world_size`` of the process that was built, if it was one
            of several; else nothing.
    """

    target: str
    files: Mapping[str, str]
    relocated: tuple[str, ...]
    kernels: Mapping[str, str]
    keys: tuple[CacheKey, ...]
    packages: tuple[StoredPackage, ...]
    traced: Mapping[str, str]
    factors: Mapping[str, Any]
    recompile_limit: int
    layout: Mapping[str, Any] = {}
    schema: int = SCHEMA


def cache_path(target: str) -> str:
    """Where a target's `Cache` lies."""
    return f"caches/{target}/cache.json"


def blob_path(target: str, digest: str) -> str:
    """Where a blob of a target lies."""
    return f"caches/{target}/blobs/{digest}"


def cache_to_json(cache: Cache) -> dict[str, Any]:
    """Plain JSON values."""
    return cast(dict[str, Any], canonical.plain(cache))


def cache_from_json(data: bytes, target: str, files: Mapping[str, Any]) -> Cache:
    """Rebuild a cache's description from its file.

    Args:
        files: What the manifest lists; everything referred to must be there.
    Raises:
        ManifestError: malformed, or it contradicts the path or the manifest.
    """
    path = cache_path(target)
    fields = canonical.decode(data, path)
    schema.validate("cache", fields, path)
    if fields["target"] != target:
        refuse(f"target: expected {target!r}, found {fields['target']!r}", path)
    cache = Cache(
        **{
            **fields,
            "relocated": tuple(fields["relocated"]),
            "keys": tuple(CacheKey(**key) for key in fields["keys"]),
            "packages": tuple(StoredPackage(**one) for one in fields["packages"]),
        }
    )
    blobs = {
        *cache.files.values(),
        *(key.components for key in cache.keys),
        *(one.content for one in cache.packages),
        *(one.facts for one in cache.packages),
    }
    wanted = {blob_path(target, digest) for digest in blobs}
    wanted |= {f"kernels/{digest}.so" for digest in cache.kernels.values()}
    for missing in sorted(wanted - files.keys()):
        refuse(f"expected {missing}, found nothing", path)
    return cache
