"""Look at this machine or image: what a start, and what a fall-back, would lack.

Nothing is imported that isn't always there, and nothing is changed but probe files that
are removed at once. Each `Finding` is a line: ok, warning or failure, and the fix.

Standard library only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import platform
import pwd
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from compilekit import targets
from compilekit._version import __version__
from compilekit.errors import ResourceError

PACKAGES = ("triton", "transformers", "safetensors", "cryptography", "oras")
PYTHONS = ((3, 11), (3, 12))
TORCHES = ((2, 11), (2, 12), (2, 13))

_ROOM = 64 << 20
_INODES = 100
_CUDA_ERROR_STUB_LIBRARY = 34


class Finding(NamedTuple):
    """One line.

    Attributes:
        check: What was looked at.
        verdict: ``ok``, ``warning`` (a fall-back or convenience lacks something) or
            ``failure`` (a start would fail).
        found: What is there.
        fix: What to do; empty when ok.
        exit_code: What a failure makes the command end with.
    """

    check: str
    verdict: str
    found: str
    fix: str = ""
    exit_code: int = ResourceError.exit_code


def examine(*, jit: bool = False, cuda: bool = False) -> Iterator[Finding]:
    """Look at everything but an artifact.

    Args:
        jit: Uncovered calls are compiled here: what that needs is no longer optional.
        cuda: An NVIDIA device is needed.
    """
    yield Finding("compilekit", "ok", __version__)
    yield _system()
    yield _python()
    yield _torch()
    yield _packages()
    yield _user()
    yield _home()
    yield from _temporary(jit)
    yield from _receipt()
    yield _memory_file()
    yield from _compiler(jit)
    yield _openmp()
    yield _isa()
    yield _threads()
    yield _driver(cuda)


# --- Software ----------------------------------------------------------------------


def _system() -> Finding:
    """Kernel, C library and distribution."""
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    parts = (f"{platform.system()} {platform.release()}", *platform.libc_ver(), name)
    return Finding("system", "ok", " ".join(filter(None, parts)))


def _packages() -> Finding:
    """Versions of what a start, a build or a fall-back may use besides torch."""
    found = []
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return Finding("packages", "ok", ", ".join(found) or "none that is optional")


def _python() -> Finding:
    here = sys.version.split()[0]
    if sys.version_info[:2] in PYTHONS:
        return Finding("python", "ok", here)
    wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    return Finding("python", "failure", here, f"Use Python {wanted}.")


def _torch() -> Finding:
    wanted = f"torch>={_dotted(TORCHES[0])},<{TORCHES[-1][0]}.{TORCHES[-1][1] + 1}"
    try:
        here = version("torch")
    except PackageNotFoundError:
        return Finding("torch", "failure", "not installed", f"pip install '{wanted}'")
    numbers = tuple(int(n) for n in here.split(".")[:2] if n.isdecimal())
    if numbers in TORCHES:
        return Finding("torch", "ok", here)
    return Finding("torch", "failure", here, f"pip install '{wanted}'")


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


def _compiler(jit: bool) -> Iterator[Finding]:
    """Only a fall-back to ``torch.compile`` needs a compiler and Python's headers."""
    lacking = "failure" if jit else "warning"
    need = "on_uncovered = jit needs it" if jit else "only on_uncovered = jit needs it"
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found:
        yield Finding("compiler", "ok", found)
    else:
        fix = f"Install g++ (Debian: apt-get install g++); {need}."
        yield Finding("compiler", lacking, f"no {name} on PATH", fix)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    # os.path: pathlib raises where a folder above can't be entered.
    if os.path.isfile(header):
        yield Finding("python headers", "ok", str(header))
    else:
        fix = f"Install Python's headers (Debian: python3-dev); {need}."
        yield Finding("python headers", lacking, f"no {header}", fix)


def _openmp() -> Finding:
    """Kernels with threads need an OpenMP runtime; torch's wheels bring one."""
    spec = importlib.util.find_spec("torch")
    folders = [Path(spec.origin).parent] if spec and spec.origin else []
    for folder in folders:
        for place in (folder / "lib", folder.with_name("torch.libs")):
            found = sorted(place.glob("libgomp*")) if os.path.isdir(place) else []
            if found:
                return Finding("libgomp", "ok", str(found[0]))
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        fix = "Install it (Debian: apt-get install libgomp1)."
        return Finding("libgomp", "failure", "neither in torch nor here", fix)
    return Finding("libgomp", "ok", "libgomp.so.1 of the system")


# --- User and places ---------------------------------------------------------------


def _user() -> Finding:
    number = os.geteuid()
    try:
        return Finding("user", "ok", f"{number} ({pwd.getpwuid(number).pw_name})")
    except KeyError:
        fix = (
            "Programs don't care; for a fall-back set TORCHINDUCTOR_CACHE_DIR and USER."
        )
        return Finding("user", "warning", f"{number}, without a passwd entry", fix)


def _home() -> Finding:
    home = os.environ.get("HOME", "")
    why = _why_unwritable(Path(home)) if home else "not set"
    if not why:
        return Finding("HOME", "ok", home)
    fix = "Programs don't use it; libraries that write caches there may complain."
    return Finding("HOME", "warning", f"{home} {why}".strip(), fix)


def _temporary(jit: bool) -> Iterator[Finding]:
    """Where a fall-back would write and map what it compiles."""
    lacking = "failure" if jit else "warning"
    need = "" if jit else " Only on_uncovered = jit writes there."
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:
        fix = f"Mount a tmpfs and set TMPDIR.{need}"
        yield Finding("temporary files", lacking, "no writable directory", fix)
        return
    why = _why_unwritable(folder)
    if why:
        yield Finding(
            "temporary files", lacking, f"{folder} {why}", f"Set TMPDIR.{need}"
        )
        return
    if is_noexec(folder):
        fix = f"Mount it with exec, or set TORCHINDUCTOR_CACHE_DIR elsewhere.{need}"
        found = f"{folder} is on {mount_point(folder)}, which is mounted noexec"
        yield Finding("temporary files", lacking, found, fix)
    else:
        yield Finding("temporary files", "ok", f"{folder}, writable and executable")
    yield _room(folder)


def _room(folder: Path) -> Finding:
    free = os.statvfs(folder)
    size = free.f_bavail * free.f_frsize
    found = f"{size >> 20} MiB and {free.f_favail} inodes free in {folder}"
    # A file system without a fixed table of inodes says 0 of 0.
    scarce = free.f_files and free.f_favail < _INODES
    if size < _ROOM or scarce:
        fix = f"Have {_ROOM >> 20} MiB and {_INODES} inodes free there."
        return Finding("free space", "warning", found, fix)
    return Finding("free space", "ok", found)


def _receipt() -> Iterator[Finding]:
    for name in ("COMPILEKIT_RECEIPT", "COMPILEKIT_METRICS"):
        file = os.environ.get(name, "")
        if not file:
            continue
        folder = Path(os.path.abspath(file)).parent
        why = _why_unwritable(folder)
        fix = f"Set {name} to a writable place, or unset it." if why else ""
        found = f"{name} in {folder}{' ' + why if why else ''}"
        yield Finding("receipt", "failure" if why else "ok", found, fix)


def _why_unwritable(folder: Path) -> str:
    """Why no file can be made in a folder; empty if one can: it was tried."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as exc:
        return f"can't be written ({exc.strerror})"


def is_noexec(folder: Path) -> bool:
    """True if the file system around a folder forbids to map code."""
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def mount_point(folder: Path) -> Path:
    """Where the file system around a folder is mounted."""
    folder = Path(os.path.realpath(folder))
    return next(place for place in (folder, *folder.parents) if os.path.ismount(place))


def _memory_file() -> Finding:
    """Where kernels can't be mapped in place, they are from a file in memory."""
    try:
        descriptor = os.memfd_create("compilekit-doctor", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, b"\0" * mmap.PAGESIZE)
            mmap.mmap(
                descriptor,
                mmap.PAGESIZE,
                mmap.MAP_PRIVATE,
                mmap.PROT_READ | mmap.PROT_EXEC,
            ).close()
            if not os.path.exists(f"/proc/self/fd/{descriptor}"):
                raise OSError(2, "/proc isn't mounted")
        finally:
            os.close(descriptor)
    except OSError as exc:
        fix = (
            "Keep the artifact where only this user or root writes, mounted with exec."
        )
        return Finding("memory files", "warning", f"refused: {exc.strerror}", fix)
    return Finding("memory files", "ok", "memfd, executable")


# --- Hardware ----------------------------------------------------------------------


def _isa() -> Finding:
    try:
        flags = targets.cpu_flags()
    except ResourceError as error:
        return Finding("isa", "failure", error.message, error.hint)
    fitting = [
        name
        for name in targets.list_targets()
        if (target := targets.load_target(name)).kind == "cpu"
        and target.machine == targets.machine()
        and not targets.missing_features(target, flags)
    ]
    here = " ".join(filter(None, (targets.machine(), targets.cpu_name())))
    if fitting:
        return Finding("isa", "ok", f"{here}: {', '.join(fitting)}")
    fix = "Run on a CPU with AVX2; no target that is shipped fits this one."
    return Finding("isa", "failure", here, fix)


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    limit = min(cores, quota) if quota else cores
    found = f"{cores} cores" + (f", a quota of {quota:g}" if quota else "")
    found += f", OMP_NUM_THREADS={asked}" if asked else ""
    threads = int(asked) if asked.isdecimal() else cores
    if threads > max(1, -(-limit // 1)):
        fix = f"Set OMP_NUM_THREADS={max(1, int(limit))}: threads wait for each other."
        return Finding("threads", "warning", found, fix)
    return Finding("threads", "ok", found)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that a container's CPU quota allows; None without a quota."""
    try:
        text = (root / "cpu.max").read_text().split()
        quota, period = text[0], text[1]
    except (OSError, IndexError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _driver(needed: bool) -> Finding:
    lacking = "failure" if needed else "ok"
    fix = "Run with the NVIDIA runtime (docker run --gpus all)." if needed else ""
    if stub := stub_here():
        away = f"Take it out of the library path ({stub.parent}): it is for linking."
        verdict = "failure" if needed else "warning"
        return Finding("driver", verdict, f"a stub at {stub}", away)
    try:
        library = ctypes.CDLL("libcuda.so.1")
        status = int(library.cuInit(0))
    except (OSError, AttributeError):
        return Finding("driver", lacking, "no NVIDIA driver", fix)
    if status:
        return Finding("driver", lacking, f"cuInit answers {status}", fix)
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    shown = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    return Finding("driver", "ok", f"NVIDIA driver for {shown}")


def stub_here() -> Path | None:
    """The stub that this process takes for the driver, wherever it was found."""
    stub = stub_driver(os.environ.get("LD_LIBRARY_PATH", ""))
    if stub is not None:
        return stub
    try:
        library = ctypes.CDLL("libcuda.so.1")
        status = int(library.cuInit(0))
    except (OSError, AttributeError):
        return None
    return _mapped("libcuda.so") if status == _CUDA_ERROR_STUB_LIBRARY else None


def _mapped(name: str) -> Path:
    """Where a library lies that this process has loaded."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            path = line.rstrip("\n").partition("/")[2]
            if name in path:
                return Path("/", path)
    return Path(name)


def stub_driver(search: str) -> Path | None:
    """The stub that the loader would take for the driver: the first one on its path."""
    for folder in filter(None, search.split(":")):
        for name in ("libcuda.so.1", "libcuda.so"):
            place = Path(folder, name)
            if os.path.exists(place):
                real = Path(os.path.realpath(place))
                return place if "stubs" in (*place.parts, *real.parts) else None
    return None
