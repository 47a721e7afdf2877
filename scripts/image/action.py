"""Run the steps of the GitHub Action as a runner does, and pull what they pushed.

    python scripts/image/action.py FOLDER [REQUIREMENTS]

An empty virtual environment is made in FOLDER, with pip's own settings; the action's steps
are read from action.yml and run in it one by one: expressions, conditions, GITHUB_OUTPUT
and RUNNER_TEMP as GitHub documents them, `bash` with its options. The model is that of
scripts/trust/small, the registry is Debian's `docker-registry` on loopback. REQUIREMENTS
is what the first step installs, by default this tree with its extras.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "compilekit" / "action.yml"
SMALL = ROOT / "scripts" / "trust" / "small"
sys.path.insert(0, str(ROOT / "scripts" / "trust"))

from registry import registry  # noqa: E402
from termination import exit_on_sigterm  # noqa: E402

EXPRESSION = re.compile(r"\$\{\{\s*(\S+?)\s*\}\}")
CONDITION = re.compile(r"(\S+) != '(\S*)'")
# What GitHub runs for `shell: bash`.
BASH = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]


class Runner:
    """What a job keeps while its steps run.

    Attributes:
        values: Expression → value, such as ``inputs.push``.
    """

    def __init__(self, folder: Path, values: dict[str, str]) -> None:
        self.values = values
        self.temporary = folder / "temporary"
        self.workspace = folder / "workspace"
        self.temporary.mkdir()
        self.workspace.mkdir()
        binaries = folder / "venv" / "bin"
        kept = ("PIP_", "SSL_", "REQUESTS_", "HOME", "LANG")
        self.environment = {
            **{k: v for k, v in os.environ.items() if k.startswith(kept)},
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(self.temporary),
            "CI": "true",
        }

    def evaluated(self, text: str) -> str:
        """A text with its expressions replaced; an unknown one is an error."""
        return EXPRESSION.sub(lambda match: self.values[match[1]], str(text))

    def wanted(self, step: dict[str, Any]) -> bool:
        """Whether a step's condition holds."""
        if "if" not in step:
            return True
        match = CONDITION.fullmatch(step["if"])
        if match is None:
            raise SystemExit(f"if: {step['if']} isn't understood")
        return self.values[match[1]] != match[2]

    def run(self, step: dict[str, Any]) -> None:
        """One step; what it wrote to GITHUB_OUTPUT is known to later ones."""
        outputs, script = self.temporary / "outputs", self.temporary / "step.sh"
        outputs.write_text("")
        script.write_text(step["run"])
        own = {name: self.evaluated(v) for name, v in step.get("env", {}).items()}
        began = time.perf_counter()
        done = subprocess.run(
            [*BASH, str(script)],
            cwd=self.workspace,
            env={**self.environment, **own, "GITHUB_OUTPUT": str(outputs)},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
        print(f"{step['name']}: exit code {done.returncode}, {seconds:.0f} s")
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-3000:]}")
        for line in outputs.read_text().splitlines():
            name, _, value = line.partition("=")
            print(f"  {name} = {value}", flush=True)
            self.values[f"steps.{step['id']}.outputs.{name}"] = value


def main(folder: Path, requirements: str) -> int:
    """Install, build, verify, push; then pull by the digests that the action gave."""
    exit_on_sigterm()
    folder.mkdir(parents=True)
    venv.create(folder / "venv", with_pip=True)
    key = folder / "release.key"
    for command in (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", key],
        ["openssl", "pkey", "-in", key, "-pubout", "-out", f"{key}.pub"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    with registry(folder) as (address, _):
        given = {
            "config": str(SMALL / "compilekit.toml"),
            "requirements": requirements,
            "push": f"{address}/team/small:1",
            "insecure": "true",
            "key": key.read_text(),
        }
        values = {"github.run_number": "7"}
        runner = Runner(folder, values)
        for name, about in action["inputs"].items():
            if name not in given and about.get("required"):
                raise SystemExit(f"{name} is required")
            default = runner.evaluated(about.get("default", ""))
            values[f"inputs.{name}"] = given.pop(name, default)
        if given:
            raise SystemExit(f"the action has no {', '.join(given)}")
        for step in action["runs"]["steps"]:
            if runner.wanted(step):
                runner.run(step)
        outputs = {
            name: runner.evaluated(about["value"])
            for name, about in action["outputs"].items()
        }
        if list(runner.temporary.glob("*.key")):
            raise SystemExit("the private key was left in RUNNER_TEMP")
        pull = ["pull", f"{address}/team/small@{outputs['manifest']}", "-o", "pulled"]
        trust = ["--require-signature", f"{key}.pub", "--min-serial", "7"]
        digest = ["--expect-digest", outputs["digest"]]
        subprocess.run(
            ["compilekit", *pull, "--insecure", *trust, *digest],
            cwd=runner.workspace,
            env=runner.environment,
            check=True,
        )
    print("pulled by the action's outputs, signed, serial 7")
    return 0


if __name__ == "__main__":
    extras = f"{ROOT}[hf,oci,sign]"
    sys.exit(main(Path(sys.argv[1]).resolve(), *(sys.argv[2:] or [extras])))
