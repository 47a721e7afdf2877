"""push and pull, against a small registry and, where it's installed, Debian's."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import socket
import subprocess
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import golden
import oras.client
import oras.decorator
import pytest
from registry_store import Store
from test_combine import V4, retargeted
from test_signature import make_keys

from compilekit import registry, targets
from compilekit.artifact import Artifact, edit, write_artifact
from compilekit.cli import run
from compilekit.compiler import attest
from compilekit.errors import (
    ConfigError,
    DigestError,
    ManifestError,
    MismatchError,
    ResourceError,
)
from compilekit.registry import carrier, remote


class Patient:
    """A clock on which every pause between attempts is over at once."""

    @staticmethod
    def sleep(_: float) -> None:
        """No pause."""


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's docker login, and no pause between attempts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr(oras.decorator, "time", Patient)


@pytest.fixture
def store() -> Iterator[Store]:
    """A registry in this process."""
    server = Store()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def both(tmp_path: Path) -> Artifact:
    """An artifact for two targets."""
    one, two = golden.write(tmp_path / "one"), retargeted(tmp_path / "two")
    return write_artifact(tmp_path / "both", *edit.merge([one, two]))


@pytest.fixture
def pushed(store: Store, both: Artifact) -> str:
    """It, in the registry."""
    reference = f"{store.address}/team/model:1"
    registry.push(both, reference, insecure=True)
    store.gets.clear()
    return reference


def test_a_pull_takes_one_layer(
    pushed: str, store: Store, both: Artifact, tmp_path: Path
) -> None:
    """Of two targets one is fetched; it is the artifact that prune makes."""
    out = tmp_path / "out" / "artifact"
    artifact = registry.pull(pushed, out, target=V4, insecure=True)
    assert list(artifact.manifest.targets) == [V4]
    manifest = json.loads(store.manifests["1"])
    layers = {one["annotations"][registry.TARGET]: one for one in manifest["layers"]}
    assert store.gets == ["1", manifest["config"]["digest"], layers[V4]["digest"]]
    again = write_artifact(tmp_path / "again", *edit.prune(both, targets=[V4]))
    assert artifact.digest == again.digest
    assert [p.name for p in out.parent.iterdir()] == ["artifact"]


@pytest.mark.parametrize("name", ["Team/model:1", "team//model:1", "team/model:a b"])
def test_a_name_that_no_registry_takes(name: str, tmp_path: Path) -> None:
    """Refused before anything is sent: a registry would answer with a page of text."""
    with pytest.raises(ConfigError, match=r"expected registry/repository:tag"):
        registry.pull(f"127.0.0.1:1/{name}", tmp_path / "out", insecure=True)


def test_an_image_is_no_artifact(store: Store, both: Artifact, tmp_path: Path) -> None:
    """What push --mcv made is for other tools, and pull says so."""
    reference = f"{store.address}/team/carried:1"
    carrier.push_carrier(both, reference, target=V4, insecure=True)
    with pytest.raises(ManifestError, match="found another kind: artifactType None"):
        registry.pull(reference, tmp_path / "out", insecure=True)


def test_a_serial_without_a_signature(store: Store, both: Artifact) -> None:
    """It would be in nothing that was pushed."""
    name = f"{store.address}/team/model:1"
    assert run(["push", str(both.root), name, "--insecure", "--serial", "4"]) == 2
    assert not store.manifests


def test_the_best_target_is_chosen(
    pushed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By machine; none that fits is a mismatch, a misspelt one names the others."""
    found = registry.pull(pushed, tmp_path / "a", insecure=True)
    assert len(found.manifest.targets) == 1
    monkeypatch.setattr(targets, "machine", lambda: "riscv64")
    with pytest.raises(MismatchError):
        registry.pull(pushed, tmp_path / "b", insecure=True)
    with pytest.raises(ConfigError, match=V4):
        registry.pull(pushed, tmp_path / "b", target="nvidia-h300", insecure=True)
    assert not (tmp_path / "b").exists()


def test_features_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target with the most features that are all there."""
    monkeypatch.setattr(targets, "machine", lambda: "x86_64")
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    cpu = {"kind": "cpu", "machine": "x86_64"}
    described = {
        "v2": {**cpu, "features": []},
        "v3": {**cpu, "features": ["avx2"]},
        "v4": {**cpu, "features": ["avx2", "avx512f"]},
        "gpu": {"kind": "cuda"},
    }
    assert registry._choose(described) == "v3"


def test_push_again_sends_nothing(pushed: str, store: Store, both: Artifact) -> None:
    """Blobs that are there aren't sent twice, and the manifest is the same."""
    before, uploads = store.manifests["1"], store.uploads
    registry.push(both, pushed, insecure=True)
    assert (store.manifests["1"], store.uploads) == (before, uploads)


def test_a_broken_push_is_resumed_blob_by_blob(store: Store, both: Artifact) -> None:
    """What had arrived isn't sent again; until all has, there is no manifest."""
    reference = f"{store.address}/team/model:1"
    store.full_after = 2
    with pytest.raises(ResourceError, match="507"):
        registry.push(both, reference, insecure=True)
    arrived = dict(store.blobs)
    assert (store.uploads, len(arrived), store.manifests) == (2, 2, {})
    store.full_after = 3
    registry.push(both, reference, insecure=True)
    assert store.uploads == len(store.blobs) == 3
    assert "1" in store.manifests


def test_a_broken_pull_is_continued(
    pushed: str, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the byte that was missing; one that can't be is named, nothing is left."""
    monkeypatch.setattr(remote, "_CHUNK", 1000)
    layer = layer_of(store, V4)
    store.breaks_after = len(store.blobs[layer]) // 3
    out = tmp_path / "out" / "artifact"
    artifact = registry.pull(pushed, out, target=V4, insecure=True)
    assert artifact.parse_all().manifest.targets.keys() == {V4}
    assert store.gets.count(layer) == 4
    shutil.rmtree(out)
    store.continues = False
    with pytest.raises(ResourceError, match="can't be continued"):
        registry.pull(pushed, out, target=V4, insecure=True)
    store.continues, store.breaks_after = True, 999
    with pytest.raises(ResourceError, match="IncompleteRead"):
        registry.pull(pushed, out, target=V4, insecure=True)
    assert list(out.parent.iterdir()) == []


def test_by_digest(pushed: str, store: Store, tmp_path: Path) -> None:
    """A reference with a digest takes that manifest and no other."""
    data = store.manifests["1"]
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    reference = pushed.replace(":1", f"@{digest}") if pushed.endswith(":1") else ""
    registry.pull(reference, tmp_path / "a", target=V4, insecure=True)
    store.manifests[digest] = data + b" "
    with pytest.raises(DigestError, match="manifest of"):
        registry.pull(reference, tmp_path / "b", target=V4, insecure=True)


def layer_of(store: Store, target: str) -> str:
    """Digest of a target's layer."""
    manifest = json.loads(store.manifests["1"])
    return next(
        one["digest"]
        for one in manifest["layers"]
        if one["annotations"][registry.TARGET] == target
    )


@pytest.mark.parametrize("change", ["flip", "cut", "grow", "swap", "gone"])
def test_a_tampered_layer(
    change: str, pushed: str, store: Store, tmp_path: Path
) -> None:
    """Another byte, fewer, more, another layer's bytes, none: nothing appears."""
    digest = layer_of(store, V4)
    data = store.blobs[digest]
    store.blobs[digest] = {
        "flip": data[:700] + bytes([data[700] ^ 1]) + data[701:],
        "cut": data[:-512],
        "grow": data + b"\0" * 512,
        "swap": store.blobs[layer_of(store, golden.TARGET)],
        "gone": b"",
    }[change]
    out = tmp_path / "out" / "artifact"
    with pytest.raises(DigestError):
        registry.pull(pushed, out, target=V4, insecure=True)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 50_000,
        b'{"layers": [{}], "config": {}}',
        b'{"layers": 7, "config": {}}',
    ],
)
def test_another_manifest(
    manifest: bytes, pushed: str, store: Store, tmp_path: Path
) -> None:
    """An image that isn't ours, or junk, is refused by name."""
    store.manifests["1"] = manifest
    with pytest.raises(ManifestError, match="compilekit push"):
        registry.pull(pushed, tmp_path / "a", insecure=True)


@pytest.mark.parametrize("size", ["1e999", "-5", '"x"', "null", str(10**30), "[]"])
def test_a_size_that_is_none(
    size: str, pushed: str, store: Store, tmp_path: Path
) -> None:
    """Whatever a manifest says of a layer's size is refused as the layer would be."""
    text = json.loads(store.manifests["1"])
    for layer in text["layers"]:
        layer["size"] = "SIZE"
    changed = json.dumps(text).replace('"SIZE"', size)
    store.manifests["1"] = changed.encode()
    with pytest.raises((ManifestError, DigestError, ResourceError)):
        registry.pull(pushed, tmp_path / "out" / "a", target=V4, insecure=True)
    assert list((tmp_path).glob("out/*")) == []


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"7",
        b"[" * 50_000,
        b'{"targets": 7}',
        b'{"targets": {"t": {"kind": "cpu"}}}',
        b'{"targets": {"t": {"kind": "cpu", "machine": "x86_64", "features": [[]]}}}',
        b'{"targets": {"t": {"kind": "cpu", "machine": "x86_64", "features": 7}}}',
    ],
)
def test_a_hostile_config_with_a_good_digest(
    config: bytes,
    pushed: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a pull chooses by is no more trusted than the rest."""
    monkeypatch.setattr(targets, "machine", lambda: "x86_64")
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    store.blobs[digest] = config
    text = json.loads(store.manifests["1"])
    text["config"]["digest"] = digest
    store.manifests["1"] = json.dumps(text).encode()
    with pytest.raises(ManifestError, match="compilekit push"):
        registry.pull(pushed, tmp_path / "a", insecure=True)


def test_a_hostile_layer_with_a_good_digest(
    pushed: str, store: Store, tmp_path: Path
) -> None:
    """A registry that seals what it tampered with meets the artifact's own digests."""
    digest = layer_of(store, V4)
    evil = store.blobs[digest].replace(b"def call(args):", b"import os     ;")
    sealed = f"sha256:{hashlib.sha256(evil).hexdigest()}"
    store.blobs[sealed] = evil
    text = store.manifests["1"].decode()
    store.manifests["1"] = text.replace(digest, sealed).encode()
    with pytest.raises(DigestError, match=rf"{pushed}(?s:.*)call\.py"):
        registry.pull(pushed, tmp_path / "a", target=V4, insecure=True)
    assert not (tmp_path / "a").exists()


def test_signatures_travel(
    store: Store,
    both: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """push --key signs each part; another key, an older serial and none are refused."""
    private, public = map(str, make_keys(tmp_path))
    _, other = map(str, make_keys(tmp_path, "other"))
    name, out = f"{store.address}/team/model", str(tmp_path / "out")
    words = ["push", str(both.root), f"{name}:1", "--insecure"]
    assert run([*words, "--key", private, "--serial", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["result"]["layers"]) == 2
    words = ["pull", f"{name}:1", "--insecure", "-o", out, "--target", V4]
    assert run([*words, "--require-signature", other]) == 11
    assert run([*words, "--require-signature", public, "--min-serial", "5"]) == 11
    assert run([*words, "--expect-digest", "0" * 64]) == 5
    assert not Path(out).exists()
    assert run([*words, "--require-signature", public, "--min-serial", "4"]) == 0
    assert run(["verify-signature", out, "--key", public]) == 0
    registry.push(both, f"{name}:2", insecure=True)
    words[1] = f"{name}:2"
    assert run([*words, "--require-signature", public]) == 11


def test_records_of_a_single_target_travel(store: Store, tmp_path: Path) -> None:
    """With one target the artifact keeps its digest, verification and signature."""
    one = golden.write(tmp_path / "artifact")
    golden.write_verification(one, {golden.TARGET: golden.verified()})
    reference = f"{store.address}/one:1"
    registry.push(one, reference, insecure=True)
    out = registry.pull(
        reference, tmp_path / "out", target=golden.TARGET, insecure=True
    )
    assert out.digest == one.digest
    assert (tmp_path / "out.verified.json").is_file()


def test_attestations_travel(store: Store, tmp_path: Path) -> None:
    """Provenance and bill lie beside the targets' layers; a pull takes its own only."""
    assert set(registry.ATTESTATIONS) == {attest.PROVENANCE, attest.SBOM}
    documents = {
        path: f'{{"of": "{path}"}}\n'.encode() for path in registry.ATTESTATIONS
    }
    one = write_artifact(
        tmp_path / "artifact", golden.parts(), golden.files(), documents
    )
    reference = f"{store.address}/one:1"
    pushed = registry.push(one, reference, insecure=True)
    assert [layer.target for layer in pushed.layers] == [golden.TARGET]
    described = json.loads(store.manifests["1"])["layers"]
    assert [layer["mediaType"] for layer in described[1:]] == [
        "application/vnd.in-toto+json",
        "application/vnd.cyclonedx+json",
    ]
    found = [store.blobs[layer["digest"]] for layer in described[1:]]
    assert found == list(documents.values())
    out = registry.pull(
        reference, tmp_path / "out", target=golden.TARGET, insecure=True
    )
    assert (out.digest, dict(out.reports)) == (one.digest, {})


def test_no_registry(both: Artifact, tmp_path: Path) -> None:
    """Nobody listens; nothing under this name; no name: each is said."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceError, match=nobody):
            registry.push(both, f"{nobody}/m:1", insecure=True)
    with pytest.raises(ConfigError):
        registry.pull("", tmp_path / "a", insecure=True)


def test_each_failed_attempt_is_said(
    both: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    """oras tries for two minutes, in which nobody would know why nothing happens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceError):
            registry.push(both, f"{nobody}/m:1", insecure=True)
    said = [one.getMessage() for one in caplog.records if one.name == remote.__name__]
    assert len(said) > 1
    assert all(nobody in one and "refused" in one for one in said)


def test_a_registry_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep an init container for ever."""
    monkeypatch.setattr(remote, "_TIMEOUT", (5, 0.05))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        reference = f"127.0.0.1:{silent.getsockname()[1]}/m:1"
        with pytest.raises(ResourceError, match="timed out"):
            registry.pull(reference, tmp_path / "a", insecure=True)


def test_unknown_tag(store: Store, tmp_path: Path) -> None:
    """The registry's answer is in the message."""
    with pytest.raises(ResourceError, match="404"):
        registry.pull(f"{store.address}/m:1", tmp_path / "a", insecure=True)


def test_without_the_package(both: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    import sys

    monkeypatch.setitem(sys.modules, "oras.client", None)
    with pytest.raises(ResourceError) as caught:
        registry.push(both, "127.0.0.1:1/m:1")
    assert "compilekit[oci]" in caught.value.hint


# --- MCV's images --------------------------------------------------------------------


def carried(store: Store) -> tuple[dict[str, str], bytes]:
    """Labels and layer of the image in the registry."""
    manifest = json.loads(store.manifests["1"])
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
    image = json.loads(store.blobs[manifest["config"]["digest"]])
    data = gzip.decompress(store.blobs[layer["digest"]])
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert image["rootfs"]["diff_ids"] == [digest]
    labels: dict[str, str] = image["config"]["Labels"]
    return labels, data


def test_an_image_for_mcv(
    store: Store,
    both: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a node extracts from it is the signed artifact; labels say how large."""
    private, public = map(str, make_keys(tmp_path))
    words = ["push", str(both.root), f"{store.address}/carrier:1", "--insecure"]
    assert run([*words, "--mcv", "--target", V4, "--key", private, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    labels, data = carried(store)
    assert result["labels"] == labels
    with tarfile.open(fileobj=io.BytesIO(data)) as layer:
        names = layer.getnames()
    # Not by extractall: a Python before 3.11.4 has no filter, and 3.12 asks for one.
    (tmp_path / "layer.tar").write_bytes(data)
    (tmp_path / "node").mkdir()
    node = ["-C", str(tmp_path / "node")]
    subprocess.run(["tar", "-xf", str(tmp_path / "layer.tar"), *node], check=True)
    assert names[0] == "io.triton.cache"
    assert "io.triton.manifest/manifest.json" in names
    cache = tmp_path / "node" / "io.triton.cache"
    sizes = [path.stat().st_size for path in cache.rglob("*") if path.is_file()]
    assert labels["cache.triton.image/cache-size-bytes"] == str(sum(sizes))
    assert labels["cache.triton.image/entry-count"] == "2"
    summary = json.loads(labels["cache.triton.image/summary"])
    assert summary["targets"][0]["backend"] == "cpu"
    assert run(["verify-signature", str(cache / "artifact"), "--key", public]) == 0
    before = store.manifests["1"]
    assert run([*words, "--mcv", "--target", V4, "--key", private]) == 0
    assert store.manifests["1"] == before


def test_labels_of_a_gpu(both: Artifact) -> None:
    """Backend, compute capability and warp size, as MCV compares them."""
    device = dict(targets.load_target("nvidia-h200").device)
    described = {"nvidia-h200": {"kind": "cuda", "device": device}}
    both.manifest = both.manifest._replace(targets=described)
    labels = carrier.mcv_labels(both, "nvidia-h200", 7)
    assert labels["cache.triton.image/summary"] == (
        '{"targets":[{"backend":"cuda","arch":"90","warp_size":32}]}'
    )
    assert labels["io.compilekit.digest"] == both.digest


def test_an_image_for_mcv_holds_one_target(
    store: Store, both: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several, one must be named; without --mcv there is nothing to choose."""
    words = ["push", str(both.root), f"{store.address}/carrier:1", "--insecure"]
    assert run([*words, "--mcv"]) == 2
    assert V4 in capsys.readouterr().err
    assert run([*words, "--target", V4]) == 2
    assert store.manifests == {}


CONFIG = """\
version: 0.1
storage: {filesystem: {rootdirectory: %s}}
http: {addr: "127.0.0.1:%d"}
"""


@pytest.mark.skipif(
    shutil.which("docker-registry") is None, reason="docker-registry isn't installed"
)
def test_debians_registry(both: Artifact, tmp_path: Path) -> None:
    """A real registry gives back what it took, unless a blob changed on its disk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    storage, config = tmp_path / "storage", tmp_path / "config.yml"
    config.write_text(CONFIG % (storage, port))
    server = subprocess.Popen(
        ["docker-registry", "serve", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port)
        reference = f"127.0.0.1:{port}/team/model:1"
        made = registry.push(both, reference, insecure=True)
        out = registry.pull(reference, tmp_path / "a", target=V4, insecure=True)
        layer = next(one for one in made.layers if one.target == V4)
        assert out.digest == layer.digest
        by_digest = re.sub(":1$", f"@{made.manifest}", reference)
        again = registry.pull(by_digest, tmp_path / "b", target=V4, insecure=True)
        assert again.digest == out.digest
        name = layer.layer.removeprefix("sha256:")
        blob = next(storage.rglob(f"{name}/data"))
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
        with pytest.raises(DigestError):
            registry.pull(reference, tmp_path / "c", target=V4, insecure=True)
        assert not (tmp_path / "c").exists()
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    """Until the registry answers."""
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/"):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the registry doesn't answer")
