"""``python -m compilekit`` and the console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    from compilekit.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
