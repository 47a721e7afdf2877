"""The real weights that ``[freeze]`` folds into programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from compilekit.compiler.models import build_real
from compilekit.compiler.sources import Place
from compilekit.config import Config
from compilekit.errors import NeedsDeviceError
from compilekit.runtime.frozen import value_digest
from compilekit.runtime.model import ModelView
from compilekit.targets import Target


class FrozenWeights:
    """A model with its weights, on the device that its programs are compiled for.

    Digests are kept: every bucket asks for them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._view = ModelView(model)
        self._digests: dict[str, str] = {}

    def values(self, places: Sequence[Place]) -> dict[int, torch.Tensor]:
        """Graph input → value of each that is a tensor of the model."""
        return {
            index: self._view.get(place.path).detach()
            for index, place in enumerate(places)
            if place.kind == "tensor"
        }

    def digests(self, tensor_paths: Iterable[str]) -> dict[str, str]:
        """Path → `value_digest` of each of some tensors."""
        wanted = sorted(tensor_paths)
        for path in wanted:
            if path not in self._digests:
                self._digests[path] = value_digest(self._view.get(path))
        return {path: self._digests[path] for path in wanted}


def read_weights(config: Config, target: Target, device: str) -> FrozenWeights | None:
    """The weights that the configuration freezes; None if it freezes none.

    Args:
        device: Where the programs' tensors are, e.g. ``cuda:0``.
    Raises:
        ConfigError: they can't be found, or don't fit the model.
        NeedsDeviceError: the target's device isn't here.
    """
    if not config.freeze.weights:
        return None
    if target.kind == "cuda":
        from compilekit._torch import emulation

        if not emulation.is_here(target):
            raise NeedsDeviceError(
                f"target {target.name}: [freeze] computes with weights on the device,"
                " and no such GPU is here",
                hint="Build there, or leave [freeze] out: nothing else needs the GPU.",
            )
    return FrozenWeights(
        build_real(config, weights=config.freeze.weights, device=device)
    )
