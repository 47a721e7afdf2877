"""Every error compilekit raises, as one tree; each class fixes its exit code.

    CompilekitError
    ├── ConfigError (2)          bad configuration or command line
    ├── CaptureError (3)         a model couldn't be captured as one graph
    │   ├── GraphBreakError
    │   ├── UnsupportedByProgramError   the program route can't carry something
    │   └── WorkerCrashedError
    ├── HarvestError (4)         compiled output is incomplete or not portable
    │   └── KernelBuildError
    ├── ArtifactError (5)        an artifact is damaged, incomplete or unreadable
    │   ├── ManifestError
    │   ├── SchemaVersionError
    │   ├── DigestError
    │   └── UnsafePathError
    ├── MismatchError (6)        artifact and machine (or model) don't fit
    ├── AttachError (7)          a program couldn't be bound to a live model
    │   └── CallRefusedError     a call breaks the calling convention
    ├── VerifyError (8)          a replayed bucket compiled something or differs
    ├── PolicyError (9)          a requirement set by the caller isn't met
    ├── NoBucketError (10)       no bucket holds the given input
    ├── SignatureError (11)
    ├── NeedsDeviceError (12)    the target's device isn't here
    └── ResourceError (13)       disk, memory, a missing program

A message reads: what failed, what was expected, what was found, the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

# What code that isn't ours may raise: a factory, a transformers class, a script that
# leaves with sys.exit. It has classes of its own, so this is everything; errors of
# this module are caught first and raised again.
FOREIGN_ERRORS = (Exception, SystemExit)


def nearest_name(name: str, known: Iterable[object]) -> str:
    """What was probably meant among what there is; empty if nothing is close."""
    import difflib  # only an error needs it

    return next(iter(difflib.get_close_matches(name, map(str, known), 1)), "")


class CompilekitError(Exception):
    """Base of the tree.

    Args:
        message: What failed, expected and found, in one or two sentences.
        hint: The next step for the reader; printed on its own line.
        **fields: Machine-readable facts, shown by ``--json``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders; keyword fields would be lost otherwise.
        return (rebuild, (type(self), self.message, self.hint, self.fields))


def rebuild(
    cls: type[CompilekitError], message: str, hint: str, fields: dict[str, Any]
) -> CompilekitError:
    """An error as it was on the other side of a process border."""
    error = cls.__new__(cls)
    CompilekitError.__init__(error, message, hint=hint, **fields)
    return error


class ConfigError(CompilekitError):
    """The configuration or the command line is wrong."""

    exit_code = 2


class CaptureError(CompilekitError):
    """A model couldn't be captured as one graph."""

    exit_code = 3


class GraphBreakError(CaptureError):
    """Dynamo broke the graph where the route needs it whole."""


class UnsupportedByProgramError(CaptureError):
    """The program route can't carry something; the message names the thing."""


class WorkerCrashedError(CaptureError):
    """The process that compiled a bucket died."""


class HarvestError(CompilekitError):
    """What the compiler left is incomplete or can't travel."""

    exit_code = 4


class KernelBuildError(HarvestError):
    """The C++ compiler refused a kernel."""


class ArtifactError(CompilekitError):
    """An artifact is damaged, incomplete or unreadable."""

    exit_code = 5


class ManifestError(ArtifactError):
    """``manifest.json`` is missing, malformed or contradicts itself."""


class SchemaVersionError(ArtifactError):
    """The artifact follows a schema this version doesn't know."""


class DigestError(ArtifactError):
    """A file's bytes aren't the ones the manifest lists."""


class UnsafePathError(ArtifactError):
    """A listed path leaves the artifact, or isn't a plain file."""


class Mismatch(NamedTuple):
    """One factor on which artifact and machine (or model) differ.

    Attributes:
        factor: Name as in the factor table, e.g. ``torch.version``.
        artifact: The artifact's value.
        here: This machine's (or model's) value.
        verdict: ``refuse`` or ``warn``.
        consequence: What would happen if it were ignored.
        hint: The next step.
    """

    factor: str
    artifact: str
    here: str
    verdict: str
    consequence: str
    hint: str

    def __str__(self) -> str:
        return (
            f"{self.factor}: the artifact has {self.artifact}, this has {self.here}"
            f" ({self.verdict}). {self.consequence} {self.hint}"
        ).rstrip()


class MismatchError(CompilekitError):
    """Artifact and machine (or model) don't fit; carries every mismatch at once."""

    exit_code = 6

    def __init__(
        self, what: str, mismatches: tuple[Mismatch, ...], *, hint: str = ""
    ) -> None:
        lines = "\n".join(f"  {mismatch}" for mismatch in mismatches)
        count = len(mismatches)
        noun = "factor differs" if count == 1 else "factors differ"
        super().__init__(
            f"{what}: {count} {noun}\n{lines}",
            hint=hint,
            mismatches=[mismatch._asdict() for mismatch in mismatches],
        )


class AttachError(CompilekitError):
    """A program or cache couldn't be bound to a live model."""

    exit_code = 7


class CallRefusedError(AttachError):
    """A call breaks the calling convention the program was built for."""


class VerifyError(CompilekitError):
    """A replayed bucket compiled something, spawned a process or differs."""

    exit_code = 8


class PolicyError(CompilekitError):
    """A requirement set by the caller (``require``) isn't met."""

    exit_code = 9


class NoBucketError(CompilekitError):
    """No bucket holds the given input."""

    exit_code = 10


class SignatureError(CompilekitError):
    """A required signature is missing or wrong."""

    exit_code = 11


class NeedsDeviceError(CompilekitError):
    """This step needs the target's device, which isn't here."""

    exit_code = 12


class ResourceError(CompilekitError):
    """Disk, memory, permissions or a missing program."""

    exit_code = 13
