"""Code that compiles by itself: functions, and scripts run as ``__main__``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compilekit import config as configuration
from compilekit.cli.verify import report
from compilekit.compiler.build import build
from compilekit.compiler.calls import caller
from compilekit.compiler.compare import tensors
from compilekit.compiler.verify import verify
from compilekit.errors import CaptureError, ConfigError
from compilekit.plan import Bucket, make_plan

# What torch's compiler warns of when it's imported is torch's own affair.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[1]

CONFIG = """
[axes]
b = [2, 3]
[entries.step]
warmup = "{warmup}"
[build]
targets = ["native"]
routes = ["cache"]
"""

SCRIPT = """
import os
import sys

import torch
import helper

import compilekit

# Unset while it's built.
receipt = None
if "COMPILEKIT_ARTIFACT" in os.environ:
    receipt = compilekit.restore(require="cache")


class Net(torch.nn.Module):
    def forward(self, x):
        return helper.twice(x) + SHIFT


SHIFT = 1.0


@torch.compile
def step(net, x):
    return net(x).sin()


if __name__ == "__main__":
    size = int(sys.argv[sys.argv.index("--rows") + 1])
    x = torch.arange(size, dtype=torch.float32)
    with torch.no_grad():
        found = step(Net(), x)
    assert torch.allclose(found, (x * 2 + 1).sin())
    if receipt is not None:
        print(len(receipt.finish().misses), "misses", receipt.packages, receipt.traced)
    sys.exit(0)
"""


def load(folder: Path, text: str) -> configuration.Config:
    """A configuration with this warm-up."""
    path = folder / "compilekit.toml"
    path.write_text(CONFIG.replace("{warmup}", text.replace('"', '\\"')))
    return configuration.load(path)


def test_a_script_has_the_buckets_that_its_arguments_name(tmp_path: Path) -> None:
    """An axis that it doesn't take would make equal buckets, so it's refused."""
    config = load(tmp_path, "train.py --rows {b}")
    assert [job.bucket.name for job in make_plan(config).jobs] == ["b2", "b3"]
    with pytest.raises(ConfigError, match="no input uses this axis"):
        load(tmp_path, "train.py")


def test_what_is_neither_function_nor_script_is_refused(tmp_path: Path) -> None:
    """The error shows both forms; a wrong axis is named with the nearest right one."""
    with pytest.raises(ConfigError, match=r"or a script and its arguments"):
        load(tmp_path, "train")
    with pytest.raises(ConfigError, match=r"\{bb\}: no such axis"):
        load(tmp_path, "train.py --rows {b} {bb}")
    with pytest.raises(ConfigError, match="No closing quotation"):
        load(tmp_path, "train.py --rows '{b}")


def test_a_script_runs_as_python_would_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name, arguments and path; exit code 0 is success, another one an error."""
    for name, value in (("argv", sys.argv), ("path", list(sys.path))):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "here = Path(__file__).parent\n"
        "assert (__name__, sys.path[0]) == ('__main__', str(here))\n"
        "(here / 'seen').write_text(' '.join(sys.argv[1:]))\n"
        "sys.exit(sys.argv[1] == '3')\n"
    )
    config = load(tmp_path, "train.py {b} 'two words' {not-an-axis}")
    run = caller(config)
    assert run("step", Bucket("b2", {"b": 2})) == {}
    assert (tmp_path / "seen").read_text() == "2 two words {not-an-axis}"
    with pytest.raises(CaptureError, match=r"script train\.py ended with exit code"):
        run("step", Bucket("b3", {"b": 3}))
    (tmp_path / "train.py").unlink()
    with pytest.raises(ConfigError, match=r"there is no script train\.py"):
        caller(config)("step", Bucket("b2", {"b": 2}))


OUTPUTS = """
import torch

rows = {"first": torch.ones(2), "name": "first", "later": [torch.zeros(1), None]}
net = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    net.weight.fill_(3)
count = 3
"""


def test_a_scripts_outputs_are_its_global_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those in containers and models; copies, which a later run doesn't change."""
    for name, value in (("argv", sys.argv), ("path", list(sys.path))):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text(OUTPUTS)
    found = caller(load(tmp_path, "train.py {b}"))("step", Bucket("b2", {"b": 2}))
    assert list(found) == ["rows", "net"]
    assert list(found["rows"]) == ["first", "later"]
    assert (len(found["rows"]["later"]), found["net"]["weight"].item()) == (1, 3)
    sys.modules["__main__"].__dict__["rows"]["first"].zero_()
    assert found["rows"]["first"].sum() == 2
    assert len(tensors(found)) == 3
    assert tensors({"rows": None, "count": 3}) == []


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False])
def test_a_scripts_outputs_are_verified(tmp_path: Path, kept: bool) -> None:
    """Against eager if it leaves a tensor; else what is shown is said."""
    text = SCRIPT if kept else SCRIPT.replace("sys.exit(0)", "del x, found")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "helper.py").write_text("def twice(x):\n    return x * 2\n")
    config = load(tmp_path, "train.py --rows {b}")
    artifact = build(config, tmp_path / "artifact", verify=False).artifact
    assert artifact is not None
    result = verify(artifact, config=config)
    assert result.passed, result.buckets
    assert [one.uncompared for one in result.buckets] == [not kept] * 2
    said = str(report(artifact, result).blocks[-1])
    assert ("they show only that nothing was compiled" in said) is not kept


CLOSURE = """
import torch

def warmup(axes):
    scale = torch.full((4,), 3.0)

    def step(x):
        y = x * scale
        print("rows:", len(x))
        return torch.relu(y + scale)

    return torch.compile(step, dynamic=False)(torch.ones(axes["b"], 4))
"""

MORE = """
[gates]
graph_breaks = 1
[compile]
threads = 1
"""

SERVED = """
import torch

import compilekit

torch.set_num_threads(1)
receipt = compilekit.restore(require="cache")
import steps

for rows in (3, 2):
    steps.warmup({"b": rows})
receipt.finish()
print(receipt.packages, receipt.traced, receipt.misses)
"""


@pytest.mark.long
def test_a_function_with_free_variables_goes_on_after_a_break(tmp_path: Path) -> None:
    """Nothing is traced, whichever bucket comes first; torch 2.11 and 2.13 differ."""
    (tmp_path / "steps.py").write_text(CLOSURE)
    path = tmp_path / "compilekit.toml"
    path.write_text(f"{CONFIG}{MORE}".replace("{warmup}", "steps:warmup"))
    artifact = build(
        configuration.load(path), tmp_path / "artifact", verify=False
    ).artifact
    assert artifact is not None
    done = subprocess.run(
        [sys.executable, "-c", SERVED],
        cwd=tmp_path,
        env={
            "PATH": "",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "COMPILEKIT_ARTIFACT": str(artifact),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['steps:warmup.<locals>.step'] [] ()"


@pytest.mark.slow
def test_a_script_starts_warm_from_its_artifact(tmp_path: Path) -> None:
    """Built as a warm-up, then run as a program, elsewhere and without a compiler."""
    built, served = tmp_path / "built", tmp_path / "served"
    built.mkdir()
    (built / "train.py").write_text(SCRIPT)
    (built / "helper.py").write_text("def twice(x):\n    return x * 2\n")
    config = load(built, "train.py --rows {b}")
    result = build(config, tmp_path / "artifact", verify=False)
    assert result.artifact is not None, result.buckets
    shutil.move(built, served)
    done = subprocess.run(
        [sys.executable, "train.py", "--rows", "3"],
        cwd=served,
        env={
            "PATH": "",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "COMPILEKIT_ARTIFACT": str(result.artifact),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 misses ['__main__:step'] []\n"
