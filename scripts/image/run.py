"""Run a Dockerfile's own steps without Docker, then its service as slim images have it.

    python scripts/image/run.py build DOCKERFILE FOLDER [--share PATH]... [--mirror URL]
    python scripts/image/run.py serve DOCKERFILE FOLDER

``build`` makes a root below FOLDER for each stage: FROM is Debian by ``debootstrap``
(minbase, which debian:*-slim is made of), RUN is a shell in the changed root, COPY copies.
``--share`` shows a path of this machine to the RUN steps alone, such as a pip
configuration or an index. ``serve`` starts the last stage's CMD as its USER in that root,
under each condition of `CONDITIONS`, waits until it is ready, asks it for embeddings, and
ends it with SIGTERM. Both need root and a mount namespace of their own.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "trust"))

from termination import exit_on_sigterm  # noqa: E402

ADDRESS = "http://127.0.0.1:8000"
# An image's PATH need not have it.
CHROOT = shutil.which("chroot") or "/usr/sbin/chroot"
# Where the image has its artifact.
ARTIFACT = "/model/artifact"
ODD = "größe und 模型"


class Step(NamedTuple):
    """One instruction of a Dockerfile."""

    word: str
    rest: str


class Stage(NamedTuple):
    """What a stage has come to: its root and what RUN and CMD get."""

    name: str
    root: Path
    environment: dict[str, str]
    settings: dict[str, str]


class Condition(NamedTuple):
    """What a start meets besides a read-only root.

    Attributes:
        place: Where a file system in memory is mounted; "" mounts none.
        options: How.
        artifact: Where in it the artifact is copied to; "" uses the image's own.
        before: Shell words that change the copy.
        refused: What the start must say, if it must end before it listens.
    """

    place: str = ""
    options: str = ""
    artifact: str = ""
    before: str = ""
    refused: str = ""


_COPIED = Condition("/mnt", "size=64m", "/mnt/artifact")
CONDITIONS = {
    "nothing writable but /dev/shm": Condition(),
    "/tmp of 64 MiB mounted noexec": Condition("/tmp", "size=64m,noexec"),
    "artifact on a noexec file system": _COPIED._replace(options="size=64m,noexec"),
    "a path with spaces and other letters": _COPIED._replace(
        artifact=f"/mnt/{ODD}/artifact"
    ),
    "a kernel cut short": _COPIED._replace(
        before="truncate -s -1 $(ls kernels/*.so | head -n 1)",
        refused="kernels/",
    ),
    "an artifact that nobody verified": _COPIED._replace(
        before="rm ../artifact.verified.json", refused="verified"
    ),
}


def read_steps(dockerfile: Path) -> list[Step]:
    """The instructions, comments left out, continued lines joined."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    found = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return [Step(word.upper(), rest) for word, rest in found]


# --- Build --------------------------------------------------------------------------


def build(dockerfile: Path, folder: Path, share: list[Path], mirror: str) -> None:
    """Every stage in order."""
    stages: list[Stage] = []
    for step in read_steps(dockerfile):
        began = time.perf_counter()
        if step.word == "FROM":
            image, _, name = step.rest.partition(" AS ")
            stages.append(start_stage(image, name or str(len(stages)), folder, mirror))
        else:
            do(step, stages, share)
        print(
            f"{time.perf_counter() - began:6.1f} s  {step.word} {step.rest[:90]}",
            flush=True,
        )
    last = stages[-1]
    (folder / "image.json").write_text(
        json.dumps({**last._asdict(), "root": str(last.root)}, indent=2)
    )


def start_stage(image: str, name: str, folder: Path, mirror: str) -> Stage:
    """A root for a stage, copied from one that is made once."""
    release = image.removeprefix("debian:").removesuffix("-slim")
    base, root = folder / f"base-{release}", folder / f"stage-{name}"
    if not base.exists():
        part = folder / f"part-{release}"
        shutil.rmtree(part, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", release, str(part), mirror]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.rename(base)
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-a", str(base), str(root)], check=True)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return Stage(name, root, {"PATH": path}, {"WORKDIR": "/", "USER": "0"})


def do(step: Step, stages: list[Stage], share: list[Path]) -> None:
    """One instruction of the last stage."""
    stage = stages[-1]
    if step.word == "RUN":
        run(stage, step.rest, share)
    elif step.word == "COPY":
        copy(stage, step.rest, {one.name: one.root for one in stages})
    elif step.word in ("ENV", "ARG"):
        for pair in shlex.split(step.rest):
            name, _, value = pair.partition("=")
            if step.word == "ARG":
                value = os.environ.get(name, value)
            stage.environment[name] = value
    elif step.word in ("WORKDIR", "USER", "CMD"):
        stage.settings[step.word] = step.rest
        if step.word == "WORKDIR":
            inside(stage.root, step.rest).mkdir(parents=True, exist_ok=True)
    else:
        raise SystemExit(f"{step.word} isn't understood")


def inside(root: Path, path: str) -> Path:
    """A path of a root as this process sees it."""
    return root / path.lstrip("/")


def run(stage: Stage, command: str, share: list[Path]) -> None:
    """A shell in the root, with the machine's network and what it was shown."""
    mounts = [mount_special(stage.root)]
    for path in share:
        place = inside(stage.root, str(path))
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        mounts.append(shared(path, place))
    enter = f"exec {CHROOT} {shlex.quote(str(stage.root))} /bin/sh -ec {shlex.quote(command)}"
    network = {
        name: value
        for name, value in os.environ.items()
        if name.lower().endswith(("_proxy", "_ca_bundle"))
        or name.startswith(("PIP_", "SSL_"))
    }
    script = "\n".join(["set -e", *mounts, enter])
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={"DEBIAN_FRONTEND": "noninteractive", **network, **stage.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"RUN {command}: {done.stdout[-3000:]}{done.stderr[-3000:]}")


def shared(path: Path, place: Path) -> str:
    """Shell words that show a path of this machine, and keep it from being written.

    A package's own steps may write where they are shown something: what they write to a
    folder lies in memory and is gone with the step.
    """
    source, target = shlex.quote(str(path)), shlex.quote(str(place))
    if not path.is_dir():
        return f"mount --bind {source} {target}; mount -o remount,bind,ro {target}"
    layers = shlex.quote(f"{place}.layers")
    return (
        f"mkdir -p {layers}; mount -t tmpfs tmpfs {layers};"
        f" mkdir {layers}/upper {layers}/work; mount -t overlay overlay"
        f" -o lowerdir={source},upperdir={layers}/upper,workdir={layers}/work {target};"
        f" umount -l {layers}; rmdir {layers}"
    )


def mount_special(root: Path) -> str:
    """Shell words that mount what every container has."""
    place = shlex.quote(str(root))
    return (
        f"mount -t proc proc {place}/proc; mount --rbind /dev {place}/dev;"
        f" cp /etc/resolv.conf {place}/etc/ 2>/dev/null || true"
    )


def copy(stage: Stage, words: str, roots: dict[str, Path]) -> None:
    """Files of the repository, or of another stage."""
    *sources, target = words.split()
    origin = ROOT
    if sources[0].startswith("--from="):
        origin = roots[sources.pop(0).removeprefix("--from=")]
    place = inside(stage.root, target)
    for source in sources:
        found = glob.glob(str(inside(origin, source)))
        if not found:
            raise SystemExit(f"COPY {source}: there is none")
        for path in map(Path, found):
            into = place / path.name if target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(path, into)


# --- Serve --------------------------------------------------------------------------


def serve(folder: Path) -> int:
    """The service under each condition; how many weren't met."""
    described = json.loads((folder / "image.json").read_text())
    stage = Stage(**{**described, "root": Path(described["root"])})
    for finding in look(stage):
        print(finding)
    failed = examine(stage)
    for name, condition in CONDITIONS.items():
        try:
            print(f"{name}: {one_start(stage, condition)}", flush=True)
        except (OSError, ValueError, TimeoutError) as exc:
            failed += 1
            print(f"{name}: FAILED {exc}", flush=True)
    return failed


def look(stage: Stage) -> list[str]:
    """What the image has and lacks."""
    lacks = [
        name
        for name in ("g++", "gcc", "cc", "c++", "ld", "as")
        for folder in stage.environment["PATH"].split(":")
        if inside(stage.root, f"{folder}/{name}").exists()
    ]
    passwd = inside(stage.root, "/etc/passwd").read_text()
    system = [
        str(path)
        for path in inside(stage.root, "/usr/lib").rglob("libgomp*")
        if path.is_file()
    ]
    known = f":{stage.settings['USER']}:" in passwd
    return [
        f"compilers in the image: {', '.join(lacks) or 'none'}",
        f"libgomp of the system: {', '.join(system) or 'none'}",
        f"user {stage.settings['USER']} in /etc/passwd: {'yes' if known else 'no'}",
    ]


def examine(stage: Stage) -> int:
    """What `compilekit doctor` says in the image; how many failures."""
    words = ["compilekit", "--json", "doctor", ARTIFACT]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", starting(stage, Condition(), words)],
        env=stage.environment,
        stdout=subprocess.PIPE,
        check=False,
    )
    result = json.loads(done.stdout)["result"]
    print(f"doctor: {result['ok']} ok, exit code {done.returncode}")
    for one in result["findings"]:
        if one["verdict"] != "ok":
            print(f"doctor: {one['verdict']}: {one['check']}: {one['found']}")
    return int(result["failure"])


def one_start(stage: Stage, condition: Condition) -> str:
    """Start the CMD in the root, ask it, end it; what it took."""
    began = time.perf_counter()
    log = stage.root.parent / "serve.log"
    served = json.loads(stage.settings["CMD"])
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", starting(stage, condition, served)],
            env=stage.environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        if condition.refused:
            return refused(process.wait(120), log, condition.refused)
        wait_until_ready(process, log)
        ready = time.perf_counter() - began
        answer = ask({"input_ids": [[101, 7592, 2088, 102], [101, 2748, 999, 102]]})
        sizes = [len(row) for row in answer["embeddings"]]
        too_long = status_of({"input_ids": [[101] * 999]})
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    if sizes != [384, 384] or too_long != 413 or process.returncode not in (0, -15):
        raise ValueError(f"{sizes}, {too_long}, exit code {process.returncode}")
    return f"ready after {ready:.1f} s, 2 embeddings, too long a text is 413"


def starting(stage: Stage, condition: Condition, command: list[str]) -> str:
    """Shell words that make the condition and become a command in the root."""
    root = shlex.quote(str(stage.root))
    lines = [
        f"mount --bind {root} {root}",
        f"mount -o remount,bind,ro {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        f"mount -t tmpfs -o size=16m tmpfs {root}/dev/shm",
    ]
    if condition.place:
        options = f"{condition.options},mode=1777"
        lines.append(f"mount -t tmpfs -o {options} tmpfs {root}{condition.place}")
    if condition.artifact:
        there = shlex.quote(f"{stage.root}{condition.artifact}")
        lines += [
            f"mkdir -p {there}",
            f"cp -a {root}{ARTIFACT}/. {there}/",
            f"cp -a {root}{ARTIFACT}.verified.json {there}.verified.json",
            f"(cd {there}; {condition.before or ':'})",
        ]
        there = condition.artifact
        command = [there if word == ARTIFACT else word for word in command]
    user, folder = stage.settings["USER"], shlex.quote(stage.settings["WORKDIR"])
    service = shlex.quote(f"cd {folder} && exec {shlex.join(command)}")
    enter = f"exec {CHROOT} --userspec={user}:{user} --groups= {root}"
    return "\n".join([*lines, f"{enter} /bin/sh -c {service}"])


def refused(code: int, log: Path, reason: str) -> str:
    """A start that ended by itself, with the reason in its last words."""
    said = log.read_text(errors="replace")
    if code == 0 or reason not in said or "Listening" in said:
        raise ValueError(f"exit code {code}: {said[-2000:]}")
    first = next(line for line in said.splitlines() if reason in line)
    return f"refused with exit code {code}: {first.strip()}"


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until /ready answers 200."""
    for _ in range(1200):
        if process.poll() is not None:
            raise ValueError(log.read_text(errors="replace")[-2000:])
        try:
            with urllib.request.urlopen(f"{ADDRESS}/ready"):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(log.read_text(errors="replace")[-2000:])


def ask(document: dict[str, Any]) -> dict[str, Any]:
    """One request for embeddings."""
    request = urllib.request.Request(f"{ADDRESS}/embed", json.dumps(document).encode())
    with urllib.request.urlopen(request) as stream:
        answer: dict[str, Any] = json.load(stream)
    return answer


def status_of(document: dict[str, Any]) -> int:
    """The status that a request gets."""
    try:
        ask(document)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def main() -> int:
    """One of the two commands."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["build", "serve"])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=Path, action="append", default=[])
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.command == "serve":
        return 1 if serve(folder) else 0
    build(given.dockerfile, folder, given.share, given.mirror)
    return 0


if __name__ == "__main__":
    sys.exit(main())
