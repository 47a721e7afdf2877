"""The process that replays one bucket of the cache route, and compares with eager.

Says one JSON line (see `child`). Under ``require =
cache`` with an empty PATH, any frame that is traced, key that misses, kernel that is
built or compiler that is started is an error; so is a result that isn't eager's. A
warm-up that leaves no tensor can't be compared: then its difference is nan.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from compilekit.compiler import child
from compilekit.plan import Bucket


def main() -> int:
    """Replay the bucket named on standard input."""
    return child.run(lambda spec, say: say(json.dumps(_replay(spec))))


def _replay(spec: dict[str, Any]) -> dict[str, Any]:
    import torch

    from compilekit import config as configuration
    from compilekit.artifact import open_artifact
    from compilekit.compiler.calls import caller
    from compilekit.compiler.compare import compare, tensors, tolerance
    from compilekit.errors import PolicyError
    from compilekit.runtime.restore import read_cache, restore

    config = configuration.load(Path(spec["config"]))
    config = dataclasses.replace(config, path=Path(spec["base"]) / "compilekit.toml")
    artifact = open_artifact(spec["artifact"])
    _, cache = read_cache(artifact)
    threads = int(cache.factors["cache.threads"])
    torch.set_num_threads(threads)
    # An environment of the caller's would be one of the things that differ; and a
    # script that restores by itself where it's told to is served here.
    for name in [*os.environ]:
        if name == "TORCHINDUCTOR_CACHE_DIR" or name.startswith("COMPILEKIT_"):
            del os.environ[name]
    os.environ["PATH"] = ""
    receipt = restore(artifact, work_dir=spec["work_dir"], require="cache")
    call = caller(config, spec["device"], weights=spec["weights"])
    bucket = Bucket(spec["bucket"], spec["axes"])

    def run() -> Any:
        torch.manual_seed(0)
        random.seed(0)
        return call(spec["entry"], bucket)

    message, error = "", float("inf")
    given = config.verify.atol, config.verify.rtol
    atol, rtol = tolerance(torch.float32, *given)
    try:
        found = run()
        receipt.finish()
    except PolicyError as exc:
        message = exc.message
    if not message:
        torch.compiler.set_stance("force_eager")
        expected = run()
        difference = compare(found, expected, *given)
        message, error = difference.message, difference.max_abs_error
        outputs = tensors(expected)
        if outputs:
            atol, rtol = tolerance(outputs[0].dtype, *given)
        elif not message:
            error = float("nan")
    return {
        "threads": threads,
        "max_abs_error": str(error),
        "atol": atol,
        "rtol": rtol,
        "compiles": receipt.compiles,
        "spawned": sum(miss.kind == "process" for miss in receipt.misses),
        "passed": not message,
        "message": message,
    }


if __name__ == "__main__":
    sys.exit(main())
