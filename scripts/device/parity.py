"""Say whether two builds of one configuration hold the same programs and kernels.

    python scripts/device/parity.py BUILT_WITHOUT_A_GPU BUILT_ON_THE_GPU

Compares digests: of each kernel's source, of its machine code, of host code, of the
calling convention. Ends with 1 if kernel sources differ.
"""

from __future__ import annotations

import sys
from typing import Any

from compilekit.artifact import Artifact, open_artifact


def main() -> None:
    """Print one line per kind of file, and every difference with its place."""
    first, second = (open_artifact(path).parse_all() for path in sys.argv[1:3])
    same_digest = first.digest == second.digest
    print(f"artifact digest: {'equal' if same_digest else 'different'}")
    differing = False
    for kind in ("source", "digest"):
        mine, other = (kernels(artifact, kind) for artifact in (first, second))
        wrong = {
            place
            for place in mine.keys() | other.keys()
            if mine.get(place) != other.get(place)
        }
        what = {"source": "kernel sources", "digest": "cubins"}[kind]
        print(f"{what}: {len(mine)} launches, {len(wrong)} differ")
        for place in sorted(wrong):
            print(f"  {place}: {mine.get(place)} and {other.get(place)}")
        differing |= kind == "source" and bool(wrong)
    programs = [path for path in first.manifest.files if path.startswith("programs/")]
    wrong_files = [
        path
        for path in programs
        if first.manifest.files[path] != second.manifest.files.get(path)
    ]
    print(f"program files: {len(programs)}, {len(wrong_files)} differ")
    for path in wrong_files:
        print(f"  {path}")
    for name in ("factors", "targets"):
        mine_, other_ = (getattr(a.manifest, name) for a in (first, second))
        if mine_ != other_:
            print(f"{name}: {mine_} and {other_}")
    sys.exit(differing)


def kernels(artifact: Artifact, field: str) -> dict[str, Any]:
    """Target, entry, bucket and name of every launch → a digest of its kernel."""
    return {
        "/".join((*place, name)): getattr(kernel, field)
        for place, program in artifact.programs.items()
        for name, kernel in program.kernels.items()
    }


if __name__ == "__main__":
    main()
