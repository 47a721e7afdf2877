"""The arguments of one call of a bucket: fake ones to compile, real ones to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compilekit import paths
from compilekit._torch.fake import (
    FakeTensorMode,
    UnfakeableTensorError,
    make_fake,
    moved,
)
from compilekit.compiler.hugging_face import vocabulary_size
from compilekit.compiler.names import (
    import_function,
    nearest,
    torch_dtype,
)
from compilekit.config import Config, EntryConfig, InputConfig
from compilekit.errors import FOREIGN_ERRORS, CompilekitError, ConfigError
from compilekit.plan import Bucket


def example_kwargs(
    config: Config,
    entry: EntryConfig,
    bucket: Bucket,
    *,
    fake: FakeTensorMode | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Make the keyword arguments of one call of `entry` at the bucket's shape.

    Args:
        config: The configuration.
        entry: The entry, with its declared inputs and fixed arguments.
        bucket: Sizes of the axes.
        fake: The model's mode, for fake tensors; None = real tensors.
        device: Where real tensors are, or the device that fake ones pretend to be on.
        seed: Seed of the values: integers are drawn between ``low`` and ``high``
            (the vocabulary's size for names that end in ``input_ids``, else 2),
            floats from a normal distribution, booleans as `_mask` does.
    Raises:
        ConfigError: a path, dtype or axis is wrong, or the example function fails.
    """
    if entry.example:
        kwargs = _call_example(config, entry, bucket, seed)
    else:
        kwargs = _from_inputs(config, entry, bucket, fake, seed)
    for name, value in entry.kwargs.items():
        if name in kwargs:
            raise ConfigError(
                f"[entries.{entry.name}] {name!r} is both an input and a fixed argument"
            )
        kwargs[name] = value
    if fake is None:
        # Drawn on the CPU, so that a seed means the same on every device.
        return kwargs if device == "cpu" else moved(kwargs, device)
    try:
        return make_fake(kwargs, fake, device)
    except UnfakeableTensorError as exc:
        # The place's first step is a keyword, not a key of the argument.
        place = paths.render((str(exc.place[0][0]), *exc.place[1:]))
        raise ConfigError(
            f"[entries.{entry.name}] argument {place} is a {exc.kind} tensor, and only"
            " plain tensors can be compiled",
            hint="Pass plain ones: .to_dense(), .dequantize(), or a subclass's parts.",
        ) from exc


def _call_example(
    config: Config, entry: EntryConfig, bucket: Bucket, seed: int
) -> dict[str, Any]:
    where = f"[entries.{entry.name}] example"
    function = import_function(config, entry.example, where)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kwargs = function(dict(bucket.axes))
    except CompilekitError:
        raise
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"{where} {entry.example!r} failed for bucket {bucket.name}:"
            f" {type(exc).__name__}: {exc}"
        ) from exc
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(
            f"{where} {entry.example!r}: expected a dict of keyword arguments, it"
            f" returned {type(kwargs).__name__}"
        )
    return dict(kwargs)


def _from_inputs(
    config: Config,
    entry: EntryConfig,
    bucket: Bucket,
    fake: FakeTensorMode | None,
    seed: int,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[tuple[str | int, ...], torch.Tensor] = {}
    for path, rule in entry.inputs.items():
        where = f"[entries.{entry.name}.inputs.{path}]"
        shape = _shape(rule, bucket, where)
        dtype = torch_dtype(rule.dtype, where)
        if fake is not None:
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        else:
            tensor = _sample(config, path, rule, shape, dtype, generator)
        tensors[_steps(path, where)] = tensor
    kwargs = _branch(tensors, f"[entries.{entry.name}.inputs]") if tensors else {}
    return dict(kwargs)


def _shape(rule: InputConfig, bucket: Bucket, where: str) -> tuple[int, ...]:
    unknown = [a for a in rule.shape if isinstance(a, str) and a not in bucket.axes]
    if unknown:
        raise ConfigError(
            f"{where} shape: {unknown[0]!r} is no axis",
            hint=nearest(unknown[0], bucket.axes),
        )
    return tuple(bucket.axes[a] if isinstance(a, str) else a for a in rule.shape)


def _sample(
    config: Config,
    path: str,
    rule: InputConfig,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    if dtype is torch.bool:
        return _mask(rule, shape, generator)
    if dtype.is_floating_point or dtype.is_complex:
        if rule.high is None:
            return torch.randn(shape, generator=generator).to(dtype)
        unit = torch.rand(shape, generator=generator)
        return (unit * (rule.high - rule.low) + rule.low).to(dtype)
    high = rule.high
    if high is None and path.rstrip("\"']").endswith("input_ids"):
        high = vocabulary_size(config)
    low = int(rule.low)
    return torch.randint(
        low, max(int(high or 2), low + 1), shape, generator=generator
    ).to(dtype)


def _mask(
    rule: InputConfig, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Booleans: each for itself with an even seed, as masks are with an odd one.

    A mask's rows begin with one value and end with the other, and some code looks for
    that (torch.nn.TransformerEncoder). They end with what pads the input, or with True.
    """
    if generator.initial_seed() % 2 == 0 or not shape:
        return torch.randint(0, 2, shape, generator=generator).bool()
    *rows, length = shape
    begins = torch.randint(1, max(length, 2), (*rows, 1), generator=generator)
    second = torch.arange(length) >= begins
    return ~second if rule.pad is False else second


def _steps(path: str, where: str) -> tuple[str | int, ...]:
    """Split ``batch["x"][0]`` into a keyword, then keys and indices."""
    try:
        first, *rest = paths.parse(path)
    except ValueError as exc:
        raise ConfigError(
            f'{where}: expected a path such as input_ids, batch["x"] or items[0]: {exc}'
        ) from exc
    if not isinstance(first, str):
        raise ConfigError(f"{where}: expected the name of an argument first")
    keys: list[str | int] = [first]
    for step in rest:
        if isinstance(step, str):
            raise ConfigError(
                f"{where}: {step!r} is an attribute of an object, which can't be made"
                " from [inputs]",
                hint="Write a function that makes the arguments, and name it:"
                ' example = "package.module:function"',
            )
        keys.append(step[0])
    return tuple(keys)


def _branch(tensors: Mapping[tuple[str | int, ...], Any], where: str) -> Any:
    """Build nested dicts and lists from paths; a list's indices must have no gap."""
    if () in tensors:
        if len(tensors) > 1:
            raise ConfigError(f"{where} is an input, and so is a part of it")
        return tensors[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for (first, *rest), tensor in tensors.items():
        below.setdefault(first, {})[tuple(rest)] = tensor
    branches = {k: _branch(rest, f"{where}[{k!r}]") for k, rest in below.items()}
    if all(isinstance(key, str) for key in branches):
        return branches
    if set(branches) != set(range(len(branches))):
        raise ConfigError(
            f"{where}: expected the indices 0 to {len(branches) - 1}, found"
            f" {', '.join(map(str, branches))}"
        )
    return [branches[index] for index in range(len(branches))]
