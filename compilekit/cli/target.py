"""``compilekit target``: the hardware that programs can be built for."""

from __future__ import annotations

import click

from compilekit.cli.options import Command, Commands
from compilekit.console import Facts, Mark, Report, Table


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
        if not fits:
            verdict = Mark(f"no: needs {target.machine}, this is {here}", "warn")
        elif missing:
            verdict = Mark(f"no: lacks {', '.join(missing)}", "warn")
        else:
            verdict = Mark("yes", "good")
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
                "runs_here": fits and not missing,
                "missing": missing,
            }
        )
    columns = ("name", "kind", "march", "vector bits", "runs here")
    return Report(
        {"targets": result},
        (Table("target", columns, rows),),
        next=f"compilekit target show {known[-1].name}",
    )


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


target = Commands(
    "target",
    help="Look at the targets that programs can be built for.",
    sections={"Commands": (list_, show)},
)
