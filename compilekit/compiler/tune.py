"""``compilekit tune``: measure kernels' configs on the device that they are for.

Each bucket is captured as a build does it, compiled with all its candidates, and run
once on real tensors; Inductor measures what it would measure at a first call. Products
of few rows are measured beforehand, each by itself. What won goes into the tuning file
(see `compilekit.compiler.tuning`) after every product and every bucket, so that an
interrupted run loses one bucket at most, and a further run goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compilekit import plan
from compilekit._torch import capture as dynamo
from compilekit._torch import emulation
from compilekit._torch.tuning import TunedKernel, tune
from compilekit.compiler import convention
from compilekit.compiler.attention import attention_from
from compilekit.compiler.compile import capture_bucket, inductor_options
from compilekit.compiler.models import build_fake
from compilekit.compiler.traced_call import fake_device, has_own_kernels
from compilekit.compiler.tuning import Tuning, load_tuning
from compilekit.config import Config
from compilekit.errors import ConfigError, NeedsDeviceError
from compilekit.events import BuildEvent, OnBuildEvent, ignore
from compilekit.output import write_text
from compilekit.paths import parse
from compilekit.targets import Target, load_target

if TYPE_CHECKING:
    from compilekit.compiler.tune_products import Choice


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """What a run found.

    Attributes:
        path: The tuning file.
        target: Where it was measured.
        kernels: Kernels in the file.
        found: Kernels that this run measured.
        choices: Products of few rows that this run measured.
        seconds: The whole run.
    """

    path: Path
    target: str
    kernels: int
    found: tuple[TunedKernel, ...]
    choices: tuple[Choice, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        data = dataclasses.asdict(self)
        return {**data, "path": str(self.path)}


def tune_config(
    config: Config,
    out: Path,
    *,
    buckets: Sequence[str] = (),
    on_event: OnBuildEvent = ignore,
) -> TuneResult:
    """Tune the kernels of a configuration's buckets on this machine's GPU.

    Args:
        config: Its one CUDA target must be the device that is here.
        out: The tuning file; kernels that it has already aren't measured again.
        buckets: Names (``entry/bucket``) of those to tune; all by default.
        on_event: Told when a bucket begins and ends.
    Raises:
        ConfigError: a bucket is unknown, or `out` is for another target.
        NeedsDeviceError: the target's device isn't here.
        ResourceError: `out` can't be written.
    """
    began = time.perf_counter()
    target = _target(config)
    jobs = [
        (name, plan.Job(target.name, name, bucket))
        for name in config.entries
        for bucket in plan.buckets(config, name)
    ]
    known = [f"{name}/{job.bucket.name}" for name, job in jobs]
    unknown = [name for name in buckets if name not in known]
    if unknown:
        raise ConfigError(
            f"buckets: expected some of {', '.join(known)}, found {', '.join(unknown)}"
        )
    chosen = [
        job
        for name, job in jobs
        if not buckets or f"{name}/{job.bucket.name}" in buckets
    ]
    tuning = load_tuning(out) if os.path.exists(out) else Tuning()
    if tuning.target not in ("", target.name):
        raise ConfigError(
            f"{out} was measured on {tuning.target}, and this is {target.name}",
            hint="Name another file.",
        )
    emulation.install_native(target)
    model = build_fake(config, "cuda:0")
    memory: dict[str, torch.Tensor] = {}
    found: list[TunedKernel] = []
    choices: list[Choice] = []
    for index, job in enumerate(chosen, 1):
        event = BuildEvent(
            "started",
            job.target,
            job.entry,
            job.bucket.name,
            stage="tune",
            index=index,
            count=len(chosen),
        )
        on_event(event)
        started = time.perf_counter()
        entry = config.entries[job.entry]
        captured = capture_bucket(model, config, entry, job.bucket, target)
        if has_own_kernels(config, entry, fake_device(target)):
            from compilekit.compiler import decode_kernels, tune_products

            for product in decode_kernels.find(captured.graph):
                if product.key not in tuning.choices:
                    choices.append(tune_products.measure(product))
                    tuning = _chosen(tuning, target.name, choices[-1])
                    _save(out, tuning)
            decode_kernels.replace(captured.graph, tuning)
        inputs = _real_inputs(captured, memory)
        options = {**inductor_options(config), "compile_threads": os.cpu_count() or 1}
        with attention_from(config.compile.attention):
            fresh = tune(captured, inputs, options, tuning.configs())
        found += fresh
        tuning = _added(tuning, target.name, fresh)
        _save(out, tuning)
        on_event(
            dataclasses.replace(
                event,
                kind="finished",
                kernels=len(fresh),
                seconds=time.perf_counter() - started,
            )
        )
    return TuneResult(
        out,
        target.name,
        len(tuning.kernels),
        tuple(found),
        tuple(choices),
        time.perf_counter() - began,
    )


def _target(config: Config) -> Target:
    names = [n for n in config.build.targets if load_target(n).kind == "cuda"]
    for name in names:
        target = load_target(name)
        if emulation.is_here(target):
            return target
    raise NeedsDeviceError(
        f"none of the targets {', '.join(config.build.targets)} is the GPU that is"
        " here, and configs are measured on it",
        hint="Run it on a machine that has the device; its file feeds builds anywhere.",
    )


def _real_inputs(
    captured: dynamo.Capture, memory: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Real tensors for a graph's inputs; a model's are made once and kept in `memory`.

    Floats are small random numbers, so that no time is that of a special case;
    integers are 0, a valid index wherever one is taken.
    """
    inputs = []
    places = convention.inputs(captured)
    for place, example in zip(places, captured.example_inputs, strict=True):
        key = place.path if place.kind == "tensor" else ""
        tensor = memory.get(key)
        if tensor is None:
            tensor = torch.empty_strided(
                tuple(example.shape),
                tuple(example.stride()),
                dtype=example.dtype,
                device="cuda",
            )
            if tensor.is_floating_point():
                tensor.normal_(0, 0.02)
            else:
                # A mask that hid everything would leave attention nothing to do.
                tensor.fill_(1 if parse(place.path)[0] == "attention_mask" else 0)
            if key:
                memory[key] = tensor
        inputs.append(tensor)
    return inputs


def _added(tuning: Tuning, target: str, found: Sequence[TunedKernel]) -> Tuning:
    kernels: dict[str, Mapping[str, Any]] = dict(tuning.kernels)
    for kernel in found:
        kernels[kernel.source] = {
            "config": dict(kernel.config),
            "default": dict(kernel.default),
            "ms": round(kernel.milliseconds, 6),
            "default_ms": round(kernel.default_milliseconds, 6),
            "measured": kernel.measured,
        }
    return dataclasses.replace(_measured_here(tuning, target), kernels=kernels)


def _chosen(tuning: Tuning, target: str, choice: Choice) -> Tuning:
    choices = {**tuning.choices, choice.product: choice.as_json()}
    return dataclasses.replace(_measured_here(tuning, target), choices=choices)


def _measured_here(tuning: Tuning, target: str) -> Tuning:
    version = str(torch.__version__).partition("+")[0]
    return dataclasses.replace(tuning, target=target, torch=version)


def _save(path: Path, tuning: Tuning) -> None:
    write_text(path, json.dumps(tuning.as_json(), indent=1, sort_keys=True) + "\n")
