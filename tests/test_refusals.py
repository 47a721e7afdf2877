"""One damaged or dishonest artifact per refusal: class, named file, exit code."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import golden
import pytest

from compilekit.artifact import Artifact, canonical, open_artifact, write_artifact
from compilekit.errors import (
    ArtifactError,
    DigestError,
    ManifestError,
    ResourceError,
    SchemaVersionError,
    UnsafePathError,
)

FILES = sorted(
    path.relative_to(golden.ARTIFACT).as_posix()
    for path in golden.ARTIFACT.rglob("*")
    if path.is_file()
)
SEALED = ("manifest.json", "reports/index.json")
PROGRAM = f"programs/{golden.TARGET}/forward/b1_s32/program.json"
ENTRY = f"programs/{golden.TARGET}/forward/entry.json"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A fresh copy of the golden artifact."""
    root = tmp_path / "artifact"
    shutil.copytree(golden.ARTIFACT, root)
    return root


def refused(root: Path, path: str, *kinds: type[ArtifactError]) -> ArtifactError:
    """Open an artifact that must be refused; the error must say which file and why."""
    with pytest.raises(ArtifactError) as caught:
        open_artifact(root).parse_all()
    error = caught.value
    assert type(error) in kinds, error
    assert error.exit_code == 5
    assert path in error.message
    assert str(root) in error.message
    assert "expected" in error.message or "not valid" in error.message
    assert "Nothing of it was used" in error.hint or "no artifact" in error.hint
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.fields) == (
        type(error),
        str(error),
        error.fields,
    )
    return error


def reseal(root: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as a dishonest builder would: with the right digest."""
    fields = json.loads((root / "manifest.json").read_text())
    del fields["digest"]
    edit(fields)
    data, _ = canonical.seal(fields)
    (root / "manifest.json").write_bytes(data)
    shutil.rmtree(root / "reports", ignore_errors=True)


def replace_file(root: Path, path: str, data: bytes) -> None:
    """Put other bytes into a file, with the right digest in the manifest."""

    def edit(fields: dict[str, Any]) -> None:
        fields["files"][path] = {"sha256": canonical.sha256(data), "size": len(data)}

    (root / path).write_bytes(data)
    reseal(root, edit)


# --- Damage: every file, in every way ----------------------------------------------


def damage_kinds(path: str) -> tuple[type[ArtifactError], ...]:
    """A damaged index may not even be JSON any more; other files are only hashed."""
    return (DigestError, ManifestError) if path in SEALED else (DigestError,)


@pytest.mark.parametrize("path", FILES)
def test_flipped_bytes(artifact: Path, path: str) -> None:
    """A flipped byte at the start, at the end or anywhere else is named."""
    data = (artifact / path).read_bytes()
    chance = random.Random(path)
    places = {0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(25))}
    for place in sorted(places):
        damaged = bytearray(data)
        damaged[place] ^= 1 << chance.randrange(8)
        (artifact / path).write_bytes(damaged)
        refused(artifact, path, *damage_kinds(path))
    (artifact / path).write_bytes(data)
    open_artifact(artifact).parse_all()


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES)
def test_every_flipped_byte(artifact: Path, path: str) -> None:
    """Each single byte of each file, inverted or with one bit flipped, is named."""
    data = (artifact / path).read_bytes()
    for place in range(len(data)):
        for mask in (0xFF, 1 << place % 8):
            damaged = bytearray(data)
            damaged[place] ^= mask
            (artifact / path).write_bytes(damaged)
            refused(artifact, path, *damage_kinds(path))


@pytest.mark.parametrize("path", FILES)
def test_truncated(artifact: Path, path: str) -> None:
    """A file that lost its last byte, its second half or everything is named."""
    data = (artifact / path).read_bytes()
    for length in (len(data) - 1, len(data) // 2, 0):
        (artifact / path).write_bytes(data[:length])
        refused(artifact, path, *damage_kinds(path))


@pytest.mark.parametrize("path", FILES)
def test_longer(artifact: Path, path: str) -> None:
    """A file with one byte more is named, a harmless-looking newline included."""
    for tail in (b"\n", b" ", b"\0"):
        data = (golden.ARTIFACT / path).read_bytes()
        (artifact / path).write_bytes(data + tail)
        refused(artifact, path, *damage_kinds(path))


@pytest.mark.parametrize("path", FILES)
def test_missing(artifact: Path, path: str) -> None:
    """A missing file is named."""
    (artifact / path).unlink()
    refused(artifact, path, *damage_kinds(path))


@pytest.mark.parametrize("path", FILES)
def test_folder_in_place_of_a_file(artifact: Path, path: str) -> None:
    """A folder isn't a file."""
    (artifact / path).unlink()
    (artifact / path).mkdir()
    error = refused(artifact, path, UnsafePathError)
    assert "found a folder" in error.message


@pytest.mark.parametrize("path", FILES)
def test_link_in_place_of_a_file(artifact: Path, path: str) -> None:
    """A link is refused even if the right bytes are behind it."""
    (artifact / path).unlink()
    (artifact / path).symlink_to(golden.ARTIFACT / path)
    error = refused(artifact, path, UnsafePathError)
    assert "found a symbolic link" in error.message


@pytest.mark.parametrize("path", FILES)
def test_pipe_in_place_of_a_file(artifact: Path, path: str) -> None:
    """A named pipe is refused at once: opening it never waits for a writer."""
    (artifact / path).unlink()
    os.mkfifo(artifact / path)
    refused(artifact, path, UnsafePathError)


@pytest.mark.parametrize("path", FILES)
def test_huge(artifact: Path, path: str) -> None:
    """A file grown to a terabyte is refused by its size, without being read."""
    os.truncate(artifact / path, 1 << 40)
    error = refused(artifact, path, *damage_kinds(path))
    assert str(1 << 40) in error.message


@pytest.mark.parametrize("folder", ["programs", "kernels", "reports"])
def test_link_in_place_of_a_folder(artifact: Path, folder: str) -> None:
    """A folder that is a link is refused even if the right files are behind it."""
    shutil.rmtree(artifact / folder)
    (artifact / folder).symlink_to(golden.ARTIFACT / folder)
    refused(artifact, folder, UnsafePathError)


def test_file_in_place_of_a_folder(artifact: Path) -> None:
    """A file where a folder should be is named, with the files that it hides."""
    shutil.rmtree(artifact / "kernels")
    (artifact / "kernels").write_text("")
    error = refused(artifact, "kernels", UnsafePathError)
    assert [problem["path"] for problem in error.fields["problems"]] == [
        "kernels",
        golden.KERNEL_PATH,
    ]


@pytest.mark.parametrize(
    "path", ["extra", ".hidden", "kernels/extra.so", "manifest.json.sig", "reports/x"]
)
def test_extra_file(artifact: Path, path: str) -> None:
    """A file that no index lists is refused, wherever it lies."""
    (artifact / path).write_text("x")
    refused(artifact, path, ManifestError)


def test_extra_folder(artifact: Path) -> None:
    """So is a folder, even an empty one."""
    (artifact / "programs" / "extra").mkdir()
    refused(artifact, "programs/extra", ManifestError)


def test_extra_link(artifact: Path) -> None:
    """So is a link, as the unsafe thing that it is."""
    (artifact / "kernels" / "extra").symlink_to("/etc/passwd")
    refused(artifact, "kernels/extra", UnsafePathError)


def test_all_problems_at_once(artifact: Path) -> None:
    """One error lists every wrong file, and has the gravest class among them."""
    (artifact / golden.KERNEL_PATH).write_bytes(golden.KERNEL[::-1])
    (artifact / golden.CONSTANT_PATH).unlink()
    (artifact / "extra").write_text("x")
    error = refused(artifact, "extra", ManifestError)
    assert "3 files are wrong" in error.message
    assert {
        problem["path"]: problem["error"] for problem in error.fields["problems"]
    } == {
        golden.KERNEL_PATH: "DigestError",
        golden.CONSTANT_PATH: "DigestError",
        "extra": "ManifestError",
    }
    (artifact / "link").symlink_to("extra")
    assert "4 files are wrong" in refused(artifact, "link", UnsafePathError).message


def test_many_problems_stay_readable(artifact: Path) -> None:
    """A long list is cut in the message and whole in the fields."""
    for number in range(50):
        (artifact / f"extra{number}").write_text("x")
    error = refused(artifact, "extra0", ManifestError)
    assert "and 30 more" in error.message
    assert len(error.fields["problems"]) == 50


def test_digest_error_has_both_values(artifact: Path) -> None:
    """Message and fields give the file, the digest expected and the one found."""
    data = golden.KERNEL[::-1]
    (artifact / golden.KERNEL_PATH).write_bytes(data)
    error = refused(artifact, golden.KERNEL_PATH, DigestError)
    expected, found = canonical.sha256(golden.KERNEL), canonical.sha256(data)
    assert error.message == (
        f"artifact {artifact}: {golden.KERNEL_PATH}: expected sha256 {expected},"
        f" found sha256 {found}"
    )
    assert error.fields["path"] == golden.KERNEL_PATH
    assert error.fields["expected"] == f"sha256 {expected}"
    assert error.fields["found"] == f"sha256 {found}"


def test_unreadable_file(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not be read is a resource error with its name."""
    real = os.open

    def denied(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".so"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ResourceError, match="Permission denied") as caught:
        open_artifact(artifact).parse_all()
    assert golden.KERNEL_PATH in caught.value.message
    assert str(artifact) in caught.value.message
    assert "owner and mode" in caught.value.hint
    assert caught.value.exit_code == 13


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "found nothing"),
        (lambda path: path.write_text("x"), "found a file"),
        (lambda path: path.mkdir(), "manifest.json"),
        (lambda path: path.symlink_to("nowhere"), "found nothing"),
    ],
    ids=["nothing", "a file", "an empty directory", "a dangling link"],
)
def test_no_artifact(
    tmp_path: Path, make: Callable[[Path], object], found: str
) -> None:
    """What isn't an artifact at all is said to be none."""
    make(tmp_path / "a")
    with pytest.raises(ManifestError, match=found) as caught:
        open_artifact(tmp_path / "a")
    assert caught.value.exit_code == 5
    assert caught.value.hint


def test_reports_of_another_build(artifact: Path, tmp_path: Path) -> None:
    """Reports that belong to another artifact are refused."""
    other = write_artifact(
        tmp_path / "other", golden.parts(), golden.variant(1), golden.reports()
    )
    shutil.rmtree(artifact / "reports")
    shutil.copytree(other.root / "reports", artifact / "reports")
    error = refused(artifact, "reports/index.json", ManifestError)
    assert other.digest in error.message


# --- Dishonest or foreign manifests, with the right digest -------------------------


def unknown_schema(fields: dict[str, Any]) -> None:
    fields["schema"] = 2


def no_schema(fields: dict[str, Any]) -> None:
    # Something must sort after the digest, or there is no digest line.
    del fields["schema"]


def other_format(fields: dict[str, Any]) -> None:
    fields["format"] = "something-else"


def unknown_key(fields: dict[str, Any]) -> None:
    fields["pickle"] = "gAR9Lg=="


def missing_key(fields: dict[str, Any]) -> None:
    del fields["factors"]


def wrong_type(fields: dict[str, Any]) -> None:
    fields["routes"] = "program"


def wrong_policy(fields: dict[str, Any]) -> None:
    fields["serve"]["on_uncovered"] = "ignore"


def negative_size(fields: dict[str, Any]) -> None:
    fields["files"][golden.KERNEL_PATH]["size"] = -1


def boolean_size(fields: dict[str, Any]) -> None:
    fields["files"][golden.KERNEL_PATH]["size"] = True


def short_digest(fields: dict[str, Any]) -> None:
    fields["files"][golden.KERNEL_PATH]["sha256"] = "abc"


def upper_digest(fields: dict[str, Any]) -> None:
    file = fields["files"][golden.KERNEL_PATH]
    file["sha256"] = file["sha256"].upper()


def lists(path: str) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        fields["files"][path] = {"sha256": canonical.sha256(b""), "size": 0}

    edit.__name__ = f"lists {path!r}"
    return edit


def wrong_name(fields: dict[str, Any]) -> None:
    file = fields["files"].pop(golden.KERNEL_PATH)
    fields["files"][f"kernels/{'0' * 64}.so"] = file


def missing_program(fields: dict[str, Any]) -> None:
    del fields["files"][PROGRAM]


def missing_axis(fields: dict[str, Any]) -> None:
    fields["entries"]["forward"]["buckets"]["b1_s32"] = {"b": 1}


def bucket_outside(fields: dict[str, Any]) -> None:
    fields["entries"]["forward"]["buckets"]["../b"] = {"b": 1, "s": 2}


def wrong_config(fields: dict[str, Any]) -> None:
    fields["model"]["config"]["layers"] = 3


@pytest.mark.parametrize(
    ("edit", "kind", "found"),
    [
        (unknown_schema, SchemaVersionError, "expected schema 1, found 2"),
        (no_schema, SchemaVersionError, "expected schema 1, found None"),
        (other_format, ManifestError, "found 'something-else'"),
        (unknown_key, ManifestError, "found 'pickle'"),
        (missing_key, ManifestError, "the key 'factors'"),
        (wrong_type, ManifestError, 'routes: expected array, found "program"'),
        (wrong_policy, ManifestError, "serve.on_uncovered: expected one of"),
        (negative_size, ManifestError, "size: expected at least 0, found -1"),
        (boolean_size, ManifestError, "size: expected integer, found true"),
        (short_digest, ManifestError, 'found "abc"'),
        (upper_digest, ManifestError, "sha256: expected text like"),
        (lists("../evil"), UnsafePathError, "'../evil'"),
        (lists("a/../../evil"), UnsafePathError, "'a/../../evil'"),
        (lists("/etc/passwd"), UnsafePathError, "'/etc/passwd'"),
        (lists("a//b"), UnsafePathError, "'a//b'"),
        (lists("./a"), UnsafePathError, "'./a'"),
        (lists("a\\b"), UnsafePathError, "a\\\\b"),
        (lists("a\0b"), UnsafePathError, "a\\x00b"),
        (lists("a\n"), UnsafePathError, "a\\n"),
        (lists(""), UnsafePathError, "''"),
        (lists("manifest.json"), ManifestError, "lists manifest.json"),
        (lists("reports/x"), ManifestError, "lists reports/x"),
        (lists(f"{golden.KERNEL_PATH}/x"), UnsafePathError, "listed as a file too"),
        (wrong_name, ManifestError, "the name states another digest"),
        (missing_program, ManifestError, PROGRAM),
        (missing_axis, ManifestError, "b1_s32: expected a size for each of"),
        (bucket_outside, ManifestError, 'found "../b"'),
        (wrong_config, ManifestError, "model.config_sha256: expected"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_dishonest_manifest(
    artifact: Path,
    edit: Callable[[dict[str, Any]], None],
    kind: type[ArtifactError],
    found: str,
) -> None:
    """A manifest whose digest is right is still held to the format."""
    reseal(artifact, edit)
    error = refused_any(artifact, kind)
    assert found in error.message


def refused_any(root: Path, kind: type[ArtifactError]) -> ArtifactError:
    """As `refused`, for errors that are about the manifest's contents."""
    with pytest.raises(ArtifactError) as caught:
        open_artifact(root).parse_all()
    assert type(caught.value) is kind
    assert caught.value.exit_code == 5
    assert str(root) in caught.value.message
    assert caught.value.hint
    return caught.value


def test_duplicate_key(artifact: Path) -> None:
    """A key that occurs twice is refused: readers would disagree about its value."""
    text = (artifact / "manifest.json").read_text()
    twice = text.replace('  "schema": 1,', '  "schema": 1,\n  "schema": 1,')
    (artifact / "manifest.json").write_text(twice)
    error = refused(artifact, "manifest.json", ManifestError)
    assert "'schema' occurs twice" in error.message


def test_manifest_of_another_writer(artifact: Path) -> None:
    """Any layout of the JSON is accepted if the digest line is right; no other is."""
    text = (artifact / "manifest.json").read_text()
    compact = json.dumps(json.loads(text), sort_keys=True)
    (artifact / "manifest.json").write_text(compact)
    refused(artifact, "manifest.json", DigestError)


# --- Dishonest programs, with the right digest -------------------------------------


@pytest.mark.parametrize(
    ("path", "edit", "found"),
    [
        (golden.ENTRY_PATH, {"tensors": []}, "tensors: expected object, found []"),
        (golden.ENTRY_PATH, {"name": "decode"}, "name: expected 'forward'"),
        (golden.ENTRY_PATH, {"target": "native"}, "target: expected 'cpu-x86_64-v3'"),
        (golden.ENTRY_PATH, {"axes": ["s", "b"]}, "axes: expected ('b', 's')"),
        (golden.ENTRY_PATH, {"schema": 2}, "schema: expected 1, found 2"),
        (golden.ENTRY_PATH, {"hook": "os.system"}, "found 'hook'"),
        (PROGRAM, {"bucket": "b1_s128"}, "bucket: expected 'b1_s32'"),
        (PROGRAM, {"entry": "decode"}, "entry: expected 'forward'"),
        (PROGRAM, {"target": "native"}, "target: expected 'cpu-x86_64-v3'"),
        (PROGRAM, {"axes": {"b": 1, "s": 33}}, "axes: expected {'b': 1, 's': 32}"),
        (PROGRAM, {"axes": {"b": 0, "s": 32}}, "axes.b: expected at least 1, found 0"),
        (PROGRAM, {"externs": None}, "externs: expected array, found null"),
        (PROGRAM, {"result": {"kind": "pickle"}}, 'result.kind: expected one of "out"'),
        (
            PROGRAM,
            {"kernels": {"k": {"digest": "0" * 64, "source": "0" * 64, "launch": {}}}},
            f"kernel k: expected kernels/{'0' * 64}.so or kernels/{'0' * 64}.cubin",
        ),
        (
            PROGRAM,
            {"constants": {"c": ["0" * 64, "x"]}},
            f"constant c: expected constants/{'0' * 64}.safetensors",
        ),
    ],
)
def test_dishonest_program(
    artifact: Path, path: str, edit: dict[str, Any], found: str
) -> None:
    """An entry or program must have the format's shape and fit its place."""
    fields = {**json.loads((artifact / path).read_text()), **edit}
    replace_file(artifact, path, canonical.encode(fields))
    error = refused(artifact, path, ManifestError)
    assert found in error.message


def test_program_that_is_no_json(artifact: Path) -> None:
    """A program.json that can't be parsed is named."""
    replace_file(artifact, PROGRAM, b"\x80\x04}.")
    refused(artifact, PROGRAM, ManifestError)


def test_program_nested_too_deeply(artifact: Path) -> None:
    """A result nested to exhaust the stack is refused, not a crash."""
    fields = json.loads((artifact / PROGRAM).read_text())
    marker = json.dumps(fields["result"])
    text = json.dumps(fields)
    for depth in (300, 900, 100_000):
        deep = '{"kind": "list", "items": [' * depth + marker + "]}" * depth
        replace_file(artifact, PROGRAM, text.replace(marker, deep).encode())
        refused_any(artifact, ManifestError)


def places(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*above, key)
        if isinstance(item, dict | list):
            yield from places(item, *above, key)


@pytest.mark.parametrize("value", [None, "x", -1, [[]]], ids=json.dumps)
@pytest.mark.parametrize("path", [PROGRAM, ENTRY])
def test_any_value_in_any_place(artifact: Path, path: str, value: Any) -> None:
    """A file that is parsed when it's first asked for is refused then, or will do."""
    fields = json.loads((artifact / path).read_text())
    refusals = 0
    for *way, last in list(places(fields)):
        changed = json.loads(json.dumps(fields))
        inner = changed
        for key in way:
            inner = inner[key]
        inner[last] = value
        replace_file(artifact, path, canonical.encode(changed))
        opened = open_artifact(artifact)
        try:
            for parsed in (opened.entries, opened.programs):
                dict(parsed)
        except ArtifactError as error:
            refusals += path in error.message
    assert refusals > 5


def test_nothing_is_parsed_before_all_is_verified(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one wrong byte in a kernel, no program is even looked at."""
    (artifact / golden.KERNEL_PATH).write_bytes(golden.KERNEL[::-1])
    parsed: list[str] = []
    real = canonical.decode

    def recorded(data: bytes, name: str) -> dict[str, Any]:
        parsed.append(name)
        return real(data, name)

    monkeypatch.setattr(canonical, "decode", recorded)
    refused(artifact, golden.KERNEL_PATH, DigestError)
    assert parsed == list(SEALED)


def test_the_golden_artifact_is_accepted(artifact: Path) -> None:
    """The copy that all these tests damage is fine to begin with."""
    assert isinstance(open_artifact(artifact).parse_all(), Artifact)
