"""Damage, kill and starve every step from a build to a start; count what comes of it.

    python scripts/trust/inject.py [--seed N] [--kills 200] [--full 90] [STAGE...]

Stages: ``files`` (every file of an artifact damaged in nine ways, and packed), ``kill``
(kill -9 at random moments of build, pack, pull and load), ``full`` (no space or inodes
left at random points of build, sign, pack, unpack, prune, merge, push, pull and load;
needs root, to mount a tmpfs). All of them by default, on an artifact built here (about
10 s).

What must hold, or the script says what didn't and exits with 1: a start gives the right
answer or none; a place holds a whole artifact or none; every failure has one of the
documented exit codes and a named cause.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SMALL = Path(__file__).with_name("small")
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(SMALL)]

import small  # noqa: E402
import torch  # noqa: E402
from termination import exit_on_sigterm  # noqa: E402

import compilekit  # noqa: E402
from compilekit.artifact import open_artifact  # noqa: E402
from compilekit.artifact.archive import unpack  # noqa: E402
from compilekit.errors import CompilekitError  # noqa: E402
from compilekit.trust.signature import load_keys, read_record, verify  # noqa: E402

COMPILEKIT = [sys.executable, "-m", "compilekit", "--plain"]
HUGE = 1 << 40
STAGES = ("files", "kill", "full")
KILLED = ("build", "pack", "pull", "load")
STARVED = ("build", "sign", "pack", "unpack", "prune", "merge", "push", "pull", "load")


class Setting(NamedTuple):
    """What the stages work on, all of it made once.

    Attributes:
        folder: Scratch space.
        artifact: Built from the small model, signed with serial 3.
        packed: The same as one file.
        digest: Its digest.
        key: The private key; the public one lies beside it.
        reference: Where it was pushed to.
        environment: For child processes.
    """

    folder: Path
    artifact: Path
    packed: Path
    digest: str
    key: Path
    reference: str
    environment: dict[str, str]


class Tally:
    """What came of the attempts: outcome → how often; and what must not have been."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def note(self, outcome: str, wrong: str = "") -> None:
        """Count one attempt."""
        self.outcomes[outcome] += 1
        if wrong:
            self.wrong.append(f"{outcome}: {wrong}")

    def report(self, title: str) -> bool:
        """Print the figures; True if nothing was wrong."""
        total = sum(self.outcomes.values())
        print(f"{title}: {total} attempts, {len(self.wrong)} wrong")
        for outcome, count in sorted(self.outcomes.items()):
            print(f"  {count:4}  {outcome}")
        for line in self.wrong:
            print(f"  WRONG {line}")
        sys.stdout.flush()
        return not self.wrong


# --- Setting ------------------------------------------------------------------------


@contextmanager
def made_setting() -> Iterator[Setting]:
    """Build, sign, pack and push the small model; a registry runs meanwhile."""
    from registry_store import Store

    server = Store()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="compilekit-inject-") as name:
        folder = Path(name)
        shutil.copytree(SMALL, folder / "small")
        # One bucket: a build is killed and starved many times.
        toml = folder / "small" / "compilekit.toml"
        toml.write_text(toml.read_text().replace("b = [1, 4]", "b = [4]"))
        key = folder / "release.key"
        artifact, packed = folder / "artifact", folder / "packed.tar"
        reference = f"{server.address}/team/small:1"
        known = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEKIT_")}
        path = os.pathsep.join([str(ROOT), str(folder / "small")])
        environment = {**known, "PYTHONPATH": path, "DOCKER_CONFIG": str(folder)}
        for command in (
            ["openssl", "genpkey", "-algorithm", "ed25519", "-out", key],
            ["openssl", "pkey", "-in", key, "-pubout", "-out", f"{key}.pub"],
            [*COMPILEKIT, "build", toml, "-o", artifact],
            [*COMPILEKIT, "sign", artifact, "--key", key, "--serial", "3"],
            [*COMPILEKIT, "pack", artifact, "-o", packed],
            [*COMPILEKIT, "push", artifact, reference, "--insecure"],
        ):
            subprocess.run(command, env=environment, check=True, capture_output=True)
        os.chmod(f"{key}.pub", 0o644)
        digest = open_artifact(artifact).digest
        yield Setting(folder, artifact, packed, digest, key, reference, environment)
    server.shutdown()
    server.server_close()


def operations(setting: Setting, place: Path) -> dict[str, list[str]]:
    """Commands that write below a place, each from nothing or onto what is there."""
    out, receipt = place / "out" / "artifact", place / "out" / "receipt.json"
    signed = ["--require-signature", f"{setting.key}.pub", "--min-serial", "3"]
    again = f"{setting.reference}-again"
    words: dict[str, list[object]] = {
        "build": ["build", setting.folder / "small" / "compilekit.toml", "-o", out],
        "sign": ["sign", out, "--key", setting.key, "--serial", "3"],
        "prune": ["prune", setting.artifact, "-o", out],
        "merge": ["merge", setting.artifact, "-o", out],
        "push": ["push", setting.artifact, again, "--insecure", "--key", setting.key],
        "pack": ["pack", setting.artifact, "-o", place / "out" / "packed.tar"],
        "unpack": ["unpack", setting.packed, "-o", out, *signed],
        "pull": ["pull", setting.reference, "-o", out, "--insecure", *signed],
        "load": ["load", setting.artifact, "--receipt", receipt, *signed, "--"],
    }
    words["load"] += [sys.executable, setting.folder / "small" / "serve.py"]
    return {name: [*COMPILEKIT, *map(str, rest)] for name, rest in words.items()}


def prepare(setting: Setting, name: str, place: Path) -> None:
    """Make the folders that an operation writes to, and what it works on there."""
    (place / "tmp").mkdir()
    (place / "out").mkdir()
    if name == "sign":
        # The signature lies beside the artifact.
        shutil.copytree(setting.artifact, place / "out" / "artifact")


def state(setting: Setting, place: Path) -> tuple[str, str]:
    """What an operation left in its place, and what is wrong with it."""
    out = place / "out"
    found = []
    try:
        if record := read_record(out / "artifact"):
            found.append("a whole signature")
            verify(setting.digest, record, load_keys(f"{setting.key}.pub"), 3)
        if (out / "artifact").exists():
            found.append("a whole artifact")
            digest = open_artifact(out / "artifact").parse_all().digest
            if digest != setting.digest:
                return "another artifact", digest
        if (out / "packed.tar").exists():
            found.append("a whole file")
            if (out / "packed.tar").read_bytes() != setting.packed.read_bytes():
                return "another file", "its bytes differ"
        if (out / "receipt.json").exists():
            found.append("a whole receipt")
            if not (out / "receipt.json").read_bytes().endswith(b"}\n"):
                return "half a receipt", "it is cut off"
    except CompilekitError as error:
        return "half an artifact", error.message
    return " and ".join(found) or "nothing", ""


def strangers(out: Path) -> list[str]:
    """What lies in a place beside whole things and their records."""
    # A build that fails keeps the logs of its buckets.
    known = ("artifact", "artifact.logs", "packed.tar", "receipt.json")
    records = ("artifact.signature.json", "artifact.verified.json")
    return sorted(p.name for p in out.iterdir() if p.name not in (*known, *records))


# --- Files --------------------------------------------------------------------------

# File, generator, another file of the artifact, a place outside of it.
Damage = Callable[[Path, random.Random, Path, Path], None]


def _truncate(path: Path, draw: random.Random, *_: Path) -> None:
    os.truncate(path, draw.randrange(max(1, path.stat().st_size)))


def _flip(path: Path, draw: random.Random, *_: Path) -> None:
    data = bytearray(path.read_bytes()) or bytearray(1)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _swap(path: Path, _: random.Random, other: Path, __: Path) -> None:
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def _directory(path: Path, *_: object) -> None:
    path.unlink()
    path.mkdir()


def _symlink(path: Path, _: random.Random, __: Path, outside: Path) -> None:
    # To the very bytes that are listed: not the contents are wrong, but the kind.
    shutil.move(path, outside)
    path.symlink_to(outside)


def _huge(path: Path, *_: object) -> None:
    os.truncate(path, HUGE)


def _pipe(path: Path, *_: object) -> None:
    path.unlink()
    os.mkfifo(path)


def _missing(path: Path, *_: object) -> None:
    path.unlink()


def _pickle(path: Path, *_: object) -> None:
    path.write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93.")


DAMAGES: dict[str, Damage] = {
    "truncated": _truncate,
    "flipped": _flip,
    "swapped": _swap,
    "a directory": _directory,
    "a symlink": _symlink,
    "huge": _huge,
    "a pipe": _pipe,
    "missing": _missing,
    "a pickle": _pickle,
}


def damaged_files(setting: Setting, draw: random.Random, per_file: int) -> bool:
    """Every file of the artifact, its records included, damaged in every way."""
    tally = Tally()
    paths = sorted(
        path.relative_to(setting.folder)
        for place in setting.folder.glob("artifact*")
        for path in ([place] if place.is_file() else place.rglob("*"))
        if (setting.folder / path).is_file()
    )
    copy, linked = setting.folder / "copy", setting.folder / "linked"
    for path in paths:
        kinds = draw.sample(sorted(DAMAGES), min(per_file, len(DAMAGES)))
        for kind in sorted(kinds):
            shutil.rmtree(copy, ignore_errors=True)
            linked.unlink(missing_ok=True)
            copy.mkdir()
            for place in setting.folder.glob("artifact*"):
                if place.is_dir():
                    shutil.copytree(place, copy / place.name)
                else:
                    shutil.copy(place, copy)
            other = draw.choice([one for one in paths if one != path])
            before = (copy / path).read_bytes(), (copy / other).read_bytes()
            DAMAGES[kind](copy / path, draw, copy / other, linked)
            if kind == "swapped" and before[0] == before[1]:
                continue
            names = (path.name, other.name)
            tally.note(*attempt(setting, copy / "artifact", str(path), kind, names))
    return tally.report(f"{len(paths)} files, each damaged")


def attempt(
    setting: Setting, root: Path, path: str, kind: str, names: Sequence[str]
) -> tuple[str, str]:
    """Start from a damaged artifact; what came of it, and what is wrong with that."""
    model, call = small.model(), small.call()
    demands = {
        "COMPILEKIT_REQUIRE_SIGNATURE": f"{setting.key}.pub",
        "COMPILEKIT_MIN_SERIAL": "3",
        "COMPILEKIT_REQUIRE": "program,verified",
    }
    os.environ.update(demands)
    try:
        with torch.inference_mode():
            expected = model(call)
            receipt = compilekit.attach(model, root)
            found = model(call)
            receipt.detach()
    except CompilekitError as error:
        # A manifest of other bytes is another artifact, which nobody has signed.
        words = (*names, "record", "isn't signed as required")
        named = any(word in error.message for word in words)
        wrong = "" if named and error.exit_code in (5, 9, 11, 13) else str(error)
        return f"{kind}: {type(error).__name__} (exit code {error.exit_code})", wrong
    finally:
        for name in demands:
            del os.environ[name]
    same = torch.allclose(found, expected, atol=1e-6)
    # A symbolic link to a record is followed: whoever owns the folder put it there.
    harmless = kind == "a symlink" and path.endswith(".json") and "/" not in path
    wrong = "" if same and harmless else f"{path} {kind}, and it started"
    return f"{kind}: a record behind a link, a right answer", wrong


def damaged_archive(setting: Setting, draw: random.Random, count: int) -> bool:
    """The packed file truncated and flipped at random places."""
    tally = Tally()
    copy, out = setting.folder / "copy.tar", setting.folder / "unpacked" / "artifact"
    for number in range(count):
        shutil.rmtree(out.parent, ignore_errors=True)
        shutil.copy(setting.packed, copy)
        kind = ("truncated", "flipped", "huge")[number % 3]
        DAMAGES[kind](copy, draw, copy, copy)
        try:
            unpack(copy, out)
        except CompilekitError as error:
            left = sorted(out.parent.iterdir()) if out.parent.exists() else []
            wrong = f"left {left[0].name}" if left else ""
            name = type(error).__name__
            tally.note(f"{kind}: {name} (exit code {error.exit_code})", wrong)
        else:
            # Owner, time and checksum fields of a header carry nothing.
            digest = open_artifact(out).parse_all().digest
            wrong = "" if digest == setting.digest else digest
            tally.note(f"{kind}: the same artifact", wrong)
    return tally.report("the packed file")


# --- Kills --------------------------------------------------------------------------


def killed(
    setting: Setting, draw: random.Random, count: int, names: Sequence[str]
) -> bool:
    """kill -9 at random moments; then one run that nobody disturbs."""
    good = True
    for name in names:
        tally = Tally()
        place = setting.folder / f"kill-{name}"
        (place / "out").mkdir(parents=True)
        (place / "tmp").mkdir()
        command = operations(setting, place)[name]
        environment = {**setting.environment, "TMPDIR": str(place / "tmp")}
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
            shutil.rmtree(place / "out")
            (place / "out").mkdir()
        limit, kills = min(seconds), 0
        while kills < -(-count // len(names)):
            if kills % 2 == 0:
                # From nothing; the next onto whatever this one leaves.
                shutil.rmtree(place / "out")
                (place / "out").mkdir()
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            began = time.perf_counter()
            try:
                process.wait(draw.uniform(0, limit))
            except subprocess.TimeoutExpired:
                kills += 1
                process.kill()
                process.wait()
                end_session(process.pid)
                tally.note(*state(setting, place))
            else:
                # Faster than before: it wasn't killed, and doesn't count.
                limit = time.perf_counter() - began
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True
        )
        left = strangers(place / "out")
        # A receipt's process number is its own: nobody else may remove what it left.
        left = [one for one in left if not one.startswith("receipt.json.")]
        what, wrong = state(setting, place)
        if done.returncode or left:
            wrong = wrong or f"{done.stderr[-300:]} left {left}"
        tally.note(f"afterwards: {what}", wrong)
        took = f"{limit:.2f} s undisturbed"
        good &= tally.report(f"kill -9 during {name}, {took}")
    return good


def end_session(leader: int) -> None:
    """Wait until what the killed process had started has ended by itself."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    os.killpg(leader, signal.SIGKILL)


# --- No space -----------------------------------------------------------------------

# What a cause must say; the last are the compiler's and the linker's own words.
CAUSE = re.compile(
    r"No space left on device|bytes free|are free|can't be written|final link failed"
)


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[None]:
    """A file system in memory with so many bytes or inodes."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def used(place: Path) -> tuple[int, int]:
    """Bytes and inodes that are taken."""
    found = os.statvfs(place)
    taken = (found.f_blocks - found.f_bfree) * found.f_frsize
    return taken, found.f_files - found.f_ffree


def measured(setting: Setting, name: str, place: Path) -> list[tuple[int, int]]:
    """Bytes and inodes that are taken before an operation, and the most during it."""
    with small_disk(place, "size=4g"):
        prepare(setting, name, place)
        before = used(place)
        peak = list(before)
        process = started(setting, name, place)
        while process.poll() is None:
            peak = [max(*pair) for pair in zip(peak, used(place), strict=True)]
            time.sleep(0.002)
        if process.returncode:
            raise SystemExit(f"{name} fails by itself: {process.communicate()[1]}")
        process.communicate()
        peak = [max(*pair) for pair in zip(peak, used(place), strict=True)]
    return list(zip(before, peak, strict=True))


def started(setting: Setting, name: str, place: Path) -> subprocess.Popen[str]:
    """An operation that has everything it writes below a place."""
    environment = {**setting.environment, "TMPDIR": str(place / "tmp")}
    return subprocess.Popen(
        operations(setting, place)[name],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def starved(
    setting: Setting, draw: random.Random, count: int, names: Sequence[str]
) -> bool:
    """No space at points drawn from what each operation needs."""
    if os.geteuid() != 0:
        print("full: skipped, only root can mount a tmpfs")
        return True
    good = True
    for name in names:
        tally = Tally()
        place = setting.folder / f"full-{name}"
        (empty, size), (taken, inodes) = measured(setting, name, place)
        first, pages = empty // 4096, size // 4096
        for number in range(-(-count // len(names))):
            if number % 3:
                # Never 0, which a tmpfs takes for no limit.
                pages_there = draw.randint(max(1, first), max(2, pages - 1))
                options = f"size={4096 * pages_there}"
            else:
                there = draw.randint(taken, max(taken + 1, inodes - 1))
                options = f"size=4g,nr_inodes={there}"
            with small_disk(place, options):
                prepare(setting, name, place)
                process = started(setting, name, place)
                _, said = process.communicate()
                what, wrong = state(setting, place)
                left = strangers(place / "out")
                if process.returncode and left:
                    wrong = wrong or f"left {left}"
                if process.returncode and not CAUSE.search(said):
                    wrong = wrong or f"no cause: {said[-1500:]}"
                # A server's own traceback ends in the named cause.
                if name != "load" and ("Traceback" in said or "unexpected" in said):
                    wrong = wrong or said[-1500:]
            limit = "inodes" if "nr_inodes" in options else "bytes"
            code = process.returncode
            tally.note(
                f"{limit}: exit code {code}, {what}", wrong and f"{options}: {wrong}"
            )
        need = f"which takes {(size - empty) >> 10} KiB and {inodes - taken} inodes"
        good &= tally.report(f"no space during {name}, {need}")
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """The stages that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    # argparse takes no empty list as a choice.
    parser.add_argument("stages", nargs="*", choices=[*STAGES, "all"], default="all")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--full", type=int, default=90)
    parser.add_argument("--damages", type=int, default=len(DAMAGES))
    parser.add_argument("--operations", help="comma-separated, of kill and full")
    given = parser.parse_args(arguments)
    exit_on_sigterm()
    stages = STAGES if "all" in given.stages else given.stages
    print(f"seed {given.seed}")
    good = True
    with made_setting() as setting:
        if "files" in stages:
            draw = random.Random(given.seed)
            good &= damaged_files(setting, draw, given.damages)
            good &= damaged_archive(setting, draw, 30 * given.damages)
        if "kill" in stages:
            names = given.operations or ",".join(KILLED)
            draw = random.Random(given.seed)
            good &= killed(setting, draw, given.kills, names.split(","))
        if "full" in stages:
            names = given.operations or ",".join(STARVED)
            draw = random.Random(given.seed)
            good &= starved(setting, draw, given.full, names.split(","))
    print("nothing was wrong" if good else "something was wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
