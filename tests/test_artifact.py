"""The artifact on disk: canonical bytes, atomic writing, verified reading, records."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import math
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import golden
import jsonschema
import pytest

from compilekit import artifact as api
from compilekit.artifact import cache as caches
from compilekit.artifact import canonical, reading, schema, store, verification, write
from compilekit.artifact import manifest as manifests
from compilekit.artifact import program as programs
from compilekit.errors import (
    ArtifactError,
    DigestError,
    ManifestError,
    ResourceError,
    UnsafePathError,
)

GOLDENS = {
    "cache": (golden.FOLDER / "cache.json",),
    "manifest": (golden.ARTIFACT / "manifest.json",),
    "reports": (golden.ARTIFACT / "reports/index.json",),
    "entry": tuple(golden.ARTIFACT.glob("programs/*/*/entry.json")),
    "program": tuple(golden.ARTIFACT.glob("programs/*/*/*/program.json")),
    "verification": (golden.RECORD,),
    "signature": (golden.FOLDER / "signature.json",),
}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- Canonical JSON ----------------------------------------------------------------


def test_encode_bytes() -> None:
    """Sorted keys, short values on one line, UTF-8, exact floats, one newline."""
    value = {"b": [1, 2.5, 1e-05], "a": {"größe": None, "y": True}, "c": (), "d": 0.1}
    assert canonical.encode(value).decode() == (
        "{\n"
        '  "a": {"größe": null, "y": true},\n'
        '  "b": [1, 2.5, 1e-05],\n'
        '  "c": [],\n'
        '  "d": 0.1\n'
        "}\n"
    )


def test_encode_breaks_long_lines_only() -> None:
    """A value moves to several lines exactly when it would pass column 120."""
    for length in (107, 108):
        text = canonical.encode({"key": ["x" * length]}).decode()
        assert (max(map(len, text.splitlines())) <= 120) == (length == 107) or (
            text.count("\n") == 5
        )
        assert json.loads(text) == {"key": ["x" * length]}


def test_encode_ignores_insertion_order() -> None:
    """The same mapping gives the same bytes in whatever order it was filled."""
    value = {f"k{i}": {"x": i, "y": [i]} for i in range(40)}
    shuffled = list(value.items())
    random.Random(0).shuffle(shuffled)
    assert canonical.encode(dict(shuffled)) == canonical.encode(value)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, b"bytes", {1: 2}, {"x"}, object(), "\ud800"],
    ids=["nan", "inf", "bytes", "integer key", "set", "object", "surrogate"],
)
def test_encode_refuses(value: object) -> None:
    """What JSON can't hold, or only by changing it, is an error."""
    with pytest.raises(ManifestError):
        canonical.encode({"outer": [value]})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"o": {"a": 1, "b": 0, "a": 1}}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"[1]", "expected a JSON object"),
        (b'{"a": "\xff"}', "byte 0xff at offset 7"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_decode_refuses(data: bytes, reason: str) -> None:
    """Whatever readers could understand in two ways is refused, and the file named."""
    with pytest.raises(ManifestError, match=reason) as caught:
        canonical.decode(data, "some/file.json")
    assert "some/file.json" in str(caught.value)


def test_seal_can_be_checked_without_json() -> None:
    """The digest is the sha256 of the file without its digest line, as documented."""
    found = subprocess.run(
        ["sh", "-c", "grep -v '^  \"digest\"' manifest.json | sha256sum"],
        cwd=golden.ARTIFACT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split()[0] == store.open_artifact(golden.ARTIFACT).digest


def test_unseal_sees_every_flipped_bit() -> None:
    """No bit of a sealed file can change unnoticed, white space included."""
    data, _ = canonical.seal({"schema": 1, "text": "a  b", "list": [1, 2]})
    for index in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            with pytest.raises((DigestError, ManifestError), match="sealed"):
                canonical.unseal(bytes(damaged), "sealed.json")


# --- Schemas -----------------------------------------------------------------------


def load_schema(name: str) -> dict[str, Any]:
    """One of the shipped schemas, parsed."""
    loaded: dict[str, Any] = json.loads((schema.FOLDER / f"{name}.json").read_text())
    return loaded


def test_every_schema_has_a_golden() -> None:
    """Each schema that ships has at least one golden file."""
    assert {path.stem for path in schema.FOLDER.glob("*.json")} == set(GOLDENS)
    assert all(GOLDENS.values())


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_fit_their_schema(name: str) -> None:
    """The schemas are JSON Schema, and the golden files fit them, by two validators."""
    loaded = load_schema(name)
    jsonschema.Draft202012Validator.check_schema(loaded)
    for path in GOLDENS[name]:
        value = json.loads(path.read_text())
        jsonschema.Draft202012Validator(loaded).validate(value)
        schema.validate(name, value, path.name)


def mutations(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one place removed, replaced or added to."""
    places: list[tuple[str | int, ...]] = []

    def collect(item: Any, steps: tuple[str | int, ...]) -> None:
        if steps:
            places.append(steps)
        if isinstance(item, dict | list):
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, child in pairs:
                collect(child, (*steps, key))

    collect(value, ())
    wrong: tuple[Any, ...] = ("x y", "0" * 64, None, True, -1, 1.5, [], {}, "drop")
    chance = random.Random(0)
    for steps in places:
        for new in chance.sample(wrong, 5):
            copied = copy.deepcopy(value)
            parent = copied
            for step in steps[:-1]:
                parent = parent[step]
            if new == "drop":
                del parent[steps[-1]]
            else:
                parent[steps[-1]] = new
            if isinstance(parent, dict) and new == {}:
                parent["unheard_of"] = 1
            yield copied


@pytest.mark.parametrize("name", GOLDENS)
def test_our_validator_agrees_with_jsonschema(name: str) -> None:
    """On hundreds of damaged files, ours refuses exactly what jsonschema refuses."""
    reference = jsonschema.Draft202012Validator(load_schema(name))
    golden_value = json.loads(GOLDENS[name][0].read_text())
    refused = 0
    for value in mutations(golden_value):
        if reference.is_valid(value):
            schema.validate(name, value, "file")
        else:
            with pytest.raises(ManifestError, match="file: "):
                schema.validate(name, value, "file")
            refused += 1
    assert refused > 25


def test_schema_error_names_the_place() -> None:
    """The error says where in the file, what was expected there and what was found."""
    value = json.loads(GOLDENS["program"][0].read_text())
    value["outputs"][1]["spec"]["shape"][0] = -3
    with pytest.raises(ManifestError) as caught:
        schema.validate("program", value, "program.json")
    assert caught.value.message == (
        "program.json: outputs[1].spec.shape[0]: expected at least 0, found -3"
    )


def test_schema_error_names_the_branch() -> None:
    """Among the kinds of a result, the one that was meant is complained about."""
    value = json.loads(GOLDENS["program"][0].read_text())
    value["result"]["items"][0][1] = {"kind": "value"}
    with pytest.raises(ManifestError, match="expected the key 'value', found none"):
        schema.validate("program", value, "program.json")
    value["result"]["items"][0][1] = {"kind": "cache"}
    with pytest.raises(ManifestError, match=r'one of "out", "tensor".*found "cache"'):
        schema.validate("program", value, "program.json")


def test_schema_refuses_deep_nesting() -> None:
    """A result nested beyond Python's recursion limit is an error of the tree."""
    value = json.loads(GOLDENS["program"][0].read_text())
    for _ in range(sys.getrecursionlimit()):
        value["result"] = {"kind": "list", "items": [value["result"]]}
    with pytest.raises(ManifestError, match="nested too deeply"):
        schema.validate("program", value, "program.json")


def test_schema_refuses_a_newline_after_a_name() -> None:
    """`$` in a pattern means the end, not the place before a last newline."""
    value = json.loads(GOLDENS["entry"][0].read_text())
    value["target"] += "\n"
    with pytest.raises(ManifestError, match="target"):
        schema.validate("entry", value, "entry.json")


def test_unknown_schema_keyword(tmp_path: Path, monkeypatch: Any) -> None:
    """A keyword that our validator would silently ignore can't get into a schema."""
    (tmp_path / "odd.json").write_text('{"type": "object", "minProperties": 1}')
    monkeypatch.setattr(schema, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="minProperties"):
        schema.validate("odd", {}, "file")


@pytest.mark.parametrize(
    ("name", "place", "record"),
    [
        ("entry", (), programs.Entry),
        ("entry", ("$defs", "spec"), programs.TensorSpec),
        ("entry", ("$defs", "rule"), programs.InputRule),
        ("entry", ("properties", "signature", "items"), programs.Parameter),
        ("entry", ("properties", "reads", "items"), programs.Read),
        ("cache", (), caches.Cache),
        ("cache", ("properties", "keys", "items"), caches.CacheKey),
        ("cache", ("properties", "packages", "items"), caches.StoredPackage),
        ("program", (), programs.Program),
        ("program", ("properties", "inputs", "items"), programs.GraphInput),
        ("program", ("properties", "outputs", "items"), programs.GraphOutput),
        (
            "program",
            ("properties", "kernels", "additionalProperties"),
            programs.KernelRef,
        ),
    ],
)
def test_schemas_list_the_fields_of_the_records(
    name: str, place: tuple[str, ...], record: type
) -> None:
    """A field added to a record but not to its schema fails here, by name."""
    part = load_schema(name)
    for step in place:
        part = part[step]
    fields, defaults = set(record._fields), set(record._field_defaults)
    # Graph inputs and outputs leave out what is at its default.
    short = record in (programs.GraphInput, programs.GraphOutput)
    left_out = defaults if short else {"native"}
    assert set(part["properties"]) == fields
    assert set(part["required"]) == fields - left_out


# --- Writing -----------------------------------------------------------------------


def test_golden_artifact(tmp_path: Path) -> None:
    """Writing the golden parts gives the committed bytes, file by file."""
    golden.write(tmp_path / "artifact")
    assert contents(tmp_path / "artifact") == contents(golden.ARTIFACT)


def test_order_of_packing_is_irrelevant(tmp_path: Path) -> None:
    """Files and manifest parts in any order give the same bytes."""
    parts, files = golden.parts(), golden.files()
    for seed in range(5):
        order = list(files)
        random.Random(seed).shuffle(order)
        shuffled = parts._replace(
            factors=dict(reversed(parts.factors.items())),
            entries={
                name: manifests.ManifestEntry(one.axes, one.buckets[::-1])
                for name, one in parts.entries.items()
            },
        )
        api.write_artifact(
            tmp_path / str(seed),
            shuffled,
            {path: files[path] for path in order},
            golden.reports(),
        )
        assert contents(tmp_path / str(seed)) == contents(golden.ARTIFACT)


def test_reports_change_nothing_else(tmp_path: Path) -> None:
    """Builds that differ in their reports have one digest and equal bytes elsewhere."""
    parts, files = golden.parts(), golden.files()
    one = api.write_artifact(tmp_path / "1", parts, files, {"reports/a.log": b"1.5s"})
    two = api.write_artifact(tmp_path / "2", parts, files, {"reports/a.log": b"1.6s"})
    none = api.write_artifact(tmp_path / "3", parts, files)
    assert one.digest == two.digest == none.digest
    assert (one.root / "manifest.json").read_bytes() == (
        two.root / "manifest.json"
    ).read_bytes()
    assert not (none.root / "reports").exists()


def test_written_artifact_reads_back(tmp_path: Path) -> None:
    """Manifest, entries and programs come back as they were given."""
    artifact = golden.write(tmp_path / "artifact")
    parts = golden.parts()
    assert artifact.root == tmp_path / "artifact"
    assert artifact.manifest.model.config == parts.model.config
    assert artifact.manifest.entries == parts.entries
    assert artifact.manifest.targets == parts.targets
    assert artifact.manifest.factors_for(golden.TARGET) == {
        "torch.version": "2.13.0",
        "torch.cuda": None,
        "python.version": "3.11",
        "glibc": "2.17",
        "libstdcxx": "3.4.19",
    }
    assert artifact.entries == {(golden.TARGET, "forward"): golden.entry()}
    assert artifact.programs == {
        (golden.TARGET, "forward", bucket.name): golden.program(bucket)
        for bucket in golden.BUCKETS
    }
    assert [key[2] for key in artifact.programs] == ["b1_s32", "b1_s128"]
    again = api.open_artifact(artifact.root)
    assert (again.manifest, again.reports) == (artifact.manifest, artifact.reports)


def test_modes_ignore_the_umask(tmp_path: Path) -> None:
    """Everyone can read what was written, also under a closed umask."""
    before = os.umask(0o077)
    try:
        root = golden.write(tmp_path / "artifact").root
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path


def test_second_build_never_mixes(tmp_path: Path) -> None:
    """A build into an artifact's place leaves only the new files, nothing beside."""
    api.write_artifact(
        tmp_path / "a", golden.parts(), golden.variant(1), golden.reports()
    )
    golden.write(tmp_path / "a")
    assert contents(tmp_path / "a") == contents(golden.ARTIFACT)
    assert os.listdir(tmp_path) == ["a"]


def test_empty_directory_is_a_place(tmp_path: Path) -> None:
    """An empty directory, missing parents and a link to a place are all fine."""
    (tmp_path / "empty").mkdir()
    golden.write(tmp_path / "empty")
    golden.write(tmp_path / "some" / "where" / "deep")
    (tmp_path / "link").symlink_to("empty")
    replaced = api.write_artifact(tmp_path / "link", golden.parts(), golden.variant(1))
    assert replaced.root == tmp_path / "empty"
    assert (tmp_path / "link").is_symlink()
    assert api.open_artifact(tmp_path / "empty").digest == replaced.digest


def test_damaged_artifact_can_be_replaced(tmp_path: Path) -> None:
    """A build repairs an artifact with a wrong or missing file."""
    root = golden.write(tmp_path / "a").root
    (root / golden.KERNEL_PATH).write_bytes(b"damaged")
    (root / golden.CONSTANT_PATH).unlink()
    golden.write(root)
    assert contents(root) == contents(golden.ARTIFACT)


def stranger_folder(root: Path) -> None:
    (root / "thesis.txt").write_text("years of work")


def stranger_subfolder(root: Path) -> None:
    (root / "drafts" / "old").mkdir(parents=True)


def stranger_manifest(root: Path) -> None:
    (root / "manifest.json").write_text('{"name": "a browser extension"}')


def stranger_in_artifact(root: Path) -> None:
    root.rmdir()
    golden.write(root)
    (root / "kernels" / "notes.txt").write_text("mine")


def stranger_link(root: Path) -> None:
    (root / "data").symlink_to("/nowhere")


def stranger_file(root: Path) -> None:
    root.rmdir()
    root.write_text("a file")


@pytest.mark.parametrize(
    ("fill", "named"),
    [
        (stranger_folder, "thesis.txt"),
        (stranger_subfolder, "drafts"),
        (stranger_manifest, "manifest.json"),
        (stranger_in_artifact, "kernels/notes.txt"),
        (stranger_link, "data"),
        (stranger_file, "found a file"),
    ],
)
def test_other_peoples_files_are_never_replaced(
    tmp_path: Path, fill: Callable[[Path], None], named: str
) -> None:
    """A place that holds anything but an artifact is refused, and left untouched."""
    place = tmp_path / "place"
    place.mkdir()
    fill(place)
    before = sorted(place.rglob("*")), contents(place)
    with pytest.raises(ResourceError, match=named) as caught:
        golden.write(place)
    assert caught.value.exit_code == 13
    assert (sorted(place.rglob("*")), contents(place)) == before
    assert os.listdir(tmp_path) == ["place"]


@pytest.mark.parametrize(
    "path",
    [
        "../evil",
        "/etc/passwd",
        "a//b",
        "a/./b",
        "a/../../b",
        "",
        "a/",
        "a\\b",
        "a\nb",
        "kernels/ü",
        "C:x",
        f"sources/{'x' * 256}",
    ],
)
def test_unsafe_paths_are_not_written(tmp_path: Path, path: str) -> None:
    """A path that would leave the artifact, or not travel, is never written."""
    with pytest.raises(UnsafePathError) as caught:
        api.write_artifact(
            tmp_path / "a", golden.parts(), {**golden.files(), path: b""}
        )
    assert repr(path) in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_file_and_folder_of_one_name(tmp_path: Path) -> None:
    """One path can't be a file and the folder of another file."""
    files = {**golden.files(), "autotune/x": b"", "autotune/x/y": b""}
    with pytest.raises(UnsafePathError, match="autotune/x"):
        api.write_artifact(tmp_path / "a", golden.parts(), files)


@pytest.mark.parametrize(
    ("path", "data", "named"),
    [
        ("reports/x", b"", "lists reports/x"),
        ("manifest.json", b"", "lists manifest.json"),
        (f"kernels/{'0' * 64}.so", b"", "states another digest"),
    ],
)
def test_files_that_contradict_the_format(
    tmp_path: Path, path: str, data: bytes, named: str
) -> None:
    """What `open_artifact` would refuse is never published."""
    files = {**golden.files(), path: data}
    with pytest.raises(ManifestError, match=named):
        api.write_artifact(tmp_path / "a", golden.parts(), files)
    assert os.listdir(tmp_path) == []


def test_report_outside_reports(tmp_path: Path) -> None:
    """A report can't be put where it would escape the manifest."""
    with pytest.raises(ManifestError, match="lists sources/x"):
        api.write_artifact(
            tmp_path / "a", golden.parts(), golden.files(), {"sources/x": b""}
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("existing", [False, True])
def test_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: Any, existing: bool
) -> None:
    """Ctrl-C while writing leaves the old artifact, or nothing, and no staging."""
    place = tmp_path / "a"
    if existing:
        golden.write(place)
    before = contents(tmp_path)
    for step in ("write_file", "sync", "_publish"):
        for countdown in (0, 3):
            left = [countdown]
            real = getattr(write, step)

            def interrupted(
                *args: Any, left: list[int] = left, real: Any = real
            ) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                real(*args)

            if step == "_publish" and countdown:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(write, step, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    api.write_artifact(place, golden.parts(), golden.variant(7))
            assert contents(tmp_path) == before
            assert os.listdir(tmp_path) == (["a"] if existing else [])


def test_full_disk(tmp_path: Path, monkeypatch: Any) -> None:
    """A full disk is a resource error with a next step, and leaves nothing."""

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(write, "write_file", full)
    with pytest.raises(ResourceError, match="No space left") as caught:
        golden.write(tmp_path / "a")
    assert "Free some space" in caught.value.hint
    assert os.listdir(tmp_path) == []


def test_unwritable_parent(tmp_path: Path) -> None:
    """A parent that can't hold a directory is a resource error that names the place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="file/a can't be written"):
        golden.write(tmp_path / "file" / "a")


def test_without_exchange(tmp_path: Path, monkeypatch: Any) -> None:
    """Where the system can't swap directories, the old one is moved aside first."""
    monkeypatch.setattr(write, "_exchange", lambda staging, out: False)
    api.write_artifact(tmp_path / "a", golden.parts(), golden.variant(1))
    golden.write(tmp_path / "a")
    assert contents(tmp_path / "a") == contents(golden.ARTIFACT)
    assert os.listdir(tmp_path) == ["a"]


def test_move_aside_is_undone(tmp_path: Path, monkeypatch: Any) -> None:
    """If the second of the two renames fails, the old artifact is put back."""
    old = golden.write(tmp_path / "a")
    monkeypatch.setattr(write, "_exchange", lambda staging, out: False)
    real = os.rename
    calls = []

    def failing(source: Path, destination: Path) -> None:
        if Path(destination) == old.root:
            calls.append(source)
            if len(calls) == 2:
                raise OSError(5, "Input/output error")
        real(source, destination)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ResourceError, match="Input/output error"):
        api.write_artifact(tmp_path / "a", golden.parts(), golden.variant(1))
    monkeypatch.undo()
    assert api.open_artifact(tmp_path / "a").digest == old.digest
    assert os.listdir(tmp_path) == ["a"]


def test_old_artifact_moved_aside_by_a_killed_writer(tmp_path: Path) -> None:
    """A writer killed between its two renames: the next one puts the old one back."""
    old = golden.write(tmp_path / "a")
    old.root.rename(tmp_path / ".a.staging-1-00000000.old")
    bad = {**golden.files(), f"kernels/{'0' * 64}.so": b""}
    with pytest.raises(ManifestError, match="states another digest"):
        api.write_artifact(tmp_path / "a", golden.parts(), bad)
    assert api.open_artifact(tmp_path / "a").digest == old.digest


def test_leftovers_are_removed_unless_in_use(tmp_path: Path) -> None:
    """Staging of dead writers goes; that of live ones and other names stay."""
    dead = tmp_path / ".a.staging-1-00000000"
    dead.mkdir()
    (dead / "half").write_text("")
    other = tmp_path / ".ab.staging-1-00000000"
    other.mkdir()
    with write.staging(tmp_path / "a") as alive:
        golden.write(tmp_path / "a")
        assert not dead.exists()
        assert other.exists()
        assert alive.exists()
    assert not alive.exists()


def test_staging_taken_for_a_leftover(tmp_path: Path, monkeypatch: Any) -> None:
    """A staging directory removed before it was locked is made again."""
    real = write._lock
    taken = []

    def stolen(path: Path, *, required: bool) -> int | None:
        if not taken:
            taken.append(path)
            shutil.rmtree(path)
        return real(path, required=required)

    monkeypatch.setattr(write, "_lock", stolen)
    golden.write(tmp_path / "a")
    assert taken
    assert os.listdir(tmp_path) == ["a"]


def test_file_system_without_locks(tmp_path: Path, monkeypatch: Any) -> None:
    """Where nothing can be locked, writing works and leftovers are left alone."""

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    (tmp_path / ".a.staging-1-00000000").mkdir()
    golden.write(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == [".a.staging-1-00000000", "a"]


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ESTALE])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_network_file_system_that_refuses(
    number: int, exchange: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """The last step fails: the reason is named, and the old artifact is as it was."""
    old = golden.write(tmp_path / "a")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    if exchange:
        monkeypatch.setattr(write, "_exchange", refuse)
    else:
        monkeypatch.setattr(write, "_exchange", lambda staging, out: False)
        monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ResourceError, match=os.strerror(number)) as caught:
        api.write_artifact(tmp_path / "a", golden.parts(), golden.variant(1))
    assert "try again" in caught.value.hint
    monkeypatch.undo()
    assert api.open_artifact(tmp_path / "a").digest == old.digest
    assert os.listdir(tmp_path) == ["a"]


_WRITERS = """
import os, signal, sys
import golden
from compilekit import artifact

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    number = int(line)
    while pid == 0:
        files = golden.variant(number % 2)
        artifact.write_artifact(sys.argv[1], golden.parts(), files, golden.reports())
        number += 1
    print(pid, flush=True)
"""


def kill(pid: int) -> None:
    """kill -9, and wait until the process is gone."""
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.001)


def test_killed_writers_leave_a_whole_artifact(tmp_path: Path) -> None:
    """kill -9 at 30 random moments: the place holds one of the two artifacts, whole."""
    place = tmp_path / "a"
    whole = {
        api.write_artifact(
            place, golden.parts(), golden.variant(number), golden.reports()
        ).digest
        for number in (0, 1)
    }
    here = Path(__file__).parent
    chance = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", _WRITERS, str(place)],
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        for _ in range(15):
            # Two at a time, so that one finds the other's staging, alive or dead.
            pids = []
            for number in (0, 1):
                starter.stdin.write(f"{number}\n")
                starter.stdin.flush()
                pids.append(int(starter.stdout.readline()))
            for pid in pids:
                time.sleep(chance.uniform(0.0, 0.05))
                kill(pid)
                assert api.open_artifact(place).digest in whole
    golden.write(place)
    assert os.listdir(tmp_path) == ["a"]


def test_readers_see_whole_artifacts(tmp_path: Path) -> None:
    """Opening while another thread rebuilds gives one artifact or the other."""
    place = tmp_path / "a"
    digests = {
        api.write_artifact(place, golden.parts(), golden.variant(number)).digest
        for number in (0, 1)
    }
    done = threading.Event()

    def rebuild() -> None:
        for number in range(15):
            api.write_artifact(place, golden.parts(), golden.variant(number % 2))
        done.set()

    writer = threading.Thread(target=rebuild)
    writer.start()
    opened = 0
    while not done.is_set():
        assert api.open_artifact(place).digest in digests
        opened += 1
    writer.join()
    assert opened


# --- Reading -----------------------------------------------------------------------


def test_read(tmp_path: Path) -> None:
    """Bytes, JSON and paths of listed files; what isn't listed is refused."""
    artifact = golden.write(tmp_path / "a")
    assert artifact.read(golden.KERNEL_PATH) == golden.KERNEL
    assert artifact.read("reports/build.log") == golden.reports()["reports/build.log"]
    assert artifact.json(golden.ENTRY_PATH)["name"] == "forward"
    assert artifact.path(golden.KERNEL_PATH) == tmp_path / "a" / golden.KERNEL_PATH
    expected = sum(map(len, golden.files().values())) + len(
        golden.reports()["reports/build.log"]
    )
    assert artifact.size_bytes == expected
    for path in ("../secret", "manifest.json.bak", "kernels"):
        for method in (artifact.read, artifact.json, artifact.path):
            with pytest.raises(ManifestError, match="isn't listed"):
                method(path)


def test_programs_are_kept_from_the_verification(tmp_path: Path) -> None:
    """What is parsed or run is what was verified, whatever happens to the file."""
    artifact = golden.write(tmp_path / "a")
    call = manifests.call_path(golden.TARGET, "forward", "b1_s32")
    (artifact.root / call).write_bytes(b"import os; os.abort()")
    assert artifact.read(call) == golden.CALL


def test_change_after_open_is_noticed(tmp_path: Path) -> None:
    """A file that isn't kept is compared with its digest again when it's read."""
    artifact = golden.write(tmp_path / "a")
    kernel = artifact.root / golden.KERNEL_PATH
    kernel.write_bytes(golden.KERNEL[::-1])
    with pytest.raises(DigestError, match=golden.KERNEL_PATH):
        artifact.read(golden.KERNEL_PATH)
    kernel.unlink()
    with pytest.raises(ArtifactError, match=golden.KERNEL_PATH):
        artifact.read(golden.KERNEL_PATH)
    kernel.symlink_to("/etc/hostname")
    with pytest.raises(UnsafePathError, match=golden.KERNEL_PATH):
        artifact.read(golden.KERNEL_PATH)
    shutil.rmtree(kernel.parent)
    kernel.parent.symlink_to("/etc")
    with pytest.raises(UnsafePathError, match=golden.KERNEL_PATH):
        artifact.read(golden.KERNEL_PATH)


def test_large_file_is_hashed_in_pieces(tmp_path: Path) -> None:
    """A file beyond one read verifies, and a late change in it is found."""
    data = os.urandom(3 << 20)
    path = f"kernels/{canonical.sha256(data)}.so"
    files = {**golden.files(), path: data}
    artifact = api.write_artifact(tmp_path / "a", golden.parts(), files)
    assert artifact.read(path) == data
    with (artifact.root / path).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([data[-1] ^ 1]))
    with pytest.raises(DigestError, match=path):
        api.open_artifact(artifact.root)


def test_open_through_a_link(tmp_path: Path) -> None:
    """`current -> v3` works; the artifact stays with the directory it resolved."""
    golden.write(tmp_path / "v3")
    (tmp_path / "current").symlink_to("v3")
    assert api.open_artifact(tmp_path / "current").root == tmp_path / "v3"


def test_reports_may_be_removed(tmp_path: Path) -> None:
    """Without its reports an artifact is the same artifact."""
    artifact = golden.write(tmp_path / "a")
    shutil.rmtree(artifact.root / "reports")
    slim = api.open_artifact(artifact.root)
    assert slim.digest == artifact.digest
    assert slim.reports == {}


def test_replaced_while_opening(tmp_path: Path, monkeypatch: Any) -> None:
    """If a build replaces the artifact during open, the new one is opened."""
    place = tmp_path / "a"
    golden.write(place)
    real = reading.verify_tree
    calls = []

    def swapped(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            new = api.write_artifact(tmp_path / "b", golden.parts(), golden.variant(1))
            shutil.rmtree(place)
            new.root.rename(place)
        return real(*args)

    monkeypatch.setattr(reading, "verify_tree", swapped)
    opened = api.open_artifact(place)
    # The first try, the verification of what was written, the second try.
    assert len(calls) == 3
    assert set(opened.manifest.files) == set(golden.variant(1))


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """Neither opening, nor refusing, nor writing leaks a file descriptor."""
    root = golden.write(tmp_path / "a").root
    before = len(os.listdir("/proc/self/fd"))
    api.open_artifact(root).read(golden.KERNEL_PATH)
    golden.write(root)
    (root / golden.KERNEL_PATH).write_bytes(b"")
    os.mkfifo(root / "extra")
    with pytest.raises(ArtifactError):
        api.open_artifact(root)
    assert len(os.listdir("/proc/self/fd")) == before


def test_standard_library_only() -> None:
    """Opening an artifact loads no package but compilekit."""
    code = (
        "import sys; before = set(sys.modules); import compilekit.artifact as a;"
        f"a.open_artifact({str(golden.ARTIFACT)!r});"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(api.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "['compilekit']\n"


# --- Verification records ----------------------------------------------------------


def test_golden_record(tmp_path: Path) -> None:
    """The record comes back as it was given, and its bytes are the committed ones."""
    artifact = golden.write(tmp_path / "artifact")
    given = {golden.TARGET: golden.verified()}
    path = api.write_verification(artifact, given)
    assert path == tmp_path / "artifact.verified.json"
    assert path.read_bytes() == golden.RECORD.read_bytes()
    record, reason = api.read_verification(artifact)
    assert record == verification.Verification(artifact.digest, given)
    assert reason == ""
    assert api.why_unverified(artifact, golden.TARGET) == ""
    assert sorted(os.listdir(tmp_path)) == ["artifact", "artifact.verified.json"]


def test_record_of_another_artifact(tmp_path: Path) -> None:
    """After a build that changed the digest, the old record doesn't count."""
    artifact = golden.write(tmp_path / "a")
    api.write_verification(artifact, {golden.TARGET: golden.verified()})
    rebuilt = api.write_artifact(artifact.root, golden.parts(), golden.variant(1))
    record, reason = api.read_verification(rebuilt)
    assert record is None
    assert artifact.digest in reason
    assert rebuilt.digest in reason
    api.write_verification(rebuilt, {"other": golden.verified("other")})
    record, _ = api.read_verification(rebuilt)
    assert record is not None
    assert set(record.targets) == {"other"}


def test_record_survives_an_identical_build(tmp_path: Path) -> None:
    """A build with the same result keeps its proof."""
    artifact = golden.write(tmp_path / "a")
    api.write_verification(artifact, {golden.TARGET: golden.verified()})
    assert api.why_unverified(golden.write(artifact.root), golden.TARGET) == ""


def test_records_of_several_targets_add_up(tmp_path: Path) -> None:
    """Verifying a second target keeps what is known about the first."""
    artifact = golden.write(tmp_path / "a")
    api.write_verification(artifact, {golden.TARGET: golden.verified()})
    api.write_verification(artifact, {"nvidia-h200": golden.verified("nvidia-h200")})
    record, _ = api.read_verification(artifact)
    assert record is not None
    assert set(record.targets) == {golden.TARGET, "nvidia-h200"}


def test_damaged_record(tmp_path: Path) -> None:
    """A damaged record is ignored with a reason; the artifact still opens."""
    artifact = golden.write(tmp_path / "a")
    path = api.write_verification(artifact, {golden.TARGET: golden.verified()})
    path.write_bytes(path.read_bytes().replace(b"false", b"true ", 1)[:-1] + b" ")
    record, reason = api.read_verification(artifact)
    assert record is None
    assert "damaged" in reason
    assert path.name in reason
    path.unlink()
    path.mkdir()
    assert "can't be read" in api.read_verification(artifact)[1]
    with pytest.raises(ResourceError, match=r"a\.verified\.json can't be written"):
        api.write_verification(artifact, {golden.TARGET: golden.verified()})
    assert sorted(os.listdir(tmp_path)) == ["a", "a.verified.json"]


def test_a_record_that_is_no_file(tmp_path: Path) -> None:
    """A pipe doesn't hang the start, and a huge file isn't read."""
    artifact = golden.write(tmp_path / "artifact")
    path = tmp_path / "artifact.verified.json"
    os.mkfifo(path)
    record, reason = api.read_verification(artifact)
    assert (record, "found a device, pipe" in reason) == (None, True)
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    record, reason = api.read_verification(artifact)
    assert (record, "expected at most" in reason) == (None, True)


def test_a_place_with_a_pipe_for_a_manifest(tmp_path: Path) -> None:
    """It is no artifact, and is left alone at once."""
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "manifest.json")
    with pytest.raises(ResourceError, match=r"manifest\.json"):
        golden.write(tmp_path / "out")


def test_why_unverified(tmp_path: Path) -> None:
    """Each way in which an artifact isn't verified has its reason."""
    artifact = golden.write(tmp_path / "a")
    assert "no record" in api.why_unverified(artifact, golden.TARGET)
    good = golden.verified()
    api.write_verification(artifact, {"other": good})
    assert "holds other, not" in api.why_unverified(artifact, golden.TARGET)
    missing = dataclasses.replace(good, buckets=good.buckets[:1])
    api.write_verification(artifact, {golden.TARGET: missing})
    assert api.why_unverified(artifact, golden.TARGET) == (
        "forward b1_s128 wasn't replayed"
    )
    failed = dataclasses.replace(
        good.buckets[0], passed=False, max_abs_error=math.inf, message="shapes differ"
    )
    buckets = (*good.buckets, failed)
    api.write_verification(
        artifact, {golden.TARGET: dataclasses.replace(good, buckets=buckets)}
    )
    assert api.why_unverified(artifact, golden.TARGET) == (
        "forward b1_s32 didn't pass: shapes differ"
    )
    record, _ = api.read_verification(artifact)
    assert record is not None
    assert record.targets[golden.TARGET].buckets[-1].max_abs_error == math.inf


# --- The format page ---------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "format.md"


@pytest.mark.parametrize("name", GOLDENS)
def test_format_page_explains_every_key(name: str) -> None:
    """Each key of each schema occurs on the page, as code."""
    page = PAGE.read_text()

    def keys(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from part.get("properties", {})
            for child in part.values():
                yield from keys(child)
        elif isinstance(part, list):
            for child in part:
                yield from keys(child)

    missing = {key for key in keys(load_schema(name)) if f"`{key}`" not in page}
    assert not missing


def test_format_page_commands(tmp_path: Path) -> None:
    """The page's commands, without compilekit, print the digest and find damage."""
    shutil.copytree(golden.ARTIFACT, tmp_path / "a")
    lines = PAGE.read_text().splitlines()
    start = lines.index("    grep -v '^  \"digest\"' manifest.json | sha256sum")
    script = "\n".join(line[4:] for line in lines[start : start + 4])

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", script], cwd=tmp_path / "a", capture_output=True, text=True
        )

    found = run()
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[0] == store.open_artifact(golden.ARTIFACT).digest
    (tmp_path / "a" / golden.KERNEL_PATH).write_bytes(b"damaged")
    found = run()
    assert found.returncode != 0
    assert golden.KERNEL_PATH in found.stdout
