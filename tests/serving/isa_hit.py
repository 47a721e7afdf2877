"""torch.compile once; print whether its cache hit, and the difference from eager."""

import json
import sys

import torch
from torch._dynamo.utils import counters

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 64),
    torch.nn.GELU(),
    torch.nn.LayerNorm(64),
    torch.nn.Softmax(-1),
).eval()
x = torch.randn(8, 64)
with torch.no_grad():
    expected = model(x)
    found = torch.compile(model, dynamic=False)(x)
sys.stdout.write(
    json.dumps(
        {
            "hits": counters["inductor"]["fxgraph_cache_hit"]
            + counters["aot_autograd"]["autograd_cache_hit"],
            "error": float((found - expected).abs().max()),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    )
)
