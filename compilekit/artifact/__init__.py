"""The artifact on disk: written atomically, opened only after every byte is verified.

    write_artifact(out_dir, manifest, files, reports)   files → Artifact
    open_artifact(path)                                 Artifact, or an error per file

Modules: `manifest` (what is in it), `program` (calling conventions), `canonical` (JSON
and digests), `schema` (JSON Schema checks), `store` (reading), `write` (writing),
`verification` (the record beside an artifact).
``docs/format.md`` describes the format for readers without compilekit.

Standard library only.
"""

from compilekit.artifact.manifest import (
    File,
    Manifest,
    ManifestEntry,
    Model,
    Serve,
)
from compilekit.artifact.store import Artifact, open_artifact
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
