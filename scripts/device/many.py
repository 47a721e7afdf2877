"""Attach an artifact with 64 buckets: how long it takes, eagerly and lazily.

    python scripts/device/many.py make ARTIFACT OUT      on any machine
    python scripts/device/many.py attach OUT LOADING     on the GPU

``make`` copies one bucket of a built artifact 63 times under other names, so that each
has its own program, host code and parsed files, as large as the real one's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from compilekit.artifact import ManifestEntry, canonical, open_artifact, write_artifact
from compilekit.artifact.program import to_json
from compilekit.plan import Bucket

COUNT = 64


def make(source: Path, out: Path) -> None:
    """Write the artifact with 64 buckets."""
    artifact = open_artifact(source).parse_all()
    manifest = artifact.manifest
    (target, entry, name), program = sorted(artifact.programs.items())[-1]
    place = f"programs/{target}/{entry}"
    files = {
        path: artifact.read(path)
        for path in manifest.files
        if not path.startswith(f"{place}/") or path == f"{place}/entry.json"
    }
    buckets = []
    for number in range(COUNT):
        axes = {**program.axes, "s": 1000 + number}
        bucket = Bucket(f"b1_s{1000 + number}", axes)
        buckets.append(bucket)
        renamed = program._replace(bucket=bucket.name, axes=axes)
        folder = f"{place}/{bucket.name}"
        files[f"{folder}/program.json"] = canonical.encode(to_json(renamed))
        for file in ("call.py", "call.pyc"):
            files[f"{folder}/{file}"] = artifact.read(f"{place}/{name}/{file}")
    axes_of = manifest.entries[entry].axes
    write_artifact(
        out,
        manifest._replace(entries={entry: ManifestEntry(axes_of, tuple(buckets))}),
        files,
        {},
    )


def attach(path: str, loading: str) -> None:
    """Attach once in this process, and print the phases."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/qwen2.5-7b"))
    import torch
    from measure import build_model

    import compilekit

    model = build_model()
    torch.cuda.synchronize()
    began = time.perf_counter()
    receipt = compilekit.attach(model, path, loading=loading)
    seconds = time.perf_counter() - began
    phases = {name: round(ms, 1) for name, ms in receipt.milliseconds.items()}
    print(json.dumps({"loading": loading, "attach_s": round(seconds, 3), **phases}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        attach(sys.argv[2], sys.argv[3])
