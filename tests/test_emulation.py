"""The hooks of the emulation: each is still what torch asks, and still needed.

What torch's wheel for CPUs holds is tested with every run: the names that are replaced
have the parameters they had, and torch still calls them. That a build fails without a
hook is tested with torch's CUDA wheel, by ``scripts/check-cuda``.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compilekit._torch.emulation import hooks
from compilekit.errors import HarvestError
from compilekit.targets import Target, load_target

# torch's own, at import of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
H200 = load_target("nvidia-h200")


def static_kernel() -> Any:
    """The class of kernels that torch's own launcher launches."""
    from torch._inductor.runtime import static_triton_launcher

    return static_triton_launcher.StaticallyLaunchedTritonKernel


def heuristics() -> Any:
    """Where kernels are compiled and launched."""
    from torch._inductor.runtime import triton_heuristics

    return triton_heuristics


def joint_graph() -> Any:
    """Where constants are folded."""
    from torch._inductor.fx_passes import joint_graph

    return joint_graph


def pad_mm() -> Any:
    """Where matrix products are padded."""
    from torch._inductor.fx_passes import pad_mm

    return pad_mm


def after_aot() -> Any:
    """Where a repro script is written."""
    from torch._dynamo.repro import after_aot

    return after_aot


def compile_fx() -> Any:
    """What asks for the repro script."""
    from torch._inductor import compile_fx

    return compile_fx


# Hook → owner of the name it replaces, the name, what calls it, and how.
REPLACED: dict[str, tuple[Any, str, Any, str]] = {
    "read_registers": (
        static_kernel,
        "load_kernel",
        lambda: heuristics().StaticTritonCompileResult.make_launcher,
        ".load_kernel(",
    ),
    "leave_unloaded": (
        lambda: heuristics().TritonCompileResult,
        "make_launcher",
        lambda: heuristics().CachingAutotuner,
        ".make_launcher()",
    ),
    "fold_on_cpu": (
        lambda: joint_graph().UniformValueConstantFolder,
        "_deduce_value",
        lambda: joint_graph().ConstantFolder,
        "self._deduce_value(",
    ),
    "print_no_values": (
        after_aot,
        "save_graph_repro",
        compile_fx,
        "after_aot.save_graph_repro(",
    ),
    "never_pad": (pad_mm, "get_cached_should_pad", pad_mm, "= get_cached_should_pad("),
}


def test_every_hook_is_tested() -> None:
    """All but Triton's driver, which a CPU wheel comes without."""
    names = {hook.__name__ for hook in hooks.EMULATED}
    assert names == {*REPLACED, "answer_triton"} == {*PROBES}
    assert set(hooks.MEASURED) < set(hooks.EMULATED)


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_the_name_is_what_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook takes the torch that is installed, and replaces the one name."""
    owner, attribute, _, _ = REPLACED[name]
    before = vars(owner())[attribute]
    monkeypatch.setattr(owner(), attribute, before)  # put back afterwards
    hook: Callable[[Target], None] = getattr(hooks, name)
    hook(H200)
    assert vars(owner())[attribute] is not before


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_torch_still_asks(name: str) -> None:
    """What is replaced is still called by what called it."""
    _, _, caller, call = REPLACED[name]
    assert call in inspect.getsource(caller())


def test_another_torch_is_refused_by_name() -> None:
    """A name that is gone, or takes something else, fails with both sides."""

    class Owner:
        def known(self, device: int, stream: int) -> None: ...

    with pytest.raises(HarvestError, match=r"Owner.gone than .* nothing of that name"):
        hooks.replace(Owner, "gone", ("self",), None)
    expected = r"expected \(self, index\), found \(self, device, stream\)"
    with pytest.raises(HarvestError, match=expected):
        hooks.replace(Owner, "known", ("self", "index"), None)
    assert "known" in vars(Owner)


# --- With torch's CUDA wheel -------------------------------------------------------

# What a process compiles for the emulated GPU, with all hooks but one.
PROBE = """
import sys
import torch
from compilekit._torch import emulation
from compilekit._torch.capture import capture_call
from compilekit._torch.emulation import hooks
from compilekit._torch.fake import new_fake_mode
from compilekit._torch.lower import lower, program_options
from compilekit.targets import load_target

def sums(x):
    return x.sum(-1)

def folds(x):
    return x + torch.full((1024,), 2.0, device=x.device) * 3

def holds(x):
    return x * torch.tensor([1.5, 2.5], device=x.device).sum()

def multiplies(x):
    return x @ x[:, :777]

omitted, name = sys.argv[1:]
hooks.EMULATED = tuple(h for h in hooks.EMULATED if h.__name__ != omitted)
emulation.install(load_target("nvidia-h200"))
mode = new_fake_mode()
with mode:
    x = torch.empty(1024, 1024, device="cuda")
function, _, launcher = name.partition(":")
options = program_options(0)
if launcher:
    options["use_static_cuda_launcher"] = False
    options["strict_static_cuda_launcher"] = False
lower(capture_call(globals()[function], (x,)), options, 0, {}, {})
print("compiled")
"""
# Hook → what can't be compiled without it, and how it fails.
PROBES: dict[str, tuple[str, str]] = {
    "answer_triton": ("sums", "cuda_utils"),
    "read_registers": ("sums", "RuntimeError"),
    "leave_unloaded": ("sums:triton", "AttributeError"),
    "fold_on_cpu": ("folds", "operation not supported"),
    "print_no_values": ("holds", "CUDA error"),
    "never_pad": ("multiplies", "RuntimeError"),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs the probe in a process that sees an H200."""
    from compilekit._torch import emulation

    folder = tmp_path_factory.mktemp("emulated")
    cuda = str(torch.version.cuda)
    stubs = emulation.make_stubs(H200, cuda, folder / "stubs")
    environment = {
        **emulation.environment(stubs, os.environ),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PROBE, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.cuda
@pytest.mark.parametrize("what", sorted({what for what, _ in PROBES.values()}))
def test_all_hooks_are_enough(emulated: Callable[..., Any], what: str) -> None:
    """Everything that a probe compiles, compiles."""
    done = emulated("none", what)
    assert done.stdout.strip() == "compiled", done.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted({*PROBES} - {"fold_on_cpu"}))
def test_a_hook_is_needed(emulated: Callable[..., Any], name: str) -> None:
    """Without it the build fails; a torch that doesn't is one hook less.

    No probe of this kind is known for fold_on_cpu: torch 2.11 compiles the one above
    without it.
    """
    what, error = PROBES[name]
    done = emulated(name, what)
    assert done.returncode == 1, "compiled without it"
    assert error in done.stderr, done.stderr


@pytest.mark.cuda
def test_register_counts_are_read_from_cubins(tmp_path: Path) -> None:
    """The number that the driver would report after loading."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (tmp_path / "copies.py").write_text(
        "import triton, triton.language as tl\n"
        "@triton.jit\n"
        "def copies(x, y, N: tl.constexpr):\n"
        "    at = tl.arange(0, N)\n"
        "    tl.store(y + at, tl.load(x + at))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from copies import copies  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    signature = {"x": "*fp32", "y": "*fp32", "N": "constexpr"}
    source = ASTSource(fn=copies, signature=signature, constexprs={"N": 1024})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert 8 <= hooks.register_count(made.asm["cubin"]) <= 64
