"""One file: the same bytes each time, and nothing gets out of a hostile one."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import golden
import pytest

from compilekit.artifact import archive, open_artifact
from compilekit.cli import run
from compilekit.errors import (
    ArtifactError,
    CompilekitError,
    DigestError,
    ManifestError,
    ResourceError,
    UnsafePathError,
)

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The golden artifact and its verification record as one file."""
    return archive.pack(open_artifact(golden.ARTIFACT), tmp_path / "a.tar").file


def members(path: Path) -> Members:
    """Every member with its bytes."""
    with tarfile.open(path) as tar:
        found = []
        for member in tar:
            stream = tar.extractfile(member)
            found.append((member, stream.read() if stream else b""))
        return found


def rewrite(path: Path, contents: Members) -> None:
    """Make an archive of these members, hostile or not."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in contents:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def refused(path: Path, *kinds: type[CompilekitError]) -> CompilekitError:
    """Unpack what must be refused; not a file may appear anywhere around it."""
    out = path.parent / "out" / "artifact"
    out.parent.mkdir(exist_ok=True)
    before = sorted(os.listdir(path.parent))
    with pytest.raises(CompilekitError) as caught:
        archive.unpack(path, out)
    assert type(caught.value) in kinds, caught.value
    assert os.listdir(out.parent) == []
    assert sorted(os.listdir(path.parent)) == before
    return caught.value


def test_there_and_back(packed: Path, tmp_path: Path) -> None:
    """Unpacking gives every file, the reports and the record, and modes of its own."""
    previous = os.umask(0o077)
    try:
        artifact = archive.unpack(packed, tmp_path / "x" / "artifact")
    finally:
        os.umask(previous)
    # Examples of a cache's description and of signatures belong to no artifact there.
    expected = tree(golden.FOLDER)
    del expected["cache.json"], expected["signature.json"]
    assert tree(artifact.root.parent) == expected
    modes = {p.stat().st_mode & 0o777 for p in artifact.root.rglob("*") if p.is_file()}
    assert modes == {0o644}
    folders = {p.stat().st_mode & 0o777 for p in artifact.root.rglob("*") if p.is_dir()}
    assert folders == {0o755}


def test_same_bytes(packed: Path, tmp_path: Path) -> None:
    """Neither time, place, owner, mode nor the umask is in the file."""
    copy = tmp_path / "elsewhere" / "b.compilekit"
    shutil.copytree(golden.FOLDER, copy.parent, copy_function=shutil.copy)
    for path in (copy.parent / "artifact").rglob("*"):
        os.utime(path, (1, 1))
    os.chmod(copy.parent / "artifact" / "manifest.json", 0o600)
    again = archive.pack(open_artifact(copy.parent / "artifact"), tmp_path / "b.tar")
    assert again.file.read_bytes() == packed.read_bytes()
    assert (again.sha256, again.size) == (
        golden.canonical.sha256(packed.read_bytes()),
        packed.stat().st_size,
    )
    for member, _ in members(packed):
        assert (member.mtime, member.uid, member.uname, member.mode) == (
            0,
            0,
            "",
            0o644,
        )


def test_without_reports_equal_builds_give_equal_files(tmp_path: Path) -> None:
    """Reports are the only thing in which two builds differ."""
    files = []
    for number in (1, 2):
        log = {"reports/build.log": b"took %d s\n" % number}
        built = golden.write_artifact(
            tmp_path / str(number), golden.parts(), golden.files(), log
        )
        packed = archive.pack(built, tmp_path / f"{number}.tar", reports=False)
        files.append(packed.file.read_bytes())
        assert not any("reports" in member.name for member, _ in members(packed.file))
    assert files[0] == files[1]


def test_a_place_with_an_artifact_is_replaced(packed: Path, tmp_path: Path) -> None:
    """The artifact there goes in one step, and its record doesn't stay behind."""
    out = tmp_path / "artifact"
    other = golden.write_artifact(out, golden.parts(), golden.variant(1))
    golden.write_verification(other, {golden.TARGET: golden.verified()})
    rewrite(packed, [m for m in members(packed) if "verified" not in m[0].name])
    assert archive.unpack(packed, out).digest != other.digest
    assert not (tmp_path / "artifact.verified.json").exists()


def test_a_strangers_place_is_left_alone(packed: Path, tmp_path: Path) -> None:
    """A folder that holds anything else isn't touched."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(ResourceError, match=r"thesis\.tex"):
        archive.unpack(packed, tmp_path / "home")
    assert os.listdir(tmp_path / "home") == ["thesis.tex"]


# --- Hostile archives ----------------------------------------------------------------


def added(name: str, **fields: object) -> Callable[[Members], None]:
    """Put one more member into an archive, after the manifest."""

    def edit(contents: Members) -> None:
        member = tarfile.TarInfo(name)
        vars_ = {"type": tarfile.REGTYPE, **fields}
        for field, value in vars_.items():
            setattr(member, field, value)
        contents.insert(2, (member, b"" if vars_["type"] != tarfile.REGTYPE else b"x"))

    return edit


def again(contents: Members) -> None:
    """Put the last file in twice."""
    contents.append(contents[-1])


KERNEL = f"artifact/{golden.KERNEL_PATH}"


@pytest.mark.parametrize(
    "edit",
    [
        added("/etc/passwd"),
        added("../outside"),
        added("artifact/../../outside"),
        added("artifact/./manifest.json"),
        added("artifact/kernels/../../../outside"),
        added("artifact/extra"),
        added("outside"),
        added("artifact/manifest.json"),
        added("artifact.verified.json"),
        added("artifact", type=tarfile.DIRTYPE),
        added("artifact/link", type=tarfile.SYMTYPE, linkname="/etc"),
        added(KERNEL, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        added(KERNEL, type=tarfile.LNKTYPE, linkname="artifact/manifest.json"),
        added(KERNEL, type=tarfile.FIFOTYPE),
        added(KERNEL, type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        added(KERNEL, type=tarfile.BLKTYPE, devmajor=8),
        added(KERNEL, type=tarfile.CONTTYPE),
        added(KERNEL, type=tarfile.GNUTYPE_SPARSE),
        again,
    ],
    ids=lambda edit: getattr(edit, "__name__", ""),
)
def test_a_member_that_does_not_belong(
    packed: Path, edit: Callable[[Members], None]
) -> None:
    """Absolute paths, ``..``, links, devices, folders, duplicates and extras."""
    contents = members(packed)
    edit(contents)
    rewrite(packed, contents)
    refused(packed, UnsafePathError)


def test_a_sparse_file_is_refused(packed: Path) -> None:
    """A few bytes that stand for a terabyte are no plain file."""
    contents = members(packed)
    place = next(n for n, (m, _) in enumerate(contents) if m.name == KERNEL)
    member = contents[place][0]
    member.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": KERNEL,
        "GNU.sparse.size": str(1 << 40),
        "GNU.sparse.map": "0,0",
    }
    rewrite(packed, contents)
    refused(packed, UnsafePathError, DigestError, ManifestError)


def test_a_member_larger_than_listed(packed: Path) -> None:
    """A member may be as large as the manifest says, before a byte of it is written."""
    contents = members(packed)
    place = next(n for n, (m, _) in enumerate(contents) if m.name == KERNEL)
    contents[place] = (contents[place][0], b"\0" * (1 << 20))
    rewrite(packed, contents)
    assert str(1 << 20) in refused(packed, DigestError).message


def test_a_listed_terabyte_is_refused_before_it_is_written(
    packed: Path, tmp_path: Path
) -> None:
    """What the manifest lists must fit on the disk."""
    contents = members(packed)
    place = next(
        n for n, (m, _) in enumerate(contents) if m.name.endswith("manifest.json")
    )
    fields = json.loads(contents[place][1])
    del fields["digest"]
    fields["files"][golden.KERNEL_PATH]["size"] = 1 << 60
    contents[place] = (contents[place][0], golden.canonical.seal(fields)[0])
    rewrite(packed, contents)
    error = refused(packed, ResourceError)
    assert "needs 1152921504" in error.message


def test_a_huge_header_is_not_read(packed: Path) -> None:
    """An extension header of many megabytes is refused, not kept in memory."""
    contents = members(packed)
    contents[0][0].pax_headers = {"comment": "x" * (8 << 20)}
    rewrite(packed, contents)
    assert "header" in refused(packed, ManifestError).message


@pytest.mark.parametrize("position", range(9))
def test_a_missing_member(packed: Path, position: int) -> None:
    """Each member but the records must be there."""
    contents = members(packed)
    name = contents.pop(position)[0].name
    rewrite(packed, contents)
    if name == "artifact.verified.json":
        archive.unpack(packed, packed.parent / "fine")
    else:
        refused(packed, ManifestError, DigestError, UnsafePathError)


def test_swapped_members(packed: Path) -> None:
    """Two files of equal size with each other's names."""
    contents = members(packed)
    calls = [n for n, (m, _) in enumerate(contents) if m.name.endswith("program.json")]
    first, second = calls
    contents[first], contents[second] = (
        (contents[first][0], contents[second][1]),
        (contents[second][0], contents[first][1]),
    )
    rewrite(packed, contents)
    refused(packed, DigestError)


def test_cut_off_anywhere(packed: Path) -> None:
    """Half a download is refused wherever it ends."""
    data = packed.read_bytes()
    last = members(packed)[-1][0]
    end = last.offset_data + last.size
    for length in (0, 1, 511, 512, 1024, *range(2000, end, 1777), end - 1, end):
        packed.write_bytes(data[:length])
        refused(packed, ManifestError, DigestError)


def test_flipped_bits(packed: Path) -> None:
    """A flipped bit is refused, or was in the padding and changes nothing."""
    data, chance = packed.read_bytes(), random.Random(6)
    for number in range(60):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        packed.write_bytes(damaged)
        out = packed.parent / f"flipped{number}" / "artifact"
        try:
            archive.unpack(packed, out)
        except (ArtifactError, ResourceError):
            assert not out.exists()
            continue
        assert tree(out) == tree(golden.ARTIFACT)


@pytest.mark.parametrize("tail", [b"x", b"\0" * 512 + b"x"])
def test_nothing_follows_the_end(packed: Path, tail: bytes) -> None:
    """Data behind the last member is refused: two archives can't hide in one file."""
    packed.write_bytes(packed.read_bytes() + tail)
    refused(packed, ManifestError)


def test_a_sparse_tail_is_not_read(packed: Path) -> None:
    """Zeros without end are refused after the first of them, not read to their end."""
    os.truncate(packed, 1 << 40)
    refused(packed, ManifestError)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08hello", b"PK\3\4", b"x" * 5000])
def test_no_archive(tmp_path: Path, content: bytes) -> None:
    """Any other file, a compressed archive included, is refused by name."""
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    assert str(path) in refused(path, ManifestError).message


def test_a_pipe_or_folder_as_file(tmp_path: Path) -> None:
    """Neither is read: a pipe that nobody writes to would hang an init container."""
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ResourceError, match="expected a plain file"):
            archive.unpack(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_file(tmp_path: Path) -> None:
    """A missing file and a folder are told apart from damage."""
    refused(tmp_path / "missing.tar", ResourceError)
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", ResourceError)


def test_pack_leaves_nothing_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves neither half a file nor a staging file."""
    out = tmp_path / "a.tar"
    out.write_bytes(b"before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        archive.pack(open_artifact(golden.ARTIFACT), out)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"]
    assert out.read_bytes() == b"before"


def test_pack_notices_a_change(tmp_path: Path) -> None:
    """What changed after the artifact was opened isn't packed."""
    shutil.copytree(golden.ARTIFACT, tmp_path / "artifact")
    artifact = open_artifact(tmp_path / "artifact")
    (artifact.root / golden.KERNEL_PATH).write_bytes(b"evil")
    with pytest.raises(DigestError):
        archive.pack(artifact, tmp_path / "a.tar")
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``pack`` and ``unpack`` say what they wrote; damage ends with exit code 5."""
    file, out = str(tmp_path / "a.tar"), str(tmp_path / "out")
    assert run(["pack", str(golden.ARTIFACT), "-o", file, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["digest"] == open_artifact(golden.ARTIFACT).digest
    assert run(["unpack", file, "-o", out]) == 0
    assert f"digest\t{result['digest']}" in capsys.readouterr().out
    Path(file).write_bytes(b"nothing")
    assert run(["unpack", file, "-o", out]) == 5
    assert "Nothing of it was used" in capsys.readouterr().err
