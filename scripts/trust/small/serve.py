"""Attach, answer, and compare with eager; what a server does until it is ready."""

from __future__ import annotations

import small
import torch

import compilekit

model, call = small.model(), small.call()
with torch.inference_mode():
    expected = model(call)
    receipt = compilekit.attach(model, require="program")
    found = model(call)
torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
receipt.finish()
print("right")
