"""What attach has to know about an entry, from one of its captured calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compilekit import paths
from compilekit._torch import capture as dynamo
from compilekit._torch.lower import Lowered
from compilekit._torch.ops import operator_origin
from compilekit.artifact.program import Entry, InputRule
from compilekit.compiler.convention import (
    argument_leaves,
    argument_tensors,
    named_tensors,
)
from compilekit.compiler.freezing import FrozenWeights
from compilekit.compiler.reads import is_json, reads
from compilekit.compiler.sources import Place
from compilekit.compiler.traced_call import TracedCall
from compilekit.config import Config, EntryConfig
from compilekit.errors import UnsupportedByProgramError
from compilekit.runtime.code import code_digest, find_functions, is_fixed, named_digest
from compilekit.runtime.model import (
    SCALARS,
    ModelView,
    ambient,
    module_mismatches,
    signature,
    tensor_spec,
)
from compilekit.runtime.result import class_name
from compilekit.targets import Target


def describe_entry(
    model: torch.nn.Module,
    config: Config,
    target: Target,
    call: TracedCall,
    captured: dynamo.Capture,
    places: tuple[Place, ...],
    lowered: Lowered,
    operators: Sequence[str],
    weights: FrozenWeights | None,
) -> Entry:
    """The entry, as far as one bucket tells: its buckets must say the same.

    Args:
        operators: ``namespace::name`` of operators that torch doesn't register.
        weights: What was folded into the program.
    Raises:
        UnsupportedByProgramError: an argument that a program can't take.
    """
    entry, kwargs = call.entry, call.kwargs
    used_axes = {
        size
        for rule in entry.inputs.values()
        for size in rule.shape
        if size in config.axes
    }
    tensors = {
        place.path: tensor_spec(example)
        for place, example in zip(places, captured.example_inputs, strict=True)
        if place.kind == "tensor"
    }
    return Entry(
        name=entry.name,
        target=target.name,
        method=entry.method,
        axes=tuple(axis for axis in config.axes if axis in used_axes),
        signature=signature(getattr(model, entry.method)),
        inputs=_rules(entry, kwargs),
        fixed=_fixed(entry, kwargs),
        cuts={
            path: {str(dim): axis for dim, axis in rule.cut.items()}
            for path, rule in entry.outputs.items()
        },
        tensors=dict(sorted(tensors.items())),
        frozen=weights.digests(places[index].path for index in lowered.frozen)
        if weights
        else {},
        aliases=_alias_groups(model),
        reads=reads(captured, model, kwargs),
        code=_traced_code(captured),
        ambient=ambient(),
        training=model.training,
        mutates_model=any(places[index].kind == "tensor" for index in lowered.mutated),
        custom_ops={name: operator_origin(name) for name in operators},
        role=entry.role,
        output=call.output,
    )


def _rules(entry: EntryConfig, kwargs: Mapping[str, Any]) -> dict[str, InputRule]:
    """The configured rules, and exact ones for tensors that only `example` makes."""
    rules = {
        paths.render(paths.parse(path)): InputRule(
            rule.dtype, rule.shape, rule.pad, rule.default, rule.low, rule.high
        )
        for path, rule in entry.inputs.items()
    }
    for path, tensor in argument_tensors(kwargs):
        if path not in rules:
            spec = tensor_spec(tensor)
            rules[path] = InputRule(spec.dtype, spec.shape)
    return dict(sorted(rules.items()))


def _fixed(entry: EntryConfig, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {}
    for path, value in argument_leaves(kwargs):
        if isinstance(value, torch.Tensor):
            continue
        plain = type(value) in SCALARS
        if not (plain and is_json(value)):
            raise UnsupportedByProgramError(
                f"argument {path} is a {class_name(type(value))}"
                f"{f' ({value})' if plain else ''}, which a program can't take",
                hint="Pass tensors, scalars, and dicts, lists, tuples or dataclasses"
                " of them.",
                thing=path,
            )
        fixed[path] = value
    return fixed


def _traced_code(captured: dynamo.Capture) -> dict[str, str]:
    """Digest of every traced function outside torch that can be found by name."""
    digests = {}
    for name, code in dynamo.traced_functions(captured):
        if "<locals>" in name or is_fixed(name.partition(":")[0]):
            continue
        found = [code_digest(function.__code__) for function in find_functions(name)]
        if code_digest(code) in found and (digest := named_digest(name)):
            digests[name] = digest
    return dict(sorted(digests.items()))


def _alias_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names under which the model holds one and the same tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return tuple(sorted(tuple(sorted(g)) for g in names.values() if len(g) > 1))


def refuse_unfit(model: torch.nn.Module, entry: Entry) -> None:
    """Refuse a model that its own program couldn't be attached to.

    Raises:
        UnsupportedByProgramError: names the hooks and replaced methods.
    """
    found = [
        f"{m.factor}: {m.here}" for m in module_mismatches(ModelView(model), entry)
    ]
    if found:
        raise UnsupportedByProgramError(
            f"the model has what attach would refuse: {'; '.join(found)}. A program"
            " doesn't call submodules",
            hint="Write it into the submodule's class, or its caller.",
            thing="; ".join(found),
        )
