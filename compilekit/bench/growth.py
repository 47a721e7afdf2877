"""How compilekit's start-up overhead grows: with buckets, with layers, with kernels.

Each line varies one number and keeps the others: a Qwen2 of hidden size 256 with more
buckets or more layers, and a chain of blocks whose kernels all differ. A layer that
repeats brings no new kernel, so layers and kernels are lines of their own. Overhead is
that of ``bench startup``: time to all first outputs less one steady call of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import events
from ..artifact import open_artifact
from ..config import Config, load
from ..errors import HarvestError
from . import startup
from .process import OnProcessEvent
from .records import Spread, write_json

SCHEMA = 1

SIZES = (64, 128, 256, 32, 48, 96, 192, 384)
"""Sequence lengths; a line with n buckets takes the first n."""

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 1000,
}

_QWEN2_TOML = """\
[model]
source = "hf:."
class = "Qwen2ForCausalLM"
dtype = "float32"
config = {{ num_hidden_layers = {layers} }}

[axes]
s = {sizes}

[entries.forward]
kwargs = {{ use_cache = false }}

[entries.forward.inputs.input_ids]
shape = [1, "s"]
dtype = "int64"
high = 1000
"""

_CHAIN = '''\
"""A chain of blocks; the constant in each makes its kernel a different one."""

import torch


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Linear(64, 64) for _ in range({kernels})
        )

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x) * (1 + index / 64))
        return x


def make():
    return Chain()
'''

_CHAIN_TOML = """\
[model]
source = "{module}:make"
dtype = "float32"

[axes]
b = [16]

[entries.forward.inputs.x]
shape = ["b", 64]
dtype = "float32"
"""


@dataclasses.dataclass(frozen=True)
class GrowthPoint:
    """One measured configuration.

    Attributes:
        value: What the line varies: buckets, layers or blocks.
        kernels: Kernels in the artifact, each counted once.
        artifact_bytes: Size of the artifact's files.
        overhead_ms: Over all processes.
        attach_ms: The part of it before the first call.
    """

    value: int
    kernels: int
    artifact_bytes: int
    overhead_ms: Spread
    attach_ms: Spread


@dataclasses.dataclass(frozen=True)
class GrowthLine:
    """One number varied.

    Attributes:
        axis: ``buckets``, ``layers`` or ``kernels``.
        fixed: What stays the same, in words.
        points: In the order of the values.
    """

    axis: str
    fixed: str
    points: tuple[GrowthPoint, ...]

    @property
    def slope_ms(self) -> float:
        """Milliseconds per unit, a least-squares fit through the medians.

        The unit of the ``kernels`` line is a kernel, not a block.
        """
        xs = [float(self._unit(point)) for point in self.points]
        return slope(xs, [point.overhead_ms.median for point in self.points])

    def __str__(self) -> str:
        shown = ", ".join(
            f"{self._unit(point)}: {point.overhead_ms.median:.1f} ms"
            for point in self.points
        )
        unit = self.axis.removesuffix("s")
        return (
            f"overhead by {self.axis} ({self.fixed}): {shown};"
            f" {self.slope_ms:+.2f} ms per {unit}"
        )

    def _unit(self, point: GrowthPoint) -> int:
        return point.kernels if self.axis == "kernels" else point.value


@dataclasses.dataclass(frozen=True)
class GrowthResult:
    """Every line of one run."""

    threads: int
    repeat: int
    environment: dict[str, str]
    lines: tuple[GrowthLine, ...]

    def as_json(self) -> dict[str, Any]:
        """Every point, with the fitted slopes, as plain JSON values."""
        lines = [
            {**dataclasses.asdict(line), "slope_ms": line.slope_ms, "text": str(line)}
            for line in self.lines
        ]
        return {"schema": SCHEMA, **dataclasses.asdict(self), "lines": lines}


def run(
    *,
    buckets: Sequence[int] = (1, 3, 8),
    layers: Sequence[int] = (4, 12, 24),
    kernels: Sequence[int] = (8, 32, 128),
    threads: int = 1,
    repeat: int = 3,
    on_build: events.OnBuildEvent = events.ignore,
    on_event: OnProcessEvent,
    out: Path | None,
    work: Path | None = None,
) -> GrowthResult:
    """Build and start every configuration of the three lines.

    Args:
        buckets: Counts of buckets, at 24 layers (at most 8).
        layers: Counts of layers, at 3 buckets.
        kernels: Counts of blocks in the chain, at 1 bucket.
        threads: Intra-op threads.
        repeat: Processes per configuration.
        on_build: Called with every event of every build.
        on_event: Called before and after every process.
        out: Where the result's JSON goes; None = nowhere.
        work: Where artifacts are kept, and found by a later run; None = nowhere.

    Raises:
        HarvestError: a configuration didn't build, or its start failed.
    """
    environment: dict[str, str] = {}
    measured: dict[str, GrowthPoint] = {}

    def point(kind: str, value: int, first: int, second: int) -> GrowthPoint:
        # The lines by buckets and by layers cross in one configuration.
        name = f"{kind}-{first}-{second}"
        if name not in measured:
            config = load(_write_config(folder / name, kind, first, second))
            artifact = _built(config, folder / name / "artifact", on_build)
            measured[name], found = _measure(
                config, artifact, threads, repeat, on_event
            )
            environment.update(found)
        return dataclasses.replace(measured[name], value=value)

    with contextlib.ExitStack() as stack:
        folder = work or Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="compilekit-growth-")
            )
        )
        lines = _lines(point, buckets, layers, kernels)
    result = GrowthResult(threads, repeat, environment, lines)
    if out is not None:
        write_json(out, result.as_json())
    return result


def _lines(
    point: Callable[[str, int, int, int], GrowthPoint],
    buckets: Sequence[int],
    layers: Sequence[int],
    kernels: Sequence[int],
) -> tuple[GrowthLine, ...]:
    lines = []
    if buckets:
        points = tuple(point("qwen2", n, 24, n) for n in buckets)
        lines.append(GrowthLine("buckets", "Qwen2, 24 layers", points))
    if layers:
        points = tuple(point("qwen2", n, n, 3) for n in layers)
        lines.append(GrowthLine("layers", "Qwen2, 3 buckets", points))
    if kernels:
        points = tuple(point("chain", n, n, 1) for n in kernels)
        lines.append(GrowthLine("kernels", "a chain of blocks, 1 bucket", points))
    return tuple(lines)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope; 0.0 when the xs don't differ."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    square = sum((x - mean_x) ** 2 for x in xs)
    if square == 0:
        return 0.0
    return (
        sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / square
    )


def _write_config(folder: Path, kind: str, count: int, buckets: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "compilekit.toml"
    if kind == "qwen2":
        (folder / "config.json").write_text(json.dumps(_QWEN2))
        sizes = list(SIZES[:buckets])
        path.write_text(_QWEN2_TOML.format(layers=count, sizes=sizes))
    else:
        module = f"compilekit_growth_chain_{count}"
        (folder / f"{module}.py").write_text(_CHAIN.format(kernels=count))
        path.write_text(_CHAIN_TOML.format(module=module))
    return path


def _built(config: Config, artifact: Path, on_build: events.OnBuildEvent) -> Path:
    """The artifact of a configuration: the one that is there, or a new one."""
    from ..compiler.build import build

    if not os.path.exists(artifact):
        built = build(config, artifact, on_event=on_build, verify=False)
        if built.artifact is None:
            reason = built.failed[0].error if built.failed else "nothing was written"
            raise HarvestError(f"bench growth: the build failed: {reason}")
    return artifact


def _measure(
    config: Config,
    artifact: Path,
    threads: int,
    repeat: int,
    on_event: OnProcessEvent,
) -> tuple[GrowthPoint, dict[str, str]]:
    result = startup.run(
        config,
        artifact=artifact,
        rows=("compilekit",),
        repeat=repeat,
        threads=threads,
        weights="",
        on_event=on_event,
        out=None,
        seed=0,
    )
    row = result.row("compilekit")
    overhead, attach = row.overhead_ms, row.spread(lambda s: s.attach_ms)
    if overhead is None or attach is None:
        raise HarvestError(
            f"bench growth: the start failed: {row.error}",
            hint="The end of its log:\n" + row.log,
        )
    opened = open_artifact(artifact)
    kernels = sum(path.startswith("kernels/") for path in opened.manifest.files)
    point = GrowthPoint(0, kernels, opened.size_bytes, overhead, attach)
    return point, dict(result.environment)
