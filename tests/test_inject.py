"""A sample of scripts/trust/inject.py: damage, kills and a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "trust" / "inject.py"


@pytest.mark.slow
def test_a_sample_of_injected_faults() -> None:
    """Never a wrong answer, never half of anything, always a named cause."""
    stages = ["files", "kill", "full", "--operations", "unpack,pull"]
    counts = ["--seed", "20261130", "--damages", "1", "--kills", "6", "--full", "6"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *stages, *counts],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing was wrong\n")
