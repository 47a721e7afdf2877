"""From a configuration to the list of jobs: target × entry × bucket."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from compilekit import targets

if TYPE_CHECKING:
    # The runtime imports this module for buckets and needs no configuration.
    from compilekit.config import Config


class Bucket(NamedTuple):
    """One static shape of an entry.

    Attributes:
        name: Axis letters and values in configuration order, e.g. ``b1_s128``;
            ``static`` for an entry without axes.
        axes: Axis name → size.
    """

    name: str
    axes: Mapping[str, int]


class Job(NamedTuple):
    """One compile: a bucket of an entry for a target."""

    target: str
    entry: str
    bucket: Bucket


class Plan(NamedTuple):
    """Every job of a build, in the order they run (largest bucket last)."""

    jobs: tuple[Job, ...]


class Shaped(Protocol):
    """What has axis names and sizes as its shape: an input of a configuration or of
    an artifact."""

    @property
    def shape(self) -> tuple[str | int, ...]: ...


def buckets(config: Config, entry_name: str) -> tuple[Bucket, ...]:
    """Every bucket of an entry, in configuration order.

    One for each combination of sizes of the axes that the entry uses; the last axis
    changes fastest. A piece of a prompt gets the smallest cache that holds it; the
    largest too if prompts are taken in pieces.
    """
    entry = config.entries[entry_name]
    axes = entry.used_axes(config.axes)
    sized = (
        dict(zip(axes, sizes, strict=True))
        for sizes in itertools.product(*(config.axes[axis] for axis in axes))
    )
    if entry.role == "prefill":
        sized = (s for s in sized if s["c"] in _prompt_caches(config, s["s"]))
    return tuple(bucket(sizes) for sizes in sized)


def _prompt_caches(config: Config, length: int) -> set[int]:
    caches = config.axes["c"]
    chosen = {min(size for size in caches if size >= length)}
    return chosen | {max(caches)} if config.serve.over_length == "chunk" else chosen


def bucket(axes: Mapping[str, int]) -> Bucket:
    """The bucket of these sizes, with its name."""
    name = "_".join(f"{axis[0]}{size}" for axis, size in axes.items())
    return Bucket(name or "static", axes)


def elements(inputs: Iterable[Shaped], axes: Mapping[str, int]) -> int:
    """Elements of all inputs together once each axis has the given size."""
    return sum(
        math.prod(axes[size] if isinstance(size, str) else size for size in rule.shape)
        for rule in inputs
    )


def make_plan(config: Config) -> Plan:
    """List the jobs of a build.

    Targets and entries keep the configuration's order; the buckets of an entry run
    from the smallest to the largest, so that a mistake shows early. A target that is
    listed both by name and as ``native`` is built once.

    Raises:
        ConfigError: A target is unknown.
        ResourceError: ``native``, and no target fits this machine.
    """
    names = dict.fromkeys(
        targets.load_target(name).name for name in config.build.targets
    )
    jobs = []
    for target in names:
        for name, entry in config.entries.items():
            rules = tuple(entry.inputs.values())
            sized = sorted(
                buckets(config, name),
                key=lambda b: (elements(rules, b.axes), math.prod(b.axes.values())),
            )
            jobs += [Job(target, name, bucket) for bucket in sized]
    return Plan(tuple(jobs))
