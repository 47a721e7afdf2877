"""Private torch.library names: where a custom operator comes from."""

from __future__ import annotations

import torch
from torch._library.custom_ops import OPDEFS

from compilekit._torch.runtime import operator_schema


def operator_origin(name: str) -> dict[str, str]:
    """Module that registers ``namespace::name`` and the operator's schema.

    The module is empty for an operator registered from C++.

    Source: torch/_library/custom_ops.py, OPDEFS and CustomOpDef (2.11, 2.13).
    """
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator)
    definition = OPDEFS.get(name)
    module = definition._init_fn.__module__ if definition is not None else ""
    return {"module": module, "schema": operator_schema(packet)}
