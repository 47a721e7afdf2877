"""Run one bucket the way a server will: ``torch.compile``, then the call.

An entry is the model's method, or a warm-up, which calls ``torch.compile`` itself: a
function, ``package.module:function``, or a script with its arguments,
``train.py --batch {b}``. That is run as ``python train.py --batch 16`` would run it: as
``__main__``, with its folder first on the path. What it compiles is found again when
the same script is started, because both call their module ``__main__``. Its outputs are
the tensors among its global variables.
"""

from __future__ import annotations

import os
import shlex
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from compilekit._torch.fake import fake_mode_of
from compilekit._torch.peers import inductor_options
from compilekit.compiler import examples, models, names
from compilekit.config import PLACEHOLDER, Config, EntryConfig, is_script
from compilekit.errors import CaptureError, ConfigError
from compilekit.plan import Bucket


def caller(
    config: Config,
    device: str = "cpu",
    *,
    weights: str = "",
    fake: bool = False,
    on_model: Callable[[torch.nn.Module], None] = lambda model: None,
) -> Callable[[str, Bucket], Any]:
    """A function that runs one bucket: name of its entry, bucket → outputs.

    The model is made for the first call that needs it; an entry is compiled once.

    Args:
        config: The configuration.
        device: Where it runs.
        weights: As for `models.build_real`.
        fake: With fake tensors, for a device that isn't here.
        on_model: Called with the model when it's made.
    """
    made: dict[str, Callable[[Bucket], Any]] = {}
    model: list[torch.nn.Module] = []

    def live() -> torch.nn.Module:
        if not model:
            model.append(
                models.build_fake(config, device)
                if fake
                else models.build_real(config, weights=weights, device=device)
            )
            on_model(model[0])
        return model[0]

    def call(name: str, bucket: Bucket) -> Any:
        if name not in made:
            entry = config.entries[name]
            made[name] = (
                _warmup(config, entry)
                if entry.warmup
                else _compiled(config, entry, live(), device, fake)
            )
        return made[name](bucket)

    return call


def _compiled(
    config: Config, entry: EntryConfig, model: torch.nn.Module, device: str, fake: bool
) -> Callable[[Bucket], Any]:
    """``torch.compile`` as the configuration says, and as the documentation shows."""
    options = inductor_options(config.compile.mode, config.compile.options)
    compiled = torch.compile(
        models.entry_callable(model, entry),
        dynamic=False,
        fullgraph=config.compile.fullgraph,
        options=options or None,
    )
    fakes = fake_mode_of(model) if fake else None
    mode = torch.inference_mode if entry.grad == "inference" else torch.no_grad

    def call(bucket: Bucket) -> Any:
        kwargs = examples.example_kwargs(
            config, entry, bucket, fake=fakes, device=device
        )
        with mode():
            return compiled(**kwargs)

    return call


def _warmup(config: Config, entry: EntryConfig) -> Callable[[Bucket], Any]:
    """What runs one bucket of a warm-up.

    Raises:
        ConfigError: there is no such function or script.
    """
    if not is_script(entry.warmup):
        where = f"[entries.{entry.name}] warmup"
        function = names.import_function(config, entry.warmup, where)
        return lambda bucket: function(dict(bucket.axes))
    script, *words = shlex.split(entry.warmup)
    path = config.path.parent.resolve() / script
    if not os.path.isfile(path):
        raise ConfigError(
            f"[entries.{entry.name}] warmup: there is no script {path.name}",
            hint=f"Its path is relative to the configuration's folder, {path.parent}.",
        )

    def run(bucket: Bucket) -> dict[str, Any]:
        module = _run_script(path, [_filled(word, bucket.axes) for word in words])
        return _tensors({n: v for n, v in vars(module).items() if n[:2] != "__"}) or {}

    return run


def _tensors(value: Any) -> Any:
    """Copies of the tensors in a value, which may change in the next run.

    Returns:
        Mappings and lists like the value's own, without their other items; None if it
        holds no tensor.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        value = value.state_dict()
    if isinstance(value, Mapping):
        named = {name: _tensors(item) for name, item in value.items()}
        return {name: item for name, item in named.items() if item is not None} or None
    if isinstance(value, (list, tuple)):
        return [item for item in map(_tensors, value) if item is not None] or None
    return None


def _filled(word: str, axes: Mapping[str, int]) -> str:
    """A script's argument with a bucket's sizes; other braces stay."""
    return PLACEHOLDER.sub(lambda m: str(axes.get(m[1], m[0])), word)


def _run_script(path: Path, arguments: list[str]) -> types.ModuleType:
    """Run a script as Python does; this process's ``__main__`` is the script's then.

    Not `runpy`: it takes the module away when the script ends, and what was compiled
    in it is stored later, by name.

    Returns:
        The script's module.
    Raises:
        CaptureError: the script ended with another code than 0.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    folder = str(path.parent)
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    code = compile(path.read_bytes(), str(path), "exec")
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise CaptureError(
                f"script {path.name} ended with exit code {end.code}"
            ) from end
    return module
