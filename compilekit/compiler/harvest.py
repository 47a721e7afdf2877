"""Turn Inductor's output code into host code that needs bare torch only.

Inductor writes a module: imports, kernel sources, constants, a ``Runner`` class with
the ``call`` method, and benchmark code. `host_code` keeps ``call`` (and the functions
it calls) by syntax tree, and refuses every name that the runtime doesn't offer.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
from collections.abc import Collection, Mapping

from compilekit._torch.runtime import extern_kernel_names, output_code_names
from compilekit._torch.triton_kernels import TritonKernel
from compilekit.compiler.launches import Launches, plain_launches
from compilekit.errors import HarvestError, UnsupportedByProgramError

# Namespaces of operators that torch itself registers.
TORCH_NAMESPACES = frozenset(
    [
        "aten",
        "prims",
        "inductor",
        "mkldnn",
        "mkl",
        "onednn",
        "quantized",
        "_quantized",
        "profiler",
    ]
)
_BUILTINS = frozenset(
    ["zip", "range", "len", "int", "float", "bool", "min", "max", "RuntimeError"]
)
_DROPPED_FUNCTIONS = frozenset({"get_args", "benchmark_compiled_module"})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class HostCode:
    """Host code of one program.

    Attributes:
        code: Python source that defines ``call(args)``.
        kernels: Name in `code` → kernel source as it stands in the output code.
        launches: Names in `code` of Triton kernels, and their grids.
        constants: Names of tensors that `code` takes from its globals.
        externs: Everything outside the kernels that it calls, sorted.
        operators: ``namespace::name`` of operators that torch doesn't register.
    """

    code: str
    kernels: Mapping[str, str]
    launches: Launches
    constants: tuple[str, ...]
    externs: tuple[str, ...]
    operators: tuple[str, ...]


def host_code(
    output_code: str,
    constants: Collection[str],
    device: str = "cpu",
    triton: Mapping[str, TritonKernel] | None = None,
) -> HostCode:
    """Keep what runs at load from Inductor's output code.

    Args:
        constants: Names of tensors that Inductor attached to the module.
        device: Device type of the target.
        triton: Name in the output code → Triton kernel.
    Raises:
        UnsupportedByProgramError: the code uses a name that the runtime doesn't offer.
        HarvestError: the code has no ``call``.
    """
    kernels: dict[str, str] = {}
    functions: list[ast.FunctionDef] = []
    for node in ast.parse(output_code).body:
        if isinstance(node, ast.ClassDef) and node.name == "Runner":
            functions.append(_call_function(node))
        elif isinstance(node, ast.FunctionDef) and node.name not in _DROPPED_FUNCTIONS:
            functions.append(node)
        elif isinstance(node, ast.Assign):
            kernel = _kernel(node)
            if kernel is not None:
                kernels[kernel[0]] = kernel[1]
    if not any(function.name == "call" for function in functions):
        raise HarvestError(
            "Inductor's output code has no call function",
            hint="This torch isn't supported; see `compilekit doctor`.",
        )
    launches = plain_launches(functions, triton or {})
    functions = [_cleaned(function) for function in functions]
    known = {
        *output_code_names(device),
        *(("device_index",) if device == "cuda" else ()),
        *kernels,
        *launches.kernels,
        *constants,
        *(function.name for function in functions),
        *_BUILTINS,
    }
    used = _used_names(functions)
    _refuse_unknown(used, known)
    externs = sorted(_externs(functions))
    _refuse_unknown_externs(externs)
    body = "\n\n".join(ast.unparse(function) for function in functions)
    return HostCode(
        code=body + "\n",
        kernels={name: kernels[name] for name in sorted(kernels) if name in used},
        launches=launches,
        constants=tuple(sorted(set(constants) & used)),
        externs=tuple(externs),
        operators=_foreign_operators(externs),
    )


def _call_function(runner: ast.ClassDef) -> ast.FunctionDef:
    """The ``call`` method as a plain function."""
    for node in runner.body:
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            node.args.args = node.args.args[1:]
            return node
    raise HarvestError("Inductor's Runner class has no call method")


def _kernel(node: ast.Assign) -> tuple[str, str] | None:
    """Name and source, if the statement makes a C++ kernel."""
    target, value = node.targets[0], node.value
    if not (isinstance(target, ast.Name) and isinstance(value, ast.Call)):
        return None
    function = value.func
    if not (isinstance(function, ast.Attribute) and function.attr == "cpp_pybinding"):
        return None
    source = value.args[1]
    if not (isinstance(source, ast.Constant) and isinstance(source.value, str)):
        return None
    return target.id, source.value


class _Cleaner(ast.NodeTransformer):
    """Drop checks that the runtime makes itself, and addresses inside strings."""

    def __init__(self, inputs: frozenset[str]) -> None:
        self.inputs = inputs

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in ("assert_size_stride", "assert_alignment")
            and isinstance(call.args[0], ast.Name)
            and call.args[0].id in self.inputs
        ):
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """``x = copy_if_misaligned(x)``, which torch 2.12 and 2.13 write on a GPU."""
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in ("copy_misaligned", "copy_if_misaligned")
            and ast.unparse(node.targets[0]) in self.inputs
        ):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            return ast.copy_location(ast.Constant(_ADDRESS.sub("", node.value)), node)
        return node


def _cleaned(function: ast.FunctionDef) -> ast.FunctionDef:
    inputs: frozenset[str] = frozenset()
    if function.name == "call" and function.body:
        first = function.body[0]
        if isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Tuple):
            inputs = frozenset(
                element.id
                for element in first.targets[0].elts
                if isinstance(element, ast.Name)
            )
    cleaned: ast.FunctionDef = _Cleaner(inputs).visit(function)
    return ast.fix_missing_locations(cleaned)


def _used_names(functions: list[ast.FunctionDef]) -> set[str]:
    """Names read in the functions that they don't bind themselves."""
    used: set[str] = set()
    for function in functions:
        bound = {argument.arg for argument in function.args.args}
        read = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    read.add(node.id)
                else:
                    bound.add(node.id)
        used |= read - bound
    return used


def _refuse_unknown(used: set[str], known: set[str]) -> None:
    unknown = sorted(used - known)
    if unknown:
        listed = [f"{n} (a built-in)" if hasattr(builtins, n) else n for n in unknown]
        raise UnsupportedByProgramError(
            "the compiled code uses names that the runtime doesn't offer:"
            f" {', '.join(listed)}",
            hint="Keep the operation that needs them out of the compiled method.",
            thing=", ".join(unknown),
        )


def _externs(functions: list[ast.FunctionDef]) -> set[str]:
    """Dotted names below ``extern_kernels``, ``aten`` and ``torch`` that are used."""
    found: set[str] = set()
    roots = ("extern_kernels", "aten", "inductor_ops", "_quantized", "torch")
    for function in functions:
        inner: set[int] = set()
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or id(node) in inner:
                continue
            parts = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                inner.add(id(value))
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in roots:
                found.add(".".join([value.id, *reversed(parts)]))
    return found


def _refuse_unknown_externs(externs: list[str]) -> None:
    offered = extern_kernel_names()
    unknown = []
    for name in externs:
        root, *rest = name.split(".")
        if (root == "extern_kernels" and rest[0] not in offered) or (
            root == "torch" and rest[0] != "ops" and not _is_torch_constant(rest)
        ):
            unknown.append(name)
    _refuse_unknown(set(unknown), set())


def _is_torch_constant(rest: list[str]) -> bool:
    """dtypes, layouts and memory formats: ``torch.float32``, ``torch.strided``."""
    import torch

    kinds = (torch.dtype, torch.layout, torch.memory_format)
    return len(rest) == 1 and isinstance(getattr(torch, rest[0], None), kinds)


def _foreign_operators(externs: list[str]) -> tuple[str, ...]:
    found = set()
    for name in externs:
        parts = name.split(".")
        if parts[:2] == ["torch", "ops"] and parts[2] not in TORCH_NAMESPACES:
            found.add(f"{parts[2]}::{parts[3]}")
    return tuple(sorted(found))
