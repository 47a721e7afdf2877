"""Signatures: what is signed, what is refused, and that nothing runs before."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from compilekit.artifact import Artifact, archive, open_artifact
from compilekit.cli import run
from compilekit.errors import (
    AttachError,
    CompilekitError,
    ConfigError,
    DigestError,
    ResourceError,
    SignatureError,
)
from compilekit.runtime import kernelfile, program
from compilekit.runtime.requirements import open_required
from compilekit.trust import places, policy, signature
from compilekit.trust.places import why_writable
from compilekit.trust.policy import Trust, open_trusted

VARIABLES = ("ARTIFACT", "EXPECT_DIGEST", "REQUIRE_SIGNATURE", "MIN_SERIAL")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No demand of the machine that runs the tests, and none left behind."""
    for name in VARIABLES:
        monkeypatch.setenv(f"COMPILEKIT_{name}", "")


def make_keys(folder: Path, name: str = "release") -> tuple[Path, Path]:
    """A pair of PEM files: private, public."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    # Whatever the umask: a key that others can write is refused.
    os.chmod(public, 0o644)
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """The release key."""
    return make_keys(tmp_path)


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Artifact:
    """The golden artifact, signed with serial 7."""
    artifact = golden.write(tmp_path / "artifact")
    signature.sign(artifact, keys[0], 7)
    return artifact


def refused(path: Path, public: Path, min_serial: int = 0) -> SignatureError:
    """Open what must be refused for its signature."""
    with pytest.raises(SignatureError) as caught:
        open_trusted(path, Trust(key_file=str(public), min_serial=min_serial))
    assert caught.value.exit_code == 11
    assert str(path) in caught.value.message
    return caught.value


def edit(artifact: Artifact, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record as somebody without the key could."""
    path = signature.record_path(artifact.root)
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


# --- The record ----------------------------------------------------------------------


def test_signed_artifact_opens(signed: Artifact, keys: tuple[Path, Path]) -> None:
    """The digest is as before, and the record lies beside the artifact."""
    opened = open_trusted(signed.root, Trust(signed.digest, str(keys[1]), 7))
    assert opened.digest == golden.write(signed.root.parent / "again").digest
    assert signature.record_path(signed.root).name == "artifact.signature.json"


def test_what_is_signed_is_documented(
    signed: Artifact, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    """OpenSSL alone can check a signature: three lines of text, and 64 bytes."""
    import base64

    record = json.loads(signature.record_path(signed.root).read_text())
    message, bytes_ = tmp_path / "message", tmp_path / "bytes"
    message.write_text(f"compilekit-signature 1\nartifact {signed.digest}\nserial 7\n")
    bytes_.write_bytes(base64.b64decode(record["signatures"][0]["signature"]))
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin"]
    command += ["-inkey", str(keys[1]), "-in", str(message), "-sigfile", str(bytes_)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_without_a_record(signed: Artifact, keys: tuple[Path, Path]) -> None:
    """An unsigned artifact is refused."""
    signature.record_path(signed.root).unlink()
    assert "no record" in refused(signed.root, keys[1]).message


def test_by_another_key(signed: Artifact, tmp_path: Path) -> None:
    """A good signature by a key that isn't trusted counts for nothing."""
    _, public = make_keys(tmp_path, "other")
    assert "expected a signature by key" in refused(signed.root, public).message


def test_under_another_keys_name(
    signed: Artifact, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    """A stranger's signature under the trusted key's name is wrong."""
    private, _ = make_keys(tmp_path, "other")
    trusted = json.loads(signature.record_path(signed.root).read_text())
    signature.record_path(signed.root).unlink()
    signature.sign(signed, private, 7)
    name = trusted["signatures"][0]["key"]
    edit(signed, lambda record: record["signatures"][0].update(key=name))
    assert "is wrong" in refused(signed.root, keys[1]).message


def test_an_older_release(signed: Artifact, keys: tuple[Path, Path]) -> None:
    """An older serial is refused, and raising the number breaks the signature."""
    error = refused(signed.root, keys[1], min_serial=8)
    assert "expected serial 8 or newer, found 7" in error.message
    edit(signed, lambda record: record["signatures"][0].update(serial=8))
    assert "is wrong" in refused(signed.root, keys[1], min_serial=8).message


def test_a_record_of_another_artifact(
    signed: Artifact, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    """A signature of something else doesn't help, whatever digest it's put under."""
    other = golden.write_artifact(tmp_path / "other", golden.parts(), golden.variant(1))
    place = signature.record_path(other.root)
    shutil.copy(signature.record_path(signed.root), place)
    assert "found one of" in refused(other.root, keys[1]).message
    edit(other, lambda record: record.update(artifact=other.digest))
    assert "is wrong" in refused(other.root, keys[1]).message


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.pop("signatures"),
        lambda record: record.update(signatures=[]),
        lambda record: record.update(signatures={"key": 1}),
        lambda record: record.update(signatures=[7]),
        lambda record: record.update(schema=2),
        lambda record: record.update(artifact=None),
        lambda record: record["signatures"][0].update(serial=True),
        lambda record: record["signatures"][0].update(serial=-1),
        lambda record: record["signatures"][0].update(serial="7"),
        lambda record: record["signatures"][0].update(key="release"),
        lambda record: record["signatures"][0].update(signature="%%%"),
        lambda record: record["signatures"][0].update(signature=""),
        lambda record: record["signatures"][0].update(signature=7),
    ],
)
def test_a_malformed_record(
    signed: Artifact,
    keys: tuple[Path, Path],
    change: Callable[[dict[str, Any]], object],
) -> None:
    """Whatever a record holds, it is refused as a signature, never as a defect."""
    edit(signed, change)
    refused(signed.root, keys[1])


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b"[" * 60000, b"x" * 99999]
)
def test_a_record_that_is_none(
    signed: Artifact, keys: tuple[Path, Path], data: bytes
) -> None:
    """Junk, deep nesting and size included."""
    signature.record_path(signed.root).write_bytes(data)
    refused(signed.root, keys[1])


def test_a_pipe_as_record(signed: Artifact, keys: tuple[Path, Path]) -> None:
    """A named pipe doesn't hang the start."""
    signature.record_path(signed.root).unlink()
    os.mkfifo(signature.record_path(signed.root))
    refused(signed.root, keys[1])


def test_keys_take_over(signed: Artifact, tmp_path: Path) -> None:
    """Two keys sign one artifact; a file of two keys trusts either."""
    private, new = make_keys(tmp_path, "new")
    signature.sign(signed, private, 8)
    both = tmp_path / "both.pub"
    both.write_bytes((tmp_path / "release.pub").read_bytes() + new.read_bytes())
    os.chmod(both, 0o644)
    for file, serial in ((tmp_path / "release.pub", 7), (new, 8), (both, 8)):
        open_trusted(signed.root, Trust(key_file=str(file), min_serial=serial))
    refused(signed.root, tmp_path / "release.pub", min_serial=8)


def test_sign_again_replaces(signed: Artifact, keys: tuple[Path, Path]) -> None:
    """One key has one signature; a damaged record is replaced."""
    signature.sign(signed, keys[0], 9)
    record = json.loads(signature.record_path(signed.root).read_text())
    assert [one["serial"] for one in record["signatures"]] == [9]
    signature.record_path(signed.root).write_text("junk")
    signature.sign(signed, keys[0], 9)
    assert json.loads(signature.record_path(signed.root).read_text()) == record


# --- Keys ----------------------------------------------------------------------------


def test_keys_that_cannot_be_used(signed: Artifact, tmp_path: Path) -> None:
    """No PEM, a public key to sign with, a locked key, no file: each is named."""
    private, public = make_keys(tmp_path, "k")
    junk, locked = tmp_path / "junk", tmp_path / "locked"
    junk.write_text("hello")
    locked.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
        )
    )
    for file in (junk, public, locked):
        with pytest.raises(SignatureError, match=file.name):
            signature.sign(signed, file, 0)
    for file in (junk, private):
        with pytest.raises(SignatureError, match=file.name):
            signature.load_keys(file)
    with pytest.raises(ResourceError, match="No such file"):
        signature.load_keys(tmp_path / "missing")


def test_a_key_that_others_can_write(signed: Artifact, keys: tuple[Path, Path]) -> None:
    """Whoever can replace the key can sign: the file and its folders are looked at."""
    os.chmod(keys[1], 0o666)
    with pytest.raises(SignatureError, match="may be written by anyone"):
        open_trusted(signed.root, Trust(key_file=str(keys[1])))
    os.chmod(keys[1], 0o644)
    os.chmod(keys[1].parent, 0o775)
    with pytest.raises(SignatureError, match="may be written by group"):
        open_trusted(signed.root, Trust(key_file=str(keys[1])))


@pytest.mark.parametrize("chain", [["../key.pub"], ["middle", "../key.pub"]])
def test_a_link_to_a_key_that_others_can_turn(
    chain: list[str], signed: Artifact, tmp_path: Path
) -> None:
    """Neither a link in a folder that others can write nor one that they made will do,
    however good the key is that it leads to now."""
    _, public = make_keys(tmp_path, "good")
    public.rename(tmp_path / "key.pub")
    folder = tmp_path / "links"
    folder.mkdir()
    links = [folder / "release.pub", folder / "middle"]
    for place, target in zip(links, chain, strict=False):
        place.symlink_to(target)
    signature.load_keys(links[0])
    folder.chmod(0o777)
    with pytest.raises(SignatureError, match=f"{folder} may be written by anyone"):
        signature.load_keys(links[0])
    folder.chmod(0o1777)
    signature.load_keys(links[0])
    if os.geteuid() == 0:
        last = links[len(chain) - 1]
        os.lchown(last, 54321, 54321)
        with pytest.raises(SignatureError, match=f"{last} belongs to user 54321"):
            signature.load_keys(links[0])


def test_a_pipe_as_key(signed: Artifact, tmp_path: Path) -> None:
    """It doesn't hang the start."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ResourceError, match="expected a plain file"):
        open_trusted(signed.root, Trust(key_file=str(tmp_path / "pipe")))


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    """It ends, with the system's own reason."""
    (tmp_path / "k").symlink_to("k")
    with pytest.raises(ResourceError, match="symbolic links"):
        signature.load_keys(tmp_path / "k")
    assert "symbolic links" in places.why_replaceable(tmp_path / "k")


def test_without_the_package(
    signed: Artifact, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature that can't be checked is refused, with the extra's name."""
    hidden = [n for n in sys.modules if n.partition(".")[0] == "cryptography"]
    for name in {*hidden, "cryptography"}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SignatureError, match="cryptography") as caught:
        open_trusted(signed.root, Trust(key_file=str(keys[1])))
    assert "compilekit[sign]" in caught.value.hint


# --- Nothing before the signature ----------------------------------------------------


def test_refused_before_anything_is_parsed(
    signed: Artifact, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong signature is found from the manifest's bytes alone."""
    signature.record_path(signed.root).unlink()
    for module, name in (("manifest", "read_manifest"), ("canonical", "decode")):
        monkeypatch.setattr(f"compilekit.artifact.{module}.{name}", None)
    refused(signed.root, keys[1])


def test_manifest_with_two_digest_lines(
    signed: Artifact, keys: tuple[Path, Path]
) -> None:
    """What was approved is what is opened: a line that hides another is noticed."""
    place = signed.root / "manifest.json"
    data = place.read_bytes()
    line = b'\n  "digest": "'
    extra = line + b'0" : 0,'
    place.write_bytes(data.replace(line, extra + line))
    with pytest.raises(CompilekitError) as caught:
        open_trusted(signed.root, Trust(key_file=str(keys[1])))
    assert caught.value.exit_code in (5, 11)


def marker_pickle(marker: Path) -> bytes:
    """A pickle that makes a file when it's opened."""

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    return pickle.dumps(Payload())


@pytest.mark.parametrize("required", [False, True])
def test_a_pickle_never_runs(
    required: bool, signed: Artifact, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    """In the place of every file, records and key included: it isn't unpickled."""
    marker = tmp_path / "marker"
    payload = marker_pickle(marker)
    files = [path for path in signed.root.rglob("*") if path.is_file()]
    files.append(signature.record_path(signed.root))
    trust = Trust(key_file=str(keys[1]) if required else "")
    for path in files:
        before = path.read_bytes()
        path.write_bytes(payload)
        if path in files[:-1] or required:
            with pytest.raises(CompilekitError) as caught:
                open_trusted(signed.root, trust)
            assert caught.value.exit_code in (5, 11)
        path.write_bytes(before)
    open_trusted(signed.root, trust)
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists()


# --- Where the demands come from -----------------------------------------------------


def test_demands_come_from_the_environment(
    signed: Artifact, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attach opens is held to them, an artifact that was opened before too."""
    opened = open_artifact(signed.root)
    monkeypatch.setenv("COMPILEKIT_REQUIRE_SIGNATURE", str(keys[1]))
    assert open_required(signed.root).digest == signed.digest
    monkeypatch.setenv("COMPILEKIT_MIN_SERIAL", "8")
    for given in (opened, signed.root, str(signed.root)):
        with pytest.raises(SignatureError):
            open_required(given)
    monkeypatch.setenv("COMPILEKIT_MIN_SERIAL", "new")
    with pytest.raises(ConfigError, match="expected a number"):
        open_required(signed.root)


def test_a_serial_alone_demands_nothing(
    signed: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be taken for protection."""
    monkeypatch.setenv("COMPILEKIT_MIN_SERIAL", "3")
    with pytest.raises(ConfigError, match="require-signature"):
        open_required(signed.root)


def test_a_plain_start_imports_nothing_of_it() -> None:
    """Without a demand neither policy nor signatures nor cryptography are imported."""
    code = (
        "import sys, compilekit.runtime.attach as a; a.open_required(sys.argv[1]);"
        "print([m for m in sys.modules if m.startswith('cryptography')"
        " or m in ('compilekit.trust.policy', 'compilekit.trust.signature')])"
    )
    words = [sys.executable, "-c", code, str(golden.ARTIFACT)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEKIT_")}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=clean)
    assert done.stdout == "[]\n"


def test_command_line(
    signed: Artifact, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """sign, verify-signature, pack, unpack and load speak of one signature."""
    private, public = map(str, keys)
    root = str(signed.root)
    assert run(["sign", root, "--key", private, "--serial", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["serial"], result["digest"]) == (8, signed.digest)
    assert run(["verify-signature", root, "--key", public, "--min-serial", "8"]) == 0
    assert "serial\t8" in capsys.readouterr().out
    assert run(["verify-signature", root, "--key", public, "--min-serial", "9"]) == 11
    demand = ["--require-signature", public, "--min-serial", "9"]
    assert run(["load", root, *demand]) == 11
    file, out = f"{root}.tar", f"{root}.unpacked"
    assert run(["pack", root, "-o", file]) == 0
    assert run(["unpack", file, "-o", out, *demand]) == 11
    assert not os.path.exists(out)
    assert run(["unpack", file, "-o", out, "--expect-digest", "0" * 64]) == 5
    assert not os.path.exists(out)
    assert run(["unpack", file, "-o", out, *demand[:3], "8"]) == 0
    assert run(["verify-signature", out, "--key", public]) == 0


def test_unpack_asks_before_it_parses(
    signed: Artifact, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive without the signature is refused from its manifest's bytes."""
    file = archive.pack(signed, f"{signed.root}.tar").file
    _, other = make_keys(signed.root.parent, "other")
    demand = policy.approval(Trust(key_file=str(other)))
    monkeypatch.setattr("compilekit.artifact.manifest.read_manifest", None)
    with pytest.raises(SignatureError):
        archive.unpack(
            file,
            f"{signed.root}.out",
            lambda digest, record: demand(digest, record, str(file)),
        )


# --- Between check and use -----------------------------------------------------------

EXTENSION = """
#include <Python.h>
static PyObject *kernel(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"kernel", kernel, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", 0, -1, methods};
PyMODINIT_FUNC PyInit_kernel(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def make_native(tmp_path: Path) -> Callable[[int], tuple[Artifact, str]]:
    """Makes an artifact with a real kernel that answers a number; and its digest."""

    def make(answer: int) -> tuple[Artifact, str]:
        source, out = tmp_path / f"k{answer}.c", tmp_path / f"k{answer}.so"
        source.write_text(EXTENSION % answer)
        include = f"-I{sysconfig.get_path('include')}"
        command = ["cc", "-shared", "-fPIC", include, str(source), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        data = out.read_bytes()
        digest = golden.canonical.sha256(data)
        files = {**golden.files(), f"kernels/{digest}.so": data}
        artifact = golden.write_artifact(
            tmp_path / f"native{answer}", golden.parts(), files
        )
        return artifact, digest

    return make


def mapped() -> str:
    """What this process has mapped."""
    return Path("/proc/self/maps").read_text()


def test_kernels_are_mapped_in_place_where_only_we_can_write(
    make_native: Callable[[int], tuple[Artifact, str]],
) -> None:
    """All processes of a machine then share one copy."""
    artifact, digest = make_native(11)
    opened = open_trusted(artifact.root, Trust(digest=artifact.digest))
    assert not opened.from_memory
    assert program._load(opened, digest, "kernel").kernel() == 11
    assert str(opened.path(f"kernels/{digest}.so")) in mapped()


@pytest.mark.parametrize("place", ["kernels/{}.so", "kernels", ".", ".."])
def test_kernels_come_from_memory_where_others_can_write(
    place: str,
    make_native: Callable[[int], tuple[Artifact, str]],
    request: pytest.FixtureRequest,
) -> None:
    """A file, its folder, the artifact or a folder above it that others can write."""
    answer = 20 + len(place)
    artifact, digest = make_native(answer)
    os.chmod(artifact.root / place.format(digest), 0o777)
    opened = open_trusted(artifact.root, Trust(digest=artifact.digest))
    assert opened.from_memory
    assert program._load(opened, digest, "kernel").kernel() == answer
    assert str(artifact.root) not in mapped()
    assert f"memfd:{digest}"[:60] in mapped()


def test_without_a_demand_too(
    make_native: Callable[[int], tuple[Artifact, str]],
) -> None:
    """Nothing lies between the hash of a kernel and its use, whatever is demanded."""
    artifact, digest = make_native(27)
    for given in (artifact.root, open_artifact(artifact.root)):
        assert not open_required(given).from_memory
    os.chmod(artifact.root / "kernels", 0o777)
    for given in (artifact.root, open_artifact(artifact.root)):
        opened = open_required(given)
        assert opened.from_memory
    assert program._load(opened, digest, "kernel").kernel() == 27
    assert str(artifact.root) not in mapped()


def test_kernels_that_others_own_come_from_memory(
    make_native: Callable[[int], tuple[Artifact, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever owns a file can change it at any time."""
    artifact, digest = make_native(31)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if os.getuid() == 0:
        os.chown(artifact.root / f"kernels/{digest}.so", 54321, 54321)
    assert open_trusted(artifact.root, Trust(digest=artifact.digest)).from_memory


def test_a_kernel_that_changed_is_not_loaded(
    make_native: Callable[[int], tuple[Artifact, str]],
) -> None:
    """Bytes for private memory are hashed as they are read."""
    artifact, digest = make_native(41)
    os.chmod(artifact.root, 0o777)
    opened = open_trusted(artifact.root, Trust(digest=artifact.digest))
    path = opened.path(f"kernels/{digest}.so")
    path.write_bytes(path.read_bytes().replace(b"\0", b"\1", 1))
    with pytest.raises(DigestError):
        program._load(opened, digest, "kernel")


def test_two_kernels_from_memory_are_two(
    make_native: Callable[[int], tuple[Artifact, str]],
) -> None:
    """The loader knows a library by its path, and descriptors' numbers come again."""
    answers = []
    for answer in (51, 52, 53):
        artifact, digest = make_native(answer)
        artifact.from_memory = True
        answers.append(program._load(artifact, digest, "kernel").kernel())
    assert answers == [51, 52, 53]


def test_noexec_needs_no_writable_disk(
    make_native: Callable[[int], tuple[Artifact, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a file system mounted noexec kernels are loaded from memory."""
    artifact, digest = make_native(61)
    monkeypatch.setattr(kernelfile, "is_noexec", lambda _: True)
    assert program._load(artifact, digest, "kernel").kernel() == 61
    assert f"memfd:{digest}"[:60] in mapped()


def test_a_kernel_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    """The error names the artifact's file, not the descriptor it came from."""
    artifact = golden.write(tmp_path / "artifact")
    artifact.from_memory = True
    digest = golden.canonical.sha256(golden.KERNEL)
    with pytest.raises(AttachError, match=f"artifact/kernels/{digest}.so can't"):
        program._load(artifact, digest, "kernel")


def test_links_up_the_tree_are_resolved(signed: Artifact, tmp_path: Path) -> None:
    """An artifact behind a link is checked where it lies; the link itself is named."""
    (tmp_path / "current").symlink_to(signed.root)
    assert "symbolic link" in why_writable(tmp_path / "current")
    opened = open_trusted(tmp_path / "current", Trust(digest=signed.digest))
    assert opened.root == signed.root
