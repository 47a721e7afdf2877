"""Read ``[generate]``: the two entries that serve a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compilekit.config.lines import KeyPath
from compilekit.config.problems import File, read_table
from compilekit.config.records import EntryConfig, InputConfig, OutputConfig
from compilekit.config.rules import GENERATE_AXES

ROLES = ("prefill", "decode")


def read_generate(
    file: File,
    data: Mapping[str, Any],
    routes: tuple[str, ...],
    read_sizes: Callable[[File, object, KeyPath], tuple[int, ...]],
) -> dict[str, tuple[int, ...]]:
    """The axes that ``[generate]`` makes; empty without it.

    Args:
        read_sizes: Reads one array of sizes.
    """
    if "generate" not in data:
        return {}
    table = read_table(file, data, ("generate",), "generate")
    axes = {}
    for axis, name in GENERATE_AXES.items():
        key = ("generate", name)
        if name not in table:
            file.report(key, "missing; an array of sizes")
        axes[axis] = read_sizes(file, table.get(name, [1]), key)
        if axis in data.get("axes", {}):
            message = f"[generate] makes axis {axis} itself"
            file.report(("axes", axis), message)
    for name, entry in read_table(file, data, ("entries",)).items():
        if name in ROLES:
            message = f"[generate] makes entry {name} itself; give yours another name"
            file.report(("entries", name), message)
        method = entry.get("method", name) if isinstance(entry, dict) else ""
        if method == "forward":
            message = "[generate] serves the model's forward; use one or the other"
            file.report(("entries", name), message)
    if "cache" in routes:
        message = 'its steps are programs; leave it out with routes = ["cache"]'
        file.report(("generate",), message)
    prompts, places = axes["s"], axes["c"]
    if prompts and places and max(prompts) > max(places):
        message = f"a prompt of {max(prompts)} needs as many places; the most is"
        file.report(("generate", "cache"), f"{message} {max(places)}")
    return axes


def generate_entries() -> dict[str, EntryConfig]:
    """``prefill`` and ``decode``; compiler/generate.py says what they compute."""
    whole = {
        "attention_mask": InputConfig(("b", "c"), "int64", pad=0),
        "start": InputConfig((), "int64"),
    }
    lengths: dict[str, str | int] = {"prefill": "s", "decode": 1}
    return {
        role: EntryConfig(
            name=role,
            method="forward",
            inputs={
                "input_ids": InputConfig(("b", lengths[role]), "int64", pad=0),
                "position_ids": InputConfig(("b", lengths[role]), "int64", pad=0),
                **whole,
                **({"last": InputConfig((1,), "int64")} if role == "prefill" else {}),
            },
            outputs={"": OutputConfig({0: "b"})},
            role=role,
        )
        for role in ROLES
    }
