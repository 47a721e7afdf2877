"""Load cubins and launch them, through the launcher that is part of torch itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from compilekit._torch.runtime import cubin_launcher, load_cubin
from compilekit.artifact import Artifact
from compilekit.artifact.program import KernelRef
from compilekit.errors import AttachError
from compilekit.runtime.kernelfile import kernel_file

# Loaded functions by (cubin digest, symbol, device index): buckets, models and
# artifacts in this process share them.
_functions: dict[tuple[str, str, int], int] = {}


def kernel_launcher(
    artifact: Artifact, kernel: KernelRef, index: int
) -> Callable[..., None]:
    """A function ``launch(arguments, stream)`` for one kernel on one device.

    Everything but the arguments was decided at build, so a launch is one C call. The
    caller holds the lock of `compilekit.runtime.program`.

    Raises:
        AttachError: the driver refuses the cubin.
    """
    facts = kernel.launch
    return functools.partial(
        cubin_launcher(),
        _function(artifact, kernel, index),
        *facts["grid"],
        facts["num_warps"],
        facts["shared"],
        facts["arg_types"] + "O" * facts["scratch"],
    )


def _function(artifact: Artifact, kernel: KernelRef, index: int) -> int:
    symbol, shared = kernel.launch["symbol"], kernel.launch["shared"]
    key = (kernel.digest, symbol, index)
    if key not in _functions:
        path = f"kernels/{kernel.digest}.cubin"
        try:
            with kernel_file(artifact, path) as place:
                _functions[key] = load_cubin(place, symbol, shared, index)
        except RuntimeError as exc:
            name = torch.cuda.get_device_name(index)
            raise AttachError(
                f"kernel {artifact.path(path)} can't be loaded on {name}: {exc}",
                hint="Is the driver older than the CUDA that assembled it?",
                kernel=kernel.digest,
            ) from exc
    return _functions[key]
