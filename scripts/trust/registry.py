"""Push to a real registry, look with skopeo, and pull what must be refused.

    python scripts/trust/registry.py ARTIFACT

Debian's `docker-registry` serves on loopback; `umoci` unpacks what was pushed as an image.
Each line shows a command, its exit code and what it said; at the end stands how many
weren't as expected.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from termination import exit_on_sigterm

ROOT = Path(__file__).parents[2]
CONFIG = """\
version: 0.1
storage: {filesystem: {rootdirectory: %s}}
http: {addr: "127.0.0.1:%d"}
"""


class Script:
    """Runs commands in a folder, shows them, and counts what wasn't as expected."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wrong = 0
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("COMPILEKIT_")},
            "PYTHONPATH": str(ROOT),
            "DOCKER_CONFIG": str(folder),
        }

    def __call__(self, *words: object, code: int = 0, says: str = "") -> str:
        """Run one command that must end with this exit code and say that."""
        command = [str(word) for word in words]
        program = (
            [sys.executable, "-m", "compilekit"]
            if command[0] == "compilekit"
            else command[:1]
        )
        done = subprocess.run(
            [*program, *command[1:]],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        good = done.returncode == code and says in done.stdout + done.stderr
        self.wrong += not good
        said = (done.stdout if code == 0 else done.stderr).strip().splitlines()
        print(
            f"$ {shlex.join(command)}\n  exit code {done.returncode}{'' if good else '  WRONG'}"
        )
        for line in said[:6]:
            print(f"  {line[:150]}")
        sys.stdout.flush()
        return done.stdout


@contextmanager
def registry(folder: Path) -> Iterator[tuple[str, Path]]:
    """Debian's registry: its address, and where it keeps blobs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    storage, config = folder / "storage", folder / "registry.yml"
    config.write_text(CONFIG % (storage, port))
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        ["docker-registry", "serve", str(config)], stdout=quiet, stderr=quiet
    )
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/").close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"127.0.0.1:{port}", storage
    finally:
        server.terminate()
        server.wait()


def blob(storage: Path, digest: str) -> Path:
    """Where the registry keeps a blob."""
    return next(storage.rglob(f"{digest.removeprefix('sha256:')}/data"))


def put_layer(address: str, name: str, manifest: dict[str, Any], data: bytes) -> None:
    """Push a layer of somebody's own making under a tag, sealed as it should be."""
    base = f"http://{address}/v2/{name}"
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    start = urllib.request.Request(f"{base}/blobs/uploads/", b"", method="POST")
    with urllib.request.urlopen(start) as answer:
        place = answer.headers["Location"]
    place = place if place.startswith("http") else f"http://{address}{place}"
    kind = {"Content-Type": "application/octet-stream"}
    url = f"{place}{'&' if '?' in place else '?'}digest={digest}"
    urllib.request.urlopen(
        urllib.request.Request(url, data, kind, method="PUT")
    ).close()
    layer = {**manifest["layers"][0], "digest": digest, "size": len(data)}
    text = json.dumps({**manifest, "layers": [layer]}).encode()
    kind = {"Content-Type": manifest["mediaType"]}
    url = f"{base}/manifests/hostile"
    urllib.request.urlopen(
        urllib.request.Request(url, text, kind, method="PUT")
    ).close()


def hostile(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Archives that want to write elsewhere, or to be more than they are."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(m, archive.extractfile(m).read()) for m in archive]  # type: ignore[union-attr]

    def packed(*more: tuple[tarfile.TarInfo, bytes]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for member, content in (*members, *more):
                archive.addfile(member, io.BytesIO(content))
        return out.getvalue()

    def member(
        name: str, kind: bytes = tarfile.REGTYPE, link: str = ""
    ) -> tarfile.TarInfo:
        made = tarfile.TarInfo(name)
        made.type, made.linkname, made.size = kind, link, 0 if link else 4
        return made

    yield "a path that leaves", packed((member("artifact/../../evil"), b"evil"))
    yield "an absolute path", packed((member("/tmp/evil"), b"evil"))
    yield (
        "a link",
        packed((member("artifact/kernels/x.so", tarfile.SYMTYPE, "/etc"), b"")),
    )
    yield "a file twice", packed((member("artifact/manifest.json"), b"evil"))
    yield "a device", packed((member("artifact/null", tarfile.CHRTYPE), b"evil"))


def main(given: str) -> int:
    """The whole story; the number of wrong ends decides."""
    for program in ("docker-registry", "skopeo", "umoci", "openssl"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} isn't installed")
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="compilekit-registry-") as name:
        folder = Path(name)
        script = Script(folder)
        artifact = folder / "artifact"
        shutil.copytree(given, artifact)
        for key in ("release", "other"):
            script("openssl", "genpkey", "-algorithm", "ed25519", "-out", f"{key}.key")
            script(
                "openssl", "pkey", "-in", f"{key}.key", "-pubout", "-out", f"{key}.pub"
            )
            os.chmod(folder / f"{key}.pub", 0o644)
        with registry(folder) as (address, storage):
            story(script, artifact, address, storage)
        print(f"{script.wrong} commands ended otherwise than expected")
        return 1 if script.wrong else 0


def story(script: Script, artifact: Path, address: str, storage: Path) -> None:
    """Every command in order."""
    model, trust = f"{address}/team/model", ["--require-signature", "release.pub"]
    push = ["compilekit", "push", artifact, "--insecure", "--key", "release.key"]
    pull = ["compilekit", "pull", "--insecure", "-o", "out"]
    copy = f"docker://{model}"
    script(*push, f"{model}:1", "--serial", "1")
    script(*push, f"{model}:2", "--serial", "2")
    text = script("skopeo", "inspect", "--tls-verify=false", "--raw", f"{copy}:2")
    manifest = json.loads(text)
    script("skopeo", "list-tags", "--tls-verify=false", copy, says='"2"')
    script("skopeo", "copy", "--src-tls-verify=false", f"{copy}:2", "dir:copied")
    script(*pull, f"{model}:2", *trust, "--min-serial", "2")
    script(
        "compilekit", "verify-signature", "out", "--key", "release.pub", says="serial"
    )
    shutil.rmtree(script.folder / "out")
    (script.folder / "out.signature.json").unlink()
    print("\nA wrong signature, an older serial, another digest:")
    script(*pull, f"{model}:2", "--require-signature", "other.pub", code=11)
    script(*pull, f"{model}:1", *trust, "--min-serial", "2", code=11, says="serial")
    script(*pull, f"{model}:2", "--expect-digest", "0" * 64, code=5)
    print("\nHostile archives, with good digests in the registry:")
    data = blob(storage, manifest["layers"][0]["digest"]).read_bytes()
    for what, evil in hostile(data):
        put_layer(address, "team/model", manifest, evil)
        print(f"# {what}")
        script(*pull, f"{model}:hostile", *trust, code=5)
    print("\nA layer changed on the registry's disk:")
    place = blob(storage, manifest["layers"][0]["digest"])
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    place.write_bytes(changed)
    script(*pull, f"{model}:2", *trust, code=5)
    left = [path.name for path in script.folder.glob("*out*")]
    if left or Path("/tmp/evil").exists():
        script.wrong += 1
        print(f"WRONG: {left} was left")
    target = manifest["layers"][0]["annotations"]["io.compilekit.target"]
    image(script, [*push, "--mcv", "--target", target], f"{address}/team/carrier:1")


def image(script: Script, push: Sequence[object], carrier: str) -> None:
    """Push as an image, and unpack it by hand as MCV does, then by umoci."""
    print("\nAn image for Red Hat's Model Cache Vault:")
    script(*push, carrier)
    copy = ["skopeo", "copy", "--src-tls-verify=false", f"docker://{carrier}"]
    said = script("skopeo", "inspect", "--tls-verify=false", copy[-1])
    labels = json.loads(said)["Labels"]
    for label, value in labels.items():
        print(f"  {label} = {value}")
    script(*copy, "dir:carried")
    layer = json.loads(said)["Layers"][0].removeprefix("sha256:")
    script("mkdir", "node")
    script("tar", "xzf", f"carried/{layer}", "-C", "node")
    script(*copy, "oci:layout:1")
    script("umoci", "unpack", "--image", "layout:1", "bundle")
    for root in ("node", "bundle/rootfs"):
        cache = f"{root}/io.triton.cache"
        verify = ["verify-signature", f"{cache}/artifact", "--key", "release.pub"]
        script("compilekit", *verify)
        files = [path for path in (script.folder / cache).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if str(size) != labels["cache.triton.image/cache-size-bytes"]:
            script.wrong += 1
            print(f"WRONG: {size} bytes were extracted")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
