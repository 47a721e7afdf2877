"""Models and example calls from a configuration: fake to compile, real to run.

Lifecycle:
    1. `build_fake` makes the model from ``config.json`` or the user's factory; weights
       are never read and nothing is allocated.
    2. `example_kwargs` makes the arguments of one bucket, fake (to capture) or real.
    3. `build_real` makes the same model with CPU weights: verify, bench, explain.

A model is constructed as ``from_pretrained(dtype=…)`` does it: the default dtype is set
while the constructor runs, so that buffers which ask for float32 (rotary frequencies)
stay float32 in a bfloat16 model.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compilekit import paths
from compilekit._torch.fake import (
    FakeTensorMode,
    UnfakeableTensorError,
    fake_mode_of,
    make_fake,
    moved,
    new_fake_mode,
)
from compilekit.config import Config, EntryConfig, InputConfig
from compilekit.errors import ConfigError
from compilekit.plan import Bucket

__all__ = [
    "FOREIGN_ERRORS",
    "build_fake",
    "build_real",
    "entry_callable",
    "example_kwargs",
    "fake_mode_of",
    "import_function",
    "model_directory",
    "torch_dtype",
    "vocabulary_size",
]

_logger = logging.getLogger("compilekit")

# What code that isn't ours raises when it's wrong: a factory, a transformers class.
FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def build_fake(
    config: Config, device: str = "cpu", *, mode: FakeTensorMode | None = None
) -> nn.Module:
    """Make the configured model with fake parameters and buffers, in eval mode.

    All its tensors share one `FakeTensorMode`, which `fake_mode_of` gives back.

    Args:
        config: The configuration.
        device: The device that the tensors pretend to be on, e.g. ``cuda:0``.
        mode: The mode of the tensors; None = a new one.
    Raises:
        ConfigError: the model can't be found, imported or constructed.
    """
    model = _construct(config, torch.device("meta"))
    try:
        return make_fake(model, mode or new_fake_mode(), device)
    except UnfakeableTensorError as exc:
        raise ConfigError(
            f"[model] source {config.model.source!r}: {exc}, and only plain tensors can"
            " be compiled",
            hint="Build before it's quantised, pruned or wrapped.",
        ) from exc


def build_real(
    config: Config, *, weights: str = "", seed: int = 0, device: str = "cpu"
) -> nn.Module:
    """Make the configured model with real tensors, in eval mode.

    Args:
        config: The configuration.
        weights: Directory for ``from_pretrained`` (a Hugging Face source) or a
            safetensors file (a factory), relative to the configuration's folder;
            ``package:NAME/DIR`` looks inside an installed package. Empty = the model's
            own random initialisation.
        seed: Seed of the initialisation; tensors that `weights` lacks get it too.
        device: Where the model is made (random weights) or moved to.
    Raises:
        ConfigError: the model or its weights can't be found or don't fit.
    """
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        if not weights:
            return _construct(config, place)
        if _is_hugging_face(config):
            return _from_pretrained(config, weights).to(place)
        model = _construct(config, torch.device("cpu"))
        _load_weights(model, config, weights)
        return model.to(place)


def entry_callable(model: nn.Module, entry: EntryConfig) -> Callable[..., Any]:
    """The bound method of `model` that `entry` compiles; the model for ``forward``."""
    if entry.method == "forward":
        return model
    method = getattr(model, entry.method, None)
    if not callable(method):
        raise ConfigError(
            f"[entries.{entry.name}] method {entry.method!r}:"
            f" {type(model).__name__} has no such method",
            hint=_nearest(entry.method, dir(model)),
        )
    return method  # type: ignore[no-any-return]


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
            floats from a normal distribution, booleans evenly.
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


def torch_dtype(name: str, where: str) -> torch.dtype:
    """The torch dtype called `name`; `where` names the place in the configuration."""
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    known = [key for key in dir(torch) if isinstance(getattr(torch, key), torch.dtype)]
    raise ConfigError(
        f"{where}: {name!r} is no torch dtype", hint=_nearest(name, known)
    )


def vocabulary_size(config: Config) -> int | None:
    """The vocabulary's size by the Hugging Face configuration, None if it has none."""
    if not _is_hugging_face(config):
        return None
    hf_config = _hugging_face_config(config)
    size = getattr(hf_config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def model_directory(config: Config, location: str) -> Path | None:
    """Find the local directory (or file) that a source or ``weights`` value means.

    Args:
        config: The configuration; relative paths are relative to its folder.
        location: A path, a Hugging Face id, or ``package:NAME/DIR`` for data that an
            installed Python package ships (the package isn't imported).
    Returns:
        The directory, or None if `location` can only be a Hugging Face id.
    Raises:
        ConfigError: there is no such directory or package.
    """
    if location.startswith("package:"):
        return _package_data(location)
    path = config.path.parent / Path(location).expanduser()
    if path.exists():
        return path.resolve()
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", location):
        return None
    raise ConfigError(f"no such directory: {path}")


def _package_data(location: str) -> Path:
    name, _, inside = location.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        raise ConfigError(
            f"{location!r}: no Python package {name!r} is installed",
            hint="Install it, or name a directory.",
        )
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, inside)
        if path.exists():
            return path.resolve()
    raise ConfigError(f"{location!r}: package {name!r} has no {inside!r}")


# --- Construction ---------------------------------------------------------------------


def _is_hugging_face(config: Config) -> bool:
    return config.model.source.startswith("hf:")


def _construct(config: Config, device: torch.device) -> nn.Module:
    if _is_hugging_face(config):
        model = _construct_hugging_face(config, device)
    else:
        model = _call_factory(config, device)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _model_dtype(config: Config) -> torch.dtype | None:
    """The dtype that ``[model] dtype`` names; None if it leaves it to the model."""
    if not config.model.dtype:
        return None
    dtype = torch_dtype(config.model.dtype, "[model] dtype")
    if not dtype.is_floating_point:
        raise ConfigError(
            f"[model] dtype: expected a floating-point dtype, found {dtype}"
        )
    return dtype


def _call_factory(config: Config, device: torch.device) -> nn.Module:
    factory = import_function(config, config.model.source, "[model] source")
    dtype = _model_dtype(config)
    try:
        with _default_dtype(dtype), device:
            model = factory()
    except FOREIGN_ERRORS as exc:
        hint = (
            "Without weights a factory runs on the meta device, where tensors have no"
            " values: read none, or compute such tensors with device='cpu'."
            if device.type == "meta"
            else ""
        )
        raise ConfigError(
            f"[model] source {config.model.source!r} failed:"
            f" {type(exc).__name__}: {exc}",
            hint=hint,
        ) from exc
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"[model] source {config.model.source!r}: expected the factory to return a"
            f" torch.nn.Module, it returned {type(model).__name__}"
        )
    return model


def import_function(config: Config, source: str, where: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` in a configuration names.

    Raises:
        ConfigError: there is none, or its module can't be imported.
    """
    module_name, _, name = source.partition(":")
    if not module_name or not name:
        raise ConfigError(
            f"{where}: expected package.module:function, found {source!r}"
        )
    # The configuration's folder stays on the path: user code imports lazily as well.
    folder = str(config.path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"{where}: can't import {module_name!r}: {type(exc).__name__}: {exc}",
            hint=f"Modules are looked for in {folder} and the installed packages.",
        ) from exc
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{where}: module {module_name!r} has no function {name!r}",
            hint=_nearest(name, dir(module)),
        )
    return function  # type: ignore[no-any-return]


# --- Hugging Face ---------------------------------------------------------------------


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as exc:
        raise ConfigError(
            f"a Hugging Face model needs the package transformers: {exc}",
            hint='Install it: pip install "compilekit[hf]"',
        ) from exc


def _hugging_face_config(config: Config) -> Any:
    """Read ``config.json`` and nothing else, with ``[model] config`` laid over it."""
    transformers = _transformers()
    location = config.model.source.removeprefix("hf:")
    directory = model_directory(config, location)
    try:
        hf_config = transformers.AutoConfig.from_pretrained(
            directory or location,
            local_files_only=directory is not None,
            trust_remote_code=False,
        )
        return _lay_over(hf_config, config.model.config)
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"[model] source {config.model.source!r}: transformers"
            f" {transformers.__version__} can't make a configuration from it:"
            f" {type(exc).__name__}: {exc}",
            hint="Code that a checkpoint brings along isn't run; for such a model write"
            " a factory and name it: source = 'package.module:factory'.",
        ) from exc


def _lay_over(hf_config: Any, values: Mapping[str, Any]) -> Any:
    """Set configuration values and derive the others again from them."""
    if not values:
        return hf_config
    data = hf_config.to_dict()
    for key, value in values.items():
        *parents, name = key.split(".")
        node = data
        for parent in parents:
            node = node.get(parent, {})
        if not isinstance(node, dict) or name not in node:
            known = node if isinstance(node, dict) else data
            raise ConfigError(
                f"[model] config {key!r}: {type(hf_config).__name__} has no such value",
                hint=_nearest(name, known),
            )
        node[name] = value
        # One kind per layer: fewer layers keep the first ones.
        kinds = node.get("layer_types")
        if name == "num_hidden_layers" and isinstance(kinds, list):
            node["layer_types"] = kinds[:value]
    return type(hf_config).from_dict(data)


def _hugging_face_class(config: Config, hf_config: Any) -> Any:
    transformers = _transformers()
    architectures = getattr(hf_config, "architectures", None) or ()
    name = config.model.model_class or next(iter(architectures), "")
    if not name:
        raise ConfigError(
            f"[model] source {config.model.source!r}: its config.json names no"
            " architecture",
            hint='Name the class: [model] class = "BertModel"',
        )
    found = getattr(transformers, name, None)
    if inspect.isclass(found) and _constructor(found) is not None:
        return found
    raise ConfigError(
        f"[model] class {name!r}: transformers {transformers.__version__} has no such"
        " model class",
        hint=_nearest(name, dir(transformers)),
    )


def _construct_hugging_face(config: Config, device: torch.device) -> nn.Module:
    hf_config = _hugging_face_config(config)
    model_class = _hugging_face_class(config, hf_config)
    dtype = _hugging_face_dtype(config, hf_config)
    try:
        with device:
            model: Any = _constructor(model_class)(hf_config, dtype=dtype)
            model.tie_weights()
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"[model] source {config.model.source!r}: {model_class.__name__} can't be"
            f" constructed: {type(exc).__name__}: {exc}"
        ) from exc
    _keep_in_float32(model, dtype)
    result: nn.Module = model
    return result


def _constructor(model_class: Any) -> Any:
    """The class method that constructs a model without weights; None if it has none.

    It does what ``from_pretrained`` does: default dtype, patches, attention choice.
    Auto classes offer it under a public name and call it on the class they choose.
    Source: transformers 5.17 and 5.24, modeling_utils.py, ``_from_config``.
    """
    public = getattr(model_class, "from_config", None)
    return public or getattr(model_class, "_from_config", None)


def _hugging_face_dtype(config: Config, hf_config: Any) -> torch.dtype:
    chosen = _model_dtype(config) or getattr(hf_config, "dtype", None) or torch.float32
    if isinstance(chosen, torch.dtype):
        return chosen
    return torch_dtype(str(chosen), "config.json dtype")


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what a model class keeps in float32, as ``from_pretrained`` does.

    Source: transformers 5.17 and 5.24, modeling_utils.py ``_get_dtype_plan``,
    core_model_loading.py ``build_glob_alternation`` (patterns are searched in names).
    """
    patterns: set[str] = set()
    if dtype is torch.float16:
        patterns.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not patterns:
        return
    kept = re.compile("|".join(sorted(patterns)).replace("*", ".*"))
    # Only what a checkpoint holds: other buffers keep what the constructor gave them.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _from_pretrained(config: Config, weights: str) -> nn.Module:
    hf_config = _hugging_face_config(config)
    model_class = _hugging_face_class(config, hf_config)
    dtype = _hugging_face_dtype(config, hf_config)
    location = weights.removeprefix("hf:")
    directory = model_directory(config, location)
    try:
        model, info = model_class.from_pretrained(
            directory or location,
            config=hf_config,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=directory is not None,
        )
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"weights {weights!r} can't be loaded into {model_class.__name__}:"
            f" {type(exc).__name__}: {exc}"
        ) from exc
    missing = sorted(info["missing_keys"])
    if missing:
        _logger.warning(
            "weights %r lack %d tensors of %s, which keep random values: %s",
            weights,
            len(missing),
            model_class.__name__,
            ", ".join(missing[:5]) + (", …" if len(missing) > 5 else ""),
        )
    result: nn.Module = model.eval()
    return result


def _load_weights(model: nn.Module, config: Config, weights: str) -> None:
    import safetensors.torch

    file = model_directory(config, weights)
    if file is None or not file.is_file():
        raise ConfigError(
            f"weights {weights!r}: expected a safetensors file (a factory's model is"
            " loaded from one file)"
        )
    try:
        safetensors.torch.load_model(model, file)
    except (RuntimeError, safetensors.SafetensorError) as exc:
        raise ConfigError(f"weights {weights!r} don't fit the model: {exc}") from exc


# --- Example calls --------------------------------------------------------------------


def _call_example(
    config: Config, entry: EntryConfig, bucket: Bucket, seed: int
) -> dict[str, Any]:
    where = f"[entries.{entry.name}] example"
    function = import_function(config, entry.example, where)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kwargs = function(dict(bucket.axes))
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
            hint=_nearest(unknown[0], bucket.axes),
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
        return torch.randint(0, 2, shape, generator=generator).bool()
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


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, [str(key) for key in known], n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
