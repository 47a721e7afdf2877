"""On a GPU: what folding a ResNet-50's weights into its programs does and is worth.

    python scripts/device/frozen.py [--out FILE]

The model has transformers' default configuration and random weights, running statistics
included. It is built on the GPU with [freeze] and without, each artifact is attached in
turn and timed next to torch.compile. Convolutions in float32 round to TF32 by default;
distances from eager are taken with that off and on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = """
[model]
source = "hf:{folder}"
class = "ResNetForImageClassification"
[axes]
b = [1, 32]
[entries.forward.inputs.pixel_values]
shape = ["b", 3, 224, 224]
dtype = "float32"
[build]
targets = ["nvidia-h200"]
"""


def main() -> None:
    """Build both, attach both, print a line for each bucket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name))
    print(json.dumps(result, indent=1))
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(folder: Path) -> dict[str, Any]:
    """Sizes, distances from eager and steady milliseconds."""
    import torch

    import compilekit

    model = made(folder)
    result: dict[str, Any] = {"build_s": {}, "attach_ms": {}, "buckets": {}}
    inputs = {size: torch.randn(size, 3, 224, 224, device="cuda") for size in (1, 32)}
    times: dict[int, dict[str, float]] = {size: {} for size in inputs}
    with torch.inference_mode():
        compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
        expected = outputs(model.forward, inputs)
        result["buckets"] = {
            size: {"torch.compile from eager": distance}
            for size, distance in distances(compiled, inputs, expected, (True,)).items()
        }
        for size, x in inputs.items():
            times[size]["eager"] = steady(model.forward, x)
            times[size]["torch.compile"] = steady(compiled, x)
        for row in ("program", "frozen"):
            artifact = built(folder, row, result)
            receipt = compilekit.attach(model, artifact, require="program")
            result["attach_ms"][row] = receipt.milliseconds
            found = distances(model.forward, inputs, expected)
            for size, x in inputs.items():
                result["buckets"][size][f"{row} from eager"] = found[size]
                times[size][row] = steady(model.forward, x)
                times[size][f"torch.compile beside {row}"] = steady(compiled, x)
            receipt.detach()
    for size in inputs:
        result["buckets"][size]["ms"] = times[size]
    return result


Outputs = dict[tuple[int, bool], Any]


def outputs(
    function: Any, inputs: dict[int, Any], roundings: tuple[bool, ...] = (False, True)
) -> Outputs:
    """Logits by batch and by whether convolutions may round to TF32."""
    import torch

    found = {}
    for rounding in roundings:
        torch.backends.cudnn.allow_tf32 = rounding
        for size, x in inputs.items():
            found[size, rounding] = function(x).logits.clone()
    return found


def distances(
    function: Any,
    inputs: dict[int, Any],
    expected: Outputs,
    roundings: tuple[bool, ...] = (False, True),
) -> dict[int, dict[str, float]]:
    """The largest difference of a logit, by batch; torch.compile would compile anew."""
    found = outputs(function, inputs, roundings)
    return {
        size: {
            ("tf32" if on else "float32"): float(
                (found[size, on] - expected[size, on]).abs().max()
            )
            for on in roundings
        }
        for size in inputs
    }


def made(folder: Path) -> Any:
    """The model on the GPU, and its checkpoint in `folder`."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig()).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder / "weights")
    return model.requires_grad_(False).cuda()


def built(folder: Path, row: str, result: dict[str, Any]) -> Path:
    """The artifact with or without [freeze]."""
    weights = folder / "weights"
    text = CONFIG.format(folder=weights)
    if row == "frozen":
        text += f'[freeze]\nweights = "{weights}"\n'
    config = folder / f"{row}.toml"
    config.write_text(text, encoding="utf-8")
    began = time.perf_counter()
    command = [sys.executable, "-m", "compilekit", "build", config, "-o", folder / row]
    subprocess.run([*command, "--no-verify"], check=True)
    result["build_s"][row] = time.perf_counter() - began
    return folder / row


def steady(function: Any, x: Any) -> float:
    """Median milliseconds of 40 calls, after ten."""
    import torch

    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function(x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[10:])


if __name__ == "__main__":
    main()
