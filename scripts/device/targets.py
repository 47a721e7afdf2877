"""On a GPU: which of an artifact's targets is taken, here and on described devices.

    python scripts/device/targets.py ARTIFACT

ARTIFACT is that of ``plain.toml`` built for several targets. The device that is here
gets its own. Every other target's device is then put in its place: one that the
artifact has is taken, another of an architecture that it has is taken with a warning,
and the rest is refused, naming what the artifact holds and what is here.
"""

from __future__ import annotations

import sys
from unittest import mock

from compilekit import targets
from compilekit.artifact import open_artifact
from compilekit.errors import MismatchError
from compilekit.runtime import gpu
from compilekit.runtime.check import choose_target


def main() -> None:
    """One line per device; ends with 1 if a choice is wrong."""
    artifact = open_artifact(sys.argv[1])
    here = gpu.gpu_here()
    if here is None:
        sys.exit("there is no GPU")
    held = artifact.manifest.targets
    wrong = False
    described = map(targets.load_target, targets.list_targets())
    for target in (t for t in described if t.kind == "cuda"):
        device = target.device
        capability = (device["major"], device["minor"])
        same = {
            name
            for name in held
            if capability
            == (held[name]["device"]["major"], held[name]["device"]["minor"])
        }
        expected = {target.name} & held.keys() or same or {"refused"}
        injected = here._replace(
            name=str(device["name"]),
            major=int(device["major"]),
            minor=int(device["minor"]),
            multi_processor_count=int(device["multi_processor_count"]),
            shared_memory=int(device["shared_memory_per_block_optin"]),
        )
        is_here = injected == here
        with mock.patch.object(gpu, "gpu_here", return_value=injected):
            try:
                taken, why = choose_target(artifact, "cuda"), ""
            except MismatchError as exc:
                taken, why = "refused", f": {exc}".replace("\n", " ")
        wrong |= taken not in expected
        place = "here" if is_here else "described"
        print(f"{device['name']} ({place})\t{taken}{why}", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
