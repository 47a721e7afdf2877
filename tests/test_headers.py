"""Precompiled headers kept between builds: `compilekit.compiler.headers`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from compilekit.compiler.headers import HEADER, find_header, keep_header

DAY = 24 * 3600


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of headers, in a user's cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compilekit" / "headers"


@pytest.fixture
def compiled(tmp_path: Path) -> tuple[Path, str, Path]:
    """What a compile leaves: its folder, the make rule, a file it was made from."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / HEADER).write_text("#include <other file.h>\n")
    (folder / f"{HEADER}.gch").write_bytes(b"compiled")
    source = tmp_path / "other file.h"
    source.write_text("int x;\n")
    escaped = str(source).replace(" ", "\\ ")
    return folder, f"{HEADER}.gch: {HEADER} \\\n {escaped}\n", source


def keep(compiled: tuple[Path, str, Path]) -> None:
    folder, rule, _ = compiled
    keep_header("key", folder, rule)


def test_a_kept_header_is_found(cache: Path, compiled: tuple[Path, str, Path]) -> None:
    """A later build gets the same bytes, under the same key only."""
    assert find_header("key") is None
    keep(compiled)
    found = find_header("key")
    assert found is not None
    assert found.name == HEADER
    assert found.with_name(f"{HEADER}.gch").read_bytes() == b"compiled"
    assert find_header("other") is None
    assert [path.parent for path in cache.iterdir()] == [cache]


def test_a_changed_source_is_noticed(
    cache: Path, compiled: tuple[Path, str, Path]
) -> None:
    """A header isn't used once a file it was made from has changed or is gone."""
    keep(compiled)
    compiled[2].write_text("int y;\nint z;\n")
    assert find_header("key") is None
    keep(compiled)
    assert find_header("key") is not None
    compiled[2].unlink()
    assert find_header("key") is None


def test_only_its_owner_can_reach_it(
    cache: Path, compiled: tuple[Path, str, Path]
) -> None:
    """The folder is private from the start."""
    keep(compiled)
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o750])
def test_a_folder_that_others_reach_is_not_used(
    mode: int, cache: Path, compiled: tuple[Path, str, Path]
) -> None:
    """Whoever can write a header decides what kernels do, so nobody else may."""
    keep(compiled)
    cache.chmod(mode)
    assert find_header("key") is None
    keep(compiled)
    assert len(list(cache.iterdir())) == 1


def test_a_link_is_not_followed(
    tmp_path: Path, cache: Path, compiled: tuple[Path, str, Path]
) -> None:
    """A link in the folder's place could lead anywhere."""
    keep(compiled)
    moved = tmp_path / "elsewhere"
    cache.rename(moved)
    cache.symlink_to(moved)
    assert find_header("key") is None


def test_a_cache_that_can_not_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: tuple[Path, str, Path]
) -> None:
    """Keeping is a favour to the next build; this one goes on."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep(compiled)
    assert find_header("key") is None


def test_a_missing_file_leaves_nothing_behind(
    cache: Path, compiled: tuple[Path, str, Path]
) -> None:
    """A header that can't be copied whole isn't published."""
    (compiled[0] / f"{HEADER}.gch").unlink()
    keep(compiled)
    assert list(cache.iterdir()) == []


def test_unused_headers_are_removed(
    cache: Path, compiled: tuple[Path, str, Path]
) -> None:
    """A header that no build used for a week goes; one that is used stays."""
    keep(compiled)
    (old,) = cache.iterdir()
    week_ago = time.time() - 8 * DAY
    os.utime(old, (week_ago, week_ago))
    assert find_header("key") is not None
    keep_header("second", *compiled[:2])
    assert old.exists()
    os.utime(old, (week_ago, week_ago))
    keep_header("third", *compiled[:2])
    assert not old.exists()


def test_a_damaged_record_is_no_record(
    cache: Path, compiled: tuple[Path, str, Path]
) -> None:
    """Without a readable list of files, nothing says that the header is right."""
    keep(compiled)
    (kept,) = cache.iterdir()
    (kept / "files.json").write_text("{")
    assert find_header("key") is None
