"""doctor: each lack of an image is a line of its own, with the fix."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import pwd
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest

from compilekit import doctor, targets
from compilekit._version import __version__
from compilekit.artifact import Artifact
from compilekit.artifact.cache import Cache
from compilekit.cli import run
from compilekit.doctor import Finding, examine


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine that runs the tests steers a check."""
    for name in [n for n in os.environ if n.startswith("COMPILEKIT_")]:
        monkeypatch.delenv(name)
    for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)


def finding(check: str, **needs: bool) -> Finding:
    """The line about one thing."""
    return next(item for item in examine(**needs) if item.check == check)


def test_every_line_has_a_verdict_and_a_fix() -> None:
    """What is ok needs no fix; anything else has one."""
    found = list(examine())
    assert len({item.check for item in found}) == len(found)
    for item in found:
        assert item.verdict in ("ok", "warning", "failure")
        assert bool(item.fix) == (item.verdict != "ok"), item
        assert item.found


def test_what_a_bug_report_needs() -> None:
    """Versions of compilekit, system, C library and packages; the CPU's name."""
    assert finding("compilekit").found == __version__
    assert platform.release() in finding("system").found
    assert platform.libc_ver()[1] in finding("system").found
    assert f"safetensors {version('safetensors')}" in finding("packages").found
    assert targets.cpu_name() in finding("isa").found


def test_a_system_that_says_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No os-release, no optional package, no /proc: lines, and no end of the look."""

    def missing(*_: object) -> str:
        raise PackageNotFoundError

    def unnamed() -> dict[str, str]:
        raise FileNotFoundError

    monkeypatch.setattr(platform, "freedesktop_os_release", unnamed)
    monkeypatch.setattr(doctor, "version", missing)
    monkeypatch.setattr(targets, "_CPUINFO", tmp_path / "cpuinfo")
    assert finding("system").verdict == "ok"
    assert finding("packages").found == "none that is optional"
    assert finding("isa").verdict == "failure"
    assert "cpuinfo" in finding("isa").found


def test_unknown_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that no kernel fits is a failure."""
    monkeypatch.setattr(doctor, "PYTHONS", ((2, 7),))
    assert finding("python") == Finding(
        "python", "failure", sys.version.split()[0], "Use Python 2.7."
    )


@pytest.mark.parametrize(
    ("installed", "verdict"),
    [("2.11.0", "ok"), ("2.13.1+cpu", "ok"), ("2.10.2", "failure"), ("3.0", "failure")],
)
def test_torch_versions(
    installed: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are compared as numbers: 2.10 is older than 2.11."""
    monkeypatch.setattr(doctor, "version", lambda _: installed)
    item = finding("torch")
    assert (item.verdict, item.found) == (verdict, installed)


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch nothing starts."""

    def missing(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    assert finding("torch").found == "not installed"


def test_no_passwd_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arbitrary user id is a warning: only a fall-back looks the name up."""

    def missing(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", missing)
    assert finding("user").verdict == "warning"


@pytest.mark.parametrize("home", ["", "/nonexistent"])
def test_no_home(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a missing nor an unusable HOME stops a start."""
    monkeypatch.setenv("HOME", home)
    assert finding("HOME").verdict == "warning"


@pytest.mark.parametrize(("jit", "verdict"), [(False, "warning"), (True, "failure")])
def test_what_only_a_fall_back_needs(
    jit: bool, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A lack of compiler, headers and executable space fails where calls compile."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert finding("compiler", jit=jit).verdict == verdict
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: str(tmp_path))
    assert finding("python headers", jit=jit).verdict == verdict
    monkeypatch.setattr(doctor, "is_noexec", lambda _: True)
    item = finding("temporary files", jit=jit)
    assert (item.verdict, "noexec" in item.found) == (verdict, True)
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert finding("temporary files", jit=jit).verdict == verdict


def test_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only root without a tmpfs."""

    def missing() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    assert finding("temporary files").found == "no writable directory"


@pytest.mark.parametrize(
    ("free", "inodes", "verdict"),
    [(1 << 30, 10_000, "ok"), (1 << 20, 10_000, "warning"), (1 << 30, 3, "warning")],
)
def test_free_space(
    free: int, inodes: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and inodes both run out."""
    values = [4096, 4096, 0, 0, free // 4096, 1 << 20, 0, inodes, 0, 255]
    found = os.statvfs_result(values)
    monkeypatch.setattr(doctor.os, "statvfs", lambda _: found)
    assert finding("free space").verdict == verdict


def test_receipt_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start would fail when it writes its receipt: said before."""
    monkeypatch.setenv("COMPILEKIT_RECEIPT", "/nonexistent/receipt.json")
    assert finding("receipt").verdict == "failure"


def test_memory_files_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel setting or a filter can forbid them."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert finding("memory files").verdict == "warning"


def test_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's nor the system's libgomp."""

    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert finding("libgomp").verdict == "failure"


def test_old_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without AVX2 runs no target."""
    monkeypatch.setattr(doctor.targets, "cpu_flags", lambda: frozenset({"sse2"}))
    assert finding("isa").verdict == "failure"


@pytest.mark.parametrize(
    ("version", "text", "cores"),
    [
        (2, "150000 100000\n", 1.5),
        (2, "max 100000\n", None),
        (2, "", None),
        (1, "200000", 2.0),
        (1, "-1", None),
    ],
)
def test_quota(version: int, text: str, cores: float | None, tmp_path: Path) -> None:
    """Both versions of control groups."""
    if version == 2:
        (tmp_path / "cpu.max").write_text(text)
    else:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text)
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert doctor.cgroup_cores(tmp_path) == cores


def test_more_threads_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores in sight and a quota of two: the fix names the number."""
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(doctor, "cgroup_cores", lambda: 2.0)
    item = finding("threads")
    assert (item.verdict, "OMP_NUM_THREADS=2" in item.fix) == ("warning", True)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert finding("threads").verdict == "ok"


class Driver:
    """A libcuda that answers cuInit and a version."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __call__(self, name: str) -> Driver:
        """Open it."""
        return self

    def cuInit(self, _: int) -> int:
        """Initialise."""
        return self.status

    def cuDriverGetVersion(self, number: Any) -> int:
        """12.8."""
        number._obj.value = 12080
        return 0


@pytest.mark.parametrize(
    ("status", "needed", "verdict", "found"),
    [
        (0, True, "ok", "CUDA 12.8"),
        (34, False, "warning", "stub"),
        (34, True, "failure", "stub"),
        (100, False, "ok", "cuInit answers 100"),
        (100, True, "failure", "cuInit answers 100"),
    ],
)
def test_driver(
    status: int,
    needed: bool,
    verdict: str,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver, a stub in its place, and no device."""
    monkeypatch.setattr(ctypes, "CDLL", Driver(status))
    item = finding("driver", cuda=needed)
    assert (item.verdict, found in item.found) == (verdict, True)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver is fine until a GPU target is to start."""

    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert finding("driver").verdict == "ok"
    assert finding("driver", cuda=True).verdict == "failure"


def test_stub_driver_first_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library for linking, itself or behind a link, isn't the driver."""
    stubs, real, linked = (tmp_path / n for n in ("cuda/stubs", "real", "linked"))
    for folder in (stubs, real, linked):
        folder.mkdir(parents=True)
    (stubs / "libcuda.so").write_text("")
    (real / "libcuda.so.1").write_text("")
    (linked / "libcuda.so.1").symlink_to(stubs / "libcuda.so")
    assert doctor.stub_driver(f"{stubs}:{real}") == stubs / "libcuda.so"
    assert doctor.stub_driver(f"{real}:{stubs}") is None
    assert doctor.stub_driver(f"::{linked}") == linked / "libcuda.so.1"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stubs))
    item = finding("driver", cuda=True)
    assert (item.verdict, str(stubs) in item.fix) == ("failure", True)


# --- The command ---------------------------------------------------------------------


def findings(
    capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and lines by check."""
    code = run(["doctor", *words, "--json"])
    result = json.loads(capsys.readouterr().out)["result"]
    return code, {item["check"]: item for item in result["findings"]}


def test_damaged_artifact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Damage is a line among the others; the exit code is its own."""
    root = tmp_path / "artifact"
    shutil.copytree(golden.ARTIFACT, root)
    (root / golden.KERNEL_PATH).write_bytes(b"x")
    code, found = findings(capsys, str(root))
    assert (code, found["artifact"]["verdict"]) == (5, "failure")
    assert golden.KERNEL_PATH in found["artifact"]["found"]
    assert found["python"]["verdict"] == "ok"


def test_artifact_in_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mismatches and the demanded digest are looked at as a start would."""
    artifact = golden.write(tmp_path / "artifact")
    monkeypatch.setattr("compilekit.runtime.check.check", lambda _: ())
    monkeypatch.setenv("COMPILEKIT_ARTIFACT", str(artifact.root))
    code, found = findings(capsys)
    assert (code, found["kernels"]["verdict"]) == (0, "ok")
    monkeypatch.setenv("COMPILEKIT_EXPECT_DIGEST", "0" * 64)
    assert findings(capsys)[0] == 5
    monkeypatch.setenv("COMPILEKIT_EXPECT_DIGEST", "")
    os.chmod(artifact.root, 0o777)
    assert findings(capsys)[1]["kernels"]["verdict"] == "warning"


def test_noexec_artifact(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """noexec is fine while memory files are there, and a failure without them."""
    artifact = golden.write(tmp_path / "artifact")
    monkeypatch.setattr("compilekit.runtime.check.check", lambda _: ())
    monkeypatch.setattr(doctor, "is_noexec", lambda _: True)
    assert findings(capsys, str(artifact.root))[1]["kernels"]["verdict"] == "ok"
    lacking = Finding("memory files", "warning", "refused", "fix")
    monkeypatch.setattr(doctor, "_memory_file", lambda: lacking)
    code, found = findings(capsys, str(artifact.root))
    assert (code, found["kernels"]["verdict"]) == (13, "failure")


def test_what_a_start_requires(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """COMPILEKIT_REQUIRE is held as a start holds it, with its exit code."""
    artifact = golden.write(tmp_path / "artifact")
    monkeypatch.setattr("compilekit.runtime.check.check", lambda _: ())
    monkeypatch.setattr("compilekit.runtime.check.choose_target", lambda _: "t")
    assert "required" not in findings(capsys, str(artifact.root))[1]
    monkeypatch.setenv("COMPILEKIT_REQUIRE", "program")
    assert findings(capsys, str(artifact.root))[1]["required"]["found"] == "program"
    for required, code in (("program,verified", 9), ("cache", 9), ("everything", 2)):
        monkeypatch.setenv("COMPILEKIT_REQUIRE", required)
        exit_code, found = findings(capsys, str(artifact.root))
        assert (exit_code, found["required"]["verdict"]) == (code, "failure")


def test_a_hub_repository(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The artifact in it that a start would take is looked at; `check` does so too."""
    place = tmp_path / "hub" / "torch2.13" / golden.TARGET
    golden.write(place)
    monkeypatch.setattr("compilekit.runtime.check.check", lambda _: ())
    known = "compilekit.runtime.requirements.installed"
    monkeypatch.setattr(known, lambda _: "2.13.0")
    level = targets.load_target(golden.TARGET).features
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset(level))
    monkeypatch.setattr(targets, "machine", lambda: "x86_64")
    code, found = findings(capsys, str(tmp_path / "hub"))
    assert (code, found["artifact"]["verdict"]) == (0, "ok")
    assert str(place) in found["artifact"]["found"]
    assert run(["check", str(tmp_path / "hub")]) == 0
    capsys.readouterr()
    monkeypatch.setattr(known, lambda _: "2.12.0")
    code, found = findings(capsys, str(tmp_path / "hub"))
    assert (code, found["artifact"]["verdict"]) == (6, "failure")
    assert run(["check", str(tmp_path / "hub")]) == 6


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Artifact:
    """An artifact with caches, on a machine that they fit."""
    from compilekit.runtime import restore

    parts = golden.parts()._replace(routes=("program", "cache"))
    files = golden.files()
    cache = Cache(golden.TARGET, {}, (), {}, (), (), {}, {}, 8)
    monkeypatch.setattr("compilekit.runtime.check.check", lambda _: ())
    monkeypatch.setattr(restore, "mismatches_here", lambda _, *, needed: ())
    monkeypatch.setattr(restore, "read_cache", lambda _: (golden.TARGET, cache))
    return golden.write_artifact(tmp_path / "artifact", parts, files)


def test_the_place_of_caches(
    cached: Artifact,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It must be private and on a disk that may hold code; a look leaves nothing."""
    work = tmp_path / "new" / "work"
    monkeypatch.setenv("COMPILEKIT_WORK_DIR", str(work))
    code, found = findings(capsys, str(cached.root))
    assert (code, found["work directory"]["verdict"]) == (0, "ok")
    assert str(work) in found["work directory"]["found"]
    assert not work.parent.exists()
    work.mkdir(parents=True)
    work.chmod(0o777)
    code, found = findings(capsys, str(cached.root))
    assert (code, found["work directory"]["verdict"]) == (13, "failure")
    assert work.is_dir()


def test_a_place_of_caches_that_others_could_replace(
    cached: Artifact,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Under a demand what was verified must stay where it was put."""
    monkeypatch.setenv("COMPILEKIT_WORK_DIR", str(tmp_path / "open" / "work"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert findings(capsys, str(cached.root))[1]["work directory"]["verdict"] == "ok"
    monkeypatch.setenv("COMPILEKIT_EXPECT_DIGEST", cached.digest)
    code, found = findings(capsys, str(cached.root))
    assert (code, found["work directory"]["verdict"]) == (13, "failure")
    assert "may be written by anyone" in found["work directory"]["found"]
    (tmp_path / "open").chmod(0o1777)
    assert findings(capsys, str(cached.root))[0] == 0


def test_a_place_of_caches_mounted_noexec(
    cached: Artifact,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The mount point and the setting are named, before anything is restored."""
    look = os.statvfs

    def noexec(path: Any) -> Any:
        found = look(path)
        names = [name for name in dir(found) if name.startswith("f_")]
        fields = {name: getattr(found, name) for name in names}
        return SimpleNamespace(**{**fields, "f_flag": found.f_flag | os.ST_NOEXEC})

    monkeypatch.setenv("COMPILEKIT_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setattr(os, "statvfs", noexec)
    code, found = findings(capsys, str(cached.root))
    assert (code, found["work directory"]["verdict"]) == (13, "failure")
    place = f"on {doctor.mount_point(tmp_path)}, which is mounted noexec"
    assert place in found["work directory"]["found"]
    assert "COMPILEKIT_WORK_DIR" in found["work directory"]["fix"]
    assert place in found["temporary files"]["found"]


def test_the_mount_point_of_a_folder(tmp_path: Path) -> None:
    """What /proc/self/mountinfo has, also behind a link."""
    (tmp_path / "link").symlink_to("/proc/self")
    assert doctor.mount_point(tmp_path / "link") == Path("/proc")
    assert os.path.ismount(doctor.mount_point(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_without_anything() -> None:
    """User 12345, no passwd entry, no HOME, nothing on PATH: it still answers."""
    # Imported before: the interpreter itself may lie where only root can read.
    code = (
        "import os, sys; from compilekit.cli import run; run(['doctor', '-q']);"
        "print('now'); sys.stdout.flush(); os.setuid(12345); run(['doctor'])"
    )
    package = str(Path(doctor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": package, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    answer = done.stdout.partition("now\n")[2]
    assert "12345, without a passwd entry" in answer, done.stderr
    assert "finding\tcompiler\twarning" in answer
