"""A start that may import no compiler: it raises on Dynamo, Inductor and Triton.

    PATH= python scripts/device/start.py ARTIFACT

For the artifact of ``plain.toml``, whose model is torch's own modules. Prints what the
start took and how far each bucket is from eager; ends with an error if anything
imported a compiler, or started a process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time
from typing import Any

FORBIDDEN = ("torch._inductor", "torch._dynamo", "triton", "transformers")


class Refuses(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Raises on the import of a compiler; looking whether one is there is allowed.

    torch looks for triton when it starts CUDA, and doesn't import it.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Take over every compiler's module."""
        if name.startswith(FORBIDDEN):
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def exec_module(self, module: Any) -> None:
        """Refuse."""
        raise ImportError(f"{module.__name__} was imported at start")


def refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """Raises when a process is started."""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        raise RuntimeError(f"{event} {arguments[:1]}")


def main() -> None:
    """Attach, call each bucket, compare with eager."""
    sys.meta_path.insert(0, Refuses())
    sys.addaudithook(refuse_processes)
    import torch
    from plain_model import Plain

    import compilekit

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Plain().eval()
    torch.set_default_dtype(torch.float32)
    calls = {s: torch.randint(0, 1000, (1, s), device="cuda") for s in (1, 128)}
    with torch.inference_mode():
        expected = {s: model(ids) for s, ids in calls.items()}
        torch.cuda.synchronize()
        began = time.perf_counter()
        receipt = compilekit.attach(model, sys.argv[1], require="program")
        found = {s: model(ids) for s, ids in calls.items()}
        torch.cuda.synchronize()
        ready = (time.perf_counter() - began) * 1e3
        for s in calls:
            worst = float((found[s] - expected[s]).abs().max())
            print(f"{s} tokens: differs from eager by {worst:.3g}")
            if worst > 0.08:
                sys.exit(f"{s} tokens: wrong")
    loaded = [name for name in sys.modules if name.startswith(FORBIDDEN)]
    print(f"ready {ready:.1f} ms, target {receipt.target}, compilers loaded: {loaded}")
    sys.exit(bool(loaded))


if __name__ == "__main__":
    main()
