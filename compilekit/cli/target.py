"""``compilekit target``: the hardware that programs can be built for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import PATH, Command, Commands, quoted
from compilekit.console import Block, Facts, Mark, Report, Table
from compilekit.output import write_text

if TYPE_CHECKING:
    from compilekit.targets import Target


@click.command("list", cls=Command, example="compilekit target list")
def list_() -> Report:
    """List the targets, and which of them this machine can run."""
    from compilekit import targets

    here, flags = targets.machine(), targets.cpu_flags()
    known = [targets.load_target(name) for name in targets.list_targets()]
    rows, result = [], []
    for target in known:
        fits = target.machine == here
        missing = targets.missing_features(target, flags) if fits else ()
        reason = ""
        if not fits:
            reason = f"needs {target.machine}, this is {here}"
        elif missing:
            reason = f"lacks {', '.join(missing)}"
        elif target.kind == "cuda":
            reason = _gpu_reason(target)
        verdict = Mark(f"no: {reason}", "warn") if reason else Mark("yes", "good")
        rows.append(
            (target.name, target.kind, target.march, target.simd_width, verdict)
        )
        result.append(
            {
                "name": target.name,
                "kind": target.kind,
                "machine": target.machine,
                "march": target.march,
                "simd_width": target.simd_width,
                "runs_here": not reason,
                "missing": missing,
            }
        )
    columns = ("name", "kind", "march", "vector bits", "runs here")
    return Report(
        {"targets": result},
        (Table("target", columns, rows),),
        next=f"compilekit target show {known[-1].name}",
    )


# What the driver makes, on Linux and below Windows: without either, torch, which takes
# a second to import, needn't be asked.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def _gpu_reason(target: Target) -> str:
    """What keeps a GPU target's code from running here; empty if nothing does."""
    if not any(os.path.exists(path) for path in _DRIVERS):
        return "no NVIDIA GPU here"
    from compilekit.runtime.gpu import gpu_here, gpu_mismatches

    found = gpu_mismatches(target.name, target.device, {}, gpu_here())
    return next((f"this is {m.here}" for m in found if m.verdict == "refuse"), "")


@click.command(cls=Command, example="compilekit target show cpu-x86_64-v4")
@click.argument("name")
def show(name: str) -> Report:
    """Show a target's values and where each comes from; NAME may be native."""
    from compilekit import targets

    target = targets.load_target(name)
    values: dict[str, object] = {
        "machine": target.machine,
        "march": target.march,
        "simd_width": target.simd_width,
        "features": " ".join(target.features),
        "aten_capability": target.aten_capability,
        **target.device,
    }
    return Report(
        target,
        (
            Facts((("target", target.name), ("kind", target.kind))),
            Table(
                "value",
                ("name", "source", "value"),
                [(n, target.marks.get(n), str(v)) for n, v in values.items()],
            ),
        ),
    )


@click.command(cls=Command, example="compilekit target probe --out nvidia-new.json")
@click.option(
    "--device",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Which of the visible GPUs.",
)
@click.option("--name", default="", metavar="NAME", help="The target's name.")
@click.option("--out", type=PATH, metavar="FILE", help="Write the description there.")
def probe(device: int, name: str, out: Path | None) -> Report:
    """Describe the GPU of this machine, from its driver.

    A description in the folder that COMPILEKIT_TARGETS names is a target like those
    that come with compilekit, also on a machine without the device.
    """
    from compilekit import targets
    from compilekit.targets import probe as probing

    if out is not None:
        # A target is found by its file's name.
        name = name or out.stem
    described = probing.probe(probing.driver_library(), device, name)
    if out is not None:
        write_text(out, json.dumps(described, indent=2) + "\n")
    title = described["device"]["name"]["value"]
    same = [
        known
        for known in map(targets.load_target, targets.list_targets())
        if known.device.get("name") == title
    ]
    rows = [
        (key, item["mark"], str(item["value"]))
        for key, item in {**described["values"], **described["device"]}.items()
    ]
    blocks: list[Block] = [
        Facts((("target", described["name"]), ("comment", described["comment"]))),
        Table("value", ("name", "source", "value"), rows),
    ]
    contradicted = {known.name: probing.differences(known, described) for known in same}
    for known in same:
        differing = [
            (known.name, key, str(known.device[key]), str(value))
            for key, value in contradicted[known.name].items()
        ]
        columns = ("target", "name", "its value", "here")
        if differing:
            blocks.append(Table("difference", columns, differing))
        else:
            blocks.append(Facts((("equal to", known.name),)))
    return Report(
        {"target": described, "differences": contradicted},
        tuple(blocks),
        next=f"COMPILEKIT_TARGETS={quoted(out.parent)} compilekit build CONFIG"
        f" -o artifact --target {described['name']}"
        if out is not None
        else "",
    )


target = Commands(
    "target",
    help="Look at the targets that programs can be built for.",
    sections={"Commands": (list_, show, probe)},
)
