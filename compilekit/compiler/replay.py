"""The process that replays one bucket: compares with eager, watches for compiles.

Says one JSON line per thread count (see `child`). It
counts processes with an audit hook, hides every compiler (empty PATH) while programs
run, and asks torch's own counters whether anything was traced.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compilekit.buckets import bucket_table
from compilekit.compiler import child
from compilekit.plan import Bucket

if TYPE_CHECKING:
    from compilekit.artifact.program import Program
    from compilekit.compiler.compare import Difference
    from compilekit.config import Config, EntryConfig

_SPAWNS = (
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
)


def main() -> int:
    """Replay the bucket named on standard input at every thread count."""
    return child.run(_say_rows)


def _say_rows(spec: dict[str, Any], say: child.Say) -> None:
    for row in _replay(spec):
        say(json.dumps(row))


def _replay(spec: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    from compilekit import config as configuration
    from compilekit._torch.runtime import compiled_frames
    from compilekit.artifact import open_artifact
    from compilekit.compiler.compare import tolerance
    from compilekit.compiler.models import build_real
    from compilekit.runtime.attach import attach

    config = configuration.load(Path(spec["config"]))
    config = dataclasses.replace(config, path=Path(spec["base"]) / "compilekit.toml")
    entry = config.entries[spec["entry"]]
    bucket = Bucket(spec["bucket"], spec["axes"])
    device = spec["device"]
    model = build_real(config, weights=spec["weights"], seed=0, device=device)
    twin = copy.deepcopy(model)
    artifact = open_artifact(spec["artifact"])
    spawned: list[str] = []
    sys.addaudithook(
        lambda name, args: spawned.append(name) if name in _SPAWNS else None
    )
    os.environ["PATH"] = ""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    atol, rtol = tolerance(dtype, config.verify.atol, config.verify.rtol)
    rows = []
    spawned.clear()
    frames = compiled_frames()
    receipt = attach(
        model,
        artifact,
        entry=entry.name,
        require="program",
        on_uncovered="error",
        target=spec["target"],
    )
    if entry.role:
        from compilekit.compiler.generate_replay import step_check

        check = step_check(model, twin, config, entry)
    else:
        program = artifact.programs[(receipt.target, entry.name, bucket.name)]
        check = _call_check(model, twin, config, entry, program, device)
    for seed, threads in enumerate(spec["threads"]):
        torch.set_num_threads(threads)
        difference = check(bucket, seed)
        message = difference.message
        compiles = compiled_frames() - frames
        if compiles and not message:
            message = f"{compiles} frames were compiled"
        if spawned and not message:
            message = f"processes were started: {', '.join(sorted(set(spawned)))}"
        rows.append(
            {
                "threads": threads,
                "max_abs_error": str(difference.max_abs_error),
                "atol": atol,
                "rtol": rtol,
                "compiles": compiles,
                "spawned": len(spawned),
                "passed": not message,
                "message": message,
            }
        )
    return rows


def _call_check(
    model: Any,
    twin: Any,
    config: Config,
    entry: EntryConfig,
    program: Program,
    device: str,
) -> Callable[[Bucket, int], Difference]:
    """A function that replays a call of a bucket with a seed, whole and padded."""
    from compilekit.compiler.examples import example_kwargs

    def check(bucket: Bucket, seed: int) -> Difference:
        kwargs = example_kwargs(config, entry, bucket, seed=seed, device=device)
        difference = _compare_call(model, twin, config, entry, kwargs, seed)
        padded = _padded(entry, bucket, program)
        if padded is None or difference.message:
            return difference
        kwargs = example_kwargs(config, entry, padded, seed=seed, device=device)
        smaller = _compare_call(model, twin, config, entry, kwargs, seed)
        if smaller.message:
            message = f"padded from {padded.name}, {smaller.message}"
            return dataclasses.replace(difference, message=message)
        return difference

    return check


def _padded(entry: EntryConfig, bucket: Bucket, program: Program) -> Bucket | None:
    """A call that is padded to the bucket, if there can be one."""
    table = bucket_table([bucket], entry.inputs)
    axes = {
        axis: size if axis in table.exact else max(size - 1, 1)
        for axis, size in bucket.axes.items()
    }
    writes = any(g.mutated and g.kind == "argument" for g in program.inputs)
    if writes or axes == bucket.axes:
        return None
    name = ", ".join(f"{axis} = {size}" for axis, size in axes.items())
    return Bucket(name, axes)


class _Seen(NamedTuple):
    """What a caller can see of a call."""

    output: Any
    argument: dict[str, Any]
    model: dict[str, Any]


def _compare_call(
    model: Any,
    twin: Any,
    config: Config,
    entry: EntryConfig,
    kwargs: dict[str, Any],
    seed: int,
) -> Difference:
    """Call a model and its eager twin, and compare all that a caller can see."""
    import torch

    from compilekit.compiler.compare import compare, compare_aliases

    atol, rtol = config.verify.atol, config.verify.rtol
    twin_kwargs = copy.deepcopy(kwargs)
    with torch.inference_mode():
        torch.manual_seed(seed)
        expected = getattr(twin, entry.method)(**twin_kwargs)
        torch.manual_seed(seed)
        found = getattr(model, entry.method)(**kwargs)
    difference = compare(found, expected, atol, rtol)
    if difference.message:
        return difference
    here = _Seen(found, kwargs, _tensors(model))
    there = _Seen(expected, twin_kwargs, _tensors(twin))
    message = compare(here, there, atol, rtol).message
    message = f"after the call, {message}" if message else compare_aliases(here, there)
    return dataclasses.replace(difference, message=message)


def _tensors(model: Any) -> dict[str, Any]:
    """Every parameter and buffer of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


if __name__ == "__main__":
    sys.exit(main())
