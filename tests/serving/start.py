"""A server's start, in a process where anything but serving fails.

    python start.py ARTIFACT THREADS [UID]

Prints one JSON document: what was imported beyond plain torch, what was spawned, and
the largest difference from eager over every bucket and two padded shapes.
"""

import json
import os
import sys

sys.path.insert(0, __file__.rpartition("/")[0])
FORBIDDEN = (
    "torch._dynamo",
    "torch._inductor",
    "triton",
    "transformers",
    "click",
    "rich",
)
SPAWNS = ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system")


class Refuse:
    """An import hook that raises on everything a start must do without."""

    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(f"{root}.") for root in FORBIDDEN):
            raise ImportError(f"{name} was imported at start")
        return None


sys.meta_path.insert(0, Refuse())
spawned = []
sys.addaudithook(lambda name, args: spawned.append(name) if name in SPAWNS else None)

import torch  # noqa: E402

plain = set(sys.modules)
from tower_model import Tower  # noqa: E402

import compilekit  # noqa: E402

torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
model = Tower().eval()
worst = 0.0
with torch.inference_mode():
    calls = []
    for b, s in ((1, 64), (1, 256), (4, 64), (4, 256), (3, 100), (2, 7)):
        x = torch.randn(b, s, 16)
        mask = torch.ones(b, s, dtype=torch.int64)
        mask[:, s // 2 :] = 0
        calls.append(({"x": x, "mask": mask}, model(x, mask)))
    if len(sys.argv) > 3:
        # After the imports: the interpreter itself may lie where only root can read.
        compilekit.attach  # noqa: B018 - imports the runtime
        os.setgroups([])
        os.setgid(int(sys.argv[3]))
        os.setuid(int(sys.argv[3]))
    receipt = compilekit.attach(model, sys.argv[1], require="program")
    for kwargs, expected in calls:
        found = model(**kwargs)
        for name, tensor in expected.items():
            assert found[name].shape == tensor.shape, name
            worst = max(worst, float((found[name] - tensor).abs().max()))
new = sorted(m for m in set(sys.modules) - plain if not m.startswith("compilekit"))
sys.stdout.write(
    json.dumps(
        {
            "worst": worst,
            "spawned": spawned,
            "new": new,
            "routes": [route.route for route in receipt.routes],
            "compiles": receipt.compiles,
        }
    )
)
