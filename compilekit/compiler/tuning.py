"""The tuning file: which config won for each kernel, on a machine that has the GPU.

``compilekit tune`` writes it, ``[autotune] from`` gives it to builds, which run
anywhere::

    {"schema": 1, "target": "nvidia-h200", "torch": "2.11.0", "kernels": {
        "<sha256 of the kernel's source>": {
            "config": {"XBLOCK": 1, "R0_BLOCK": 2048, "num_warps": 8, "num_stages": 1},
            "default": {...}, "ms": 0.031, "default_ms": 0.052, "measured": 24}},
     "choices": {
        "bfloat16 1 x 3584 @ 3584b 512b 512b": {
            "blocks": [2, 256, 1, 4], "ms": 0.0095, "library_ms": 0.027,
            "measured": 5}}}

Kernels are known by their source alone: equal ones in other buckets, models and torch
versions have been tuned as well. A choice says how a product of few rows is computed:
by our kernel, cut into such `blocks` (see kernels/products.py), or, where they are
empty, by the library that torch calls.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compilekit.config import Config
from compilekit.errors import ConfigError

SCHEMA = 1

Kernels = Mapping[str, Mapping[str, Any]]
"""Source digest → ``config``, ``default``, ``ms``, ``default_ms``, ``measured``."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What a tuning file holds.

    Attributes:
        target: Where it was measured; empty if nothing was.
        torch: With which torch.
        kernels: See `Kernels`.
        choices: Product → ``blocks``, ``ms``, ``library_ms``, ``measured``.
    """

    target: str = ""
    torch: str = ""
    kernels: Kernels = dataclasses.field(default_factory=dict)
    choices: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def configs(self) -> dict[str, Mapping[str, Any]]:
        """Source digest → the config that won."""
        return {digest: each["config"] for digest, each in self.kernels.items()}

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def read_tuning(config: Config) -> Tuning:
    """What a configuration's ``[autotune] from`` names; an empty one without it.

    Raises:
        ConfigError: the file isn't there, or isn't one that ``compilekit tune`` wrote.
    """
    if not config.autotune.source:
        return Tuning()
    return load_tuning(config.path.parent / config.autotune.source)


def load_tuning(path: Path) -> Tuning:
    """Read a tuning file.

    Raises:
        ConfigError: it isn't there, or isn't one that ``compilekit tune`` wrote.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"[autotune] from: {path} can't be read: {exc.strerror}",
            hint="`compilekit tune` writes it, on a machine that has the device.",
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"[autotune] from: {path} isn't JSON: {exc}") from exc
    problem = _problem(data)
    if problem:
        raise ConfigError(
            f"[autotune] from: {path} isn't a tuning file: {problem}",
            hint="`compilekit tune` writes it, on a machine that has the device.",
        )
    return Tuning(
        data["target"], data["torch"], data["kernels"], data.get("choices", {})
    )


def _problem(data: Any) -> str:
    """What keeps a document from being a tuning file; empty if nothing does."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        return f"expected schema {SCHEMA}, found {found}"
    if not isinstance(data.get("target"), str) or not isinstance(
        data.get("torch"), str
    ):
        return "target and torch must be names"
    kernels = data.get("kernels")
    if not isinstance(kernels, dict):
        return "kernels must be a table"
    for digest, kernel in kernels.items():
        values = kernel.get("config") if isinstance(kernel, dict) else None
        good = isinstance(values, dict) and {"num_warps", "num_stages"} <= values.keys()
        if not good:
            return f"kernel {digest[:12]} has no config with num_warps and num_stages"
    choices = data.get("choices", {})
    if not isinstance(choices, dict):
        return "choices must be a table"
    for key, choice in choices.items():
        blocks = choice.get("blocks") if isinstance(choice, dict) else None
        good = isinstance(blocks, list) and len(blocks) in (0, 4)
        if not good or any(type(number) is not int for number in blocks or ()):
            return f"choice {key} has no blocks: four numbers, or none"
    return ""
