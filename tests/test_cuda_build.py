"""GPU-less builds with torch's CUDA wheel: cubins, launches, manifest, and refusals.

They need a CUDA build of torch and no GPU: ``scripts/check-cuda`` runs them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compilekit._torch.emulation.assembler import check_assembler
from compilekit.artifact import Artifact, open_artifact
from compilekit.compiler.device import cuda_environment
from compilekit.errors import ResourceError
from compilekit.targets import list_targets, load_target

pytestmark = pytest.mark.cuda

MODELS = '''
import torch, triton
import triton.language as tl
from torch import nn
import torch.nn.functional as F

class Small(nn.Module):
    """Attention, a norm (a reduction), a matrix product and random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256)

    def forward(self, x):
        q = self.linear(x).view(*x.shape[:2], 4, 64).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return F.dropout(self.norm(x + y.transpose(1, 2).flatten(2)), 0.1, True)

class Masked(nn.Module):
    """Attention that no fused kernel takes: a mask expanded along the keys."""

    def forward(self, x):
        q = x.view(*x.shape[:2], 4, 64).transpose(1, 2)
        rows = torch.zeros(1, 1, x.shape[1], 1, dtype=x.dtype, device=x.device)
        mask = rows.expand(1, 1, x.shape[1], x.shape[1])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

@triton.jit
def _described(x, out, n, BLOCK: tl.constexpr):
    where = tl.make_tensor_descriptor(x, [n], [1], [BLOCK])
    there = tl.make_tensor_descriptor(out, [n], [1], [BLOCK])
    at = tl.program_id(0) * BLOCK
    there.store([at], where.load([at]) + 1)

class Kinds(nn.Module):
    """Independent work of several shapes, long reductions and a transposed read."""

    def forward(self, x):
        y = x.float()
        long = torch.cat([y] * 256, -1)
        return [y.relu() + 1, y[..., :64].sin(), long.sum(-1), y.transpose(1, 2) + 2]

class Descriptors(nn.Module):
    """A kernel of the user's that makes TMA descriptors in scratch memory."""

    def forward(self, x):
        out = torch.empty_like(x)
        _described[(x.numel() // 128,)](x, out, x.numel(), BLOCK=128)
        return out
'''

CONFIG = """
[model]
source = "models:{name}"
dtype = "bfloat16"
[axes]
s = [16, 64]
[entries.forward.inputs.x]
shape = [1, "s", 256]
dtype = "bfloat16"
[gates]
math_attention = "{gate}"
[build]
targets = [{targets}]
"""


def build(
    folder: Path, name: str, *targets: str, gate: str = "error", more: str = ""
) -> tuple[int, dict[str, Any]]:
    """Build in a fresh process, and its exit code and JSON."""
    (folder / "models.py").write_text(MODELS)
    listed = ", ".join(f'"{target}"' for target in targets)
    config = folder / "compilekit.toml"
    text = CONFIG.format(name=name, gate=gate, targets=listed)
    config.write_text(f"{text}\n{more}")
    command = [sys.executable, "-m", "compilekit", "--json", "build", str(config)]
    done = subprocess.run(
        [*command, "-o", str(folder / "artifact"), "-j", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)["result"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Three architectures in one artifact."""
    folder = tmp_path_factory.mktemp("small")
    code, result = build(folder, "Small", "nvidia-a100", "nvidia-h200", "nvidia-b200")
    assert code == 0, result
    assert {bucket["status"] for bucket in result["buckets"]} == {"unverified"}
    return open_artifact(folder / "artifact").parse_all()


def test_every_target_has_machine_code_of_its_own(artifact: Artifact) -> None:
    """A cubin is an ELF file for CUDA, and its flags name its architecture."""
    found: dict[str, set[int]] = {}
    for (target, _, _), program in artifact.programs.items():
        for kernel in program.kernels.values():
            cubin = artifact.read(f"kernels/{kernel.digest}.cubin")
            assert cubin[:4] == b"\x7fELF"
            assert int.from_bytes(cubin[18:20], "little") == 190  # EM_CUDA
            flags = int.from_bytes(cubin[48:52], "little")
            found.setdefault(target, set()).add(flags)
    assert len(set().union(*found.values())) == len(found) == 3
    assert all(len(flags) == 1 for flags in found.values())


def test_every_launch_is_complete(artifact: Artifact) -> None:
    """Host code calls each kernel with as many arguments as its cubin takes."""
    for (target, entry, bucket), program in artifact.programs.items():
        code = artifact.read(f"programs/{target}/{entry}/{bucket}/call.py")
        calls = [
            node
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in program.kernels
        ]
        assert {call.func.id for call in calls} == set(program.kernels)  # type: ignore[attr-defined]
        for call in calls:
            launch = program.kernels[call.func.id].launch  # type: ignore[attr-defined]
            packed, _stream = call.args
            assert isinstance(packed, ast.Tuple)
            types = launch["arg_types"] + "O" * launch["scratch"]
            assert len(packed.elts) == len(types)
            assert all(size >= 1 for size in launch["grid"])
            assert 0 < launch["registers"] <= 255


def test_the_manifest_says_what_a_machine_needs(artifact: Artifact) -> None:
    """Assembler, CUDA and shared memory are factors of each GPU target."""
    for target, described in artifact.manifest.targets.items():
        factors = artifact.manifest.factors_for(target)
        assert described["kind"] == "cuda"
        assert factors["cuda.ptxas"].count(".") >= 1
        assert factors["torch.cuda"].count(".") == 1
        assert (
            factors["shared_memory"]
            <= described["device"]["shared_memory_per_block_optin"]
        )


def test_attention_is_reported(artifact: Artifact) -> None:
    """On an H200 PyTorch picks cuDNN, on the emulated one too."""
    report = json.loads(artifact.read("reports/nvidia-h200/attention.json"))
    assert report["forward"]["s64"]["backends"] == {"cudnn": 1}
    report = json.loads(artifact.read("reports/nvidia-a100/attention.json"))
    assert report["forward"]["s64"]["backends"] == {"flash": 1}


def test_nothing_of_the_emulation_is_inside(artifact: Artifact) -> None:
    """No file names the stub, or a path of this machine."""
    for path in artifact.manifest.files:
        data = artifact.read(path)
        assert b"cudart_stub" not in data
        assert str(artifact.root.parent).encode() not in data


def test_attention_without_a_fused_kernel_fails_the_gate(tmp_path: Path) -> None:
    """The error names the call's line and its tensors."""
    code, result = build(tmp_path, "Masked", "nvidia-h200")
    assert code == 3
    assert "1 attention call got no fused kernel" in result["buckets"][0]["error"]
    assert "models.py" in result["buckets"][0]["error"]


def test_a_kernel_that_only_triton_can_launch_is_named(tmp_path: Path) -> None:
    """Scratch memory needs an allocator at each launch: refused with its name."""
    code, result = build(tmp_path, "Descriptors", "nvidia-h200")
    assert code == 3
    error = result["buckets"][0]["error"]
    assert re.search(r"kernel _described\w* can't be launched without Triton", error)
    assert "Global scratch not yet supported" in error


def compile_options(options: str) -> str:
    """Lines of a configuration."""
    return f"[compile]\noptions = {{ {options} }}\n"


@pytest.mark.parametrize("option", ["combo_kernels", "triton.use_block_ptr"])
def test_a_kind_of_kernel_is_carried(tmp_path: Path, option: str) -> None:
    """What the option makes Inductor write is launched like any other kernel."""
    out = tmp_path / "artifact"
    code, result = build(
        tmp_path, "Kinds", "nvidia-h200", more=compile_options(f'"{option}" = true')
    )
    assert code == 0, result
    word = {"combo_kernels": b"num_xblocks", "triton.use_block_ptr": b"block_ptr"}
    sources = [path.read_bytes() for path in (out / "sources").iterdir()]
    assert any(word[option] in source for source in sources)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("triton.force_cooperative_reductions", "does not support launch attributes"),
        ("triton.enable_pdl", "does not support launch attributes"),
        ("triton.use_tensor_descriptor", "Global scratch not yet supported"),
        ("triton.multi_kernel", "multi_kernel_0"),
    ],
)
def test_a_kind_of_kernel_is_refused(tmp_path: Path, option: str, why: str) -> None:
    """The bucket fails with the kernel's name and what can't be passed to it."""
    value = "1" if option == "triton.multi_kernel" else "true"
    options = f'"{option}" = {value}'
    if option == "triton.use_tensor_descriptor":
        options += ", assume_aligned_inputs = true"
    code, result = build(
        tmp_path, "Kinds", "nvidia-h200", more=compile_options(options)
    )
    assert code == 3, result
    assert why in result["buckets"][0]["error"]
    assert "kernel" in result["buckets"][0]["error"]


def test_same_bytes_again(artifact: Artifact, tmp_path: Path) -> None:
    """A second build elsewhere gives the same digest."""
    code, result = build(tmp_path, "Small", "nvidia-a100", "nvidia-h200", "nvidia-b200")
    assert (code, result["digest"]) == (0, artifact.digest)


def test_a_tuning_file_decides_configs(artifact: Artifact, tmp_path: Path) -> None:
    """A kernel that the file knows gets its config, the others stay as they were."""
    launches = {
        kernel.source: kernel
        for (target, _, _), program in artifact.programs.items()
        for kernel in program.kernels.values()
        if target == "nvidia-h200"
    }
    source, kernel = next(iter(sorted(launches.items())))
    config = {**kernel.launch["config"], "num_warps": 1}
    assert kernel.launch["config"]["num_warps"] != 1
    tuning = {
        "schema": 1,
        "target": "nvidia-h200",
        "torch": "2.11.0",
        "kernels": {source: {"config": config}},
    }
    (tmp_path / "tuned.json").write_text(json.dumps(tuning))
    more = '[autotune]\nfrom = "tuned.json"'
    code, result = build(tmp_path, "Small", "nvidia-h200", more=more)
    assert code == 0, result
    assert result["configs"]["tuned"] == 1
    assert result["configs"]["default"] == len(launches) - 1
    rebuilt = open_artifact(tmp_path / "artifact").parse_all()
    for program in rebuilt.programs.values():
        for each in program.kernels.values():
            if each.source == source:
                assert each.launch["config"] == config
                assert each.launch["tuned"] == "nvidia-h200"
            else:
                assert each.digest == launches[each.source].digest


@pytest.mark.parametrize("name", [n for n in list_targets() if n.startswith("nvidia-")])
def test_the_wheels_assembler_knows_every_target(name: str) -> None:
    """Triton's own assembler takes each GPU whose description is shipped."""
    check_assembler(load_target(name))


def test_an_assembler_that_rejects_the_gpu_ends_the_build(tmp_path: Path) -> None:
    """The wheel's own, asked for a GPU that doesn't exist; nothing is compiled."""
    unknown = load_target("nvidia-h200")
    unknown = unknown._replace(device={**unknown.device, "major": 9, "minor": 9})
    with pytest.raises(ResourceError, match=r"sm_99a.* is not defined"):
        check_assembler(unknown)


# A start from restored caches, where the GPU is emulated: no kernel is launched.
START = """
import contextlib, json, sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime import static_triton_launcher
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import compilekit
from compilekit import config as configuration
from compilekit._torch import emulation, without_device
from compilekit.compiler.calls import caller
from compilekit.plan import make_plan
from compilekit.runtime import gpu
from compilekit.targets import load_target

def load_kernel(self, device):
    # So many that Inductor would try a smaller reduction.
    self.function, self.n_regs, self.n_spills = 1, 250, 0

def compile_only(patches):
    # Kernels aren't held to one config here, as they are while caches are built.
    without_device.kept_triton_kernels = lambda *given: contextlib.nullcontext()
    without_device.compile_only(patches)

launchers = []
make_launchers = CachingAutotuner._make_launchers

def made(self):
    make_launchers(self)
    launchers.append(len(self.launchers))

emulation.install(load_target("nvidia-h200"))
static_triton_launcher.StaticallyLaunchedTritonKernel.load_kernel = load_kernel
CachingAutotuner._make_launchers = made
gpu.driver_version = lambda: (13, 0)
processes = []
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork")
sys.addaudithook(lambda event, args: event in STARTS and processes.append(str(args)))
with contextlib.ExitStack() as patches:
    compile_only(patches)
    config = configuration.load(Path("compilekit.toml"))
    receipt = compilekit.restore("artifact", work_dir="work", require="cache")
    there = {path for path in Path("work").rglob("*.*") if path.suffix != ".py"}
    call = caller(config, "cuda:0", fake=True)
    for job in make_plan(config).jobs:
        call(job.entry, job.bucket)
    receipt.finish()
    kinds = (".so", ".cubin")
    new = [p for p in Path("work").rglob("*.*") if p.suffix in kinds and p not in there]
found = {name: counters[name] for name in ("inductor", "aot_autograd")}
found.update(processes=processes, launchers=launchers, new=list(map(str, new)))
print(json.dumps(found))
"""


def start(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Restore a folder's artifact in a fresh process."""
    (folder / "start.py").write_text(START)
    environment = cuda_environment(load_target("nvidia-h200"), folder, os.environ)
    del environment["TRITON_DISABLE_LINE_INFO"]
    here = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "start.py"],
        cwd=folder,
        env={**environment, **here, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_kernel_that_triton_doesnt_find_names_the_component(tmp_path: Path) -> None:
    """One that only Triton's own launcher can launch, under a changed variable."""
    more = 'routes = ["cache"]'
    code, result = build(tmp_path, "Descriptors", "nvidia-h200", more=more)
    assert code == 0, result
    cache = json.loads(
        open_artifact(tmp_path / "artifact").read("caches/nvidia-h200/cache.json")
    )
    assert "Triton" in {key["kind"] for key in cache["keys"]}
    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["processes"] == []
    done = start(tmp_path, TRITON_DISABLE_LINE_INFO="1")
    assert done.returncode == 1
    assert "variable TRITON_DISABLE_LINE_INFO was absent, is true" in done.stderr


def test_caches_are_built_without_the_gpu(tmp_path: Path) -> None:
    """Graphs with their cubins inside, found by keys that name the GPU."""
    code, result = build(tmp_path, "Small", "nvidia-h200", more='routes = ["cache"]')
    assert code == 0, result
    artifact = open_artifact(tmp_path / "artifact")
    cache = json.loads(artifact.read("caches/nvidia-h200/cache.json"))
    assert {key["kind"] for key in cache["keys"]} >= {"AOTAutograd", "FX graph"}
    assert cache["factors"]["cache.gpu"] == "NVIDIA H200"
    # Nothing here ran on the device, or depends on this host's CPU.
    assert cache["packages"] == []
    assert cache["kernels"] == {}
    assert list(cache["traced"]) == ["models:Small.forward"]
    kinds = [name.split("/")[1] for name in cache["files"] if "inductor/" in name]
    assert kinds.count("fxgraph") == 2
    cubins = [name for name in cache["files"] if name.endswith(".cubin")]
    assert len(cubins) >= 2

    # Another process finds all of it, as far as it gets without the device.
    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["inductor"]["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in found["inductor"]
    assert found["aot_autograd"]["autograd_cache_hit"] == 2
    # Each kernel was found, with one config, and is launched without Triton.
    assert found["inductor"]["triton_bundler_load_static_autotuner"] == len(cubins)
    assert set(found["launchers"]) == {1}
    assert (found["processes"], found["new"]) == ([], [])
