"""Triton launches in host code become plain calls with grids worked out at build."""

from __future__ import annotations

import ast

import pytest

from compilekit._torch.triton_kernels import TritonKernel
from compilekit.compiler.launches import evaluate, plain_launches
from compilekit.errors import UnsupportedByProgramError


def kernel(**fields: object) -> TritonKernel:
    """A pointwise kernel with one pointer in, one out and a size."""
    facts: dict[str, object] = {
        "cubin": b"cubin",
        "symbol": "triton_",
        "source": "def triton_(): ...",
        "num_warps": 4,
        "shared": 0,
        "arg_types": "OOi",
        "scratch": 0,
        "parameters": ("in_ptr0", "out_ptr0", "xnumel"),
        "arguments": ("in_ptr0", "out_ptr0", "xnumel"),
        "prefix": (),
        "grid": ("-((xnumel) // -(128))", "1", "1"),
        "config": {"XBLOCK": 128},
        "candidates": 1,
        "tuned": False,
        "registers": 16,
    }
    return TritonKernel(**{**facts, **fields})  # type: ignore[arg-type]


def rewritten(code: str, **kernels: TritonKernel) -> tuple[str, dict[str, object]]:
    """Host code after the rewrite, and the grids."""
    functions = [n for n in ast.parse(code).body if isinstance(n, ast.FunctionDef)]
    launches = plain_launches(functions, kernels)
    return ast.unparse(functions[0]), dict(launches.grids)


CALL = """
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        stream0 = get_raw_stream(0)
        triton_poi_0.run(arg0, buf0, 300, stream=stream0)
        stream0 = get_raw_stream(0)
        triton_poi_0.run(arg0, buf0, 300, stream=stream0)
        return (buf0,)
"""


def test_a_launch_becomes_a_call() -> None:
    """The guard goes, the stream is asked for once, and the grid is a number."""
    code, grids = rewritten(CALL, triton_poi_0=kernel())
    assert grids == {"triton_poi_0": (3, 1, 1)}
    assert code == (
        "def call(args):\n"
        "    stream0 = get_raw_stream(device_index)\n"
        "    triton_poi_0((arg0, buf0, 300), stream0)\n"
        "    triton_poi_0((arg0, buf0, 300), stream0)\n"
        "    return (buf0,)"
    )


def test_constants_of_the_cubin_are_not_passed() -> None:
    """A size that the cubin holds as a constant leaves the call, not the grid."""
    code, grids = rewritten(
        CALL, triton_poi_0=kernel(arguments=("in_ptr0", "out_ptr0"))
    )
    assert "triton_poi_0((arg0, buf0), stream0)" in code
    assert grids == {"triton_poi_0": (3, 1, 1)}


def test_scratch_pointers_are_written_out() -> None:
    """Null pointers that this Triton's kernels take stand in the code."""
    code, _ = rewritten(CALL, triton_poi_0=kernel(scratch=2))
    assert "triton_poi_0((arg0, buf0, 300, None, None), stream0)" in code


def test_two_grids_are_two_names() -> None:
    """One kernel launched with two sizes keeps both grids."""
    code, grids = rewritten(
        CALL.replace(
            "300, stream=stream0)\n        return",
            "900, stream=stream0)\n        return",
        ),
        triton_poi_0=kernel(),
    )
    assert grids == {"triton_poi_0": (3, 1, 1), "triton_poi_0_g2": (8, 1, 1)}
    assert "triton_poi_0_g2((arg0, buf0, 900), stream0)" in code


def test_devices_follow_the_model() -> None:
    """A device that the code names is the model's, not number 0."""
    code, _ = rewritten(
        "def call(args):\n    return aten.full(device=device(type='cuda', index=0))"
    )
    assert "device(type='cuda', index=device_index)" in code


def test_a_grid_that_depends_on_data_is_refused() -> None:
    """A size that isn't a literal can't give a grid at build."""
    with pytest.raises(UnsupportedByProgramError) as caught:
        rewritten(CALL.replace("300", "u0"), triton_poi_0=kernel())
    assert "the launch of triton_poi_0 depends on data" in caught.value.message
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("-((x) // -(128))", 3),
        ("max(1, x // 400)", 1),
        ("x % 7 + 2 * x - 1", 605),
        ("1", 1),
    ],
)
def test_grid_expressions(expression: str, value: int) -> None:
    """The closed grammar gives what Python would."""
    assert evaluate(expression, {"x": 300}) == value


@pytest.mark.parametrize("expression", ["y", "x ** 2", "open('f')", "x.real", "'a'"])
def test_other_expressions_are_refused(expression: str) -> None:
    """Anything outside the grammar is an unknown name, never evaluated."""
    with pytest.raises(KeyError):
        evaluate(expression, {"x": 300})
