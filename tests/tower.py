"""The artifact of tests/serving: built once for all test modules of a run."""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from compilekit import config as configuration
from compilekit.compiler.build import build

FOLDER = Path(__file__).parent / "serving"
sys.path.insert(0, str(FOLDER))

from tower_model import Tower  # noqa: E402

__all__ = ["FOLDER", "Tower", "artifact", "call", "live_model"]


@functools.cache
def artifact() -> Path:
    """Four buckets of the tower, built by the real build."""
    folder = Path(tempfile.mkdtemp(prefix="compilekit-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = FOLDER / "compilekit.toml"
    result = build(configuration.load(path), folder / "tower", verify=False)
    if result.artifact is None:
        raise RuntimeError(f"the tower doesn't build: {result.buckets}")
    return result.artifact


def live_model(layers: int = 2) -> Tower:
    """The tower as a server would have it: same weights each time, eval mode."""
    torch.manual_seed(0)
    return Tower(layers).eval()


def call(b: int = 1, s: int = 64) -> dict[str, torch.Tensor]:
    """Arguments of one call."""
    generator = torch.Generator().manual_seed(b * 1000 + s)
    mask = torch.ones(b, s, dtype=torch.int64)
    mask[:, s // 2 :] = 0
    return {"x": torch.randn(b, s, 16, generator=generator), "mask": mask}
