"""Change one factor at a time and print what became of it, as one table.

    python scripts/cache_proof/staleness.py [--strict] [ROW ...]

Each row is a process that restores one artifact: a fresh one where the environment
changes, else one forked from a process that imported torch and compiled nothing. A row
ends as

    same         everything was found, nothing was traced or compiled
    traced       a frame was traced again; every graph was found
    recompiled   graphs were compiled anew, really: the row ran them
    refused      an error before anything ran

and but for ``same`` a reason must name what differs, with both values: the component
of the cache key as torch's own key function records it, where the change is in a key;
else the guard, setting, source or factor. What torch counted must agree with the
verdict, and the output with eager's. Exit code 1 if a row isn't so. ``--strict`` sets
``require = cache``: ``policy`` instead of ``traced`` and ``recompiled``, and nothing is
compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import forked  # noqa: E402

ATOL = 1e-5
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Row(NamedTuple):
    """One change.

    Attributes:
        verdict: ``same``, ``traced``, ``recompiled`` or ``refused``.
        reason: Must be part of a reason.
        key: Must be part of the reason of a missed cache key: a component with both
            values.
        env: Variables.
        first: Code before `restore`.
        then: Code after it, with ``model``, ``x``, ``options``, ``mode``.
        edit: File, old and new text.
        threads: Intra-op threads.
        atol: How far from eager the output may be.
    """

    verdict: str
    reason: str = ""
    key: str = ""
    env: dict[str, str] = {}  # noqa: RUF012 - never changed
    first: str = ""
    then: str = ""
    edit: tuple[str, str, str] | None = None
    threads: int = 2
    atol: float = ATOL


def options(text: str) -> str:
    """Code that passes options to ``torch.compile``."""
    return f"options = {{'options': {text}}}"


AUTOCAST = """
@contextlib.contextmanager
def mode():
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        yield
"""

# With this the package doesn't fit, and every graph is looked up by its keys.
MOVED = ("stale_model.py", "class Net", "# moved\nclass Net")
MOVED_ALONE = "of stale_model:Net: source of stale_model"


def unaffected(**variables: str) -> Row:
    """Variables that no option and no key may depend on."""
    return Row("traced", MOVED_ALONE, env=variables, edit=MOVED)


ROWS: dict[str, Row] = {
    "nothing": Row("same"),
    # Where things lie must not matter.
    "hash seed": Row("same", env={"PYTHONHASHSEED": "7"}),
    "home": Row("same", env={"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere"}),
    "user": Row("same", env={"USER": "other", "LOGNAME": "other"}),
    "no PATH": Row("same", env={"PATH": ""}),
    "in CI": unaffected(CI="true", GITHUB_ACTIONS="true", GITHUB_WORKSPACE="/nowhere", RUNNER_TEMP="/nowhere", GITLAB_CI="true", JENKINS_URL="http://ci", BUILD_NUMBER="7", TF_BUILD="True"),
    "outside CI": unaffected(CI=""),
    "in a pod": unaffected(HOSTNAME="pod-7", POD_IP="10.0.0.7", KUBERNETES_SERVICE_HOST="10.0.0.1", NVIDIA_VISIBLE_DEVICES="void", CUDA_VISIBLE_DEVICES="", OMP_PROC_BIND="close", KMP_AFFINITY="compact", MALLOC_ARENA_MAX="2"),
    "one of a job's ranks": unaffected(RANK="1", LOCAL_RANK="1", ROLE_RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="7", SLURM_JOB_ID="7", TORCH_COMPILE_JOB_ID="7"),
    "Python and locale": unaffected(PYTHONUNBUFFERED="1", PYTHONNODEBUGRANGES="1", PYTHONUTF8="1", PYTHONFAULTHANDLER="1", LC_ALL="C", TZ="Asia/Tokyo"),
    "logs": unaffected(TORCH_LOGS="+dynamo,graph_breaks", TORCH_TRACE="{tmp}/trace", TORCHDYNAMO_VERBOSE="1", PT2_COMPILE_ID_PREFIX="pod-7"),
    "caches switched off": unaffected(TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_AUTOGRAD_CACHE="0", TORCH_COMPILE_FORCE_DISABLE_CACHES="1"),
    "optimised Python": Row("same", env={"PYTHONOPTIMIZE": "1"}),
    "working directory": Row("same", first="os.chdir('/')"),
    "another work directory": Row("same", env={"COMPILEKIT_WORK_DIR": "{tmp}/other"}),
    "compile threads": Row("same", env={"TORCHINDUCTOR_COMPILE_THREADS": "1"}),
    "another thread": Row("same", then="in_thread = True"),
    "other bucket first": Row("same", then="x = model_module.sample(6)"),
    # Environment that torch's keys hold.
    "compiler path": Row("recompiled", "inductor.cpp.cxx was (None, 'g++'), is (None, '/usr/bin/g++')", "inductor_config[cpp.cxx] was (None, 'g++'), is (None, '/usr/bin/g++')", env={"CXX": "/usr/bin/g++"}),
    "max autotune by environment": Row("recompiled", "inductor.max_autotune was False, is True", "inductor_config[max_autotune] was False, is True", env={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    "dynamic sources by environment": Row("traced", "compiler.dynamic_sources was '', is 'y'", env={"TORCH_COMPILE_DYNAMIC_SOURCES": "y"}),
    "tag of the caches": Row("recompiled", "compiler.cache_key_tag was '', is 'x'", "cache_key_tag was , is x", env={"TORCH_COMPILE_CACHE_KEY_TAG": "x"}),
    "freezing by environment": Row("recompiled", "inductor.freezing was False, is True", env={"TORCHINDUCTOR_FREEZING": "1"}),
    "threads": Row("recompiled", key="cpp_runtime_thread_count was 2, is 1 or cache.threads was 2, is 1", threads=1),
    "vector instructions": Row("refused", "cache.cpu_capability", env={"ATEN_CPU_CAPABILITY": "default"}),
    "cache directory of others": Row("refused", "TORCHINDUCTOR_CACHE_DIR is", env={"TORCHINDUCTOR_CACHE_DIR": "{tmp}/theirs"}),
    # Options.
    "epilogue fusion": Row("recompiled", "inductor.epilogue_fusion was True, is False", "inductor_config[epilogue_fusion] was True, is False", then=options("{'epilogue_fusion': False}")),
    "vector width": Row("recompiled", "inductor.cpp.simdlen was None, is 1", "inductor_config[cpp.simdlen] was None, is 1", then=options("{'cpp.simdlen': 1}")),
    "dynamic threads": Row("recompiled", "inductor.cpp.dynamic_threads was False, is True", "inductor_config[cpp.dynamic_threads] was False, is True", then=options("{'cpp.dynamic_threads': True}")),
    "shape padding": Row("recompiled", "inductor.shape_padding was True, is False", "inductor_config[shape_padding] was True, is False", then=options("{'shape_padding': False}")),
    "mode": Row("recompiled", "inductor.max_autotune was False, is True", "inductor_config[max_autotune] was False, is True", then="options = {'mode': 'max-autotune-no-cudagraphs'}"),
    "dynamic shapes": Row("recompiled", "compile.dynamic was False, is True", "example_inputs[2] was TensorMetadata", then="options = {'dynamic': True}"),
    "global option": Row("recompiled", "inductor.pattern_matcher was True, is False", "inductor_config[pattern_matcher] was True, is False", then="import torch._inductor.config as c; c.pattern_matcher = False"),
    "functorch option": Row("traced", "functorch.recompute_views was False, is True", "autograd_config[recompute_views] was False, is True", then="import torch._functorch.config as c; c.recompute_views = True"),
    "dynamo option": Row("traced", "dynamo.capture_scalar_outputs was False, is True", then="import torch._dynamo.config as c; c.capture_scalar_outputs = True"),
    # State of the process.
    "matmul precision": Row("recompiled", key="cuda_matmul_settings was ('none', True, True), is ('tf32', True, True)", then="torch.set_float32_matmul_precision('medium')"),
    "deterministic": Row("recompiled", key="deterministic_algorithms_settings was (False, False, True), is (True, False, True)", then="torch.use_deterministic_algorithms(True)"),
    "default dtype": Row("recompiled", key="default_dtype was torch.float32, is torch.float64", then="torch.set_default_dtype(torch.float64)"),
    "grad mode": Row("recompiled", key="grad_enabled was False, is True", then="mode = torch.enable_grad"),
    "inference mode": Row("traced", "dispatch key set mismatch", then="x = x.clone(); mode = torch.inference_mode"),
    "autocast": Row("recompiled", key="autocast_state[cpu] was absent, is torch.bfloat16", then=AUTOCAST, atol=0.02),
    # The model.
    "training mode": Row("traced", "training was False, is True", "gm was dropout =", then="model.train()"),
    "dtype": Row("recompiled", "expected Float, actual Double", "example_inputs[0] was TensorMetadata(dtype=torch.float32", then="model.double(); x = x.double()"),
    "layer count": Row("recompiled", "['layers']._modules) was 2, is 3", "example_inputs[5] was absent, is TensorMetadata", then="model = model_module.make(layers=3)"),
    "configuration value": Row("recompiled", "L['self'].eps was 0.1, is 0.2", "gm was x = dropout + 0.1;  dropout = None, is x = dropout + 0.2", then="model = model_module.make(eps=0.2)"),
    "function as an attribute": Row("recompiled", "act was", "gm was ", then="model.act = torch.nn.functional.relu"),
    "forward hook": Row("recompiled", "frame ?:<lambda> is traced anew: no package holds it", then="model.register_forward_hook(lambda m, a, o: o + 1)"),
    "replaced function": Row("recompiled", "G['scale'] was function stale_helper:scale", "gm was ", then="model_module.scale = lambda x: x * 4"),
    "global constant": Row("recompiled", "G['OFFSET'] was 0.25, is 0.75", "gm was ", then="model_module.OFFSET = 0.75"),
    # Source.
    "source of the model": Row("recompiled", "source of stale_model", "gm was ", edit=("stale_model.py", "+ self.eps", "- self.eps")),
    "a line above the class": Row("traced", "source of stale_model", edit=MOVED),
    "the same in another thread": Row("traced", "source of stale_model", then="in_thread = True", edit=MOVED),
    "source of a helper": Row("recompiled", "source of stale_helper", "gm was ", edit=("stale_helper.py", "* 0.5", "* 0.75")),
    "operator's schema": Row("recompiled", key="custom_operators[stale::double] was ", edit=("stale_model.py", "def double(x: torch.Tensor)", "def double(x: torch.Tensor, n: int = 0)")),
    "operator's fake": Row("recompiled", key="custom_operators[stale::double] was ", edit=("stale_model.py", "return torch.empty_like(x)", "return x.new_empty(x.shape)")),
    # The call.
    "another shape": Row("recompiled", "size mismatch at index 0. expected 4, actual 5", then="x = model_module.sample(5)"),
    "another layout": Row("recompiled", "stride mismatch", then="x = x.t().contiguous().t()"),
    # The machine, as far as a process can pretend.
    "torch minor": Row("refused", "torch.version: the artifact has", first="torch.__version__ = '2.99.0'"),
    "Python patch release": Row("traced", "cache.python was", first="import platform; platform.python_version = lambda: '3.11.99'"),
    "CPU without AVX2": Row("refused", "a CPU without", first="import compilekit.targets as t; f = t.cpu_flags(); t.cpu_flags = lambda: f - {'avx2'}"),
    "another architecture": Row("refused", "machine: the artifact has", first="import compilekit.targets as t; t.machine = lambda: 'aarch64'"),
}  # fmt: skip


def build(folder: Path) -> Path:
    """The artifact, by the real build."""
    out = folder / "stale.artifact"
    command = [sys.executable, "-m", "compilekit", "build", str(HERE / "stale.toml")]
    # What the build prints is no part of the table.
    subprocess.run(
        [*command, "-o", str(out), "--no-verify", "-j", "2"],
        stdout=sys.stderr,
        check=True,
    )
    return out


def run(artifact: Path, row: Row, folder: Path, strict: bool = False) -> dict[str, Any]:
    """One row's process; what `stale_child.answer_to` says."""
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
    environment = {
        "TMPDIR": str(folder / "tmp"),
        "COMPILEKIT_WORK_DIR": str(folder / "work"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    (folder / "tmp").mkdir(exist_ok=True)
    # A recompile writes there: each row starts from what was restored.
    shutil.rmtree(folder / "work", ignore_errors=True)
    if not row.env:
        return in_fork(spec, environment)
    environment |= {k: v.replace("{tmp}", str(folder)) for k, v in row.env.items()}
    # Importing Dynamo, as this process did, sets a cache directory for its children.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_CACHES)}
    done = subprocess.run(
        [sys.executable, str(HERE / "stale_child.py")],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        env={**inherited, **environment},
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return died("\n".join(done.stderr.strip().splitlines()[-3:]))
    return dict(json.loads(lines[-1]))


def in_fork(spec: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """A row in a process that shares this one's imports."""

    def row() -> dict[str, Any]:
        os.environ.update(environment)
        # The model's source is the row's, not the one beside this script.
        sys.path.remove(str(HERE))
        import stale_child

        return stale_child.answer_to(spec)

    status, answer = forked.wait(forked.start(row))
    return died(f"status {status}, see above") if answer is None else dict(answer)


def died(why: str) -> dict[str, Any]:
    """The answer of a process that gave none."""
    return {"verdict": "died", "reasons": [["error", why]], "counted": {}, "error": 0.0}


def problem(row: Row, found: dict[str, Any], strict: bool = False) -> str:
    """Why a row isn't as it must be; empty if it is."""
    wanted = row.verdict
    if strict and wanted in ("traced", "recompiled"):
        wanted = "policy"
    if found["verdict"] != wanted:
        return f"expected {wanted}, found {found['verdict']}"
    if not found["error"] <= row.atol:
        return f"differs from eager by {found['error']}"
    reasons = [text for _, text in found["reasons"]]
    if wanted != "same" and not (row.reason or row.key):
        return "the row expects no reason"
    if row.reason and not any(row.reason in text for text in reasons):
        return f"no reason says {row.reason!r}"
    keys = [text for kind, text in found["reasons"] if kind in ("key", "error")]
    # Torch 2.11 guards frames by what 2.13 only has in keys.
    wanted_keys = row.key.split(" or ")
    if row.key and not any(key in text for text in keys for key in wanted_keys):
        return f"no missed key says {row.key!r}"
    return _against_torch(wanted, found["counted"])


def _against_torch(verdict: str, counted: dict[str, int]) -> str:
    """Hold a verdict against torch's own counters: nothing may pass in silence."""
    if verdict in ("refused", "policy"):
        return ""
    traced, graphs = counted["traced"], counted["graphs"]
    fits = {
        "same": traced == graphs == 0,
        "traced": traced > 0 and graphs == 0 and counted["looked up"] > 0,
        "recompiled": traced > 0 and graphs > 0,
    }[verdict]
    return "" if fits else f"torch counted {counted}"


def shown(row: Row, found: dict[str, Any]) -> str:
    """The reason that names what differs."""
    texts = [text for _, text in found["reasons"]]
    for wanted in (*row.key.split(" or "), row.reason):
        fitting = [text for text in texts if wanted and wanted in text]
        if fitting:
            return _around(fitting[0], wanted)
    return ""


def _around(text: str, wanted: str, width: int = 150) -> str:
    """A reason's part with the expected words."""
    parts = [part for part in text.replace("\n", " ").split("; ") if wanted in part]
    part = parts[0] if parts else text
    return part if len(part) <= width else part[: width - 1] + "…"


def table(artifact: Path, names: list[str], folder: Path, strict: bool) -> int:
    """Run rows and print them as one table; how many aren't as they must be."""
    forked.prepare()
    failures = 0
    line = "{:30} | {:10} | {:>6} | {:>6} | {:>7} | {:>5} | {}"
    print(line.format("change", "verdict", "traced", "graphs", "error", "s", "differs"))
    for name in names:
        began = time.perf_counter()
        found = run(artifact, ROWS[name], folder, strict)
        wrong = problem(ROWS[name], found, strict)
        failures += bool(wrong)
        counted = found["counted"]
        cells = (counted.get("traced", "-"), counted.get("graphs", "-"))
        error = f"{found['error']:.0e}" if counted else "-"
        seconds = f"{time.perf_counter() - began:.1f}"
        mark = "FAILED" if wrong else found["verdict"]
        what = wrong or shown(ROWS[name], found)
        print(line.format(name, mark, *cells, error, seconds, what), flush=True)
        if wrong:
            for kind, text in found["reasons"]:
                print(f"    {kind}: {text}", flush=True)
    print(f"{len(names)} rows, {failures} failed")
    return failures


def main(arguments: list[str]) -> int:
    """Print the table; 1 if a row isn't as it must be."""
    strict = "--strict" in arguments
    names = [name for name in arguments if name != "--strict"] or list(ROWS)
    with tempfile.TemporaryDirectory(prefix="compilekit-stale-") as name:
        given = os.environ.get("STALE_ARTIFACT")
        artifact = Path(given) if given else build(Path(name))
        return 1 if table(artifact, names, Path(name), strict) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
