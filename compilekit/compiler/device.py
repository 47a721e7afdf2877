"""The environment of a process that compiles for a GPU, here or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compilekit import errors
from compilekit.targets import Target


def cuda_environment(
    target: Target, scratch: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """An environment in which torch sees a target's GPU.

    Where it isn't, a stub CUDA runtime in `scratch` is preloaded.

    Raises:
        NeedsDeviceError: this torch wasn't built for CUDA.
    """
    from compilekit._torch import emulation
    from compilekit._torch.emulation.assembler import check_assembler
    from compilekit._torch.versions import installed_torch

    installed = installed_torch()
    if installed.cuda is None:
        raise errors.NeedsDeviceError(
            f"target {target.name} needs a CUDA build of torch; this is"
            f" {installed.version}",
            hint="Install torch's CUDA wheel; no GPU or driver is needed.",
        )
    check_assembler(target)
    if emulation.is_here(target):
        return emulation.native_environment(environment)
    stubs = emulation.make_stubs(target, installed.cuda, scratch / "stubs")
    return emulation.environment(stubs, environment)
