"""diff, prune and merge, and the receipt as metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import golden
import pytest

from compilekit.artifact import Artifact, canonical, edit, open_artifact, write_artifact
from compilekit.artifact.compare import compare, times_path
from compilekit.cli import run
from compilekit.errors import ConfigError, Mismatch, MismatchError, ResourceError
from compilekit.runtime.receipt import Receipt, Route

V4 = "cpu-x86_64-v4"


def retargeted(folder: Path, **factors: Any) -> Artifact:
    """The golden artifact for another target, with a kernel of its own."""
    kernel = golden.KERNEL + b"v4"
    old, new = canonical.sha256(golden.KERNEL), canonical.sha256(kernel)
    files = {}
    for path, data in golden.files().items():
        place = path.replace(golden.TARGET, V4).replace(old, new)
        text = data.replace(golden.TARGET.encode(), V4.encode())
        files[place] = text.replace(old.encode(), new.encode())
    files[f"kernels/{new}.so"] = kernel
    for path in [p for p in files if p.endswith(".json")]:
        files[path] = canonical.encode(json.loads(files[path]))
    parts = golden.parts()
    targets = {V4: {**parts.targets[golden.TARGET], "march": "x86-64-v4"}}
    parts = parts._replace(targets=targets, factors={**parts.factors, **factors})
    return write_artifact(folder, parts, files)


@pytest.fixture
def one(tmp_path: Path) -> Artifact:
    """The golden artifact."""
    return golden.write(tmp_path / "one")


# --- merge and prune -----------------------------------------------------------------


def test_merge_of_targets_and_back(one: Artifact, tmp_path: Path) -> None:
    """Merged and pruned again, each part has the digest that it had."""
    two = retargeted(tmp_path / "two")
    both = write_artifact(tmp_path / "both", *edit.merge([one, two]))
    assert set(both.manifest.targets) == {golden.TARGET, V4}
    assert len(both.programs) == 4
    for part, name in ((one, golden.TARGET), (two, V4)):
        again = edit.prune(both, targets=[name])
        assert write_artifact(tmp_path / name, *again).digest == part.digest


def test_merge_order_does_not_matter(one: Artifact, tmp_path: Path) -> None:
    """The same artifacts give the same bytes in any order, twice included."""
    two = retargeted(tmp_path / "two")
    digests = {
        write_artifact(tmp_path / f"m{n}", *edit.merge(order)).digest
        for n, order in enumerate([[one, two], [two, one], [two, one, two]])
    }
    assert len(digests) == 1


def test_merge_of_buckets(one: Artifact, tmp_path: Path) -> None:
    """Buckets that were built apart make the artifact that was built at once."""
    parts = [
        write_artifact(tmp_path / bucket, *edit.prune(one, buckets=[bucket]))
        for bucket in ("b1_s128", "b1_s32")
    ]
    assert [len(part.programs) for part in parts] == [1, 1]
    assert write_artifact(tmp_path / "all", *edit.merge(parts)).digest == one.digest


def test_prune_takes_unused_kernels_along(one: Artifact, tmp_path: Path) -> None:
    """A source that nothing uses goes; used kernels and constants stay."""
    extra = write_artifact(tmp_path / "extra", golden.parts(), golden.variant(1))
    assert write_artifact(tmp_path / "p", *edit.prune(extra)).digest == one.digest


@pytest.mark.parametrize(
    ("kind", "name"), [("targets", "x"), ("entries", "decode"), ("buckets", "b9_s9")]
)
def test_prune_names_what_there_is(kind: str, name: str, one: Artifact) -> None:
    """A misspelt name is refused with those that there are."""
    with pytest.raises(ConfigError, match=f"{name}: expected one of"):
        edit.prune(one, **{kind: [name]})


def contradictions(*artifacts: Artifact) -> list[str]:
    """What merge refuses."""
    with pytest.raises(MismatchError) as caught:
        edit.merge(artifacts)
    return [item["factor"] for item in caught.value.fields["mismatches"]]


def test_merge_refuses_contradictions(one: Artifact, tmp_path: Path) -> None:
    """Factors, model and a target's own description, all at once."""
    two = retargeted(tmp_path / "two", **{"torch.version": "2.11.0"})
    assert contradictions(one, two) == ["torch.version"]
    parts = golden.parts()
    target = {**parts.targets[golden.TARGET], "march": "x86-64-v2"}
    other = parts._replace(
        model=parts.model._replace(dtype="bfloat16"), targets={golden.TARGET: target}
    )
    three = write_artifact(tmp_path / "three", other, golden.files())
    assert contradictions(one, three) == ["model.dtype", f"target {golden.TARGET}"]


def test_merge_refuses_two_programs_for_one_bucket(
    one: Artifact, tmp_path: Path
) -> None:
    """The same bucket compiled to other code."""
    path = f"programs/{golden.TARGET}/forward/b1_s32/call.py"
    files = {**golden.files(), path: golden.CALL + b"# other\n"}
    two = write_artifact(tmp_path / "two", golden.parts(), files)
    assert contradictions(one, two) == [path]


def test_merge_refuses_a_hole(one: Artifact, tmp_path: Path) -> None:
    """A target that lacks one of the buckets."""
    two = retargeted(tmp_path / "two")
    small = write_artifact(tmp_path / "small", *edit.prune(two, buckets=["b1_s32"]))
    assert contradictions(one, small) == [f"{V4} forward b1_s128"]


# --- diff ----------------------------------------------------------------------------


def changed(a: Artifact, b: Artifact) -> set[tuple[str, str]]:
    """Kind and name of each difference."""
    return {(change.kind, change.name) for change in compare(a, b)}


def test_equal_artifacts_have_no_differences(one: Artifact) -> None:
    """Reports and place don't count."""
    assert compare(one, open_artifact(golden.ARTIFACT)) == ()


def test_differences_are_named(one: Artifact, tmp_path: Path) -> None:
    """Model, factors, targets, buckets, host code, kernels, sizes."""
    two = retargeted(tmp_path / "two", **{"torch.version": "2.11.0"})
    found = changed(one, two)
    assert ("factor", "torch.version") in found
    assert {("target", golden.TARGET), ("target", V4)} <= found
    assert ("bucket", f"{V4} forward b1_s32") in found
    assert ("size", "bytes") in found
    small = write_artifact(tmp_path / "small", *edit.prune(one, buckets=["b1_s32"]))
    name = f"{golden.TARGET} forward b1_s128"
    assert {c for c in changed(one, small) if c[0] == "bucket"} == {("bucket", name)}


def test_a_kernels_config_is_compared(one: Artifact, tmp_path: Path) -> None:
    """A kernel that was launched with another config, and its other binary."""
    path = f"programs/{golden.TARGET}/forward/b1_s32/program.json"
    fields = json.loads(golden.files()[path])
    fields["kernels"]["kernel"]["launch"]["num_warps"] = 8
    files = {**golden.files(), path: canonical.encode(fields)}
    two = write_artifact(tmp_path / "two", golden.parts(), files)
    name = f"{golden.TARGET} forward b1_s32 kernel launch.num_warps"
    assert changed(one, two) - {("size", "bytes")} == {("kernel", name)}


def test_every_difference_of_a_digest_is_shown(one: Artifact, tmp_path: Path) -> None:
    """Whichever file differs, there is a line: none are equal with other digests."""
    for number, path in enumerate(p for p in golden.files() if p.endswith(".py")):
        files = {**golden.files(), path: golden.CALL + b"#\n"}
        two = write_artifact(tmp_path / str(number), golden.parts(), files)
        assert changed(one, two)
    other = golden.write_artifact(tmp_path / "v", golden.parts(), golden.variant(1))
    assert [kind for kind, _ in changed(one, other)].count("file") == 1


def test_times_are_shown_and_make_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each build took, beside each other; a bucket that one lacks has one time."""
    place = times_path(golden.TARGET)
    for name, seconds in (
        ("one", {"forward b1_s32": 1.5, "forward b1_s128": 2}),
        ("two", {"forward b1_s32": 3.25}),
    ):
        reports = {**golden.reports(), place: canonical.encode(seconds)}
        write_artifact(tmp_path / name, golden.parts(), golden.files(), reports)
    words = ["diff", str(tmp_path / "one"), str(tmp_path / "two")]
    assert run([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["changes"], result["a"]) == ([], result["b"])
    name = f"{golden.TARGET} forward b1_s32"
    assert {"kind": "time", "name": name, "a": 1.5, "b": 3.25} in result["times"]
    name = f"{golden.TARGET} forward b1_s128"
    assert {"kind": "time", "name": name, "a": 2, "b": None} in result["times"]
    assert run([*words, "--plain"]) == 0
    assert "equal\tyes" in (out := capsys.readouterr().out)
    assert f"time\t{golden.TARGET} forward b1_s32\t1.500000\t3.250000" in out


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """diff, prune and merge through the command line."""
    one, two = golden.write(tmp_path / "one"), retargeted(tmp_path / "two")
    both, back = str(tmp_path / "both"), str(tmp_path / "back")
    assert run(["merge", str(one.root), str(two.root), "-o", both, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["programs"] == 4
    assert run(["prune", both, "-o", back, "--target", golden.TARGET]) == 0
    assert one.digest in capsys.readouterr().out
    assert run(["diff", str(one.root), back]) == 0
    assert "equal\tyes" in capsys.readouterr().out
    assert run(["diff", str(one.root), both, "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["result"]["changes"]
    assert {"kind": "target", "name": V4, "a": None, "b": "present"} in changes
    small = str(tmp_path / "small")
    assert run(["prune", str(two.root), "-o", small, "--bucket", "b1_s32"]) == 0
    assert run(["merge", str(one.root), small, "-o", both]) == 6


# --- Metrics -------------------------------------------------------------------------


def receipt() -> Receipt:
    """A receipt with one of everything."""
    return Receipt(
        artifact="ab" * 32,
        path=Path("/artifact"),
        target='cpu"x\\',
        routes=(
            Route("forward", "b1_s32", "program", 3),
            Route("forward", "b1_s64", "program", 3),
        ),
        milliseconds={"open": 1.5, "bind": 0.25},
        warnings=(Mismatch("torch.version", "1", "2", "warn", "", ""),),
        serialised=(),
        require=(),
        undo=lambda: None,
    )


def test_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is there, labels are escaped, and a client's words aren't labels."""
    file = tmp_path / "compilekit.prom"
    monkeypatch.setenv("COMPILEKIT_METRICS", str(file))
    made = receipt()
    made.note_uncovered("forward", "a shape that a client chose", "eager")
    made.note_uncovered("forward", "another", "eager")
    made.write()
    base = 'artifact="%s",target="cpu\\"x\\\\"' % ("ab" * 32)
    lines = file.read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        f'compilekit_attach_seconds{{{base},phase="open"}} 0.0015',
        f'compilekit_attach_seconds{{{base},phase="bind"}} 0.00025',
        f'compilekit_buckets{{{base},entry="forward",route="program"}} 2',
        f"compilekit_compiles_total{{{base}}} 0",
        f"compilekit_rebinds_total{{{base}}} 0",
        f'compilekit_uncovered_calls_total{{{base},entry="forward",route="eager"}} 2',
        f"compilekit_warnings{{{base}}} 1",
    ]
    assert sum(line.startswith("# TYPE") for line in lines) == 6
    assert [p.name for p in tmp_path.iterdir()] == ["compilekit.prom"]


def test_a_counter_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call shows, after ten million of them too."""
    file = tmp_path / "compilekit.prom"
    monkeypatch.setenv("COMPILEKIT_METRICS", str(file))
    made = receipt()
    made.note_uncovered("forward", "a shape", "eager")
    made.uncovered[0].calls = 12_345_678
    made.write()
    assert 'route="eager"} 12345678\n' in file.read_text()


def test_a_link_beside_the_metrics_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who guesses the name that is written first can't point it at another file."""
    file, other = tmp_path / "compilekit.prom", tmp_path / "other"
    other.write_text("mine")
    Path(f"{file}.{os.getpid()}").symlink_to(other)
    monkeypatch.setenv("COMPILEKIT_METRICS", str(file))
    with pytest.raises(ResourceError, match="symbolic links"):
        receipt().write()
    assert other.read_text() == "mine"


def test_metrics_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable."""
    monkeypatch.setenv("COMPILEKIT_METRICS", "/nonexistent/x.prom")
    with pytest.raises(ResourceError) as caught:
        receipt().write()
    assert "COMPILEKIT_METRICS" in caught.value.hint


def test_a_full_disk_leaves_nothing_beside_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun under another name is removed."""
    monkeypatch.setenv("COMPILEKIT_METRICS", str(tmp_path / "x.prom"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ResourceError, match="No space left"):
        receipt().write()
    assert list(tmp_path.iterdir()) == []
