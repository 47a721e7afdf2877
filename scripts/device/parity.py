"""On a GPU: do builds without and with it hold the same programs and kernels?

    python scripts/device/parity.py ARTIFACTS [NAME…] [--jobs 4] [--out FILE]

Each configuration of this folder is built twice: where the GPU can't be seen, so that
it is emulated, and where it can. Compared are the digests of each kernel's source, of
its machine code, of host code and calling convention. A kernel that differs is listed
with the lines of its source that do. ARTIFACTS/NAME is the build without a GPU; one
that lies there already, made on another machine, is taken. The report is written anew
after each configuration; ends with 1 if one differs or fails.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compilekit import config as configuration
from compilekit.artifact import Artifact, open_artifact

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Build and compare every configuration; one line and one record each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.names or sorted(
        path.stem
        for path in HERE.glob("*.toml")
        if "program" in configuration.load(path).build.routes
    )
    reports: list[dict[str, Any]] = []

    def keep(name: str) -> None:
        report = compared(name, arguments.artifacts / name)
        reports.append(report)
        show(report)
        if arguments.out:
            ordered = sorted(reports, key=lambda one: str(one["name"]))
            arguments.out.write_text(json.dumps(ordered, indent=1), encoding="utf-8")

    with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
        list(pool.map(keep, names))
    sys.exit(any(differs(report) for report in reports))


def compared(name: str, emulated: Path) -> dict[str, Any]:
    """Build one configuration twice, and hold both builds together."""
    with tempfile.TemporaryDirectory() as folder:
        native = Path(folder) / "artifact"
        began = time.perf_counter()
        without = {} if emulated.is_dir() else {"CUDA_VISIBLE_DEVICES": ""}
        failed = (without and build(name, emulated, without)) or build(name, native, {})
        if failed:
            return {"name": name, "error": failed}
        seconds = round(time.perf_counter() - began, 1)
        first = open_artifact(emulated).parse_all()
        second = open_artifact(native).parse_all()
        return {"name": name, "seconds": seconds, **differences(first, second)}


def build(name: str, out: Path, variables: dict[str, str]) -> str:
    """Build a configuration; what it printed if it failed."""
    config = HERE / f"{name}.toml"
    command = [sys.executable, "-m", "compilekit", "build", config, "-o", out]
    done = subprocess.run(
        [*command, "--no-verify", "-j", "2"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout + done.stderr)[-2000:] if done.returncode else ""


def differences(first: Artifact, second: Artifact) -> dict[str, Any]:
    """What differs between two builds of one configuration."""
    launches = kernels(first)
    others = kernels(second)
    files = {
        path: digest
        for path, digest in first.manifest.files.items()
        if path.startswith("programs/")
    }
    return {
        "same_digest": first.digest == second.digest,
        "launches": len(launches),
        "sources": [
            {"launch": place, "lines": changed_lines(first, second, place)}
            for place in sorted(launches.keys() | others.keys())
            if source(launches.get(place)) != source(others.get(place))
        ],
        "cubins": sorted(
            place
            for place, kernel in launches.items()
            if place in others and kernel.digest != others[place].digest
        ),
        "files": sorted(
            path
            for path, digest in files.items()
            if second.manifest.files.get(path) != digest
        ),
        "factors": {
            target: {"first": mine, "second": second.manifest.factors_for(target)}
            for target in first.manifest.targets
            if (mine := first.manifest.factors_for(target))
            != second.manifest.factors_for(target)
        },
    }


def kernels(artifact: Artifact) -> dict[str, Any]:
    """Target, entry, bucket and name of every launch → its kernel."""
    return {
        "/".join((*place, name)): kernel
        for place, program in artifact.programs.items()
        for name, kernel in program.kernels.items()
    }


def source(kernel: Any) -> str:
    """The digest of a kernel's source; empty for a launch that isn't there."""
    return "" if kernel is None else str(kernel.source)


def changed_lines(first: Artifact, second: Artifact, place: str) -> list[str]:
    """The lines of a kernel's source that one build has and the other hasn't."""
    texts = []
    for artifact in (first, second):
        digest = source(kernels(artifact).get(place))
        data = artifact.read(f"sources/{digest}.py") if digest else b""
        texts.append(data.decode().splitlines())
    lines = difflib.unified_diff(
        *texts, "without a GPU", "on the GPU", lineterm="", n=0
    )
    return list(lines)[:40]


def differs(report: dict[str, Any]) -> bool:
    """True if the two builds aren't the same, or one failed."""
    return not report.get("same_digest", False)


def show(report: dict[str, Any]) -> None:
    """One line per configuration, and one per kernel that differs."""
    if "error" in report:
        last = report["error"].strip().splitlines()[-1]
        print(f"{report['name']}\tfailed\t{last}", flush=True)
        return
    counts = "\t".join(
        f"{len(report[kind])} {kind} differ"
        for kind in ("sources", "cubins", "files", "factors")
    )
    digest = "equal" if report["same_digest"] else "different"
    print(
        f"{report['name']}\tdigest {digest}\t{report['launches']} launches\t{counts}",
        flush=True,
    )
    for one in report["sources"]:
        print(f"  {one['launch']}", *one["lines"], sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
