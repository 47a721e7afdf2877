"""Where programs run."""

from __future__ import annotations

import itertools

import torch

from compilekit.errors import AttachError, ConfigError


def model_place(model: torch.nn.Module) -> torch.device:
    """The model's device: its first GPU, or else the CPU."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))


def asked_place(device: str | torch.device) -> torch.device:
    """The device that somebody named; a GPU without a number is the current one.

    Raises:
        ConfigError: torch knows no such device.
        AttachError: no program runs on it.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(f"device: expected cpu or cuda, found {device}") from exc
    if place.type not in ("cpu", "cuda"):
        raise AttachError(
            f"programs run on cpu and cuda, and device = {device} was asked for",
            hint='Use device = "cpu", or build for the device.',
        )
    if str(place) == "cuda":
        # Without a GPU the check of the machine says what is missing.
        here = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return torch.device("cuda", here)
    return place
