"""One process of ``bench throughput``: one strategy, or the device's limits.

Run with ``python -m``; the JSON spec comes on stdin, one JSON line goes to stdout.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compilekit.bench._startup_child import answer, wait

TUNED = "compilekit-tuned"

# Strategy → mode of torch.compile; None = eager or compilekit.
MODES: Mapping[str, str | None] = {
    "eager": None,
    "default": "default",
    "reduce-overhead": "reduce-overhead",
    "max-autotune": "max-autotune",
    "max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs",
    "compilekit": None,
    "compilekit-no-graphs": None,
    TUNED: None,
}


def main() -> None:
    """Do what the spec on stdin says."""
    answer(lambda spec: limits(spec) if spec["strategy"] == "limits" else run(spec))


def limits(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What this device does at best: bytes read and matrix products per second.

    The best of a copy and a reduction over 4 GB, and a bf16 product of 8192³ (on a CPU
    64 MB and 1024³ in float32). A GPU that multiplies without a pause draws more power
    than it may, and slows down: its rate after a second of that is kept as well.
    """
    import torch

    device = spec["device"]
    gpu = device != "cpu"
    dtype = torch.bfloat16 if gpu else torch.float32
    count = 2**31 if gpu else 2**24
    source = torch.ones(count, dtype=dtype, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = _best(functools.partial(target.copy_, source), device)
    read = _best(source.sum, device)
    side = 8192 if gpu else 1024
    a = torch.randn(side, side, dtype=dtype, device=device)
    product = _best(lambda: a @ a, device)
    sustained = _sustained(lambda: a @ a, device)
    return {
        "strategy": "limits",
        "copy_bytes_per_s": 2 * size / copied,
        "read_bytes_per_s": size / read,
        "matmul_flop_per_s": 2 * side**3 / product,
        "sustained_matmul_flop_per_s": 2 * side**3 / sustained,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
    }


def _best(call: Callable[[], Any], device: str, repeat: int = 20) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeat):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _sustained(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call in the second of a row of them that takes two seconds."""
    began = time.perf_counter()
    half, calls = began, 0
    while (now := time.perf_counter()) - began < 2.0:
        if now - began < 1.0:
            half, calls = now, 0
        for _ in range(8):
            call()
        calls += 8
        wait(device)
    return (now - half) / calls


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Prefill, decode and generate by one strategy; every time in the result."""
    began = time.perf_counter()
    import torch

    from compilekit.compiler import hugging_face, models
    from compilekit.config import load

    config = load(Path(spec["config"]))
    device: str = spec["device"]
    imported = time.perf_counter()
    model: Any = models.build_real(config, weights=spec["weights"], device=device)
    model.requires_grad_(False)
    wait(device)
    built = time.perf_counter()
    strategy = _Strategy(spec, model)
    attached = time.perf_counter()
    vocabulary = hugging_face.vocabulary_size(config) or 2
    prompt, longest = spec["prompt"], spec["cache"]
    result: dict[str, Any] = {
        "strategy": spec["strategy"],
        "import_s": imported - began,
        "model_s": built - imported,
        "attach_s": attached - built,
        "prompt": prompt,
        "cache": longest,
        **_work(model),
        "steps": [],
    }
    with torch.inference_mode():
        for batch in spec["batches"]:
            generator = torch.Generator().manual_seed(batch)
            ids = torch.randint(0, vocabulary, (batch, prompt), generator=generator)
            ids = ids.to(device)
            cache = strategy.new_cache(batch, longest)
            times = []
            for _ in range(1 + spec["calls"]):
                strategy.reset(cache)
                wait(device)
                began = time.perf_counter()
                strategy.step(ids, cache, 0)
                wait(device)
                times.append((time.perf_counter() - began) * 1e3)
            first, *later = times
            result["steps"].append(
                {"kind": "prefill", "batch": batch, "first_ms": first, "ms": later}
            )
            token = ids[:, :1].contiguous()
            result["steps"].append(_decode(strategy, cache, token, prompt, spec))
            # The next batch's cache takes its memory, which graphs were captured on.
            del cache
        result["ready_s"] = result["attach_s"] + sum(
            row["first_ms"] / 1e3 for row in result["steps"]
        )
        if spec["new_tokens"]:
            result["generate"] = [
                _generate(strategy, model, vocabulary, spec) for _ in range(2)
            ]
    if device != "cpu":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
        result["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if strategy.receipt is not None:
        result["graphs_mb"] = dict(strategy.receipt.graphs)
        result["calls"] = dict(strategy.receipt.calls)
        result["compiles"] = strategy.receipt.compiles
        result["attach_ms"] = dict(strategy.receipt.milliseconds)
    return result


def _work(model: Any) -> dict[str, int]:
    """Bytes that a decode step reads, and products that a prompt's token needs.

    An embedding's rows are looked up; of a prompt only the last token gets logits.
    """
    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    layers = [p for p in model.parameters() if p is not head and p is not table]
    return {
        "decode_bytes": sum(p.numel() * p.element_size() for p in (*layers, head)),
        "prefill_products": sum(p.numel() for p in layers if p.ndim > 1),
    }


def _decode(
    strategy: _Strategy, cache: Any, token: Any, start: int, spec: Mapping[str, Any]
) -> dict[str, Any]:
    """Decode steps behind a prompt: ms per step, of several rounds of steps.

    A step's host work runs while the device works on the one before, as in a server;
    a round ends when the device has finished.
    """
    device = spec["device"]
    began = time.perf_counter()
    strategy.step(token, cache, start)
    wait(device)
    first = (time.perf_counter() - began) * 1e3
    position = start + 1
    # CUDA graph modes record at their second and third call.
    for _ in range(3):
        strategy.step(token, cache, position)
        position += 1
    wait(device)
    rounds = []
    steps = min(16, (spec["cache"] - position) // max(1, spec["calls"]))
    for _ in range(spec["calls"]):
        began = time.perf_counter()
        for _ in range(steps):
            strategy.step(token, cache, position)
            position += 1
        wait(device)
        rounds.append((time.perf_counter() - began) * 1e3 / steps)
    return {
        "kind": "decode",
        "batch": token.shape[0],
        "first_ms": first,
        "ms": rounds,
        "steps_per_round": steps,
    }


def _generate(
    strategy: _Strategy, model: Any, vocabulary: int, spec: Mapping[str, Any]
) -> dict[str, Any]:
    """Seconds of one unmodified ``generate`` of the largest batch."""
    import torch

    batch, device = max(spec["batches"]), spec["device"]
    generator = torch.Generator().manual_seed(0)
    shape = (batch, spec["prompt"])
    ids = torch.randint(0, vocabulary, shape, generator=generator).to(device)
    wait(device)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=spec["new_tokens"],
        min_new_tokens=spec["new_tokens"],
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        **strategy.generate_options,
    )
    wait(device)
    seconds = time.perf_counter() - began
    made = out.shape[1] - ids.shape[1]
    return {"seconds": seconds, "batch": batch, "new_tokens": made}


class _Strategy:
    """How a strategy steps: one interface over eager, torch.compile and compilekit."""

    def __init__(self, spec: Mapping[str, Any], model: Any) -> None:
        import os

        import torch

        from compilekit.compiler.generate import cache_name

        name = spec["strategy"]
        self.model = model
        self.device = spec["device"]
        self.ours = name.startswith("compilekit")
        self.cache_name = cache_name(model)
        self.receipt: Any = None
        self.generate_options: dict[str, Any] = {}
        self.forward: Callable[..., Any] = model
        mode = MODES[name]
        if self.ours:
            import compilekit

            os.environ["COMPILEKIT_CUDA_GRAPHS"] = "0" if "no-graphs" in name else "1"
            artifact = spec["tuned" if name == TUNED else "artifact"]
            self.receipt = compilekit.attach(
                model, artifact, require="program", loading="eager"
            )
        elif mode is not None:
            from transformers import CompileConfig

            self.forward = torch.compile(
                model.forward, mode=mode, fullgraph=True, dynamic=False
            )
            self.generate_options["compile_config"] = CompileConfig(
                mode=mode, fullgraph=True, dynamic=False
            )
        else:
            self.generate_options["disable_compile"] = True
        self.masks: dict[int, Any] = {}

    def new_cache(self, batch: int, length: int) -> Any:
        """A cache for `batch` sequences, its memory there."""
        from transformers import StaticCache

        if self.ours:
            return self.model.forward.new_cache(batch, length)
        cache = StaticCache(config=self.model.config, max_cache_len=length)
        text = self.model.config.get_text_config(decoder=True)
        heads = text.num_key_value_heads
        size = getattr(text, "head_dim", None)
        cache.early_initialization(
            batch_size=batch,
            num_heads=heads,
            head_dim=size or text.hidden_size // text.num_attention_heads,
            dtype=self.model.dtype,
            device=self.device,
        )
        return cache

    def reset(self, cache: Any) -> None:
        """Forget what a cache holds."""
        cache.reset()

    def step(self, ids: Any, cache: Any, start: int) -> Any:
        """Logits of the last token."""
        import torch

        batch, count = ids.shape
        longest = cache.get_max_length()
        mask = self.masks.get(batch)
        if mask is None:
            mask = self.masks[batch] = torch.ones(
                batch, longest, dtype=torch.int64, device=self.device
            )
        positions = torch.arange(start, start + count, device=self.device)
        if not self.ours:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self.forward(
            input_ids=ids,
            attention_mask=mask[:, : start + count] if self.ours else mask,
            position_ids=positions[None].expand(batch, -1),
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: cache},
        ).logits


if __name__ == "__main__":
    main()
