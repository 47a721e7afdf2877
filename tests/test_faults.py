"""docs/faults.md names tests that exist; and the kinds of fault no other file tests."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import torch

import compilekit
from compilekit._torch.versions import installed_torch
from compilekit.artifact import archive, open_artifact
from compilekit.artifact.program import KernelRef
from compilekit.artifact.verification import read_verification
from compilekit.errors import AttachError, KernelBuildError, ResourceError
from compilekit.runtime import cuda, model
from compilekit.runtime.gpu import Gpu, gpu_mismatches
from compilekit.targets import load_target

ROOT = Path(__file__).parents[1]
# Where it is installed: the wheel is tested without the source tree.
PACKAGE = Path(compilekit.__file__).parent
FAULTS = ROOT / "tests" / "faults"
ROWS = [
    line.split(" | ")
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d", line)
]


def test_every_row_is_there() -> None:
    """32 kinds of fault, each with a test."""
    assert [int(row[0].strip("| ")) for row in ROWS] == list(range(1, 33))
    assert all("`" in row[3] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_the_tests_of_a_row_exist(row: list[str]) -> None:
    """Each name is a test function of that file."""
    for name in re.findall(r"`([^`]+)`", row[3]):
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert function in names, name


@pytest.mark.skipif(not (ROOT / "compilekit").is_dir(), reason="no source tree")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_a_row_without_its_fix_is_red(row: list[str]) -> None:
    """The stored patch takes the fix out of this very tree, against one of its tests.

    ``scripts/trust/faults.py`` applies each and runs the test, which takes minutes.
    """
    patch = FAULTS / f"{int(row[0].strip('| ')):02}.patch"
    named = re.search(r"^Test: (\S+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    assert named is not None
    assert f"`{named[1]}`" in row[3]
    command = ["git", "apply", "--check", "-C1", str(patch)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def variables(path: Path) -> set[str]:
    """Names of environment variables in a module: constants that look like one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"_?[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", node.value)
    }


def test_the_runtime_reads_its_own_variables_only() -> None:
    """A pod's address or a cache's place can't change what a start does."""
    found = set()
    for folder in ("runtime", "artifact", "trust", "targets"):
        for path in (PACKAGE / folder).rglob("*.py"):
            found |= {name for name in variables(path) if "environ" in path.read_text()}
    assert {name for name in found if not name.startswith("COMPILEKIT_")} <= {
        # Set for a moment while a kernel is loaded, then put back.
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        # The cache route sets all of torch's own, and refuses a place set by others.
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        # torchrun's, for caches that were built as one rank of several.
        "WORLD_SIZE",
    }
    assert "COMPILEKIT_ARTIFACT" in found


UNPACK = (
    "import sys; from compilekit.artifact.archive import unpack; unpack(*sys.argv[1:])"
)


def unpacking(file: Path, out: Path) -> subprocess.Popen[str]:
    """A process that unpacks."""
    command = [sys.executable, "-c", UNPACK, str(file), str(out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_many_unpack_into_one_place(tmp_path: Path) -> None:
    """Six replicas share a volume: all succeed, and one whole artifact is left."""
    packed = archive.pack(open_artifact(golden.ARTIFACT), tmp_path / "a.tar")
    out = tmp_path / "volume" / "artifact"
    processes = [unpacking(packed.file, out) for _ in range(6)]
    errors = [process.communicate()[1] for process in processes]
    assert [p.returncode for p in processes] == [0] * 6, errors
    assert open_artifact(out).digest == packed.digest
    left = sorted(path.name for path in out.parent.iterdir())
    assert left == ["artifact", "artifact.verified.json"]


def test_killed_unpack_leaves_nothing_or_all(tmp_path: Path) -> None:
    """kill -9 at twelve moments; the next one cleans up after all of them."""
    packed = archive.pack(open_artifact(golden.ARTIFACT), tmp_path / "a.tar")
    out, chance = tmp_path / "volume" / "artifact", random.Random(12)
    for _ in range(12):
        process = unpacking(packed.file, out)
        time.sleep(chance.uniform(0.02, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if out.exists():
            assert open_artifact(out).digest == packed.digest
            shutil.rmtree(out)
    archive.unpack(packed.file, out)
    left = sorted(path.name for path in out.parent.iterdir())
    assert left == ["artifact", "artifact.verified.json"]


def test_disk_full_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a write fails, the artifact before is whole and nothing else is left."""
    packed = archive.pack(open_artifact(golden.ARTIFACT), tmp_path / "a.tar")
    out = tmp_path / "volume" / "artifact"
    before = golden.write_artifact(out, golden.parts(), golden.variant(1))
    real, calls, failures = os.fsync, 0, 0
    limit, message = 0, ""

    def failing(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for limit in range(200):  # noqa: B007 (read by `failing`)
        calls = 0
        try:
            archive.unpack(packed.file, out)
        except ResourceError as error:
            failures, message = failures + 1, error.message
            staged = [p for p in out.parent.iterdir() if p.name.startswith(".")]
            assert staged == []
            assert open_artifact(out).digest in (before.digest, packed.digest)
        else:
            break
    assert failures > 10
    assert "No space left" in message
    assert open_artifact(out).digest == packed.digest


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_any_path_in_any_locale(locale: str, tmp_path: Path) -> None:
    """Spaces, umlauts and bytes that are no UTF-8: packed, unpacked and looked at."""
    for name in ("größe und 模型".encode(), b"latin-\xe9"):
        place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        place.mkdir()
        root, file, out = place / "a b", place / "a.tar", place / "c"
        shutil.copytree(golden.ARTIFACT, root)
        code = (
            "import sys; from compilekit.cli import run\n"
            "a, f, o = sys.argv[1:]\n"
            "print([run(['pack', a, '-o', f]), run(['unpack', f, '-o', o]),"
            " run(['inspect', o]), run(['inspect', o + 'x', '--json'])])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(root), str(file), str(out)],
            env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith(b"[0, 0, 0, 5]"), done.stdout
        shutil.rmtree(place)


@pytest.mark.parametrize(
    ("major", "minor", "factors"), [(9, 0, []), (8, 9, ["gpu.compute_capability"])]
)
def test_a_gpus_name_does_not_matter(
    major: int, minor: int, factors: list[str]
) -> None:
    """A longer name of the same architecture fits, another architecture doesn't."""
    built = load_target("nvidia-h200").device
    here = Gpu("NVIDIA H200 141GB HBM3e", major, minor, 132, 232_448, (13, 0))
    found = gpu_mismatches("nvidia-h200", built, {}, here)
    assert [item.factor for item in found if item.verdict == "refuse"] == factors


def test_a_cubin_that_the_driver_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names kernel, device and the driver's reason; memory or disk alike."""
    digest = golden.canonical.sha256(b"cubin")
    files = {**golden.files(), f"kernels/{digest}.cubin": b"cubin"}
    artifact = golden.write_artifact(tmp_path / "artifact", golden.parts(), files)
    seen = []

    def refuse(path: str, *_: Any) -> int:
        seen.append(Path(path).read_bytes())
        raise RuntimeError("device kernel image is invalid")

    monkeypatch.setattr(cuda, "load_cubin", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    kernel = KernelRef(digest, digest, {"symbol": "k", "shared": 0})
    for from_memory in (False, True):
        artifact.from_memory = from_memory
        with pytest.raises(AttachError, match="NVIDIA H200: device kernel") as caught:
            cuda._function(artifact, kernel, 0)
        assert f"artifact/kernels/{digest}.cubin" in caught.value.message
        assert "driver older" in caught.value.hint
    assert seen == [b"cubin", b"cubin"]


def operator_mismatches(name: str, schema: str, module: str = "") -> list[str]:
    """What an entry that calls this operator finds here."""
    entry = golden.entry()._replace(
        custom_ops={name: {"module": module, "schema": schema}}
    )
    return [f"{m.factor}: {m.here}" for m in model._custom_ops(entry)]


def test_a_custom_operator_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A declaration of what it writes was corrected: the old program is refused."""
    (tmp_path / "late_operators.py").write_text(
        "import torch\n"
        "library = torch.library.Library('compilekit_faults', 'DEF')\n"
        "library.define('fill(Tensor(a!) x) -> ()')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name, right = (
        "compilekit_faults::fill",
        "compilekit_faults::fill(Tensor(a!) x) -> ()",
    )
    assert operator_mismatches(name, right) == [f"operator {name}: no such operator"]
    assert operator_mismatches(name, right, "late_operators") == []
    assert operator_mismatches(name, right.replace("(a!)", "")) == [
        f"operator {name}: {right}"
    ]


# --- Compilers ------------------------------------------------------------------------


def test_a_compilers_banner_in_latin_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that speaks another encoding is used, and its errors are shown."""
    from compilekit.compiler import kernels

    compiler = tmp_path / "g++"
    compiler.write_bytes(
        b"#!/bin/sh\n"
        b'[ "$1" = --version ] && echo "g++ (\xe9dition) 12.2" && exit\n'
        b'echo "kernel.cpp:1: error: \xe9chec" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    target = load_target("cpu-x86_64-v3")
    found = kernels.find_toolchain(target, tmp_path / "scratch")
    assert found.version == "g++ (\ufffddition) 12.2"
    with pytest.raises(KernelBuildError, match="error: \ufffdchec"):
        kernels.compile_kernel(found, tmp_path / "header.h", "int x;", "kernel")


@pytest.mark.parametrize("end", ["exit 1", "kill -ABRT $$"])
def test_a_compiler_without_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A full disk is named, not what the compiler says after it."""
    from compilekit.compiler import kernels

    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 12.2" && exit\n'
        'echo "ld: final link failed: No space left on device" >&2\n'
        f'echo "collect2: error: ld returned 1 exit status" >&2; {end}\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = kernels.find_toolchain(load_target("cpu-x86_64-v3"), tmp_path / "scratch")
    with pytest.raises(ResourceError, match="final link failed: No space left"):
        kernels.compile_kernel(found, tmp_path / "header.h", "int x;", "kernel")


@pytest.mark.parametrize(
    ("left", "full"),
    [
        ({"f_bavail": 0}, True),
        ({"f_favail": 0}, True),
        ({"f_favail": 0, "f_files": 0}, False),
        ({}, False),
    ],
)
def test_a_worker_that_died_on_a_full_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: dict[str, int],
    full: bool,
) -> None:
    """It couldn't write why: whoever started it looks for itself."""
    from compilekit.compiler import workers

    found = {"f_bavail": 1, "f_files": 9, "f_favail": 1, **left}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**found))
    assert workers._is_full(tmp_path) is full


UNCACHEABLE = """
import torch

@torch.compile
def solve(a):
    return torch.cond(a.sum() > 0, lambda x: x + 1, lambda x: x - 1, (a,))

def warmup(axes):
    solve(torch.eye(axes["n"]))
"""
CACHED = """
[axes]
n = [4]
[entries.step]
warmup = "uncacheable:warmup"
[build]
targets = ["native"]
routes = ["cache"]
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_torch_refuses_to_cache(tmp_path: Path) -> None:
    """The build fails with torch's reason: each start would have compiled it anew."""
    from compilekit import config as configuration
    from compilekit.compiler.build import build

    (tmp_path / "uncacheable.py").write_text(UNCACHEABLE)
    (tmp_path / "compilekit.toml").write_text(CACHED)
    config = configuration.load(tmp_path / "compilekit.toml")
    result = build(config, tmp_path / "artifact", verify=False)
    assert (result.artifact, result.exit_code) == (None, 4)
    assert "torch refuses to cache a graph" in result.buckets[0].error
    assert not (tmp_path / "artifact").exists()


QUANTISED = """
[model]
source = "quantised:Quantised"
[axes]
b = [4]
[entries.forward.inputs.x]
shape = ["b", 16]
dtype = "float32"
[build]
targets = ["native"]
routes = ["cache"]
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_subclass_on_the_second_start(tmp_path: Path) -> None:
    """A fresh process that restores the caches compiles nothing and equals eager."""
    from compilekit import config as configuration
    from compilekit.compiler.build import build

    shutil.copy(ROOT / "tests" / "modules" / "quantised.py", tmp_path)
    (tmp_path / "compilekit.toml").write_text(QUANTISED)
    config = configuration.load(tmp_path / "compilekit.toml")
    result = build(config, tmp_path / "artifact")
    if installed_torch().version.startswith("2.11."):
        # It prints the tensor while it compiles, and fails at that without us as well.
        assert "backend='inductor' raised" in result.buckets[0].error
        assert result.artifact is None
        return
    assert result.exit_code == 0, result.buckets
    record, _ = read_verification(open_artifact(tmp_path / "artifact"))
    assert record is not None
    [target] = record.targets.values()
    [bucket] = target.buckets
    assert (bucket.passed, bucket.compiles, bucket.spawned) == (True, 0, 0)
    assert bucket.max_abs_error <= 1e-6


# --- Several ranks --------------------------------------------------------------------


def test_a_parameter_of_several_ranks(tmp_path: Path) -> None:
    """A rank's part of a tensor is named, and never taken for the whole."""
    from torch import distributed, nn
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    from compilekit._torch.fake import UnfakeableTensorError, make_fake, new_fake_mode

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        model = nn.Sequential(nn.Linear(8, 8))
        parts = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
        model[0].weight = nn.Parameter(parts)
        with pytest.raises(UnfakeableTensorError, match=r"0\.weight.*DTensor"):
            make_fake(model, new_fake_mode(), "cpu")
    finally:
        distributed.destroy_process_group()


RANKS = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

distributed.init_process_group("gloo")

@torch.compile
def reduce(x):
    y = x.relu()
    distributed.all_reduce(y)
    return y + 1

def collective(axes):
    with torch.no_grad():
        return reduce(torch.ones(axes["n"]))

def sharded(axes):
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = torch.compile(parallel.parallelize_module(model, mesh, plan))
    with torch.no_grad():
        return model(torch.ones(axes["n"], 8))
"""
OF_RANKS = """
[axes]
n = [4]
[entries.step]
warmup = "several_ranks:NAME"
[build]
targets = ["native"]
routes = ["cache"]
"""


def build_as_ranks(folder: Path, entry: str) -> list[subprocess.CompletedProcess[str]]:
    """Two builds at once that are two ranks of one job, each with its own place."""
    (folder / "several_ranks.py").write_text(RANKS)
    (folder / "compilekit.toml").write_text(OF_RANKS.replace("NAME", entry))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base = [
        sys.executable,
        "-m",
        "compilekit",
        "build",
        str(folder / "compilekit.toml"),
    ]

    def one(rank: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*base, "-o", str(folder / f"artifact-{rank}"), "--no-verify", "--json"],
            env={**os.environ, **job, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.mark.long
def test_ranks_whose_keys_differ_in_each_process(tmp_path: Path) -> None:
    """torch's key of a distributed tensor fits one process: each rank's build says so,
    with the rank and the object's type, where torch stores what nobody finds again."""
    for rank, done in enumerate(build_as_ranks(tmp_path, "sharded")):
        assert done.returncode == 4, done.stderr
        [bucket] = json.loads(done.stdout)["result"]["buckets"]
        assert bucket["error"].startswith(f"rank {rank} of 2: "), bucket
        assert "DTensor" in bucket["error"]
        assert not (tmp_path / f"artifact-{rank}").exists()


@pytest.mark.long
def test_each_rank_has_its_artifact(tmp_path: Path) -> None:
    """Where keys are stable, each rank's caches say whose they are."""
    from compilekit.artifact import open_artifact
    from compilekit.runtime.restore import read_cache

    for rank, done in enumerate(build_as_ranks(tmp_path, "collective")):
        assert done.returncode == 0, done.stderr
        artifact = open_artifact(tmp_path / f"artifact-{rank}")
        assert read_cache(artifact)[1].layout == {"rank": rank, "world_size": 2}


@pytest.mark.parametrize(
    ("layout", "variables", "found"),
    [
        ({}, {"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"rank": 1, "world_size": 2}, {"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"rank": 1, "world_size": 2}, {"RANK": "0", "WORLD_SIZE": "2"}, "0 of 2"),
        ({"rank": 1, "world_size": 2}, {"RANK": "1", "WORLD_SIZE": "4"}, "1 of 4"),
        ({"rank": 1, "world_size": 2}, {}, "none"),
    ],
)
def test_caches_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, int],
    variables: dict[str, str],
    found: str | None,
) -> None:
    """They are refused in another rank and outside; a lone process's fit any rank."""
    from compilekit.runtime.cache_check import rank_mismatches

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    mismatches = rank_mismatches(layout)
    assert [one.verdict for one in mismatches] == ([] if found is None else ["refuse"])
    assert [(one.artifact, one.here) for one in mismatches] == (
        [] if found is None else [("1 of 2", found)]
    )
