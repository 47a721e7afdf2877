"""A tiny artifact made by hand, used by the tests of the format.

``tests/data/golden/`` holds it as written: one example of every JSON file. After a
change of the format, ``python tests/golden.py`` writes it again; look at the diff.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

from compilekit.artifact import (
    Artifact,
    Manifest,
    ManifestEntry,
    Model,
    TargetVerified,
    canonical,
    write_artifact,
    write_verification,
)
from compilekit.artifact.program import (
    Constant,
    Entry,
    GraphInput,
    GraphOutput,
    InputRule,
    KernelRef,
    Parameter,
    Program,
    Read,
    TensorSpec,
    to_json,
)
from compilekit.plan import Bucket
from compilekit.results import BucketVerified

FOLDER = Path(__file__).parent / "data" / "golden"
ARTIFACT = FOLDER / "artifact"
RECORD = FOLDER / "artifact.verified.json"

TARGET = "cpu-x86_64-v3"
BUCKETS = (
    Bucket("b1_s32", {"b": 1, "s": 32}),
    Bucket("b1_s128", {"b": 1, "s": 128}),
)
KERNEL = b"\x7fELF\x02\x01\x01\x00 bytes of a shared object, for the tests only\n"
SOURCE = b'extern "C" void kernel(const float* in0, float* out0) { *out0 = *in0; }\n'
CALL = b"def call(args):\n    (arg0, arg1) = args\n    return (kernel(arg0, arg1),)\n"


def safetensors(name: str, values: tuple[float, ...]) -> bytes:
    """One float32 vector as a safetensors file."""
    size = 4 * len(values)
    entry = {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, size]}
    header = json.dumps({name: entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack("<2f", *values)


CONSTANT = safetensors("constant0", (0.5, 2.0))
KERNEL_PATH = f"kernels/{canonical.sha256(KERNEL)}.so"
SOURCE_PATH = f"sources/{canonical.sha256(SOURCE)}.cpp"
CONSTANT_PATH = f"constants/{canonical.sha256(CONSTANT)}.safetensors"
ENTRY_PATH = f"programs/{TARGET}/forward/entry.json"


def entry() -> Entry:
    """The entry's calling convention: tied weights, a baked argument, a custom op."""
    return Entry(
        name="forward",
        target=TARGET,
        method="forward",
        axes=("b", "s"),
        signature=(
            Parameter("input_ids", "positional", required=True),
            Parameter("attention_mask", "positional", required=False),
            Parameter("use_cache", "keyword", required=False, default=True),
        ),
        inputs={
            "input_ids": InputRule("int64", ("b", "s"), pad=0, high=1000),
            "attention_mask": InputRule("int64", ("b", "s"), pad=0, default=1),
        },
        fixed={"use_cache": False},
        cuts={"last_hidden_state": {"1": "s"}},
        tensors={
            "embed.weight": TensorSpec("float32", (1000, 8), (8, 1)),
            "head.weight": TensorSpec("float32", (1000, 8), (8, 1)),
        },
        aliases=(("embed.weight", "head.weight"),),
        reads=(
            Read("config.hidden_act", "value", "gelu"),
            Read("layers", "length", 2),
            Read("layers.0", "type", "tiny.model:Layer"),
        ),
        code={"tiny.model:Tiny.forward": canonical.sha256(b"bytecode")},
        ambient={"grad_mode": False, "autocast": False},
        custom_ops={
            "tiny::scale": {
                "module": "tiny.ops",
                "schema": "tiny::scale(Tensor x) -> Tensor",
            }
        },
    )


def program(bucket: Bucket) -> Program:
    """A bucket's program: every kind of input and output, a nested result."""
    b, s = bucket.axes["b"], bucket.axes["s"]
    ids = TensorSpec("int64", (b, s), (s, 1))
    hidden = TensorSpec("float32", (b, s, 8), (s * 8, 8, 1))
    return Program(
        target=TARGET,
        entry="forward",
        bucket=bucket.name,
        axes=bucket.axes,
        inputs=(
            GraphInput("tensor", "embed.weight", aligned=True),
            GraphInput("argument", "input_ids", spec=ids),
        ),
        outputs=(
            GraphOutput(hidden, "program", 0),
            GraphOutput(ids, "input", 1),
            GraphOutput(TensorSpec("float32", (8,), (1,)), "view", 0, offset=8),
        ),
        result={
            "kind": "dataclass",
            "class": "tiny.model:Output",
            "items": [
                ["last_hidden_state", {"kind": "out", "index": 0}],
                [
                    "extras",
                    {
                        "kind": "tuple",
                        "items": [
                            {"kind": "out", "index": 1},
                            {"kind": "out", "index": 2},
                            {"kind": "tensor", "path": "embed.weight"},
                            {"kind": "argument", "path": "input_ids"},
                            {"kind": "value", "value": 0.1},
                        ],
                    },
                ],
            ],
        },
        kernels={
            "kernel": KernelRef(
                digest=canonical.sha256(KERNEL),
                source=canonical.sha256(SOURCE),
                launch={"argtypes": ["const float*", "float*"]},
            )
        },
        constants={
            "_tensor_constant0": Constant(canonical.sha256(CONSTANT), "constant0")
        },
        externs=("torch.ops.aten.mm.default",),
    )


def parts() -> Manifest:
    """The manifest, before `write_artifact` lists the files."""
    return Manifest(
        model=Model(
            source="tiny.model:make",
            class_name="tiny.model:Tiny",
            dtype="float32",
            config={"hidden_act": "gelu", "layers": 2, "eps": 1e-05, "name": "größe"},
        ),
        targets={
            TARGET: {
                "kind": "cpu",
                "machine": "x86_64",
                "march": "x86-64-v3",
                "simd_width": 256,
                "features": ["avx2", "fma"],
                "aten_capability": "AVX2",
                "device": {},
                "factors": {"glibc": "2.17", "libstdcxx": "3.4.19"},
            }
        },
        entries={"forward": ManifestEntry(("b", "s"), BUCKETS)},
        factors={
            "torch.version": "2.13.0",
            "torch.cuda": None,
            "python.version": "3.11",
        },
    )


def files() -> dict[str, bytes]:
    """Every file but the manifest and the reports."""
    contents = {
        KERNEL_PATH: KERNEL,
        SOURCE_PATH: SOURCE,
        CONSTANT_PATH: CONSTANT,
        ENTRY_PATH: canonical.encode(to_json(entry())),
    }
    for bucket in BUCKETS:
        folder = f"programs/{TARGET}/forward/{bucket.name}"
        contents[f"{folder}/call.py"] = CALL
        contents[f"{folder}/program.json"] = canonical.encode(to_json(program(bucket)))
    return contents


def variant(number: int) -> dict[str, bytes]:
    """The same files and one more kernel source, so that the digest differs."""
    source = f"// variant {number}\n".encode()
    return {**files(), f"sources/{canonical.sha256(source)}.cpp": source}


def reports() -> dict[str, bytes]:
    """One report."""
    return {"reports/build.log": b"b1_s32 compiled 1.5s\nb1_s128 compiled 1.7s\n"}


def write(folder: Path) -> Artifact:
    """Write the golden artifact."""
    return write_artifact(folder, parts(), files(), reports())


def verified(target: str = TARGET) -> TargetVerified:
    """Results in which every bucket passed."""
    return TargetVerified(
        factors={"torch.version": "2.13.0", "threads": 2},
        buckets=tuple(
            BucketVerified(
                entry="forward",
                bucket=bucket.name,
                threads=2,
                max_abs_error=4.76837158203125e-07,
                atol=1e-05,
                rtol=1e-05,
                compiles=0,
                spawned=0,
                passed=True,
                target=target,
            )
            for bucket in BUCKETS
        ),
    )


def sign(artifact: Artifact) -> bytes:
    """The signature record of two keys that everybody knows."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from compilekit.trust import signature

    made = []
    for serial in (1, 2):
        key = Ed25519PrivateKey.from_private_bytes(bytes([serial]) * 32)
        signed = key.sign(signature.message(artifact.digest, serial))
        name = canonical.sha256(key.public_key().public_bytes_raw())
        made.append(signature.Signature(name, serial, signed))
    return signature.encode_record(artifact.digest, made)


if __name__ == "__main__":
    written = write(ARTIFACT)
    write_verification(written, {TARGET: verified()})
    (FOLDER / "signature.json").write_bytes(sign(written))
    sys.stdout.write(f"wrote {FOLDER}\n")
