"""One row of the staleness table: apply a change, restore, run, compare with eager.

The JSON spec comes on stdin: artifact, folder of the model's source, Python code to run
before and after `restore`, the call. One JSON line goes to stdout.
"""

import contextlib
import json
import os
import sys


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
    answer = {"verdict": "", "reasons": [], "error": 0.0}
    try:
        receipt = compilekit.restore(spec["artifact"], require=spec.get("require", ()))
    except CompilekitError as exc:
        answer |= {"verdict": "refused", "reasons": str(exc).splitlines()}
        answer["code"] = exc.exit_code
        return answer
    scope["model"] = stale_model.make()
    scope["x"] = stale_model.sample(4)
    scope["options"] = {}
    scope["mode"] = torch.no_grad
    exec(spec.get("then", ""), scope)
    model, x = scope["model"], scope["x"]
    try:
        compiled = torch.compile(model, **scope["options"])
        with scope["mode"]():
            found = compiled(x)
        receipt.finish()
    except CompilekitError as exc:
        answer |= {"verdict": "policy", "reasons": str(exc).splitlines()}
        answer["code"] = exc.exit_code
        return answer
    with scope["mode"]():
        expected = model(x)
    answer["error"] = float((found.double() - expected.double()).abs().max())
    answer["reasons"] = [miss.reason for miss in receipt.misses]
    answer["verdict"] = "recompiled" if receipt.misses else "same"
    return answer


if __name__ == "__main__":
    main()
