"""Take each fix of docs/faults.md out in turn, and show the test that goes red.

    python scripts/trust/faults.py [ROW...]

Works on a copy of the tree. All tests named in tests/faults/NN.patch are run without any
patch first and must be green; then each patch is applied alone, its test is run and must
be red, and the patch is taken back. Exit code 1 if any row is otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.artifact")


class Row(NamedTuple):
    """One fault: its number, its patch, what the patch breaks, the test against it."""

    number: int
    patch: Path
    broken: str
    test: str


class Run(NamedTuple):
    """What pytest said: its exit code, the tests that failed, its last line."""

    code: int
    failed: list[str]
    summary: str


def read_rows(wanted: set[int]) -> list[Row]:
    """The stored patches, all of them by default."""
    rows = []
    for patch in sorted((ROOT / "tests" / "faults").glob("*.patch")):
        text = patch.read_text(encoding="utf-8")
        named = re.search(r"^Test: (\S+)::(\S+)$", text, re.MULTILINE)
        if named is None:
            raise SystemExit(f"{patch}: expected a line 'Test: FILE::FUNCTION'")
        test = f"tests/{named[1]}.py::{named[2]}"
        rows.append(Row(int(patch.stem), patch, text.partition("\n")[0], test))
    return [row for row in rows if not wanted or row.number in wanted]


def run_tests(tree: Path, tests: list[str]) -> Run:
    """Run tests of a tree with the package of that tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    failed = [line.split()[1] for line in lines if line.startswith("FAILED ")]
    return Run(done.returncode, failed, lines[-1])


def apply(tree: Path, patch: Path, *options: str) -> None:
    """Change a tree by a patch."""
    # Outside a repository: inside one, git passes over files that it doesn't track.
    ceiling = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", "-C1", *options, str(patch)]
    subprocess.run(command, cwd=tree, env=ceiling, check=True)


def main() -> int:
    """Every row; the number of rows that aren't as they should be decides."""
    rows = read_rows(set(map(int, sys.argv[1:])))
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="compilekit-faults-") as folder:
        # Some tests start as another user, who reads the package there.
        os.chmod(folder, 0o755)
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        began = time.perf_counter()
        clean = run_tests(tree, sorted({row.test for row in rows}))
        print(f"no patch: {clean.summary}", flush=True)
        if clean.code != 0 or "skipped" in clean.summary:
            print("expected every test to pass", *clean.failed, sep="\n  ")
            return 1
        for row in rows:
            apply(tree, row.patch)
            started = time.perf_counter()
            found = run_tests(tree, [row.test])
            apply(tree, row.patch, "--reverse")
            # 1: tests failed. Anything else, a syntax error say, proves nothing.
            red = found.code == 1 and bool(found.failed)
            wrong += not red
            seconds = time.perf_counter() - started
            name = found.failed[0] if red else f"{row.test}: {found.summary}"
            more = f" and {len(found.failed) - 1} more" if len(found.failed) > 1 else ""
            print(
                f"{row.number:2}  {'red' if red else 'NOT RED':7} {seconds:5.1f} s"
                f"  {row.broken[:-1]}: {name}{more}",
                flush=True,
            )
        total = time.perf_counter() - began
    print(f"{len(rows) - wrong} of {len(rows)} rows go red, {total:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
