"""Provenance and the bill of materials: whole documents, about this very artifact."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import golden
import pytest

from compilekit.artifact import (
    Artifact,
    archive,
    canonical,
    open_artifact,
    write_artifact,
)
from compilekit.artifact.manifest import seal_manifest
from compilekit.cli import run
from compilekit.compiler import attest
from compilekit.errors import ResourceError

pytest.importorskip("cyclonedx")
pytest.importorskip("in_toto_attestation")

ROOT = Path(__file__).parents[1]
BUILDER = "https://ci.example.com/release"
CONFIG = b'[model]\nsource = "tiny.model:make"\n'
TIMES = (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2026, 1, 2, 4, tzinfo=UTC))


@pytest.fixture
def attested(tmp_path: Path) -> Artifact:
    """The golden artifact with both documents."""
    data, sealed = seal_manifest(golden.parts(), golden.files())
    made = attest.attestations(sealed, data, CONFIG, BUILDER, *TIMES)
    return write_artifact(
        tmp_path / "artifact",
        golden.parts(),
        golden.files(),
        {**golden.reports(), **made},
    )


def hold_to_standards(artifact: Artifact) -> Any:
    """Hold both documents to their libraries' definitions; the statement's fields."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    text = artifact.read(attest.PROVENANCE)
    messages: Any = (statement_pb2, provenance_pb2)
    message = json_format.Parse(text, messages[0].Statement())
    Statement.copy_from_pb(message).validate()
    fields = json.loads(text)
    # A field that SLSA doesn't know is an error.
    json_format.ParseDict(fields["predicate"], messages[1].Provenance())
    validator = JsonStrictValidator(SchemaVersion.V1_5)
    assert validator.validate_str(artifact.read(attest.SBOM).decode()) is None
    return fields


def test_the_statement_is_about_the_artifact(attested: Artifact) -> None:
    """Its subject is the manifest, by the file's sha256 and the artifact's digest."""
    fields = hold_to_standards(attested)
    manifest = (attested.root / "manifest.json").read_bytes()
    assert fields["_type"] == "https://in-toto.io/Statement/v1"
    assert fields["predicateType"] == attest.PREDICATE
    assert fields["subject"] == [
        {
            "name": "manifest.json",
            "digest": {
                "sha256": canonical.sha256(manifest),
                "compilekit": attested.digest,
            },
        }
    ]
    definition = fields["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["config"] == CONFIG.decode()
    dependencies = definition["resolvedDependencies"]
    assert dependencies[0]["digest"] == {"sha256": canonical.sha256(CONFIG)}
    assert {"uri": f"pkg:pypi/torch@{version('torch')}"} in dependencies
    details = fields["predicate"]["runDetails"]
    assert details["builder"]["id"] == BUILDER
    assert details["metadata"]["startedOn"] == "2026-01-02T03:04:05+00:00"


def test_the_bill_is_valid(attested: Artifact) -> None:
    """CycloneDX's own reader takes it, and it lists what was installed."""
    from cyclonedx.model.bom import Bom

    hold_to_standards(attested)
    fields = json.loads(attested.read(attest.SBOM))
    assert (fields["bomFormat"], fields["specVersion"]) == ("CycloneDX", "1.5")
    assert fields["metadata"]["component"]["version"] == attested.digest
    links = {component["purl"] for component in fields["components"]}
    assert f"pkg:pypi/torch@{version('torch')}".replace("+", "%2B") in links
    loaded: Any = Bom
    assert len(loaded.from_json(fields).components) == len(fields["components"])


def test_the_digest_does_not_depend_on_them(attested: Artifact, tmp_path: Path) -> None:
    """They are reports: sealed, shown, and removed with the rest of them."""
    assert attested.digest == golden.write(tmp_path / "plain").digest
    path = attested.root / attest.PROVENANCE
    path.write_bytes(path.read_bytes().replace(b"example", b"exemple"))
    with pytest.raises(Exception, match="provenance"):
        open_artifact(attested.root)


def test_inspect_shows_them(
    attested: Artifact, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Who built it, when, and how many components; packed and unpacked as well."""
    archive.pack(attested, tmp_path / "a.tar")
    archive.unpack(tmp_path / "a.tar", tmp_path / "again")
    for root in (attested.root, tmp_path / "again"):
        assert run(["inspect", str(root), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["result"]["attested"]
        assert shown["builder"] == BUILDER
        assert shown["finished"] == "2026-01-02T04:00:00+00:00"
        assert shown["components"] > 10
    golden.write(tmp_path / "plain")
    assert run(["inspect", str(tmp_path / "plain"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["attested"] == {}


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build ends before it compiles, and names the extra."""
    monkeypatch.setitem(sys.modules, "cyclonedx.model.bom", None)
    with pytest.raises(ResourceError) as caught:
        attest.require_libraries()
    assert "compilekit[attest]" in caught.value.hint


def build_attested(folder: Path, home: Path) -> Artifact:
    """`compilekit build --attest` of a small model, from a folder of its own."""
    shutil.copytree(ROOT / "scripts" / "trust" / "small", folder)
    home.mkdir()
    known = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEKIT_")}
    own = {name: str(home) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    words = ["build", "compilekit.toml", "-o", "artifact", "--attest", BUILDER]
    subprocess.run(
        [sys.executable, "-m", "compilekit", *words],
        cwd=folder,
        env={**known, **own, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        check=True,
    )
    return open_artifact(folder / "artifact").parse_all()


@pytest.mark.long
def test_a_real_build_is_attested_and_reproducible(tmp_path: Path) -> None:
    """Both documents are valid, and only reports differ between two builds."""
    first = build_attested(tmp_path / "first", tmp_path / "home")
    second = build_attested(tmp_path / "größe und 模型", tmp_path / "another home")
    contents = []
    for artifact in (first, second):
        fields = hold_to_standards(artifact)
        manifest = (artifact.root / "manifest.json").read_bytes()
        [subject] = fields["subject"]
        assert subject["digest"]["sha256"] == canonical.sha256(manifest)
        definition = fields["predicate"]["buildDefinition"]
        config = (artifact.root.parent / "compilekit.toml").read_text()
        assert definition["externalParameters"]["config"] == config
        files = [path for path in artifact.root.rglob("*") if path.is_file()]
        names = {path.relative_to(artifact.root): path for path in files}
        assert {Path(attest.PROVENANCE), Path(attest.SBOM)} < names.keys()
        contents.append(
            {
                n: path.read_bytes()
                for n, path in names.items()
                if n.parts[0] != "reports"
            }
        )
    assert contents[0] == contents[1]
    assert first.digest == second.digest
