"""The package's version; the build backend and ``--version`` read it here."""

__version__ = "0.1.0"
