"""``compilekit inspect``: what an artifact holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilekit.cli.options import Command, artifact_argument
from compilekit.console import Block, Facts, Report, Size, Table
from compilekit.errors import ConfigError
from compilekit.paths import toml_key

if TYPE_CHECKING:
    from compilekit.artifact import Artifact
    from compilekit.artifact.program import Program, TensorSpec


@click.command(cls=Command, example="compilekit inspect artifact --bucket b1_s128")
@artifact_argument
@click.option(
    "-b",
    "--bucket",
    metavar="NAME",
    help="Show this bucket's kernels, inputs and outputs.",
)
def inspect(artifact: Path, bucket: str | None) -> Report:
    """Show what ARTIFACT holds, after verifying every digest. Imports no torch."""
    from compilekit.artifact import open_artifact

    opened = open_artifact(artifact)
    return overview(opened) if bucket is None else one_bucket(opened, bucket)


def overview(artifact: Artifact) -> Report:
    """Model, targets, entries, buckets, factors, sizes and digest."""
    from compilekit.compiler import attest

    manifest = artifact.manifest
    documents = [p for p in (attest.PROVENANCE, attest.SBOM) if p in artifact.reports]
    attested = attest.summary({path: artifact.read(path) for path in documents})
    sizes = {key: program_size(artifact, p) for key, p in artifact.programs.items()}
    kernels = [path for path in manifest.files if path.startswith("kernels/")]
    result = {
        "artifact": str(artifact.root),
        "digest": artifact.digest,
        "schema": manifest.schema,
        "model": manifest.model,
        "targets": manifest.targets,
        "routes": manifest.routes,
        "factors": manifest.factors,
        "serve": manifest.serve,
        "buckets": [
            {
                "target": target,
                "entry": entry,
                "bucket": bucket,
                "axes": artifact.programs[target, entry, bucket].axes,
                "kernels": len(artifact.programs[target, entry, bucket].kernels),
                "size_bytes": size,
            }
            for (target, entry, bucket), size in sizes.items()
        ],
        "kernels": len(kernels),
        "files": len(manifest.files),
        "size_bytes": artifact.size_bytes,
        "attested": attested,
    }
    facts = Facts(
        (
            ("artifact", str(artifact.root)),
            ("digest", artifact.digest),
            ("schema", manifest.schema),
            ("model", manifest.model.source),
            ("class", manifest.model.class_name),
            ("dtype", manifest.model.dtype),
            ("targets", ", ".join(manifest.targets)),
            ("routes", ", ".join(manifest.routes)),
            ("kernels", len(kernels)),
            ("files", len(manifest.files)),
            ("size", Size(artifact.size_bytes)),
            *attested.items(),
        )
    )
    rows = [
        (*key, len(artifact.programs[key].kernels), Size(size))
        for key, size in sizes.items()
    ]
    table = Table(
        "bucket",
        ("target", "entry", "bucket", "kernels", "size"),
        rows,
        fold=("target", "entry"),
    )
    factors = Table(
        "factor",
        ("factor", "value"),
        [(name, shown(value)) for name, value in sorted(manifest.factors.items())],
    )
    blocks: tuple[Block, ...] = (facts, table, *([factors] if factors.rows else []))
    return Report(result, blocks)


def one_bucket(artifact: Artifact, name: str) -> Report:
    """A bucket's kernels with the place of their source, its inputs and outputs."""
    found = {key: p for key, p in artifact.programs.items() if key[2] == name}
    if not found:
        known = dict.fromkeys(key[2] for key in artifact.programs)
        raise ConfigError(
            f"bucket {name}: expected one of {', '.join(known)}",
            bucket=name,
            known=list(known),
        )
    from compilekit.artifact.program import output_paths

    kernel_rows: list[tuple[str, str, str, Size, str]] = []
    tensor_rows: list[tuple[str, str, str, str, str]] = []
    for (target, entry, _), program in found.items():
        for label, kernel in program.kernels.items():
            path = stored(artifact, "kernels", kernel.digest)
            size = artifact.manifest.files[path].size
            source = stored(artifact, "sources", kernel.source)
            kernel_rows.append((target, entry, label, Size(size), source))
        # Weights are listed once per entry; a bucket's own tensors are its arguments.
        for given in program.inputs:
            if given.spec is not None:
                row = (target, entry, given.kind, given.path, described(given.spec))
                tensor_rows.append(row)
        for path, index in output_paths(program.result).items():
            spec = program.outputs[index].spec
            key = toml_key(path)
            tensor_rows.append((target, entry, "output", key, described(spec)))
    return Report(
        {
            "artifact": str(artifact.root),
            "digest": artifact.digest,
            "bucket": name,
            "programs": list(found.values()),
        },
        (
            Table(
                "kernel",
                ("target", "entry", "kernel", "size", "source"),
                kernel_rows,
                fold=("target", "entry"),
            ),
            Table(
                "tensor",
                ("target", "entry", "kind", "path", "tensor"),
                tensor_rows,
                fold=("target", "entry"),
            ),
        ),
    )


def program_size(artifact: Artifact, program: Program) -> int:
    """Bytes of a program and the kernels it launches; shared ones count each time."""
    folder = f"programs/{program.target}/{program.entry}/{program.bucket}/"
    files = artifact.manifest.files
    own = sum(file.size for path, file in files.items() if path.startswith(folder))
    digests = {kernel.digest for kernel in program.kernels.values()}
    return own + sum(files[stored(artifact, "kernels", d)].size for d in digests)


def stored(artifact: Artifact, folder: str, digest: str) -> str:
    """Path of the file that has this digest."""
    prefix = f"{folder}/{digest}."
    return next(path for path in artifact.manifest.files if path.startswith(prefix))


def described(spec: TensorSpec) -> str:
    """``float32[1, 32, 384]``."""
    return f"{spec.dtype}{list(spec.shape)}"


def shown(value: object) -> str:
    """A factor's value in one line."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
