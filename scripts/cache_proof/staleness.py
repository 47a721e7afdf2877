"""Change one factor at a time and print what became of it, as one table.

    python scripts/cache_proof/staleness.py [--strict] [ROW ...]

Each row is a process that restores one artifact: a fresh one where the environment
changes, else one forked from a process that imported torch and compiled nothing. It must end as ``same`` (hits
only), ``refused`` (before anything runs) or ``recompiled``, and in the last two cases a
reason must name the factor with both values. The output must equal eager's. Exit code 1
if a row doesn't. ``--strict`` sets ``require = cache``: ``policy`` instead of
``recompiled``, and nothing is compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Row(NamedTuple):
    """One change.

    Attributes:
        verdict: ``same``, ``refused`` or ``recompiled``.
        reason: Must be part of a reason.
        env: Variables; None unsets one.
        first: Code before `restore`.
        then: Code after it, with ``model``, ``x``, ``options``, ``mode``.
        edit: File → old and new text.
        threads: Intra-op threads.
    """

    verdict: str
    reason: str = ""
    env: dict[str, str | None] = {}  # noqa: RUF012 - never changed
    first: str = ""
    then: str = ""
    edit: tuple[str, str, str] | None = None
    threads: int = 2


def options(text: str) -> str:
    """Code that passes options to ``torch.compile``."""
    return f"options = {{'options': {text}}}"


ROWS: dict[str, Row] = {
    "nothing": Row("same"),
    # Where things lie must not matter.
    "hash seed": Row("same", env={"PYTHONHASHSEED": "7"}),
    "home": Row("same", env={"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere"}),
    "user": Row("same", env={"USER": "other", "LOGNAME": "other"}),
    "host": Row("same", env={"HOSTNAME": "pod-7", "POD_IP": "10.0.0.7"}),
    "no PATH": Row("same", env={"PATH": ""}),
    "working directory": Row("same", first="os.chdir('/')"),
    "another work directory": Row("same", env={"COMPILEKIT_WORK_DIR": "{tmp}/other"}),
    "compile threads": Row("same", env={"TORCHINDUCTOR_COMPILE_THREADS": "1"}),
    "other bucket first": Row("same", then="x = model_module.sample(6)"),
    # Environment that torch's keys hold.
    "compiler path": Row("recompiled", "cpp.cxx was (None, 'g++'), is (None, '/usr/bin/g++')", env={"CXX": "/usr/bin/g++"}),
    "max autotune by environment": Row("recompiled", "inductor.max_autotune was False, is True", env={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    "freezing by environment": Row("recompiled", "inductor.freezing was False, is True", env={"TORCHINDUCTOR_FREEZING": "1"}),
    "threads": Row("recompiled", "cpp_runtime_thread_count was 2, is 1", threads=1),
    "vector instructions": Row("refused", "cache.cpu_capability", env={"ATEN_CPU_CAPABILITY": "default"}),
    "cache directory of others": Row("refused", "TORCHINDUCTOR_CACHE_DIR is", env={"TORCHINDUCTOR_CACHE_DIR": "{tmp}/theirs"}),
    # Options.
    "epilogue fusion": Row("recompiled", "inductor.epilogue_fusion was True, is False", then=options("{'epilogue_fusion': False}")),
    "vector width": Row("recompiled", "inductor.cpp.simdlen was None, is 1", then=options("{'cpp.simdlen': 1}")),
    "dynamic threads": Row("recompiled", "inductor.cpp.dynamic_threads was False, is True", then=options("{'cpp.dynamic_threads': True}")),
    "shape padding": Row("recompiled", "inductor.shape_padding was True, is False", then=options("{'shape_padding': False}")),
    "mode": Row("recompiled", "inductor.max_autotune was False, is True", then="options = {'mode': 'max-autotune-no-cudagraphs'}"),
    "dynamic shapes": Row("recompiled", "compile.dynamic was False, is True", then="options = {'dynamic': True}"),
    "global option": Row("recompiled", "inductor.pattern_matcher was True, is False", then="import torch._inductor.config as c; c.pattern_matcher = False"),
    "functorch option": Row("recompiled", "functorch.functionalize_rng_ops was False, is True", then="import torch._functorch.config as c; c.functionalize_rng_ops = True"),
    "dynamo option": Row("recompiled", "dynamo.capture_scalar_outputs was False, is True", then="import torch._dynamo.config as c; c.capture_scalar_outputs = True"),
    # State of the process.
    "matmul precision": Row("recompiled", "cuda_matmul_settings was ('none', True, True), is ('tf32', True, True)", then="torch.set_float32_matmul_precision('medium')"),
    "deterministic": Row("recompiled", "deterministic_algorithms_settings was (False, False, True), is (True, False, True)", then="torch.use_deterministic_algorithms(True)"),
    "default dtype": Row("recompiled", "default_dtype was torch.float32, is torch.float64", then="torch.set_default_dtype(torch.float64)"),
    "grad mode": Row("recompiled", "grad_enabled was False, is True", then="mode = torch.enable_grad"),
    "inference mode": Row("recompiled", "", then="x = x.clone(); mode = torch.inference_mode"),
    "autocast": Row("recompiled", "autocast_state[cpu] was absent, is torch.bfloat16", then="mode = lambda: torch.autocast('cpu', torch.bfloat16)"),
    # The model.
    "training mode": Row("recompiled", "training was False, is True", then="model.train()"),
    "dtype": Row("recompiled", "expected Float, actual Double", then="model.double(); x = x.double()"),
    "layer count": Row("recompiled", "['layers']._modules) was 2, is 3", then="model = model_module.make(layers=3)"),
    "configuration value": Row("recompiled", "L['self'].eps was 0.1, is 0.2", then="model = model_module.make(eps=0.2)"),
    "function as an attribute": Row("recompiled", "act was", then="model.act = torch.nn.functional.relu"),
    "forward hook": Row("recompiled", "frame ?:<lambda> is traced anew: no package holds it", then="model.register_forward_hook(lambda m, a, o: o + 1)"),
    "replaced function": Row("recompiled", "G['scale'] was function stale_helper:scale", then="model_module.scale = lambda x: x * 4"),
    "global constant": Row("recompiled", "G['OFFSET'] was 0.25, is 0.75", then="model_module.OFFSET = 0.75"),
    # Source.
    "source of the model": Row("recompiled", "source of stale_model", edit=("stale_model.py", "+ self.eps", "- self.eps")),
    "a line above the class": Row("recompiled", "source of stale_model", edit=("stale_model.py", "class Net", "# moved\nclass Net")),
    "source of a helper": Row("recompiled", "source of stale_helper", edit=("stale_helper.py", "* 0.5", "* 0.75")),
    "operator's schema": Row("recompiled", "stale::double", edit=("stale_model.py", "def double(x: torch.Tensor)", "def double(x: torch.Tensor, n: int = 0)")),
    "operator's fake": Row("recompiled", "stale::double", edit=("stale_model.py", "return torch.empty_like(x)", "return x.new_empty(x.shape)")),
    # The call.
    "another shape": Row("recompiled", "size mismatch at index 0. expected 4, actual 5", then="x = model_module.sample(5)"),
    "another layout": Row("recompiled", "stride mismatch", then="x = x.t().contiguous().t()"),
    # The machine, as far as a process can pretend.
    "torch minor": Row("refused", "torch.version: the artifact has", first="torch.__version__ = '2.99.0'"),
    "Python patch release": Row("recompiled", "cache.python was", first="import platform; platform.python_version = lambda: '3.11.99'"),
    "CPU without AVX2": Row("refused", "a CPU without", first="import compilekit.targets as t; f = t.cpu_flags(); t.cpu_flags = lambda: f - {'avx2'}"),
    "another architecture": Row("refused", "machine: the artifact has", first="import compilekit.targets as t; t.machine = lambda: 'aarch64'"),
}  # fmt: skip


def build(folder: Path) -> Path:
    """The artifact, by the real build."""
    out = folder / "stale.artifact"
    command = [sys.executable, "-m", "compilekit", "build", str(HERE / "stale.toml")]
    subprocess.run([*command, "-o", str(out), "--no-verify", "-j", "2"], check=True)
    return out


def run(artifact: Path, row: Row, folder: Path, strict: bool = False) -> dict[str, Any]:
    """One fresh process."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name in ("stale_model.py", "stale_helper.py"):
        text = (HERE / name).read_text()
        if row.edit and row.edit[0] == name:
            changed = text.replace(row.edit[1], row.edit[2], 1)
            if changed == text:
                raise ValueError(f"{name} has no {row.edit[1]!r}")
            text = changed
        (source / name).write_text(text)
    spec = {"artifact": str(artifact), "folder": str(source), "threads": row.threads}
    spec |= {"first": row.first, "then": row.then}
    spec["require"] = ["cache"] if strict else []
    places = {
        "TMPDIR": str(folder / "tmp"),
        "COMPILEKIT_WORK_DIR": str(folder / "work"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    (folder / "tmp").mkdir(exist_ok=True)
    # A recompile writes there: each row starts from what was restored.
    shutil.rmtree(folder / "work", ignore_errors=True)
    if not row.env:
        return forked(spec, places)
    changed = {k: (v or "").replace("{tmp}", str(folder)) for k, v in row.env.items()}
    done = subprocess.run(
        [sys.executable, str(HERE / "stale_child.py")],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        env={**os.environ, **places, **changed},
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"verdict": "died", "reasons": done.stderr.strip().splitlines()[-3:]}
    return dict(json.loads(lines[-1]))


def forked(spec: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """A row in a process that shares this one's imports, and nothing else."""
    sys.path.insert(0, str(HERE))
    os.environ.update(places)
    import stale_child
    import torch._inductor.compile_fx  # noqa: F401 - 20 times the row's own work

    answer, its_end = os.pipe()
    number = os.fork()
    if number == 0:
        code = 1
        try:
            os.close(answer)
            sys.path.remove(str(HERE))
            data = json.dumps(stale_child.answer_to(spec)).encode()
            with os.fdopen(its_end, "wb") as pipe:
                pipe.write(data)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(its_end)
    with os.fdopen(answer, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(number, 0)
    if status or not data:
        return {"verdict": "died", "reasons": [f"status {status}, see above"]}
    return dict(json.loads(data))


def problem(row: Row, found: dict[str, Any], strict: bool = False) -> str:
    """Why a row isn't as it must be; empty if it is."""
    wanted = row.verdict
    if strict and wanted == "recompiled":
        wanted = "policy"
    if found["verdict"] != wanted:
        return f"expected {wanted}, found {found['verdict']}"
    if found.get("error", 0.0) > 1e-5:
        return f"differs from eager by {found['error']}"
    text = "\n".join(found["reasons"])
    if row.reason not in text:
        return f"no reason says {row.reason!r}"
    if wanted != "same" and not text:
        return "no reason"
    return ""


def shown(row: Row, found: dict[str, Any]) -> str:
    """The reason that names the factor."""
    lines = [line.strip() for line in found["reasons"]]
    fitting = [line for line in lines if row.reason and row.reason in line]
    return (fitting or lines or [""])[0][:230]


def main(arguments: list[str]) -> int:
    """Print the table; 1 if a row isn't as it must be."""
    strict = "--strict" in arguments
    names = [name for name in arguments if name != "--strict"] or list(ROWS)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="compilekit-stale-") as name:
        folder = Path(name)
        given = os.environ.get("STALE_ARTIFACT")
        artifact = Path(given) if given else build(folder)
        for label in names:
            began = time.perf_counter()
            found = run(artifact, ROWS[label], folder, strict)
            wrong = problem(ROWS[label], found, strict)
            failures += bool(wrong)
            seconds = time.perf_counter() - began
            mark = f"FAILED ({wrong})" if wrong else found["verdict"]
            print(
                f"{label} | {mark} | {shown(ROWS[label], found)} | {seconds:.1f} s",
                flush=True,
            )
            if wrong:
                print("    " + "\n    ".join(found["reasons"]), flush=True)
    print(f"{len(names)} rows, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
