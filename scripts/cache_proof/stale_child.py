"""One row of the staleness table: apply a change, restore, run, compare with eager.

The JSON spec comes on stdin: artifact, folder of the model's source, Python code to run
before and after `restore`, the call. One JSON line goes to stdout.
"""

import contextlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    """Do what the spec on stdin says."""
    print(json.dumps(answer_to(json.load(sys.stdin))))


def answer_to(spec: dict) -> dict:
    """Apply a change, restore, run, compare."""
    sys.path.insert(0, spec["folder"])
    import torch

    torch.set_num_threads(spec.get("threads", 2))
    import stale_helper
    import stale_model

    import compilekit
    from compilekit.errors import CompilekitError

    scope = {"torch": torch, "model_module": stale_model, "helper": stale_helper}
    scope |= {"contextlib": contextlib, "os": os, "sys": sys}
    exec(spec.get("first", ""), scope)
    answer = {"verdict": "", "reasons": [], "error": 0.0, "counted": {}}
    try:
        receipt = compilekit.restore(spec["artifact"], require=spec.get("require", ()))
    except CompilekitError as exc:
        answer |= {"verdict": "refused", "reasons": _reasons(str(exc))}
        return answer
    scope["model"] = stale_model.make()
    scope["x"] = stale_model.sample(4)
    scope["options"] = {}
    scope["mode"] = torch.no_grad
    exec(spec.get("then", ""), scope)
    model, x = scope["model"], scope["x"]
    compiled = torch.compile(model, **scope["options"])

    def call() -> torch.Tensor:
        with scope["mode"]():
            return compiled(x)

    try:
        if scope.get("in_thread"):
            with ThreadPoolExecutor(max_workers=1) as pool:
                found = pool.submit(call).result()
        else:
            found = call()
        receipt.finish()
    except CompilekitError as exc:
        answer |= {"verdict": "policy", "reasons": _reasons(str(exc))}
        return answer
    with scope["mode"]():
        expected = model(x)
    answer["error"] = float((found.double() - expected.double()).abs().max())
    answer["reasons"] = [[miss.kind, miss.reason] for miss in receipt.misses]
    answer["counted"] = counted()
    kinds = {miss.kind for miss in receipt.misses}
    compiled_anew = kinds & {"compile", "kernel", "benchmark", "process"}
    answer["verdict"] = "recompiled" if compiled_anew else "traced"
    if not kinds:
        answer["verdict"] = "same"
    return answer


def _reasons(text: str) -> list[list[str]]:
    return [["error", line.strip()] for line in text.splitlines()]


def counted() -> dict[str, int]:
    """What torch itself counted, which compilekit's watching can't have changed."""
    from torch._dynamo.utils import counters

    return {
        "traced": counters["stats"]["unique_graphs"],
        "graphs": counters["inductor"]["fxgraph_cache_miss"]
        + counters["inductor"]["fxgraph_cache_bypass"],
        "looked up": counters["inductor"]["fxgraph_cache_hit"]
        + counters["aot_autograd"]["autograd_cache_hit"],
    }


if __name__ == "__main__":
    main()
