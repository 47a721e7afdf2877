"""One process of ``bench startup``: saves the reference, prepares or measures a row.

Run with ``python -m``; the JSON spec comes on stdin, one JSON line goes to stdout, and
whatever libraries print ends up on stderr. Nothing heavy is imported at module level:
every import that a start pays for is part of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from ..config import Config
    from ..plan import Bucket
    from ..runtime.cache_receipt import CacheReceipt

_COMPILER_PACKAGES = ("torch._dynamo", "torch._inductor", "torch._export", "triton")

Task = Callable[[Mapping[str, Any]], dict[str, Any]]

_spawned: Counter[str] = Counter()


class Call(NamedTuple):
    """One bucket's call: keyword arguments for an entry's method."""

    entry: str
    method: str
    bucket: Bucket
    kwargs: Mapping[str, Any]


class Loaded(NamedTuple):
    """A live model in eval mode, its calls, and what making them took."""

    config: Config
    model: torch.nn.Module
    calls: list[Call]
    entry_callable: Callable[..., Callable[..., Any]]
    import_torch_ms: float
    import_code_ms: float
    model_ms: float


def main() -> None:
    """Do what the spec on stdin says."""
    sys.addaudithook(_count_processes)
    tasks: dict[str, Task] = {
        "reference": reference,
        "prepare": prepare,
        "measure": measure,
    }
    answer(lambda spec: tasks[spec["task"]](spec))


def answer(task: Task) -> None:
    """Run a task on the spec from stdin and write its result as one line."""
    # Libraries print to descriptor 1; the result line has a descriptor of its own.
    with os.fdopen(os.dup(1), "w") as result:
        os.dup2(2, 1)
        data = task(json.loads(sys.stdin.read()))
        result.write(json.dumps(data) + "\n")


def load(spec: Mapping[str, Any]) -> Loaded:
    """Import torch, then the model's code, then build the model: timed one by one."""
    started = time.perf_counter()
    import torch

    import_torch_ms = elapsed_ms(started)
    torch.set_num_threads(spec["threads"])

    from ..config import load as load_config

    config = load_config(Path(spec["config"]))
    started = time.perf_counter()
    from ..compiler import models

    _import_model_code(config)
    import_code_ms = elapsed_ms(started)
    started = time.perf_counter()
    device = spec.get("device", "cpu")
    model = models.build_real(config, weights=spec["weights"], device=device)
    wait(device)
    model_ms = elapsed_ms(started)
    calls = make_calls(config, device)
    return Loaded(
        config,
        model,
        calls,
        # Held here: importing it again, once compilekit is unloaded, would cost time.
        models.entry_callable,
        import_torch_ms,
        import_code_ms,
        model_ms,
    )


def _import_model_code(config: Config) -> None:
    """Import transformers and the model class's module, as far as they're named.

    A factory's module is imported by the construction that follows.
    """
    if config.model.source.startswith("hf:"):
        import transformers

        getattr(transformers, config.model.model_class or "AutoModel")


def wait(device: str) -> None:
    """Wait for a GPU: a call returns before its work is done."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def make_calls(config: Config, device: str = "cpu") -> list[Call]:
    """Every bucket of every entry, in configuration order, with sample inputs."""
    from ..compiler.examples import example_kwargs
    from ..plan import buckets

    return [
        Call(
            name,
            entry.method,
            bucket,
            example_kwargs(config, entry, bucket, device=device),
        )
        for name, entry in config.entries.items()
        for bucket in buckets(config, name)
    ]


def reference(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Save eager's output of every bucket, and say where all of this ran."""
    loaded = load(spec)
    import torch

    with torch.no_grad():
        outputs = [tensors(eager(loaded, call)(**call.kwargs)) for call in loaded.calls]
    torch.save(outputs, Path(spec["store"]) / "reference.pt")
    return {
        "buckets": [f"{call.entry}/{call.bucket.name}" for call in loaded.calls],
        "environment": versions(),
    }


def versions() -> dict[str, str]:
    """What the numbers depend on, of what this process has imported."""
    import platform

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    if transformers := sys.modules.get("transformers"):
        found["transformers"] = transformers.__version__
    return found


def prepare(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Make what a row ships, and say how long that took without the imports."""
    store = Path(spec["store"])
    if spec["what"] in ("artifact", "cache-artifact"):
        route = "program" if spec["what"] == "artifact" else "cache"
        return _prepare_artifact(Path(spec["config"]), store / spec["what"], route)
    loaded = load(spec)
    started = time.perf_counter()
    if spec["what"] == "packages":
        _prepare_packages(loaded, store / "packages")
    elif spec["what"] == "functions":
        _prepare_functions(loaded, store / "functions")
    else:
        _prepare_caches(loaded, store)
    return {"seconds": time.perf_counter() - started}


def _prepare_artifact(config_path: Path, artifact: Path, route: str) -> dict[str, Any]:
    import compileall
    import dataclasses

    from ..compiler.build import build
    from ..config import load as load_config
    from ..errors import CaptureError

    started = time.perf_counter()
    config = load_config(config_path)
    chosen = dataclasses.replace(config.build, routes=(route,))
    config = dataclasses.replace(config, build=chosen)
    result = build(config, artifact, verify=False)
    if result.artifact is None:
        raise CaptureError("; ".join(f"{b.bucket}: {b.error}" for b in result.failed))
    seconds = time.perf_counter() - started
    # An installed package has its byte code; a fresh checkout doesn't yet.
    compileall.compile_dir(Path(__file__).parents[1], quiet=2)
    return {"seconds": seconds}


def _prepare_packages(loaded: Loaded, packages: Path) -> None:
    import torch

    from .._torch import peers
    from ..errors import CaptureError

    packages.mkdir()
    options = peers.inductor_options(
        loaded.config.compile.mode, loaded.config.compile.options
    )
    for call in loaded.calls:
        if call.method != "forward":
            raise CaptureError(
                f"aoti: torch.export takes a module's forward, not {call.method}"
            )
        with torch.no_grad():
            peers.package_with_aoti(
                loaded.model, call.kwargs, _package(packages, call), options
            )


def _prepare_functions(loaded: Loaded, folder: Path) -> None:
    import torch

    from .._torch import peers

    folder.mkdir()
    options = peers.inductor_options(
        loaded.config.compile.mode, loaded.config.compile.options
    )
    for call in loaded.calls:
        with torch.no_grad():
            peers.save_with_aot_compile(
                eager(loaded, call), call.kwargs, _function(folder, call), options
            )


def _prepare_caches(loaded: Loaded, store: Path) -> None:
    """Compile everything once; keep the directory, the bundle and the kernels."""
    import shutil

    import torch

    from .._torch.caches import kernels
    from ..errors import CaptureError

    # Never undone: the process ends with what it prepares or measures.
    kernels.record(contextlib.ExitStack(), store / "mega+kernels" / "kernels")
    with torch.no_grad():
        functions = start("cold", loaded, store)
        for call, function in zip(loaded.calls, functions, strict=True):
            function(**call.kwargs)
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise CaptureError("mega: torch.compiler.save_cache_artifacts saved nothing")
    for row in ("mega", "mega+kernels"):
        (store / row).mkdir(exist_ok=True)
        (store / row / "bundle.bin").write_bytes(saved[0])
    shutil.move(os.environ["TORCHINDUCTOR_CACHE_DIR"], store / "moved")


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """One start: attach, every first call, then steady calls and the comparison."""
    loaded = load(spec)
    import torch

    modules = set(sys.modules)
    weights_rss_bytes = memory_bytes("VmRSS")
    _spawned.clear()
    first_ms: list[float] = []
    later_ms: list[list[float]] = []
    outputs: list[list[torch.Tensor]] = []
    with torch.no_grad():
        phases_ms: dict[str, float] = {}
        if spec["what"] in ("compilekit", "cache"):
            _forget_compilekit()
        started = time.perf_counter()
        functions = start(spec["what"], loaded, Path(spec["shipped"]), phases_ms)
        device = spec.get("device", "cpu")
        attach_ms = elapsed_ms(started)
        for call, function in zip(loaded.calls, functions, strict=True):
            started = time.perf_counter()
            output = function(**call.kwargs)
            wait(device)
            first_ms.append(elapsed_ms(started))
            outputs.append(tensors(output))
        started_up = _start_facts(modules)
        for call, function in zip(loaded.calls, functions, strict=True):
            later_ms.append(call_ms(function, call.kwargs, spec["calls"], device))
    expected = torch.load(Path(spec["store"]) / "reference.pt", weights_only=True)
    return {
        "ready_ms": attach_ms + sum(first_ms),
        "import_torch_ms": loaded.import_torch_ms,
        "import_code_ms": loaded.import_code_ms,
        "model_ms": loaded.model_ms,
        "attach_ms": attach_ms,
        "attach_phases_ms": phases_ms,
        "weights_rss_bytes": weights_rss_bytes,
        "buckets": [
            {
                "entry": call.entry,
                "bucket": call.bucket.name,
                "first_ms": first,
                "steady_ms": statistics.median(later),
                "later_ms": later,
                # As text: JSON has no infinity.
                "max_abs_diff": str(max_abs_diff(output, wanted)),
            }
            for call, first, later, output, wanted in zip(
                loaded.calls, first_ms, later_ms, outputs, expected, strict=True
            )
        ],
        **started_up,
    }


def _forget_compilekit() -> None:
    """Unload compilekit: this process used parts of it that a server hasn't imported.

    Only so does attach pay for its imports here as it does there.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] == "compilekit":
            del sys.modules[name]


def _start_facts(modules_before: set[str]) -> dict[str, Any]:
    """What attach and the first calls did to this process."""
    from .._torch import peers

    added = set(sys.modules) - modules_before
    return {
        "peak_rss_bytes": memory_bytes("VmHWM"),
        "maxrss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "spawned": dict(_spawned),
        "counters": peers.compile_counters(),
        "compiler_modules": sorted(set(_COMPILER_PACKAGES) & added),
    }


def start(
    row: str,
    loaded: Loaded,
    shipped: Path,
    phases_ms: dict[str, float] | None = None,
) -> list[Callable[..., Any]]:
    """Do what the row does before its first call; one function per call.

    Args:
        row: A key of `compilekit.bench.startup.ROWS`.
        loaded: The model and its calls.
        shipped: Where the things lie that the row ships.
        phases_ms: Filled with the phases of a row that reports them.
    """
    if row == "eager":
        return [eager(loaded, call) for call in loaded.calls]
    if row == "compilekit":
        started = time.perf_counter()
        import compilekit

        attach = compilekit.attach
        imported_ms = elapsed_ms(started)
        receipt = attach(loaded.model, shipped)
        if phases_ms is not None:
            phases_ms.update({"import": imported_ms, **receipt.milliseconds})
        return [eager(loaded, call) for call in loaded.calls]
    if row == "aoti":
        from .._torch import peers

        weights = {
            **dict(loaded.model.named_parameters(remove_duplicate=False)),
            **dict(loaded.model.named_buffers(remove_duplicate=False)),
        }
        return [
            peers.load_with_aoti(_package(shipped, call), weights)
            for call in loaded.calls
        ]
    if row == "aot":
        from .._torch import peers

        return [
            peers.load_with_aot_compile(
                eager(loaded, call), _function(shipped, call), call.kwargs
            )
            for call in loaded.calls
        ]
    restored = _restore(shipped, phases_ms) if row == "cache" else None
    if row in ("mega", "mega+kernels"):
        import torch

        if row == "mega+kernels":
            from .._torch.caches import kernels

            known = {path.stem: path for path in (shipped / "kernels").iterdir()}
            kernels.serve(contextlib.ExitStack(), known, on_build=lambda key: None)
        torch.compiler.load_cache_artifacts((shipped / "bundle.bin").read_bytes())
    entries = {call.entry: compiled(loaded, call) for call in loaded.calls}
    if restored is not None and phases_ms is not None:
        phases_ms.update(restored.milliseconds)
    return [entries[call.entry] for call in loaded.calls]


def _restore(artifact: Path, phases_ms: dict[str, float] | None) -> CacheReceipt:
    """Restore an artifact's caches; a step that they don't cover fails the row.

    Returns:
        The receipt, whose phases grow when ``torch.compile`` installs packages.
    """
    # This process was given a directory as every row is; restore brings its own.
    work = os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    started = time.perf_counter()
    import compilekit

    restore = compilekit.restore
    imported_ms = elapsed_ms(started)
    receipt = restore(artifact, work_dir=f"{work}-work", require="cache")
    if phases_ms is not None:
        phases_ms["import"] = imported_ms
    return receipt


def eager(loaded: Loaded, call: Call) -> Callable[..., Any]:
    """The entry as user code calls it."""
    entry = loaded.config.entries[call.entry]
    return loaded.entry_callable(loaded.model, entry)


def compiled(loaded: Loaded, call: Call) -> Callable[..., Any]:
    """``torch.compile`` with the configuration's mode and options."""
    import torch

    from .._torch import peers

    options = peers.inductor_options(
        loaded.config.compile.mode, loaded.config.compile.options
    )
    function: Callable[..., Any] = torch.compile(
        eager(loaded, call), dynamic=False, fullgraph=True, options=options or None
    )
    return function


def call_ms(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    calls: int,
    device: str = "cpu",
) -> list[float]:
    """Times of several calls, one after the other."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        output = function(**kwargs)
        wait(device)
        times.append(elapsed_ms(started))
        # Giving its memory back isn't part of the call.
        del output
    return times


def tensors(output: Any) -> list[torch.Tensor]:
    """Copies of an output's tensors, in a stable order."""
    import torch

    from .._torch import peers

    return [
        leaf.detach().clone()
        for leaf in peers.leaves(output)
        if isinstance(leaf, torch.Tensor)
    ]


def max_abs_diff(found: list[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Largest absolute difference; inf when the outputs aren't comparable."""
    wanted = list(expected)
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in wanted]:
        return float("inf")
    worst = 0.0
    for here, there in zip(found, wanted, strict=True):
        if here.numel() == 0:
            continue
        diff = (here.double() - there.double()).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, float(diff.max()))
    return worst


def memory_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process.

    Unlike ``ru_maxrss``, VmHWM starts anew at exec instead of keeping the parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def elapsed_ms(started: float) -> float:
    """Milliseconds since a `time.perf_counter` reading."""
    return (time.perf_counter() - started) * 1e3


def _package(packages: Path, call: Call) -> Path:
    return packages / f"{call.entry}-{call.bucket.name}.pt2"


def _function(functions: Path, call: Call) -> Path:
    return functions / f"{call.entry}-{call.bucket.name}.bin"


def _count_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: every way in which Python starts a process, by program."""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        _spawned[os.path.basename(os.fsdecode(arguments[0] or "?"))] += 1
    elif event in ("os.fork", "os.forkpty", "os.system"):
        _spawned[event] += 1


if __name__ == "__main__":
    main()
