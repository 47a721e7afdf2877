"""The process that runs every bucket with torch.compile, so that its caches fill.

It says events (see `child`), and leaves its results in a scratch folder. It runs twice:

    caches     torch's own caches in inductor/ and triton/, kernels/<key>.so, keys.json,
               compiled.json
    packages   again with Dynamo's package recorder: packages.pickle, operators, traced

A graph that torch refuses to cache fails its bucket, with torch's reason; so does one
that the second process looks up by another key, and one graph break more than
``[gates] graph_breaks`` allows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compilekit import config as configuration
from compilekit.compiler import child
from compilekit.errors import CompilekitError, GraphBreakError, HarvestError
from compilekit.events import BuildEvent, to_line
from compilekit.plan import Bucket
from compilekit.runtime.reasons import Stored, explain_miss
from compilekit.targets import load_target

# The kind of key under which Inductor's output is stored.
_GRAPH = "FX graph"


@dataclass
class Seen:
    """What one bucket met.

    Attributes:
        bucket: ``entry/bucket``.
        bypasses: Why torch refused to cache a graph, for each.
        compiles: Graphs that Inductor compiled.
        keys: What was looked up for the first time.
        frames: Each frame that Dynamo traced → how often.
    """

    bucket: str = ""
    bypasses: list[str] = field(default_factory=list)
    compiles: int = 0
    keys: list[dict[str, Any]] = field(default_factory=list)
    frames: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Run the jobs named on standard input; 0 even if some of them failed."""
    return child.run(
        lambda spec, say: run(
            spec, Path(spec["folder"]), lambda event: say(to_line(event))
        )
    )


def run(
    spec: Mapping[str, Any], folder: Path, emit: Callable[[BuildEvent], None]
) -> None:
    """Call every bucket in this process, watching; write down what was seen."""
    import torch

    from compilekit._torch import breaks
    from compilekit._torch.caches import (
        events,
        factors,
        kernels,
        keys,
        package_record,
        packages,
        settings,
        triton_configs,
    )
    from compilekit._torch.capture import CaptureUnsupported
    from compilekit.compiler.calls import caller
    from compilekit.compiler.worker import describe_model

    config = configuration.load(Path(spec["config"]))
    if config.compile.threads:
        torch.set_num_threads(config.compile.threads)
    # Never closed: the process ends with its last bucket.
    patches = contextlib.ExitStack()
    seen = Seen()
    everything: list[Seen] = []
    recorder = package_record.record() if spec["phase"] == "packages" else None
    settings.compile_all_buckets_once(patches, spec["recompile_limit"])
    on_gpu = spec["device"] != "cpu"
    options = settings.GPU_OPTIONS if on_gpu else {}
    settings.pin_options(patches, options)
    if recorder is not None:
        triton_configs.serve(patches)
    launched = triton_configs.record(patches)
    kernels.record(patches, folder / "kernels")
    first = [] if recorder is None else json.loads((folder / "keys.json").read_bytes())
    known = {key["key"] for key in first}

    def unseen(kind: str, key: str) -> bool:
        # With the recorder AOTAutograd's keys hold a random name.
        new = key not in known and (recorder is None or kind != "AOTAutograd")
        known.add(key)
        return new

    def on_key(key: Any) -> None:
        seen.keys.append(_key_of(key, seen.bucket))

    keys.watch(patches, unseen, on_key)
    if on_gpu:
        from compilekit._torch.caches import triton_keys

        # Kernels that worker processes compiled are looked up by the second process, if
        # Inductor doesn't launch them by their machine code.
        triton_keys.watch(patches, unseen, on_key)

    def on_frame(code: Any, frame_locals: Any) -> None:
        seen.frames[packages.code_id(code)] += 1
        if recorder is not None:
            recorder.note_frame(code)

    def on_event(kind: str, detail: str) -> None:
        if kind == "bypass" and recorder is None:
            seen.bypasses.append(detail)
        seen.compiles += kind == "compile"

    events.watch(patches, on_frame, on_event)
    broken = breaks.Recorder()
    patches.enter_context(broken.listening())
    compiled: dict[str, Any] = {}
    if spec["emulated"]:
        from compilekit._torch import emulation, without_device

        emulation.install(load_target(spec["target"]))
        without_device.compile_only(patches)
    call = caller(
        config,
        spec["device"],
        fake=spec["emulated"],
        on_model=lambda model: describe_model(model, folder / "model.json"),
    )
    for index, entry, name, axes in spec["jobs"]:
        began = time.perf_counter()
        seen = Seen(f"{entry}/{name}")
        everything.append(seen)
        broken.breaks.clear()
        about = BuildEvent(
            "started", spec["target"], entry, name, index=index, count=spec["count"]
        )
        emit(about)
        try:
            call(entry, Bucket(name, axes))
            places = _hold_breaks(broken.breaks, config)
            _refuse_bypassed(seen.bypasses)
            if recorder is not None:
                _refuse_missed(seen, first)
        except CaptureUnsupported as exc:
            emit(_failed(about, _broken(exc), began))
            continue
        except Exception as exc:  # noqa: BLE001 - reported, then the next bucket runs
            emit(_failed(about, exc, began))
            continue
        compiled[seen.bucket] = {
            "frames": dict(sorted(seen.frames.items())),
            "graph_breaks": places,
            "new_keys": sorted(f"{key['kind']} {key['key']}" for key in seen.keys),
        }
        kernels_there = sum(1 for _ in (folder / "kernels").glob("*.so"))
        emit(
            replace(
                about,
                kind="finished",
                kernels=kernels_there,
                seconds=time.perf_counter() - began,
                warning=_counted(places) if places else "",
            )
        )
    found = [key for one in everything for key in one.keys]
    if recorder is None:
        _write(folder / "keys.json", found)
        _write(folder / "factors.json", factors.here(options))
        unused = triton_configs.settle(folder / "inductor", launched)
        _write(folder / "unused.json", unused)
        _write(folder / "layout.json", _rank())
        _write(folder / "compiled.json", compiled)
    else:
        made = recorder.packages()
        plain = pickle.dumps([package._asdict() for package in made])
        (folder / "packages.pickle").write_bytes(plain)
        _write(folder / "keys.json", first + found)
        _write(folder / "traced.json", recorder.traced(made))
    if spec["emulated"]:
        why = "built where the device isn't: its guards are made at start"
        frames = {name for one in everything for name in one.frames}
        _write(folder / "traced.json", dict.fromkeys(sorted(frames), why))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _key_of(key: Any, bucket: str) -> dict[str, Any]:
    return {
        "kind": key.kind,
        "key": key.key,
        "bucket": bucket,
        "components": {n: [c.hash, c.text] for n, c in key.components.items()},
        "subclasses": key.subclasses,
    }


def _rank() -> dict[str, int]:
    """This process's place among those of its job; nothing where it is alone."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return {}
    size = distributed.get_world_size()
    return {"rank": distributed.get_rank(), "world_size": size} if size > 1 else {}


def _refuse_missed(seen: Seen, first: list[dict[str, Any]]) -> None:
    """Refuse a bucket with a graph that a second process doesn't find again.

    Args:
        first: What the first process looked up, and so has stored.
    """
    if not seen.compiles:
        return
    reason = "torch stored nothing under its key"
    missed = [key for key in seen.keys if key["kind"] == _GRAPH]
    if missed:
        stored = [
            Stored(
                key["key"],
                key["bucket"],
                functools.partial(key.__getitem__, "components"),
            )
            for key in first
            if key["kind"] == _GRAPH
        ]
        reason = explain_miss(_GRAPH, missed[0]["components"], stored)
    mine = [key for key in first if key["bucket"] == seen.bucket]
    kinds = sorted({kind for key in mine for kind in key["subclasses"]})
    if kinds:
        reason += f"; among its inputs are {', '.join(kinds)}"
    raise HarvestError(
        f"a second process compiles a graph that the first one stored: {reason}",
        hint="Each start would compile it anew. Keep what differs between processes"
        " out of the compiled code.",
    )


def _refuse_bypassed(bypasses: list[str]) -> None:
    """Refuse a bucket with a graph that no start could look up."""
    if bypasses:
        raise HarvestError(
            f"torch refuses to cache a graph: {bypasses[0]}",
            hint="A start would compile it anew. Keep that out of the compiled code,"
            " e.g. behind torch.compiler.disable.",
        )


def _hold_breaks(found: list[Any], config: configuration.Config) -> list[str]:
    """The places of a bucket's graph breaks, each once.

    Raises:
        GraphBreakError: there are more than ``[gates] graph_breaks`` allows.
    """
    from compilekit._torch import breaks

    own = [one for one in found if one.gb_type not in breaks.NO_BREAKS]
    places = list(dict.fromkeys(map(breaks.describe_raw_break, own)))
    allowed = config.gates.graph_breaks
    if len(places) > allowed:
        raise GraphBreakError(
            f"{_counted(places)}, [gates] graph_breaks allows {allowed}:"
            + "".join(f"\n  {place}" for place in places),
            hint="Remove them (compilekit explain says how), or set [gates]"
            f" graph_breaks = {len(places)}.",
        )
    return places


def _broken(exc: Exception) -> GraphBreakError:
    """A graph break under ``[compile] fullgraph``."""
    from compilekit._torch.breaks import describe_break

    error = GraphBreakError(
        f"Dynamo can't hold the call in one graph: {describe_break(exc)}",
        hint="This route may break graphs: [compile] fullgraph = false, and [gates]"
        " graph_breaks says how often. `compilekit explain CONFIG` lists each break.",
    )
    error.__cause__ = exc
    return error


def _counted(places: list[str]) -> str:
    return f"{len(places)} graph break{'s' if len(places) > 1 else ''}"


def _failed(about: BuildEvent, exc: Exception, began: float) -> BuildEvent:
    """Report a failed bucket; the traceback stays in the log."""
    traceback.print_exception(exc)
    sys.stderr.flush()
    message = str(exc)
    if not isinstance(exc, CompilekitError):
        message = f"{type(exc).__name__}: {message}"
    if rank := _rank():
        message = f"rank {rank['rank']} of {rank['world_size']}: {message}"
    return replace(
        about,
        kind="failed",
        seconds=time.perf_counter() - began,
        message=message,
        error_type=type(exc).__name__,
        exit_code=exc.exit_code if isinstance(exc, CompilekitError) else 3,
    )


if __name__ == "__main__":
    sys.exit(main())
