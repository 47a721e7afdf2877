"""The scripts of scripts/cache_proof, which show that the cache route holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_signature import make_keys, marker_pickle

from compilekit import config as configuration
from compilekit.artifact import (
    Artifact,
    Manifest,
    canonical,
    open_artifact,
    write_artifact,
)
from compilekit.artifact.cache import blob_path, cache_from_json, cache_path
from compilekit.compiler.build import build
from compilekit.errors import ArtifactError, SignatureError
from compilekit.plan import make_plan
from compilekit.runtime.restore import restore
from compilekit.trust import signature

# What torch's compiler warns of when it's imported is torch's own affair.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[1]
PROOF = ROOT / "scripts" / "cache_proof"

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="setuid needs root")


@pytest.fixture(autouse=True)
def proof_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the scripts importable, and no more than that."""
    monkeypatch.syspath_prepend(PROOF)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="compilekit-open-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def stale_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of stale.toml, by the real build in a process of its own."""
    out = tmp_path_factory.mktemp("stale") / "stale.artifact"
    command = [sys.executable, "-m", "compilekit", "build", str(PROOF / "stale.toml")]
    done = subprocess.run(
        [*command, "-o", str(out), "--no-verify", "-j", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return out


def run(script: str, *arguments: str, **environment: str) -> str:
    """What a script prints; it must end with 0."""
    done = subprocess.run(
        [sys.executable, str(PROOF / script), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_a_line_above_a_class_costs_the_package_and_nothing_else(
    stale_artifact: Path,
) -> None:
    """Its frames are traced, with the reason; every graph is found, in any thread."""
    rows = ("nothing", "a line above the class", "the same in another thread")
    printed = run("staleness.py", *rows, STALE_ARTIFACT=str(stale_artifact))
    assert "3 rows, 0 failed" in printed
    assert "a line above the class         | traced" in printed


@pytest.mark.slow
def test_a_line_above_a_class_is_an_error_where_caches_are_required(
    stale_artifact: Path,
) -> None:
    """The error names the lines, with both digests; so does a changed option's."""
    rows = ("--strict", "a line above the class", "epilogue fusion", "threads")
    printed = run("staleness.py", *rows, STALE_ARTIFACT=str(stale_artifact))
    assert "3 rows, 0 failed" in printed


@pytest.mark.slow
def test_a_detached_process_restores_again(
    stale_artifact: Path, tmp_path: Path
) -> None:
    """Variables and options are back, the receipt hears of nothing more."""
    code = """
import os, sys
import torch, torch._dynamo.config, torch._dynamo.eval_frame
import compilekit
from compilekit.runtime import restore
before = dict(os.environ), torch._dynamo.config.recompile_limit
call = torch._dynamo.eval_frame._TorchDynamoContext.__call__
torch.set_num_threads(2)
first = compilekit.restore(sys.argv[1], work_dir=sys.argv[2], require="cache")
assert torch._dynamo.eval_frame._TorchDynamoContext.__call__ is not call
first.detach()
first.detach()
assert (dict(os.environ), torch._dynamo.config.recompile_limit) == before
assert torch._dynamo.eval_frame._TorchDynamoContext.__call__ is call
# Twice: installed frames are taken out as well, and torch traces them by itself.
second = compilekit.restore(sys.argv[1], work_dir=sys.argv[2], require="cache")
assert second is not first
import stale_model
kept = stale_model.warmup({"b": 4})
second.finish()
second.detach()
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
assert torch.equal(kept, stale_model.warmup({"b": 4}))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
assert first.misses == second.misses == ()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(stale_artifact), str(tmp_path / "work")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{PROOF}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_pickle_in_the_caches_never_runs(
    stale_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In place of every file: not before digests pass, and never under a demand."""
    marker = tmp_path / "marker"
    payload = marker_pickle(marker)
    shutil.copytree(stale_artifact, tmp_path / "ours")
    ours = open_artifact(tmp_path / "ours")
    private, public = make_keys(tmp_path)
    signature.sign(ours, private, 1)
    record = signature.record_path(ours.root)
    for path in (p for p in ours.root.rglob("*") if p.is_file()):
        before = path.read_bytes()
        path.write_bytes(payload)
        with pytest.raises(ArtifactError):
            restore(ours.root)
        path.write_bytes(before)
    theirs = write_artifact(tmp_path / "theirs", *with_pickles(ours, payload))
    shutil.copy(record, signature.record_path(theirs.root))
    monkeypatch.setenv("COMPILEKIT_REQUIRE_SIGNATURE", str(public))
    with pytest.raises(SignatureError):
        restore(theirs.root)
    assert not marker.exists()
    # Where nothing is demanded, whoever seals an artifact runs code: these were pickles
    # that are opened.
    monkeypatch.delenv("COMPILEKIT_REQUIRE_SIGNATURE")
    code = "import sys, compilekit; compilekit.restore(sys.argv[1]); import stale_model"
    subprocess.run(
        [sys.executable, "-c", f"{code}; stale_model.warmup({{'b': 4}})", theirs.root],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{PROOF}", "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert marker.exists()


def with_pickles(
    artifact: Artifact, payload: bytes
) -> tuple[Manifest, dict[str, bytes]]:
    """An artifact in which every pickle of torch's is another one, for sealing."""
    [target] = artifact.manifest.targets
    files = {path: artifact.read(path) for path in artifact.manifest.files}
    place = cache_path(target)
    cache = cache_from_json(files[place], target, artifact.manifest.files)
    digests = {package.content for package in cache.packages}
    digests |= {d for path, d in cache.files.items() if "/fxgraph/" in path}
    digests |= {d for path, d in cache.files.items() if "/aotautograd/" in path}
    text = files[place].decode()
    for digest in digests:
        del files[blob_path(target, digest)]
        text = text.replace(digest, canonical.sha256(payload))
    files[blob_path(target, canonical.sha256(payload))] = payload
    return artifact.manifest, {**files, place: text.encode()}


@pytest.mark.slow
def test_survivors_of_a_killed_process_answer_right(stale_artifact: Path) -> None:
    """One round of eight processes that restore at once; the script does twenty."""
    printed = run("concurrency.py", str(stale_artifact), "--rounds", "1")
    assert "1 rounds of 8 processes" in printed
    assert "0 failed" in printed


@pytest.mark.slow
@AS_ROOT
def test_a_model_with_breaks_is_served_by_another_user(open_path: Path) -> None:
    """A print and a branch on data: built, moved, served without a compiler."""
    import elsewhere

    if closed := elsewhere.closed_packages():
        pytest.skip(f"another user can't enter {closed}, where torch is")
    found = elsewhere.run(elsewhere.CASES["branches"], 54321, open_path)
    assert elsewhere.problem(found) == "", found
    assert (found["user"], found["path"]) == (54321, "")
    artifact = open_artifact(open_path / "moved" / "artifact")
    (path,) = (name for name in artifact.reports if name.endswith("compiled.json"))
    compiled = json.loads(artifact.read(path))
    first = compiled["branches/b2"]
    assert len(first["graph_breaks"]) == 2
    assert any("print" in place for place in first["graph_breaks"])
    assert first["frames"]["branches:Branches.forward"] > 0
    kinds = {key.rpartition(" ")[0] for key in first["new_keys"]}
    assert kinds == {"AOTAutograd", "FX graph"}


BREAKING = """
import torch

def warmup(axes):
    @torch.compile(backend="eager")  # a break is a break, and nothing is compiled
    def step(x):
        x = x + 1
        print("rows:", len(x))
        return x * 2 if x.sum() > 0 else -x

    return step(torch.ones(axes["b"]))
"""


@pytest.mark.slow
def test_more_breaks_than_allowed_fail_the_build(tmp_path: Path) -> None:
    """Exit code 3, with the number, what is allowed, and every place."""
    (tmp_path / "breaking.py").write_text(BREAKING)
    path = tmp_path / "compilekit.toml"
    path.write_text(
        """
        axes = { b = [2] }
        entries = { step = { warmup = "breaking:warmup" } }
        gates = { graph_breaks = 1 }
        build = { targets = ["native"], routes = ["cache"] }
        """
    )
    result = build(configuration.load(path), tmp_path / "artifact", verify=False)
    assert (result.artifact, result.exit_code) == (None, 3)
    (bucket,) = result.buckets
    assert bucket.error_type == "GraphBreakError"
    assert "2 graph breaks, [gates] graph_breaks allows 1" in bucket.error
    assert 'in step: print("rows:", len(x))' in bucket.error
    assert "if x.sum() > 0" in bucket.error


@pytest.mark.long
def test_one_changed_factor_at_a_time(
    stale_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One table of more than thirty rows, recompiles executed and all."""
    printed = run("staleness.py", STALE_ARTIFACT=str(stale_artifact))
    with capsys.disabled():
        sys.stdout.write(f"\n{printed}")
    rows, failed = printed.splitlines()[-1].split(" rows, ")
    assert int(rows) >= 30
    assert failed == "0 failed"


@pytest.mark.long
def test_twelve_buckets_in_reverse_and_one_per_process(tmp_path: Path) -> None:
    """More than Dynamo's recompile limit: all are found, whatever the order."""
    path = PROOF / "twelve.toml"
    config = configuration.load(path)
    result = build(config, tmp_path / "artifact", verify=False)
    assert result.artifact is not None, result.buckets
    jobs = make_plan(config).jobs
    buckets = [(job.entry, job.bucket.name, dict(job.bucket.axes)) for job in jobs]
    assert len(buckets) == 12
    for number, order in enumerate((buckets[::-1], *([one] for one in buckets))):
        served = serve(result.artifact, path, order, tmp_path / f"tmp{number}")
        assert served["misses"] == served["processes"] == []
        assert served["counted"]["traced"] == served["counted"]["graphs"] == 0
        assert served["max_abs_diff"] < 1e-5


@pytest.mark.long
@AS_ROOT
@pytest.mark.parametrize("case", ["training", "qwen2-4", "qwen2-24"])
def test_built_deleted_and_served_by_another_user(case: str, open_path: Path) -> None:
    """A training step, and Qwen2 with 4 and 24 layers."""
    import elsewhere

    found = elsewhere.run(elsewhere.CASES[case], 54321, open_path)
    assert elsewhere.problem(found) == "", found


@pytest.mark.long
def test_twenty_rounds_of_eight_processes(stale_artifact: Path) -> None:
    """One of them killed at random; the others answer right, nothing is left."""
    printed = run("concurrency.py", str(stale_artifact))
    assert "20 rounds of 8 processes" in printed
    assert "0 failed" in printed


def serve(
    artifact: Path, config: Path, buckets: list[Any], tmp: Path
) -> dict[str, Any]:
    """What scripts/cache_proof/serve.py answers in a fresh process without PATH."""
    tmp.mkdir()
    spec = {"artifact": str(artifact), "config": str(config), "buckets": buckets}
    done = subprocess.run(
        [sys.executable, str(PROOF / "serve.py")],
        input=json.dumps(spec),
        env={"PATH": "", "TMPDIR": str(tmp), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))
