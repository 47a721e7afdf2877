"""The artifact on disk: written atomically, opened only after every byte is verified.

    write_artifact(out_dir, manifest, files, reports)   files → Artifact
    open_artifact(path)                                 Artifact, or an error per file

Modules: `manifest` (what is in it), `program` (calling conventions), `canonical` (JSON
and digests), `schema` (JSON Schema checks), `store` (reading), `write` (writing),
`verification` (the record beside an artifact).
``docs/format.md`` describes the format for readers without compilekit.

Standard library only.
"""

from typing import TYPE_CHECKING, Any

from compilekit.artifact.manifest import (
    File,
    Manifest,
    ManifestEntry,
    Model,
    Serve,
)
from compilekit.artifact.store import Artifact, open_artifact

if TYPE_CHECKING:
    from compilekit.artifact.verification import (
        TargetVerified,
        Verification,
        read_verification,
        why_unverified,
        write_verification,
    )
    from compilekit.artifact.write import write_artifact

__all__ = [
    "Artifact",
    "File",
    "Manifest",
    "ManifestEntry",
    "Model",
    "Serve",
    "TargetVerified",
    "Verification",
    "open_artifact",
    "read_verification",
    "why_unverified",
    "write_artifact",
    "write_verification",
]

# A start only reads: importing what writes and verifies would cost it 7 ms.
_LATER = {
    "TargetVerified": "verification",
    "Verification": "verification",
    "read_verification": "verification",
    "why_unverified": "verification",
    "write_artifact": "write",
    "write_verification": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_LATER[name]}")
    value = globals()[name] = getattr(module, name)
    return value
