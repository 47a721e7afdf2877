"""The layers, held by reading every module's syntax tree; nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "compilekit"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A process boundary: what goes wrong in one bucket is reported, the next one runs.
CATCHES_ALL = {
    *("cli/__init__.py", "compiler/child.py"),
    *("compiler/cache_worker.py", "compiler/worker.py"),
}

STANDARD_LIBRARY = "standard library"
RUNTIME = "runtime"
TRUST = "trust"
REGISTRY = "registry"
COMPILER = "compiler"
COMMAND_LINE = "command line"


def layer(path: Path) -> str:
    """The layer that a module of the package belongs to."""
    parts = path.relative_to(PACKAGE).parts
    if parts in {("console.py",), ("__main__.py",)} or parts[0] == "cli":
        return COMMAND_LINE
    if parts[0] == "trust":
        return TRUST
    if parts[0] == "registry":
        return REGISTRY
    if (
        parts[0] == "runtime"
        or parts[:2] == ("_torch", "caches")
        or parts
        in {
            ("_torch", "layout.py"),
            ("_torch", "runtime.py"),
            ("_torch", "versions.py"),
            ("_torch", "__init__.py"),
        }
    ):
        return RUNTIME
    if parts[0] in ("compiler", "kernels", "bench", "_torch"):
        return COMPILER
    if len(parts) == 1 or parts[0] in ("artifact", "config", "targets"):
        return STANDARD_LIBRARY
    raise AssertionError(f"no layer for {path}: name one here")


BELOW = {
    STANDARD_LIBRARY: {STANDARD_LIBRARY},
    TRUST: {STANDARD_LIBRARY, TRUST},
    REGISTRY: {STANDARD_LIBRARY, REGISTRY},
    RUNTIME: {STANDARD_LIBRARY, TRUST, RUNTIME},
    COMPILER: {STANDARD_LIBRARY, TRUST, RUNTIME, COMPILER},
    COMMAND_LINE: {STANDARD_LIBRARY, TRUST, REGISTRY, RUNTIME, COMPILER, COMMAND_LINE},
}
PACKAGES = {
    STANDARD_LIBRARY: set(),
    TRUST: {"cryptography"},
    # requests is what oras speaks through, and what it raises.
    REGISTRY: {"oras", "requests"},
    RUNTIME: {"torch", "safetensors"},
    COMPILER: {
        *("torch", "safetensors", "transformers", "triton"),
        # The extra `attest`: statements are protocol buffers, links purls.
        *("cyclonedx", "packageurl", "in_toto_attestation", "google"),
        # The extra `report`: the plot of a throughput.
        "matplotlib",
    },
    COMMAND_LINE: {"click", "rich"},
}


def tree(path: Path) -> ast.Module:
    """A module, parsed."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def typing_only(module: ast.Module) -> set[ast.AST]:
    """Nodes below ``if TYPE_CHECKING``, which never run."""
    return {
        inner
        for node in ast.walk(module)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that one imports, at any depth, with the line."""
    module = tree(path)
    skipped = typing_only(module)
    relative = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(module):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(relative[: -node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield source, node.lineno
            yield from ((f"{source}.{a.name}", node.lineno) for a in node.names)


def module_path(name: str) -> Path | None:
    """The file of a module of the package; None if the name is no module."""
    place = PACKAGE.parent.joinpath(*name.split("."))
    for candidate in (place.with_suffix(".py"), place / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def shown(path: Path) -> str:
    """Path below the package."""
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_imports_stay_within_the_layers(path: Path) -> None:
    """A module imports its own layer, those below, and its layer's packages only."""
    mine = layer(path)
    wrong = []
    for name, line in imports(path):
        top = name.partition(".")[0]
        if top == "compilekit":
            # The package itself is lazy: it belongs to the lowest layer.
            target = module_path(name)
            if target is not None and layer(target) not in BELOW[mine]:
                wrong.append(f"line {line}: {name} is of the {layer(target)} layer")
        elif top not in sys.stdlib_module_names and top not in PACKAGES[mine]:
            wrong.append(f"line {line}: {name}")
    assert wrong == []


@pytest.mark.parametrize(
    "path", [p for p in MODULES if layer(p) == COMMAND_LINE], ids=shown
)
def test_commands_import_heavy_things_inside(path: Path) -> None:
    """At module level the command line imports click and light modules, never rich."""
    heavy = []
    top_level = ast.Module(tree(path).body, [])
    for node in top_level.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        relative = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = ".".join(relative[: -node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            names = [source, *(f"{source}.{name}" for name in names)]
        for name in names:
            target = module_path(name) if name.startswith("compilekit") else None
            if target and layer(target) not in (STANDARD_LIBRARY, COMMAND_LINE):
                heavy.append(name)
            if name.partition(".")[0] in ("rich", "torch", "transformers"):
                heavy.append(name)
    assert heavy == []


def dotted(node: ast.expr) -> str:
    """``torch._C._x`` for the attribute chain that it is; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join((node.id, *reversed(parts)))


def private(name: str) -> bool:
    """True for a name below torch or triton that its makers don't promise to keep."""
    top, *rest = name.split(".")
    # Dunder names (torch.__version__) are public.
    return top in ("torch", "triton") and any(
        part.startswith("_") and not part.startswith("__") for part in rest
    )


@pytest.mark.parametrize(
    "path", [p for p in MODULES if "_torch" not in p.parent.parts], ids=shown
)
def test_private_torch_names_stay_in_their_room(path: Path) -> None:
    """Outside ``_torch/`` nobody names a private part of torch or triton; of triton
    nothing at all, but for the language in which our own kernels are written."""
    speaks_triton = path.parent.name == "kernels"

    def refused(name: str) -> bool:
        return private(name) or (not speaks_triton and name.split(".")[0] == "triton")

    found = [f"line {line}: {name}" for name, line in imports(path) if refused(name)]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and refused(dotted(node)):
            found.append(f"line {node.lineno}: {dotted(node)}")
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_no_assert_and_no_blanket_except(path: Path) -> None:
    """Validation raises errors of the tree; only process boundaries catch all."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assert):
            found.append(f"line {node.lineno}: assert")
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            found.append(f"line {node.lineno}: bare except")
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {dotted(name) for name in caught}
        blanket = names & {"Exception", "BaseException"}
        if blanket and shown(path) not in CATCHES_ALL:
            found.append(f"line {node.lineno}: except {', '.join(sorted(blanket))}")
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_our_errors_are_not_taken_for_foreign_ones(path: Path) -> None:
    """Where everything that foreign code raises is caught, ours passes before."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Try):
            continue
        caught = [ast.unparse(each.type) for each in node.handlers if each.type]
        for before, names in enumerate(caught):
            if "FOREIGN_ERRORS" in names:
                passed = any("CompilekitError" in each for each in caught[:before])
                assert passed, f"line {node.handlers[before].lineno}"


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_a_path_is_asked_for_by_a_function_that_answers(path: Path) -> None:
    """Path's own methods raise for a folder that others closed, and for long names."""
    asking = {"exists", "is_dir", "is_file", "is_symlink", "expanduser"}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr in asking and not (node.args or node.keywords)
            assert not method, f"line {node.lineno}: take os.path's"
