"""Build, delete the build directory, and serve elsewhere as a user without a compiler.

    python scripts/cache_proof/elsewhere.py [--uid UID] [CASE ...]

Cases: branches, training, qwen2-4 and qwen2-24 (all by default; the last one takes
minutes). Each is built by `compilekit build` in a directory that is deleted before a
process of another user, which no password file knows, restores the artifact from a
read-only directory with an empty PATH and ``require = cache``. It calls every bucket,
the last one first. A row of the table must say 0 traced, 0 graphs, 0 kernels, 0
processes, 0 misses, and equal eager; exit code 1 if one doesn't. Only root can do
this: the user is set with setuid.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ATOL = 1e-4


class Case(NamedTuple):
    """What is built: files of a folder, a configuration among them, and its depth."""

    folder: Path
    config: str
    layers: int = 0


CASES = {
    "branches": Case(HERE, "branches.toml"),
    "training": Case(ROOT / "examples" / "training", "compilekit.toml"),
    "qwen2-4": Case(ROOT / "examples" / "qwen2", "compilekit.toml", layers=4),
    "qwen2-24": Case(ROOT / "examples" / "qwen2", "compilekit.toml", layers=24),
}


def prepare(case: Case, folder: Path) -> Path:
    """Copy a case's files; the path of its configuration."""
    folder.mkdir()
    for source in case.folder.iterdir():
        if source.suffix in (".py", ".toml", ".json"):
            shutil.copyfile(source, folder / source.name)
    path = folder / case.config
    if case.layers:
        described = json.loads((folder / "config.json").read_text())
        described["num_hidden_layers"] = case.layers
        described.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(described))
        text = path.read_text()
        wanted = 'targets = ["native"]'
        if wanted not in text:
            raise ValueError(f"{path} has no {wanted}")
        path.write_text(text.replace(wanted, f'{wanted}\nroutes = ["cache"]'))
    return path


def run(case: Case, uid: int, work: Path, order: str = "reversed") -> dict[str, Any]:
    """Build, delete, serve elsewhere; what `serve` answers."""
    from compilekit import config as configuration
    from compilekit.plan import make_plan

    work.mkdir(exist_ok=True)
    built = prepare(case, work / "built")
    served = prepare(case, work / "served")
    command = [sys.executable, "-m", "compilekit", "build", str(built), "--no-verify"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    made = work / "built" / "artifact"
    subprocess.run(
        [*command, "-o", str(made)], env=environment, stdout=sys.stderr, check=True
    )
    artifact = work / "moved" / "artifact"
    artifact.parent.mkdir()
    shutil.copytree(made, artifact)
    shutil.rmtree(work / "built")
    for path in (*artifact.rglob("*"), artifact):
        path.chmod(0o555 if path.is_dir() else 0o444)
    work.chmod(0o755)
    buckets = [
        (job.entry, job.bucket.name, dict(job.bucket.axes))
        for job in make_plan(configuration.load(served)).jobs
    ]
    if order == "reversed":
        buckets.reverse()
    spec = {"artifact": str(artifact), "config": str(served), "buckets": buckets}
    return serve_as(uid, spec, work / f"home-{uid}")


def serve_as(uid: int, spec: dict[str, Any], home: Path) -> dict[str, Any]:
    """A process of another user, with nothing but a directory of its own."""
    home.mkdir(mode=0o700)
    os.chown(home, uid, uid)
    python, variables = interpreter(home.parent)
    done = subprocess.run(
        [python, str(HERE / "serve.py")],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        env={"PATH": "", "TMPDIR": str(home), **variables},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process ended with {done.returncode}:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def closed_packages() -> str:
    """The first folder above this environment's packages that only its owner enters."""
    packages = Path(sysconfig.get_path("purelib"))
    return next(
        (str(p) for p in packages.parents if not p.stat().st_mode & stat.S_IXOTH), ""
    )


def interpreter(folder: Path) -> tuple[str, dict[str, str]]:
    """An interpreter that other users can run, and the variables that it needs.

    One that lies in a home directory is copied: another prefix mustn't matter, either.
    """
    real = Path(sys.executable).resolve()
    if all(parent.stat().st_mode & stat.S_IXOTH for parent in real.parents):
        return sys.executable, {"PYTHONPATH": str(ROOT)}
    copied = folder / "python"
    left = shutil.ignore_patterns("test", "site-packages", "__pycache__", "share")
    shutil.copytree(sys.base_prefix, copied, ignore=left, symlinks=True)
    packages = sysconfig.get_path("purelib")
    return str(copied / "bin" / real.name), {
        "PYTHONPATH": os.pathsep.join((str(ROOT), packages)),
        "LD_LIBRARY_PATH": str(copied / "lib"),
    }


def problem(found: dict[str, Any]) -> str:
    """Why an answer isn't as it must be; empty if it is."""
    if found["misses"]:
        return f"misses: {found['misses']}"
    for name in ("traced", "graphs", "missed", "kernels"):
        if found["counted"][name]:
            return f"{found['counted'][name]} {name}"
    if found["processes"]:
        return f"processes: {found['processes']}"
    if not found["max_abs_diff"] <= ATOL:
        return f"differs from eager by {found['max_abs_diff']}"
    return ""


def main() -> int:
    """Print one row per case; 1 if one isn't as it must be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uid", type=int, default=54321)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    given = parser.parse_args()
    failures = 0
    for name in given.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="compilekit-elsewhere-") as folder:
            found = run(CASES[name], given.uid, Path(folder))
        wrong = problem(found)
        failures += bool(wrong)
        counted = ", ".join(f"{n} {what}" for what, n in found["counted"].items())
        seconds = ", ".join(f"{k} {v:.2f} s" for k, v in found["seconds"].items())
        print(
            f"{name} | user {found['user']} | {counted},"
            f" {len(found['processes'])} processes, {len(found['misses'])} misses"
            f" | from eager {found['max_abs_diff']:.1e} | {seconds} | {wrong or 'ok'}",
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
