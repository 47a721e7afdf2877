"""On a GPU: programs against torch.compile with the same kernel configs, and eager.

    python scripts/device/compare.py ARTIFACTS [NAME…] [--out FILE]

ARTIFACTS holds one artifact per configuration of this folder, built on a machine
without a GPU. Each model runs in a process of its own. For each bucket: are program and
torch.compile bitwise equal (and if not, which outputs), how far is each from eager,
steady and host milliseconds of all three, and whether the kernels' sources are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run every model, print one line per bucket, keep the raw numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    known = sorted(path.stem for path in HERE.glob("*.toml"))
    names = arguments.names or [n for n in known if (arguments.artifacts / n).is_dir()]
    if arguments.child:
        print(json.dumps(measure(names[0], arguments.artifacts / names[0])))
        return

    def run(name: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, __file__, arguments.artifacts, name, "--child"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        else:
            found = {"name": name, "error": done.stderr.strip()[-3000:]}
        show(found)
        return found

    with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
        results = list(pool.map(run, names))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    sys.exit(any("error" in result for result in results))


def show(result: dict[str, Any]) -> None:
    """One line per bucket."""
    name = result["name"]
    if "error" in result:
        print(f"{name}\tfailed\t{result['error'].splitlines()[-1]}", flush=True)
        return
    kernels = result["kernels"]
    print(
        f"{name}\tkernel sources: {kernels['same']} the same, here only"
        f" {kernels['here_only']}, artifact only {kernels['artifact_only']}"
    )
    for bucket in result["buckets"]:
        times = ", ".join(
            f"{row} {one['steady_ms']:.3f} (host {one['host_ms']:.3f})"
            for row, one in bucket["times"].items()
        )
        equal = "bitwise equal" if not bucket["unequal"] else bucket["unequal"]
        print(
            f"{name}\t{bucket['bucket']}\t{equal}\tfrom eager: program"
            f" {bucket['program_from_eager']:.3g} torch.compile"
            f" {bucket['compiled_from_eager']:.3g}\tmisaligned arguments:"
            f" {bucket['misaligned']}\tms {times}",
            flush=True,
        )


def measure(name: str, path: Path) -> dict[str, Any]:
    """One model: eager, torch.compile with the first configs, then its artifact."""
    import torch

    import compilekit
    from compilekit import config as configuration
    from compilekit import plan
    from compilekit._torch.native import same_configs
    from compilekit.artifact import open_artifact
    from compilekit.compiler.attention import attention_from
    from compilekit.compiler.examples import example_kwargs
    from compilekit.compiler.models import build_real
    from compilekit.compiler.tuning import read_tuning

    config = configuration.load(HERE / f"{name}.toml")
    model = build_real(config, device="cuda")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    artifact = open_artifact(path)
    entry = config.entries["forward"]
    calls = {
        bucket.name: example_kwargs(config, entry, bucket, device="cuda", seed=1)
        for bucket in plan.buckets(config, "forward")
    }

    def outputs(function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
        found = {}
        for bucket, kwargs in calls.items():
            model.load_state_dict(state)
            torch.manual_seed(7)
            found[bucket] = leaves(function(**kwargs))
            found[bucket].update({f"model {k}": v.clone() for k, v in buffers(model)})
        return found

    sources: dict[str, str] = {}
    times: dict[str, dict[str, Any]] = {}
    eager = model.forward
    with torch.inference_mode():
        rows = {"eager": outputs(eager)}
        compiled = torch.compile(
            eager, dynamic=False, fullgraph=True, **how_to_compile(config)
        )
        with (
            same_configs(sources, read_tuning(config).configs()),
            attention_from(config.compile.attention),
        ):
            rows["compiled"] = outputs(compiled)
        receipt = compilekit.attach(model, artifact, require="program")
        rows["program"] = outputs(model.forward)
        misaligned = {
            bucket: call_misaligned(model, state, kwargs, rows["program"][bucket])
            for bucket, kwargs in calls.items()
        }
        functions = {
            "eager": eager,
            "torch.compile": compiled,
            "program": model.forward,
        }
        for bucket, kwargs in calls.items():
            times[bucket] = timed(functions, kwargs)
    mine = {
        kernel.source
        for (target, _, _), program in artifact.programs.items()
        if target == receipt.target
        for kernel in program.kernels.values()
    }
    return {
        "name": name,
        "target": receipt.target,
        "attach_ms": receipt.milliseconds,
        "compiles": receipt.compiles,
        "kernels": {
            "same": len(mine & sources.keys()),
            "here_only": sorted(sources[digest] for digest in sources.keys() - mine),
            "artifact_only": sorted(mine - sources.keys()),
        },
        "buckets": [
            {
                "bucket": bucket,
                "unequal": unequal(rows["program"][bucket], rows["compiled"][bucket]),
                "program_from_eager": worst(
                    rows["program"][bucket], rows["eager"][bucket]
                ),
                "compiled_from_eager": worst(
                    rows["compiled"][bucket], rows["eager"][bucket]
                ),
                "misaligned": misaligned[bucket],
                "times": times[bucket],
            }
            for bucket in calls
        ],
    }


def how_to_compile(config: Any) -> dict[str, Any]:
    """For torch.compile: options, and the backend if a program's attention is chosen.

    The model then says that its mask is causal, as the program's does.
    """
    from compilekit._torch.native import compile_options, inductor
    from compilekit.compiler.causal import pass_causality

    options = compile_options(config.compile.mode, dict(config.compile.options))
    if config.autotune.source:
        options["compile_threads"] = 1
    if not config.compile.attention:
        return {"options": options}

    def backend(graph: Any, examples: Any) -> Any:
        pass_causality(graph)
        return inductor(graph, examples, options)

    return {"backend": backend}


def call_misaligned(model: Any, state: Any, kwargs: Any, expected: Any) -> str:
    """What a call makes of arguments whose address no kernel can take: equal results,
    or a refusal by name."""
    import torch

    from compilekit.errors import CallRefusedError

    shifted = {}
    for name, tensor in kwargs.items():
        if not isinstance(tensor, torch.Tensor):
            shifted[name] = tensor
            continue
        room = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        shifted[name] = room.copy_(tensor)
    model.load_state_dict(state)
    torch.manual_seed(7)
    try:
        found = leaves(model.forward(**shifted))
    except CallRefusedError as exc:
        return f"refused: {exc.message}"
    different = unequal(found, expected)
    return f"different: {different}" if different else "equal"


def buffers(model: Any) -> list[tuple[str, Any]]:
    """Buffers, whose values a call may have changed."""
    return list(model.named_buffers())


def leaves(value: Any, path: str = "output") -> dict[str, Any]:
    """Every tensor of an output by its place, copied."""
    import torch

    if isinstance(value, torch.Tensor):
        return {path: value.clone()}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = {}
    for key, one in items:
        found.update(leaves(one, f"{path}[{key}]"))
    return found


def unequal(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Places whose bits differ, and by how much."""
    import torch

    return {
        key: worst({key: value}, {key: expected[key]})
        for key, value in found.items()
        if not torch.equal(value.nan_to_num(), expected[key].nan_to_num())
    }


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest absolute difference."""
    return max(
        float((value.double() - expected[key].double()).abs().max())
        for key, value in found.items()
    )


def timed(functions: dict[str, Any], kwargs: Any, calls: int = 30) -> dict[str, Any]:
    """Steady and host milliseconds of each, calls interleaved."""
    import torch

    steady: dict[str, list[float]] = {name: [] for name in functions}
    host: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(calls):
        for name, function in functions.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            function(**kwargs)
            host[name].append((time.perf_counter() - began) * 1e3)
            torch.cuda.synchronize()
            steady[name].append((time.perf_counter() - began) * 1e3)
    return {
        name: {
            "steady_ms": statistics.median(steady[name][5:]),
            "host_ms": statistics.median(host[name][5:]),
        }
        for name in functions
    }


if __name__ == "__main__":
    main()
