"""The example Deployment and the GitHub Action: valid, and about things that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from compilekit.cli import root
from compilekit.trust import policy

ROOT = Path(__file__).parents[1]
DEPLOYMENT = ROOT / "examples" / "minilm" / "deployment.yaml"
ACTION = ROOT / ".github" / "actions" / "compilekit" / "action.yml"


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    """The pod's part of the Deployment."""
    manifest = yaml.safe_load(DEPLOYMENT.read_text(encoding="utf-8"))
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The init containers and the server."""
    return [*pod["initContainers"], *pod["containers"]]


def options_of(words: list[str]) -> None:
    """Have click parse a `compilekit` command line without running it."""
    assert words[0] == "compilekit"
    command = root.get_command(click.Context(root), words[1])
    assert command is not None, words[1]
    with click.Context(command) as context:
        command.make_parser(context).parse_args(list(words[2:]))


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_the_deployment_fits_the_schema(version: str) -> None:
    """Kubernetes' own schema takes it, unknown fields refused."""
    manifest = yaml.safe_load(DEPLOYMENT.read_text(encoding="utf-8"))
    kubernetes_validate.validate(manifest, version, strict=True)
    manifest["spec"]["template"]["spec"]["containers"][0]["imagePull"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_its_containers_fit_together(pod: dict[str, Any]) -> None:
    """Volumes that are mounted exist, and what is named lies below a mount."""
    known = {volume["name"] for volume in pod["volumes"]}
    for container in containers(pod):
        mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
        assert {one["name"] for one in mounts.values()} <= known
        named = [one["value"] for one in container["env"]]
        named += [*container["command"], *container.get("args", ())]
        for path in [word for word in named if word.startswith("/")]:
            assert any(path == m or path.startswith(f"{m}/") for m in mounts), path
        writable = [m for m, one in mounts.items() if not one.get("readOnly")]
        # Downloads, heartbeats and torch's own start need one.
        folders = {one["value"] for one in container["env"] if one["name"] == "TMPDIR"}
        assert folders <= set(writable)
        assert writable


def test_its_key_is_mounted_alone(pod: dict[str, Any]) -> None:
    """kubelet makes a configMap's folder writable by everybody, which no key may be in.

    Source: kubernetes/kubernetes#133641.
    """
    shared = {volume["name"] for volume in pod["volumes"] if "configMap" in volume}
    for container in containers(pod):
        [mount] = [m for m in container["volumeMounts"] if m["name"] in shared]
        named = {one["name"]: one["value"] for one in container["env"]}
        assert mount["mountPath"] == named["COMPILEKIT_REQUIRE_SIGNATURE"]
        assert mount["subPath"] == Path(mount["mountPath"]).name


def test_its_commands_exist(
    pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each container's words are a command line of this compilekit, and each demands
    the same signature and serial."""
    for container in containers(pod):
        options_of([*container["command"], *container.get("args", ())])
        with monkeypatch.context() as patch:
            for one in container["env"]:
                patch.setenv(one["name"], one["value"])
            demanded = policy.from_environment()
        assert demanded == policy.Trust(key_file="/keys/release.pub", min_serial=1)


def test_the_actions_commands_exist() -> None:
    """Each `compilekit` in the action's steps is a command line of this compilekit."""
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    steps = "\n".join(step["run"] for step in action["runs"]["steps"])
    lines = re.findall(r"^\s*(compilekit .*?)(?: >.*| \|\|.*)?$", steps, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        words = line.replace('"${words[@]}"', "--insecure --key k --serial 1").split()
        options_of(words)


def test_the_actions_expressions_exist() -> None:
    """What the steps read is an input or another step's output."""
    text = ACTION.read_text(encoding="utf-8")
    action = yaml.safe_load(text)
    steps = {step.get("id"): step for step in action["runs"]["steps"]}
    for expression in re.findall(r"\$\{\{ (\S+) \}\}", text):
        match expression.split("."):
            case ["inputs", name]:
                assert name in action["inputs"]
            case ["steps", step, "outputs", name]:
                assert f"{name}=" in steps[step]["run"]
            case other:
                assert other == ["github", "run_number"]
