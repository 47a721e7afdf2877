"""Compare a result with eager's: classes, structure, metadata, aliases, values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from compilekit import paths
from compilekit._torch.runtime import storage_id
from compilekit.runtime.result import class_name

# Absolute and relative tolerance by dtype, where the configuration sets none. Compiled
# kernels keep intermediates in float32 and sum in another order than eager.
TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-4, 1e-4),
    torch.float16: (2e-2, 2e-2),
    torch.bfloat16: (8e-2, 8e-2),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """What a comparison found.

    Attributes:
        max_abs_error: Over all floating outputs; inf where they can't be compared.
        message: What is wrong; empty if everything is within tolerance.
    """

    max_abs_error: float
    message: str = ""


def tolerance(
    dtype: torch.dtype, atol: float | None, rtol: float | None
) -> tuple[float, float]:
    """The configured tolerances, or else those of the dtype; 0 for integers."""
    default = TOLERANCES.get(dtype, (0.0, 0.0))
    return (default[0] if atol is None else atol, default[1] if rtol is None else rtol)


def compare(
    found: Any, expected: Any, atol: float | None = None, rtol: float | None = None
) -> Difference:
    """Compare two results of one call, part by part.

    NaN equals NaN. `compare_aliases` looks at who shares memory with whom.
    """
    leaves: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    message = _walk(found, expected, "", leaves)
    if message:
        return Difference(math.inf, message)
    worst = 0.0
    messages = []
    for path, have, want in leaves:
        error, wrong = _tensor(have, want, atol, rtol)
        worst = max(worst, error)
        if wrong:
            messages.append(f"{path or 'the output'}: {wrong}")
    return Difference(worst, "; ".join(messages))


def tensors(result: Any) -> list[torch.Tensor]:
    """What `compare` measures in a result."""
    leaves: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    _walk(result, result, "", leaves)
    return [tensor for _, tensor, _ in leaves]


def _walk(found: Any, expected: Any, path: str, leaves: list[Any]) -> str:
    where = path or "the output"
    if type(found) is not type(expected):
        kinds = class_name(type(expected)), class_name(type(found))
        if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
            return f"{where}: expected a {kinds[0]}, found a {kinds[1]}"
    if isinstance(expected, torch.Tensor):
        leaves.append((path, found, expected))
        return ""
    if isinstance(expected, Mapping) and list(found) != list(expected):
        return f"{where}: expected keys {list(expected)}, found {list(found)}"
    parts: list[tuple[str, Any, Any]]
    if dataclasses.is_dataclass(expected):
        names = [field.name for field in dataclasses.fields(expected)]
        parts = [
            (paths.join(path, n, "dataclass"), getattr(found, n), getattr(expected, n))
            for n in names
        ]
    elif isinstance(expected, Mapping):
        parts = [
            (paths.join(path, str(key), "dict"), found[key], expected[key])
            for key in expected
        ]
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{where}: expected {len(expected)} parts, found {len(found)}"
        fields = getattr(expected, "_fields", None)
        parts = [
            (
                paths.join(path, fields[i], "namedtuple") if fields else f"{path}[{i}]",
                have,
                want,
            )
            for i, (have, want) in enumerate(zip(found, expected, strict=True))
        ]
    elif found != expected:
        return f"{where}: expected {expected!r}, found {found!r}"
    else:
        return ""
    for name, have, want in parts:
        message = _walk(have, want, name, leaves)
        if message:
            return message
    return ""


def _tensor(
    found: torch.Tensor,
    expected: torch.Tensor,
    atol: float | None,
    rtol: float | None,
) -> tuple[float, str]:
    for what in ("dtype", "shape", "device"):
        have, want = getattr(found, what), getattr(expected, what)
        if have != want:
            return math.inf, f"expected {what} {want}, found {have}"
    if found.numel() == 0:
        return 0.0, ""
    absolute, relative = tolerance(expected.dtype, atol, rtol)
    have, want = found.detach(), expected.detach()
    if torch.equal(have, want):
        return 0.0, ""
    if not (have.is_floating_point() or have.is_complex()):
        return math.inf, "other values"
    wide = torch.complex128 if have.is_complex() else torch.float64
    have, want = have.to(wide), want.to(wide)
    nan = torch.isnan(have) & torch.isnan(want)
    equal = nan | (have == want)
    error = torch.where(equal, 0.0, (have - want).abs())
    error = torch.nan_to_num(error, nan=math.inf)
    worst = float(error.max())
    if bool((error > absolute + relative * want.abs().nan_to_num()).any()):
        return worst, (
            f"differs from eager by {worst:.3g} (atol {absolute:g}, rtol {relative:g})"
        )
    return worst, ""


def compare_aliases(found: Any, expected: Any) -> str:
    """Say which tensors share storage on one side only; "" if none do.

    Args:
        found: Anything that `compare` takes: give it outputs, arguments and model
            together, so that an output that is a view of an input is seen.
        expected: The same of eager's call.
    """
    leaves: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    message = _walk(found, expected, "", leaves)
    return message or "; ".join(_aliases(leaves))


def _aliases(leaves: list[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """Tensors that share storage with an earlier one on one side only."""
    messages = []
    here: dict[int, str] = {}
    there: dict[int, str] = {}
    for path, have, want in leaves:
        first = here.setdefault(storage_id(have), path)
        expected = there.setdefault(storage_id(want), path)
        if first != expected:
            messages.append(
                f"in eager, {path} shares memory with {expected}"
                if expected != path
                else f"in eager, {path} doesn't share memory with {first}"
            )
    return messages
