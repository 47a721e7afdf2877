"""Cut rules: every output dimension that follows a padded axis is cut back.

A call that is padded to a bucket computes at the bucket's size. An output dimension
that follows a padded axis must be cut to the call's own size, or the caller gets the
padding back without a word. `check_cuts` refuses a bucket whose rules leave one out,
or name something that isn't there.

Which dimensions follow an axis is seen by comparing shapes at two sizes: those of the
buckets compiled so far, and before that of an eager run on fake tensors, so that a
forgotten rule is reported with the first bucket and all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from compilekit._torch.fake import fake_mode_of
from compilekit.artifact.program import Program, output_paths
from compilekit.buckets import bucket_table
from compilekit.compiler.convention import output_tensors
from compilekit.compiler.examples import example_kwargs
from compilekit.config import Config, EntryConfig
from compilekit.errors import (
    FOREIGN_ERRORS,
    CompilekitError,
    ConfigError,
    nearest_name,
)
from compilekit.paths import toml_key
from compilekit.plan import Bucket

Shapes = Mapping[str, tuple[int, ...]]
"""Output path → shape."""

Followed = Mapping[tuple[str, int], str]
"""(output path, dimension) → the padded axis it follows."""


def check_cuts(
    model: torch.nn.Module,
    config: Config,
    entry: EntryConfig,
    program: Program,
    earlier: Sequence[Program],
) -> None:
    """Hold a bucket's outputs against the entry's cut rules.

    Args:
        model: The fake model; run eagerly, and only for an entry's first bucket.
        program: The bucket just compiled.
        earlier: The entry's buckets compiled before it.
    Raises:
        ConfigError: a rule is missing, names no output, or can't hold; with the lines
            to write into the configuration.
    """
    shapes = output_shapes(program)
    _refuse_misfits(entry, program.axes, shapes)
    table = bucket_table([Bucket(program.bucket, program.axes)], entry.inputs)
    followed: dict[tuple[str, int], str] = {}
    for axis in table.axes:
        if axis in table.exact:
            continue
        others = [output_shapes(p) for p in earlier if _differ(program, p) == [axis]]
        if not earlier:
            others = list(_probes(model, config, entry, program, axis))
        for other in others:
            followed.update(dict.fromkeys(_changed(shapes, other), axis))
    _refuse_uncut(entry, program.axes, shapes, followed)


def output_shapes(program: Program) -> Shapes:
    """Shape of every output that the graph computes."""
    return {
        path: program.outputs[index].spec.shape
        for path, index in output_paths(program.result).items()
    }


def _differ(program: Program, other: Program) -> list[str]:
    return [a for a, size in program.axes.items() if other.axes[a] != size]


def _changed(shapes: Shapes, other: Shapes) -> Iterator[tuple[str, int]]:
    """Dimensions whose size isn't the same in both."""
    for path, shape in shapes.items():
        sizes = zip(shape, other.get(path, ()), strict=False)
        for dimension, (here, there) in enumerate(sizes):
            if here != there:
                yield path, dimension


def _probes(
    model: torch.nn.Module,
    config: Config,
    entry: EntryConfig,
    program: Program,
    axis: str,
) -> Iterator[Shapes]:
    """Output shapes at other sizes of one axis, from eager runs on fake tensors."""
    size = program.axes[axis]
    others = [other for other in config.axes[axis] if other != size][:1]
    # An axis of one size: a size below it, and one that halving can tell from it.
    for other in others or sorted({size - 1, size // 2} - {0}):
        bucket = Bucket("probe", {**program.axes, axis: other})
        mode = fake_mode_of(model)
        try:
            kwargs = example_kwargs(config, entry, bucket, fake=mode)
            with torch.no_grad(), mode:
                value = getattr(model, entry.method)(**kwargs)
        except CompilekitError:
            raise
        except FOREIGN_ERRORS:
            # Not every size runs, and not every model runs eagerly on fake tensors.
            continue
        yield {path: tuple(t.shape) for path, t in output_tensors(value).items()}


def _refuse_misfits(
    entry: EntryConfig, axes: Mapping[str, int], shapes: Shapes
) -> None:
    for path, rule in entry.outputs.items():
        where = f"[entries.{entry.name}.outputs.{toml_key(path)}]"
        if path not in shapes:
            near = nearest_name(path, shapes)
            known = ", ".join(toml_key(known) for known in shapes) or "none"
            raise ConfigError(
                f"{where}: the call computes no such output; it computes {known}",
                hint=f"Did you mean {toml_key(near)}?" if near else "",
            )
        for dimension, axis in rule.cut.items():
            shape = shapes[path]
            if dimension >= len(shape):
                raise ConfigError(
                    f"{where} cut: expected a dimension below {len(shape)}, found"
                    f" {dimension}; the output's shape is {list(shape)}"
                )
            if shape[dimension] != axes[axis]:
                raise ConfigError(
                    f"{where} cut: dimension {dimension} has size {shape[dimension]}"
                    f" where axis {axis} is {axes[axis]}, so it can't be cut to it",
                    hint="Name the dimension that has the axis's size; one that"
                    " follows it in another way can't be cut: leave the inputs' pad"
                    " out, so that only exact shapes are accepted.",
                )


def _refuse_uncut(
    entry: EntryConfig, axes: Mapping[str, int], shapes: Shapes, followed: Followed
) -> None:
    missing: dict[str, dict[int, str]] = {}
    for (path, dimension), axis in followed.items():
        rule = entry.outputs.get(path)
        if rule is not None and rule.cut.get(dimension) == axis:
            continue
        if shapes[path][dimension] != axes[axis]:
            raise ConfigError(
                f"[entries.{entry.name}] output {toml_key(path)}: dimension {dimension}"
                f" has size {shapes[path][dimension]} where axis {axis} is"
                f" {axes[axis]}; it follows the axis, and can't be cut to it",
                hint=f"Leave pad out of the inputs that have axis {axis}, so that only"
                " exact shapes are accepted.",
            )
        missing.setdefault(path, {})[dimension] = axis
    if missing:
        what = "; ".join(
            f"{toml_key(path)} along {' and '.join(dict.fromkeys(rule.values()))}"
            for path, rule in missing.items()
        )
        raise ConfigError(
            f"[entries.{entry.name}] a padded call would get its padding back in"
            f" {what}: these outputs follow a padded axis and aren't cut",
            hint="\n".join(["Add:", *_toml_lines(entry, missing)]),
            missing={path: dict(rule) for path, rule in missing.items()},
        )


def _toml_lines(
    entry: EntryConfig, missing: Mapping[str, Mapping[int, str]]
) -> Iterator[str]:
    for path, rule in missing.items():
        written = entry.outputs[path].cut if path in entry.outputs else {}
        cut = ", ".join(f'{d} = "{a}"' for d, a in sorted({**written, **rule}.items()))
        yield f"[entries.{entry.name}.outputs.{toml_key(path)}]"
        yield f"cut = {{ {cut} }}"
