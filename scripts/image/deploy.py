"""Run a Deployment's containers without Kubernetes, in the image that run.py built.

    python scripts/image/deploy.py FOLDER [DEPLOYMENT]

The image's own artifact is signed and pushed to Debian's `docker-registry` on loopback,
which stands for the registry that DEPLOYMENT names. Then its init container and its
server run as a node runs them: the pod's user, group and no capability, a read-only root,
emptyDir volumes of their size and open to everybody, as the folder of a configMap with its
symbolic links is, the environment of the manifest and nothing else. The server must become
ready and answer; with a higher serial demanded, the init container must refuse. Needs
root and a mount namespace of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "examples" / "minilm" / "deployment.yaml"
sys.path[:0] = [str(ROOT / "scripts" / "trust"), str(ROOT / "scripts" / "image")]

import run  # noqa: E402
from registry import registry  # noqa: E402
from termination import exit_on_sigterm  # noqa: E402

NAMED = "registry.example.com"


class Pod(NamedTuple):
    """What one start of the pod works on.

    Attributes:
        stage: The image.
        spec: The pod's part of the manifest.
        folder: Scratch space; volumes and logs lie here.
        address: Of the registry.
        key: The public key.
    """

    stage: run.Stage
    spec: dict[str, Any]
    folder: Path
    address: str
    key: Path


def volumes(pod: Pod) -> list[str]:
    """Shell words that make the pod's volumes, as kubelet does."""
    group = pod.spec["securityContext"]["fsGroup"]
    lines = []
    for volume in pod.spec["volumes"]:
        place = pod.folder / volume["name"]
        place.mkdir(exist_ok=True)
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            options = f"size={size},mode=2777,gid={group}"
            lines.append(f"mount -t tmpfs -o {options} tmpfs {shlex.quote(str(place))}")
        elif not (place / "..data").is_symlink():
            (place / "..1").mkdir()
            (place / "..1" / "release.pub").write_bytes(pod.key.read_bytes())
            (place / "..data").symlink_to("..1")
            (place / "release.pub").symlink_to("..data/release.pub")
            place.chmod(0o777)
    return lines


def container(pod: Pod, about: dict[str, Any], *, log: Path) -> str:
    """Shell words that run one container to its end."""
    root = shlex.quote(str(pod.stage.root))
    lines = [
        f"mount --bind {root} {root}",
        f"mount -o remount,bind,ro {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
    ]
    for mount in about["volumeMounts"]:
        place = shlex.quote(f"{pod.stage.root}{mount['mountPath']}")
        source = pod.folder / mount["name"] / mount.get("subPath", "")
        lines.append(f"mount --bind {shlex.quote(str(source))} {place}")
        if mount.get("readOnly"):
            lines.append(f"mount -o remount,bind,ro {place}")
    words = [*about["command"], *about.get("args", ())]
    words = [word.replace(NAMED, pod.address) for word in words]
    # The registry on loopback has no certificate.
    words += ["--insecure"] if "pull" in words else []
    named = {one["name"]: one["value"] for one in about["env"]}
    environment = [f"{k}={v}" for k, v in {**pod.stage.environment, **named}.items()]
    context = pod.spec["securityContext"]
    user = f"{context['runAsUser']}:{context['runAsGroup']}"
    service = f"cd {pod.stage.settings['WORKDIR']} && exec {shlex.join(words)}"
    enter = [run.CHROOT, f"--userspec={user}", f"--groups={context['fsGroup']}"]
    lines.append(
        f"exec {shlex.join(['env', '-i', *environment, *enter, str(pod.stage.root)])}"
        f" /bin/sh -c {shlex.quote(service)} >{shlex.quote(str(log))} 2>&1"
    )
    return "\n".join(lines)


def start(pod: Pod) -> subprocess.Popen[bytes]:
    """The init containers, then the server, in one mount namespace."""
    lines = volumes(pod)
    for number, about in enumerate(pod.spec["initContainers"]):
        inner = container(pod, about, log=pod.folder / f"init-{number}.log")
        lines.append(f"unshare --mount sh -ec {shlex.quote(inner)}")
    [server] = pod.spec["containers"]
    lines.append(container(pod, server, log=pod.folder / "server.log"))
    return subprocess.Popen(["unshare", "--mount", "sh", "-ec", "\n".join(lines)])


def served(pod: Pod) -> str:
    """A start that must become ready, answer, and end with SIGTERM."""
    [server] = pod.spec["containers"]
    if server["readinessProbe"]["httpGet"] != {"path": "/ready", "port": 8000}:
        raise SystemExit("the readiness probe asks elsewhere")
    began = time.perf_counter()
    process = start(pod)
    try:
        run.wait_until_ready(process, pod.folder / "server.log")
        seconds = time.perf_counter() - began
        answer = run.ask({"input_ids": [[101, 7592, 102]]})
    except FileNotFoundError:
        said = (pod.folder / "init-0.log").read_text()
        raise SystemExit(f"an init container ended the start: {said}") from None
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
    if code or len(answer["embeddings"][0]) != 384:
        raise SystemExit(f"exit code {code}, {answer}")
    return f"ready after {seconds:.1f} s, an embedding, exit code 0"


def refused(pod: Pod) -> str:
    """A start whose init container must refuse an older serial."""
    code = start(pod).wait(120)
    said = (pod.folder / "init-0.log").read_text()
    if code != 11 or "serial" not in said or (pod.folder / "server.log").exists():
        raise SystemExit(f"exit code {code}: {said}")
    reason = next(line for line in said.splitlines() if "serial" in line)
    return f"init container ends with exit code {code}: {reason.strip()}"


def demanding(spec: dict[str, Any], serial: str) -> dict[str, Any]:
    """The pod with another COMPILEKIT_MIN_SERIAL."""
    changed: dict[str, Any] = json.loads(json.dumps(spec))
    for about in (*changed["initContainers"], *changed["containers"]):
        for one in about["env"]:
            if one["name"] == "COMPILEKIT_MIN_SERIAL":
                one["value"] = serial
    return changed


def main(folder: Path, deployment: Path) -> int:
    """Push, start, refuse."""
    exit_on_sigterm()
    described = json.loads((folder / "image.json").read_text())
    stage = run.Stage(**{**described, "root": Path(described["root"])})
    manifest = yaml.safe_load(deployment.read_text(encoding="utf-8"))
    spec = manifest["spec"]["template"]["spec"]
    for mount in (m for c in spec["containers"] for m in c["volumeMounts"]):
        place = run.inside(stage.root, mount["mountPath"])
        if "subPath" in mount:
            place.parent.mkdir(exist_ok=True)
            place.touch()
        else:
            place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compilekit-deploy-") as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        key = scratch / "release.key"
        public = Path(f"{key}.pub")
        for words in (
            ["openssl", "genpkey", "-algorithm", "ed25519", "-out", key],
            ["openssl", "pkey", "-in", key, "-pubout", "-out", public],
        ):
            subprocess.run(words, check=True, capture_output=True)
        with registry(scratch) as (address, _):
            push = ["push", stage.root / "model" / "artifact", "--key", key]
            push += ["--serial", "1", "--insecure", f"{address}/team/minilm:1"]
            subprocess.run(
                [sys.executable, "-m", "compilekit", *map(str, push)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                check=True,
            )
            for what, end, pod in (
                ("as it stands", served, spec),
                ("serial 2 demanded", refused, demanding(spec, "2")),
            ):
                place = scratch / what.replace(" ", "-")
                place.mkdir()
                print(f"{what}: {end(Pod(stage, pod, place, address, public))}")
    return 0


if __name__ == "__main__":
    given = [Path(word).resolve() for word in sys.argv[1:]]
    sys.exit(main(given[0], *(given[1:] or [DEPLOYMENT])))
