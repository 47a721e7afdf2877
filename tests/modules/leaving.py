"""A script without a guard: importing it parses the command line."""

import sys

sys.exit(2)
