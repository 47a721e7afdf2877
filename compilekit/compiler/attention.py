"""Which kernel each attention call got, and the gate on those that got none.

PyTorch chooses a backend for ``scaled_dot_product_attention`` by device, dtype, shapes
and mask while a bucket is compiled, and the choice is part of the program. ``math`` is
plain matrix products and a softmax: correct, and slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compilekit.errors import CaptureError

# What transformers knows ours by, while a language model's steps are traced.
GROUPED = "compilekit_grouped"


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention calls of one bucket.

    Attributes:
        backends: Backend → calls: ``cudnn``, ``flash``, ``efficient``, ``math``, and
            ``flex`` for FlexAttention. Attention that a model writes out itself, as
            products and a softmax, isn't a call.
        unfused: Each kind of call that got ``math``, with its tensors and its line.
    """

    backends: Mapping[str, int]
    unfused: tuple[str, ...]


@contextlib.contextmanager
def attention_from(backends: Sequence[str]) -> Iterator[None]:
    """Have PyTorch choose among these only, in its own order.

    Args:
        backends: Names of ``[compile] attention``; empty = all.
    """
    if not backends:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = [
        SDPBackend.MATH
        if name == "math"
        else getattr(SDPBackend, f"{name.upper()}_ATTENTION")
        for name in backends
    ]
    with sdpa_kernel(chosen):
        yield


def counted(calls: list[tuple[str, str]]) -> Attention:
    """Backends with their number, of (backend, description) per call."""
    backends = Counter(backend for backend, _ in calls)
    unfused = dict.fromkeys(text for backend, text in calls if backend == "math")
    return Attention(dict(sorted(backends.items())), tuple(unfused))


def hold_gate(attention: Attention, gate: str) -> str:
    """Hold a bucket to ``[gates] math_attention``.

    Returns:
        A warning; empty if there is nothing to say.
    Raises:
        CaptureError: the gate is ``error``, and a call got ``math``.
    """
    if not attention.unfused or gate == "ignore":
        return ""
    number = attention.backends["math"]
    text = (
        f"{number} attention call{'s' * (number > 1)} got no fused kernel:"
        f" {'; '.join(attention.unfused)}"
    )
    if gate == "error":
        raise CaptureError(
            f'[gates] math_attention = "error": {text}',
            hint="A mask that is expanded along its last dimension, or a dtype or head"
            " size that no backend takes, leaves only math.",
        )
    return text


def shown(attention: Attention) -> str:
    """``cudnn 28, math 1``; empty without attention calls."""
    return ", ".join(f"{name} {n}" for name, n in attention.backends.items())


def to_json(attention: Attention) -> dict[str, Any]:
    """For ``reports/<target>/attention.json``."""
    return {
        "backends": dict(attention.backends),
        "unfused": list(attention.unfused),
    }
