"""A sample of scripts/trust/inject.py, and how these scripts are ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "trust" / "inject.py"
ENDED = """
import time
from termination import exit_on_sigterm

exit_on_sigterm()
try:
    print("started", flush=True)
    time.sleep(60)
finally:
    time.sleep(0.2)
    print("cleaned up", flush=True)
"""


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


def test_sigterm_lets_a_script_clean_up() -> None:
    """Also where it comes twice: finally blocks run to their end."""
    command = [sys.executable, "-c", ENDED]
    with subprocess.Popen(
        command, cwd=SCRIPT.parent, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "started\n"
        script.terminate()
        script.terminate()
        assert script.stdout.read() == "cleaned up\n"
    assert script.returncode == 1
