"""The cache route: harvest, staging, reasons, receipts, and one training step whole."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compilekit import config as configuration
from compilekit.artifact import Artifact, Manifest, ManifestEntry, Model, canonical
from compilekit.artifact.cache import (
    PLACE,
    Cache,
    CacheKey,
    StoredPackage,
    blob_path,
    cache_path,
    cache_to_json,
)
from compilekit.artifact.write import write_artifact
from compilekit.compiler import cache_harvest
from compilekit.errors import (
    AttachError,
    ConfigError,
    HarvestError,
    ManifestError,
    PolicyError,
    ResourceError,
)
from compilekit.plan import Bucket, make_plan
from compilekit.runtime import restore
from compilekit.runtime.cache_receipt import CacheReceipt
from compilekit.runtime.reasons import Stored, explain_miss, explain_settings
from compilekit.runtime.stage import stage, work_directory

ROOT = Path(__file__).parents[1]
TARGET = "cpu-x86_64-v3"


# --- Reasons -----------------------------------------------------------------------


def stored(bucket: str, **components: tuple[str, str]) -> Stored:
    """A key of an artifact."""
    return Stored("f" + bucket, bucket, lambda: components)


def test_a_miss_names_the_component_with_both_values() -> None:
    """The closest key is compared, and only what differs is named."""
    near = stored(
        "forward/b1_s128",
        gm=("1", "graph"),
        **{"inductor_config[cpp.cxx]": ("a", "(None, 'g++')")},
    )
    far = stored("forward/b1_s64", gm=("2", "other graph"))
    components = {
        "gm": ("1", "graph"),
        "inductor_config[cpp.cxx]": ("b", "(None, '/usr/local/bin/g++')"),
    }
    assert explain_miss("FX graph", components, [far, near]) == (
        "FX graph key of bucket forward/b1_s128: inductor_config[cpp.cxx] was (None,"
        " 'g++'), is (None, '/usr/local/bin/g++')"
    )


def test_a_long_text_is_shown_around_its_first_difference() -> None:
    """Two graphs of many lines are told apart by the line that differs."""
    was = "\n".join(f"line {i}" for i in range(100))
    now = was.replace("line 57", "line fifty-seven")
    text = explain_miss("AOTAutograd", {"gm": ("2", now)}, [stored("b", gm=("1", was))])
    assert "gm was line 57, is line fifty-seven" in text


def test_components_that_came_or_went_are_named() -> None:
    """A component on one side only is absent on the other."""
    text = explain_miss("Triton", {"new": ("", "1")}, [stored("b", old=("", "2"))])
    assert "new was absent, is 1" in text
    assert "old was 2, is absent" in text


def test_an_artifact_without_keys_says_so() -> None:
    """There is nothing to compare with."""
    assert "holds none" in explain_miss("FX graph", {}, [])


def test_settings_are_compared_by_name() -> None:
    """Equal ones stay out; a flood is cut."""
    assert explain_settings({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == (
        "b was 2, is 3",
    )
    many = explain_settings({}, {f"s{i}": "x" for i in range(9)})
    assert many[-1] == "and 5 more settings"


# --- Harvest -----------------------------------------------------------------------


def triton_cache(root: Path) -> Path:
    """Files as triton 3.6 leaves them, with absolute paths in the group file."""
    folder = root / "KEYOFKERNEL"
    folder.mkdir(parents=True)
    names = ("k.json", "k.cubin", "k.ttir", "k.llir", "k.ptx", "k.source")
    for name in names:
        (folder / name).write_text('{"num_warps": 4}' if name == "k.json" else name)
    group = {"child_paths": {name: str(folder / name) for name in names}}
    (folder / "__grp__k.json").write_text(json.dumps(group))
    (folder / "k.json.lock").write_text("")
    (root / "locks").mkdir()
    return root


def test_triton_files_travel_without_the_build_path(tmp_path: Path) -> None:
    """Group files hold a stand-in; intermediate code and locks stay behind."""
    files, relocated = cache_harvest.triton_files(triton_cache(tmp_path / "t"))
    assert sorted(files) == [
        "triton/KEYOFKERNEL/__grp__k.json",
        "triton/KEYOFKERNEL/k.cubin",
        "triton/KEYOFKERNEL/k.json",
    ]
    assert relocated == ("triton/KEYOFKERNEL/__grp__k.json",)
    assert not any(str(tmp_path).encode() in data for data in files.values())
    group = json.loads(files[relocated[0]])
    assert group["child_paths"]["k.cubin"] == f"{PLACE}/triton/KEYOFKERNEL/k.cubin"
    assert sorted(group["child_paths"]) == ["k.cubin", "k.json"]


def test_a_group_with_a_missing_member_is_refused(tmp_path: Path) -> None:
    """triton drops such members without a word."""
    root = triton_cache(tmp_path / "t")
    (root / "KEYOFKERNEL" / "k.cubin").unlink()
    with pytest.raises(HarvestError, match=r"names k\.cubin"):
        cache_harvest.triton_files(root)


def test_inductor_files_are_entries_and_records(tmp_path: Path) -> None:
    """Generated Python, headers, locks and half-written files stay behind."""
    kept = ("fxgraph/ab/fabc/1", "aotautograd/aabc/2", "xy/cxyz.best_config")
    left = ("xy/cxyz.py", "locks/a.lock", "fxgraph/ab/fabc/.1.tmp", "xy/k.so")
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = cache_harvest.inductor_files(tmp_path)
    assert sorted(found) == sorted(f"inductor/{name}" for name in kept)


# --- Staging -----------------------------------------------------------------------


@pytest.fixture
def artifact(tmp_path: Path) -> tuple[Artifact, Cache]:
    """A small artifact with made-up caches."""
    blobs = [b"entry", f'{{"at": "{PLACE}/triton/K/k.cubin"}}'.encode(), b"{}\n"]
    digests = [canonical.sha256(data) for data in blobs]
    library = canonical.sha256(b"library")
    cache = Cache(
        target=TARGET,
        files={"inductor/fxgraph/a/f/1": digests[0], "triton/K/g.json": digests[1]},
        relocated=("triton/K/g.json",),
        kernels={"key": library},
        keys=(CacheKey("FX graph", "fa", "forward/s1", digests[2]),),
        packages=(StoredPackage("m:f", digests[0], digests[2]),),
        traced={},
        factors={"cache.threads": 1},
        recompile_limit=8,
    )
    files = {blob_path(TARGET, d): b for d, b in zip(digests, blobs, strict=True)}
    files[f"kernels/{library}.so"] = b"library"
    files[cache_path(TARGET)] = canonical.encode(cache_to_json(cache))
    from compilekit.compiler.build import _described

    manifest = Manifest(
        model=Model("m:f", "", ""),
        targets={TARGET: _described(TARGET)},
        entries={"forward": ManifestEntry(("s",), (Bucket("s1", {"s": 1}),))},
        factors={"torch.version": "2.13.0", "python.version": "3.11"},
        routes=("cache",),
    )
    return write_artifact(tmp_path / "artifact", manifest, files), cache


def test_caches_are_staged_once_and_privately(
    artifact: tuple[Artifact, Cache], tmp_path: Path
) -> None:
    """The stand-in becomes the real place; nobody else can write there."""
    work = work_directory(tmp_path / "work")
    place, made = stage(*artifact, work)
    assert made
    assert stage(*artifact, work) == (place, False)
    assert os.listdir(work) == [place.name]
    group = json.loads((place / "triton/K/g.json").read_text())
    assert group["at"] == f"{place}/triton/K/k.cubin"
    assert (place / "inductor/fxgraph/a/f/1").read_bytes() == b"entry"
    for path in (work, place, *place.rglob("*")):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


def test_a_dead_process_leaves_nothing(
    artifact: tuple[Artifact, Cache], tmp_path: Path
) -> None:
    """What was half staged goes with the next start."""
    work = work_directory(tmp_path / "work")
    place, _ = stage(*artifact, work)
    left = work / f".{place.name}.staging-1-abc"
    left.mkdir()
    (left / "half").write_text("")
    stage(*artifact, work)
    assert os.listdir(work) == [place.name]


def test_a_work_directory_that_others_write_is_refused(tmp_path: Path) -> None:
    """Whoever writes there decides what code runs."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ResourceError, match="only its owner can write"):
        work_directory(tmp_path / "open")


def test_a_cache_that_lacks_a_blob_is_no_artifact(
    artifact: tuple[Artifact, Cache],
) -> None:
    """cache.json is checked against the manifest's list."""
    from compilekit.artifact.cache import cache_from_json

    opened, cache = artifact
    files = dict(opened.manifest.files)
    gone = blob_path(TARGET, cache.files["triton/K/g.json"])
    del files[gone]
    with pytest.raises(ManifestError, match=gone):
        cache_from_json(opened.read(cache_path(TARGET)), TARGET, files)


def test_another_cache_directory_is_refused(
    artifact: tuple[Artifact, Cache], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch would go on reading and writing there."""
    monkeypatch.setattr(restore, "compiled_frames", lambda: 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    with pytest.raises(AttachError, match="TORCHINDUCTOR_CACHE_DIR is"):
        restore._refuse_bound(artifact[0])


def test_a_process_that_compiled_already_is_refused(
    artifact: tuple[Artifact, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code isn't the artifact's."""
    monkeypatch.setattr(restore, "compiled_frames", lambda: 3)
    with pytest.raises(AttachError, match="compiled 3 frames"):
        restore._refuse_bound(artifact[0])


# --- Receipts ----------------------------------------------------------------------


def receipt(require: tuple[str, ...]) -> CacheReceipt:
    """A receipt without anything behind it."""
    return CacheReceipt(
        artifact="a" * 64,
        path=Path("artifact"),
        target=TARGET,
        routes=(),
        milliseconds={},
        warnings=(),
        serialised=(),
        require=require,
        undo=lambda: None,
        staged="",
    )


def test_a_required_start_stops_before_it_compiles() -> None:
    """Frame and keys are gathered first, so that the error has all reasons."""
    held = receipt(("cache",))
    held.note_miss("frame", "grad mode")
    held.note_miss("key", "grad_enabled was False, is True")
    with pytest.raises(PolicyError, match=r"grad mode\n.*grad_enabled was False"):
        held.note_miss("compile", "Inductor compiles a graph")
    with pytest.raises(PolicyError):
        held.finish()
    # From the end of the start on, steps are only counted.
    held.note_miss("kernel", "a late one")
    assert [miss.kind for miss in held.misses] == ["frame", "key", "compile", "kernel"]


def test_without_a_requirement_steps_are_only_listed() -> None:
    """The receipt's JSON has every reason."""
    free = receipt(())
    free.note_miss("compile", "why")
    assert free.finish().as_json()["misses"] == [{"kind": "compile", "reason": "why"}]
    assert free.compiles == 1


# --- Configuration -----------------------------------------------------------------


def load(tmp_path: Path, text: str) -> configuration.Config:
    """A configuration from text."""
    path = tmp_path / "compilekit.toml"
    path.write_text(text)
    return configuration.load(path)


WARM = """
[axes]
b = [1, 2]
s = [8]
[entries.step]
warmup = "steps:warmup"
[build]
targets = ["cpu-x86_64-v3"]
"""


def test_a_warmup_needs_no_model_and_gets_all_axes(tmp_path: Path) -> None:
    """Its buckets are the product of the axes."""
    config = load(tmp_path, WARM + 'routes = ["cache"]\n')
    assert [job.bucket.name for job in make_plan(config).jobs] == ["b1_s8", "b2_s8"]


def test_a_warmup_is_refused_on_the_program_route(tmp_path: Path) -> None:
    """A program is one graph of a model's method."""
    with pytest.raises(ConfigError, match=r'needs \[build\] routes = \["cache"\]'):
        load(tmp_path, WARM)


def test_a_warmup_makes_its_own_calls(tmp_path: Path) -> None:
    """Inputs beside it would be ignored, so they're refused."""
    text = WARM.replace("[build]", "kwargs = { a = 1 }\n[build]")
    with pytest.raises(ConfigError, match="makes its own calls"):
        load(tmp_path, text + 'routes = ["cache"]\n')


# --- Whole -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_step_is_restored_without_a_compiler(tmp_path: Path) -> None:
    """Built, moved, served in reverse with an empty PATH; then one option differs."""
    config = ROOT / "examples" / "training" / "compilekit.toml"
    command = [sys.executable, "-m", "compilekit", "--json", "build", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["COMPILEKIT_WORK_DIR"] = str(tmp_path / "work")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment.pop(name, None)
    built = subprocess.run(
        [*command, "-o", str(tmp_path / "built"), "--no-verify", "-j", "2"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (tmp_path / "built").rename(tmp_path / "moved")
    served = subprocess.run(
        [sys.executable, "steps.py", str(tmp_path / "moved")],
        cwd=config.parent,
        env={**environment, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert served.returncode == 0, served.stdout + served.stderr
    assert "0 compiles" in served.stdout
    changed = "import torch._inductor.config as c; c.epilogue_fusion = False"
    code = f"{changed}; import sys, steps; steps.main()"
    refused = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "moved")],
        cwd=config.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode != 0
    assert "inductor.epilogue_fusion was True, is False" in refused.stderr


def test_a_stored_guard_holds_a_function_by_what_it_does() -> None:
    """Replaced by an equal one it passes, by another it doesn't."""
    from compilekit._torch.caches.guard_values import checker, describe, differing

    def one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def two(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    wanted = [("L['f']", describe(one)), ("G['n']", "3")]
    check = checker(wanted, {"n": 3})
    assert check({"f": one})
    assert check({"f": one})
    assert not check({"f": two})
    assert check({"f": one})
    assert not checker(wanted, {})({"f": one})
    ((expression, was, now),) = differing(wanted, {"f": two}, {"n": 3})
    assert expression == "L['f']"
    assert was != now


def test_a_value_is_described_alike_in_every_process() -> None:
    """No address, no order of a set: two processes agree."""
    code = """
import functools, torch
from compilekit._torch.caches.guard_values import describe
gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
values = [torch.nn.Linear, torch.relu, torch.float32, gelu, torch.nn.ReLU(), 1.5]
print(describe(values))
"""
    texts: set[Any] = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "0x" not in texts.pop()
