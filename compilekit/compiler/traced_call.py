"""The call that one bucket is compiled from, on fake tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from compilekit._torch.fake import fake_mode_of
from compilekit.compiler import convention
from compilekit.compiler.examples import example_kwargs
from compilekit.compiler.failures import explained
from compilekit.compiler.models import entry_callable
from compilekit.config import Config, EntryConfig
from compilekit.errors import ConfigError, UnsupportedByProgramError
from compilekit.plan import Bucket
from compilekit.targets import Target


class TracedCall(NamedTuple):
    """The call that one bucket is compiled from.

    Attributes:
        entry: The entry; one of ``[generate]``'s with the cache among its inputs.
        kwargs: Fake arguments.
        function: What is traced, as ``function(model, kwargs)``.
        around: Held while it is traced.
        output: See `Entry.output`.
        own_kernels: Whether products of few rows are our own kernels'.
    """

    entry: EntryConfig
    kwargs: dict[str, Any]
    function: Callable[..., Any]
    around: contextlib.AbstractContextManager[None]
    output: str = ""
    own_kernels: bool = False


def traced_call(
    model: torch.nn.Module,
    config: Config,
    entry: EntryConfig,
    bucket: Bucket,
    device: str,
) -> TracedCall:
    """The call of an entry for a bucket, its arguments made of fake tensors.

    Raises:
        ConfigError: the method is missing, or takes other arguments.
        UnsupportedByProgramError: it takes one of them by position only.
        CaptureError: the model or the example can't be made of fake tensors.
    """
    mode = fake_mode_of(model)
    if entry.role:
        # It imports transformers, which no other entry needs.
        from compilekit.compiler import generate

        with explained("the model can't be run on fake tensors"):
            causal = generate.describe(model)
        own_kernels = has_own_kernels(config, entry, device)
        function = generate.STEPS[entry.role]
        attention = generate.attention_on(device, config.compile.attention)
        if own_kernels and entry.role == "decode":
            # It imports Triton, which torch's CPU wheel lacks.
            from compilekit.compiler import decode_kernels

            function = decode_kernels.decode
            attention = decode_kernels.token_attention(attention)
        return TracedCall(
            entry=generate.with_cache(entry, causal),
            kwargs=generate.example(config, entry, bucket, causal, mode, device),
            function=function,
            around=generate.grouped(model, attention),
            output=causal.output,
            own_kernels=own_kernels,
        )
    with explained("the example call can't be made of fake tensors"):
        kwargs = example_kwargs(config, entry, bucket, fake=mode, device=device)
    _refuse_signature(model, entry, kwargs)
    function = convention.entry_function(entry.method)
    return TracedCall(entry, kwargs, function, contextlib.nullcontext())


def _refuse_signature(
    model: torch.nn.Module, entry: EntryConfig, kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that the method doesn't take by name.

    Raises:
        UnsupportedByProgramError: one of them is positional only, or ``*args``.
        ConfigError: the method is missing, or takes other arguments.
    """
    method = entry_callable(model, entry)
    function = model.forward if method is model else method
    signature = inspect.signature(function)
    name = f"{type(model).__name__}.{entry.method}"
    for parameter in signature.parameters.values():
        if parameter.name in kwargs and parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            star = "*" * (parameter.kind is inspect.Parameter.VAR_POSITIONAL)
            raise UnsupportedByProgramError(
                f"{name} takes {star}{parameter.name} by position only, and a program's"
                " inputs have names",
                hint="Give the method named parameters, or wrap it in one that has.",
                thing=parameter.name,
            )
    taken = ", ".join(signature.parameters)
    try:
        signature.bind(**kwargs)
    except TypeError as exc:
        raise ConfigError(
            f"[entries.{entry.name}] doesn't fit {name}({taken}): {exc}",
            hint="Declare what the call passes in [entries.NAME.inputs] or kwargs.",
        ) from exc


def has_own_kernels(config: Config, entry: EntryConfig, device: str) -> bool:
    """Whether an entry's products of few rows are our own kernels'."""
    return bool(entry.role) and config.compile.decode_kernels and device != "cpu"


def fake_device(target: Target) -> str:
    """The device that fake tensors pretend to be on."""
    return "cuda:0" if target.kind == "cuda" else "cpu"
