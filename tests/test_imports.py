"""What importing costs: each module alone, and nothing heavy before it's needed."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import golden
import pytest

import compilekit

PACKAGE = Path(compilekit.__file__).parent
HEAVY = ("torch", "transformers", "triton", "numpy", "safetensors")
DRAWING = ("click", "rich")

STANDARD_LIBRARY_ONLY = sorted(
    ".".join(
        ("compilekit", *path.relative_to(PACKAGE).with_suffix("").parts)
    ).removesuffix(".__init__")
    for pattern in ("*.py", "artifact/*.py", "targets/*.py")
    for path in PACKAGE.glob(pattern)
    if path.name not in ("console.py", "__main__.py")
)


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of these packages a fresh process has after running some code."""
    tail = "import json, sys; print(json.dumps([n for n in %r if n in sys.modules]))"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{tail % (names,)}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return list(json.loads(process.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_standard_library_modules_import_alone(module: str) -> None:
    """Each one imports by itself, without a warning, torch, click or rich."""
    assert loaded_by(f"import {module}", HEAVY + DRAWING) == []


@pytest.mark.parametrize(
    "line",
    [
        ["--help"],
        ["--version"],
        ["build", "--help"],
        ["bench", "startup", "--help"],
        ["target", "list"],
        ["inspect", "tests/data/golden/artifact"],
        ["doctor"],
        ["pull", "127.0.0.1:1/model:1", "-o", "out", "--min-serial", "1"],
        ["diff", "tests/data/golden/artifact", "tests/data/golden/artifact"],
        ["unpack", "no-such-file", "-o", "out"],
        ["plan", "examples/minilm/compilekit.toml"],
        ["build", "no-such.toml", "-o", "out"],
    ],
    ids=" ".join,
)
def test_light_commands_load_no_torch(line: list[str]) -> None:
    """Help, lists and refusals answer without torch, and in plain form without rich."""
    code = f"from compilekit.cli import run; run({line!r})"
    assert loaded_by(code, (*HEAVY, "rich")) == []


def test_help_is_instant() -> None:
    """``--help`` costs a moment of processor time, whatever else the machine does."""
    command = [sys.executable, "-m", "compilekit", "--help"]
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(
            after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        )
    # 0.11 s on an idle core (click alone 0.05); a busy one's caches are cold.
    assert min(seconds) < 0.3


@pytest.mark.parametrize(
    "line", [["check"], ["load"], ["load", "--require", "program"]]
)
def test_a_preflight_for_a_cpu_imports_no_torch(line: list[str]) -> None:
    """The command that is started pays for torch; its preflight needn't."""
    program = (
        "import sys\n"
        "from compilekit.cli import run\n"
        "code = run(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "print('code', code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, line[0], str(golden.ARTIFACT), *line[1:]],
        capture_output=True,
        text=True,
        check=True,
    )
    # The golden artifact is for one Python and one torch.
    assert "code 0" in done.stdout or "code 6" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_build_leaves_torch_to_its_workers(tmp_path: Path) -> None:
    """The process that plans and packs would spend seconds on importing it."""
    (tmp_path / "toy.py").write_text("from torch.nn import GELU as make\n")
    config = tmp_path / "compilekit.toml"
    config.write_text(
        '[model]\nsource = "toy:make"\ndtype = "float32"\n[axes]\nb = [2]\n'
        '[entries.forward.inputs.input]\nshape = ["b", 8]\ndtype = "float32"\n'
        '[build]\ntargets = ["cpu-x86_64-v3"]\n'
    )
    program = (
        "import sys\n"
        "from compilekit.cli import run\n"
        "code = run(sys.argv[1:])\n"
        "print('code', code, 'torch' in sys.modules)\n"
    )
    out = str(tmp_path / "artifact")
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        [*command, "build", str(config), "-o", out, "--no-verify"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("code 0 False\n"), done.stdout + done.stderr
