"""A path to load a kernel from, whose bytes are the verified ones.

A kernel can only be loaded by path. The file in the artifact is used where it lies, so
that all processes of a machine share its pages. Where somebody could change it after it
was verified, or where the file system forbids to map code (noexec), its verified bytes
are put into a file in memory that only this process has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from compilekit.artifact import Artifact
from compilekit.errors import ResourceError

# Where each file in memory gets a path of its own.
_made = 0


@contextmanager
def kernel_file(artifact: Artifact, path: str) -> Iterator[str]:
    """A path to load a listed kernel from; good within the block.

    Raises:
        DigestError: the kernel has changed since the artifact was opened.
        ResourceError: no file can be made in memory.
    """
    if not (artifact.from_memory or is_noexec(artifact)):
        yield str(artifact.path(path))
        return
    data = artifact.read(path)
    try:
        descriptor = os.memfd_create(os.path.basename(path)[:64], os.MFD_CLOEXEC)
    except OSError as exc:
        raise ResourceError(
            f"kernel {path} of artifact {artifact.root} can't be put into memory:"
            f" {exc.strerror}",
            hint="Put the artifact where only root or this user can write, on a file"
            " system that isn't mounted noexec.",
        ) from exc
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        yield _unique_path(descriptor)
    finally:
        os.close(descriptor)


def is_noexec(artifact: Artifact) -> bool:
    """True if the artifact's file system forbids to map its kernels."""
    return bool(os.statvfs(artifact.root).f_flag & os.ST_NOEXEC)


def _unique_path(descriptor: int) -> str:
    """A path of an open file that no earlier one of this process had.

    The dynamic loader takes a path that it has loaded before for the same library, and
    numbers of descriptors come again. ``.`` and ``/`` spell a number instead.
    """
    global _made
    _made += 1
    spelled = "".join("./" if bit == "0" else ".//" for bit in f"{_made:b}")
    return f"/proc/self/fd/{spelled}{descriptor}"
