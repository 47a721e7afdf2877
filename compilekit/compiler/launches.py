"""Triton launches in host code: grids worked out at build, so that a start only calls.

Inductor writes ``triton_poi_0.run(buf0, buf1, 1024, stream=stream0)`` and computes the
grid from the sizes at each call. Shapes are static here, so the sizes are literals:
`plain_launches` evaluates each grid once and leaves
``triton_poi_0((buf0, buf1, 1024), stream0)``, with exactly the arguments the cubin
takes: a launch is one call into C.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

from compilekit._torch.triton_kernels import TritonKernel
from compilekit.errors import UnsupportedByProgramError

Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Launches:
    """Host code with plain launches.

    Attributes:
        grids: Name in the host code → grid.
        kernels: Name in the host code → the kernel it launches; a kernel launched with
            two grids has two names.
    """

    grids: Mapping[str, Grid]
    kernels: Mapping[str, TritonKernel]


def plain_launches(
    functions: list[ast.FunctionDef], kernels: Mapping[str, TritonKernel]
) -> Launches:
    """Rewrite every launch in place, and the device guard around them.

    Raises:
        UnsupportedByProgramError: a grid depends on data.
    """
    grids: dict[str, Grid] = {}
    launched: dict[str, TritonKernel] = {}
    rewriter = _Rewriter(kernels, grids, launched)
    for function in functions:
        rewriter.visit(function)
        function.body = _asked_once(function.body)
        ast.fix_missing_locations(function)
    return Launches(grids, launched)


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self,
        kernels: Mapping[str, TritonKernel],
        grids: dict[str, Grid],
        launched: dict[str, TritonKernel],
    ) -> None:
        self.kernels = kernels
        self.grids = grids
        self.launched = launched

    def visit_With(self, node: ast.With) -> Any:
        """``with torch.cuda._DeviceGuard(0): …`` → its body; the runtime guards."""
        self.generic_visit(node)
        context = ast.unparse(node.items[0].context_expr)
        if not context.startswith("torch.cuda._DeviceGuard("):
            return node
        return [
            statement
            for statement in node.body
            if not ast.unparse(statement).startswith("torch.cuda.set_device(")
        ]

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id == "get_raw_stream":
            node.args = [ast.Name("device_index", ast.Load())]
        elif isinstance(function, ast.Name) and function.id == "device":
            for keyword in node.keywords:
                if keyword.arg == "index":
                    keyword.value = ast.Name("device_index", ast.Load())
        elif (
            isinstance(function, ast.Attribute)
            and function.attr == "run"
            and isinstance(function.value, ast.Name)
            and function.value.id in self.kernels
        ):
            return self._launch(function.value.id, node)
        return node

    def _launch(self, name: str, node: ast.Call) -> ast.Call:
        kernel = self.kernels[name]
        passed = dict(zip(kernel.parameters, node.args, strict=False))
        sizes = {
            parameter: value
            for parameter, argument in passed.items()
            if (value := _integer(argument)) is not None
        }
        grid = _grid(name, kernel, sizes)
        label = self._label(name, grid)
        self.launched[label] = kernel
        stream = next(k.value for k in node.keywords if k.arg == "stream")
        arguments = [passed[argument] for argument in kernel.arguments]
        nulls: list[ast.expr] = [ast.Constant(None)] * kernel.scratch
        packed = ast.Tuple([*arguments, *nulls], ast.Load())
        return ast.Call(ast.Name(label, ast.Load()), [packed, stream], [])

    def _label(self, name: str, grid: Grid) -> str:
        """The kernel's name, numbered if it's launched with several grids."""
        label, number = name, 2
        while self.grids.setdefault(label, grid) != grid:
            label, number = f"{name}_g{number}", number + 1
        return label


def _asked_once(body: list[ast.stmt]) -> list[ast.stmt]:
    """Drop repeated ``stream0 = get_raw_stream(…)``: one call has one stream."""
    asked: set[str] = set()
    kept = []
    for statement in body:
        text = ast.unparse(statement) if isinstance(statement, ast.Assign) else ""
        if " = get_raw_stream(" in text and text in asked:
            continue
        asked.add(text)
        kept.append(statement)
    return kept


def _integer(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def _grid(name: str, kernel: TritonKernel, sizes: Mapping[str, int]) -> Grid:
    known = dict(sizes)
    try:
        for line in kernel.prefix:
            target, _, expression = line.partition(" = ")
            known[target.strip()] = evaluate(expression, known)
        x, y, z = (evaluate(expression, known) for expression in kernel.grid)
    except KeyError as exc:
        raise UnsupportedByProgramError(
            f"the launch of {name} depends on data: its grid needs {exc.args[0]}",
            hint="Make the size static, or build this bucket with the cache route.",
            thing=name,
        ) from exc
    return x, y, z


_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"max": max, "min": min}


def evaluate(expression: str, known: Mapping[str, int]) -> int:
    """An integer expression over names: + - * // %, unary minus, min and max.

    Raises:
        KeyError: a name isn't known, or the expression has anything else in it.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return known[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return _FUNCTIONS[node.func.id](*map(value, node.args))
        raise KeyError(ast.unparse(node))

    return value(ast.parse(expression, mode="eval").body)
