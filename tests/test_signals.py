"""A build that is stopped: nothing half-made, nobody left working."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parent / "serving" / "compilekit.toml"

# What runs in a shell's background ignores Ctrl-C, and so do its children.
MAIN = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from compilekit.__main__ import main\n"
    "main()\n"
)


def workers(temporary: Path) -> list[int]:
    """Processes that work in a folder, by their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        ours = any(
            value.startswith(b"TMPDIR=" + os.fsencode(temporary))
            for value in environment
        )
        if ours and b"compilekit.compiler.worker" in command:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_build_that_is_stopped(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C, a cancelled CI job, the kernel's last resort."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    out = tmp_path / "artifacts" / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "--plain", "build", CONFIG, "-o", out],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stderr is not None
    until = time.monotonic() + 60
    while not (working := workers(temporary)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(working) == 1
    process.send_signal(number)
    message = process.stderr.read()
    process.stderr.close()
    assert process.wait() == code
    assert "Traceback" not in message
    if number != signal.SIGKILL:
        assert "interrupted; nothing was written" in message
        assert list(temporary.iterdir()) == []
    until = time.monotonic() + 30
    while workers(temporary) and time.monotonic() < until:
        time.sleep(0.1)
    assert workers(temporary) == []
    assert not out.exists()
    assert not [p for p in tmp_path.rglob("*") if "staging" in p.name]
