"""What a configuration file may hold: keys, words, names, forced options."""

from __future__ import annotations

import re
from collections.abc import Mapping

# What each table may hold; the loader refuses everything else.
KEYS: Mapping[str, tuple[str, ...]] = {
    "": (
        *("model", "axes", "entries", "generate", "compile", "gates", "verify"),
        *("build", "serve", "autotune", "freeze"),
    ),
    "model": ("source", "dtype", "class", "config"),
    "entries.*": (
        *("method", "inputs", "outputs", "kwargs", "example"),
        *("warmup", "grad"),
    ),
    "entries.*.inputs.*": ("shape", "dtype", "pad", "default", "low", "high"),
    "entries.*.outputs.*": ("cut",),
    "generate": ("batch", "prompt", "cache"),
    "compile": (
        *("mode", "fullgraph", "threads", "attention", "decode_kernels"),
        "options",
    ),
    "gates": ("graph_breaks", "math_attention"),
    "verify": ("atol", "rtol", "weights"),
    "build": ("targets", "routes", "jobs"),
    "autotune": ("from",),
    "freeze": ("weights",),
    "serve": ("on_uncovered", "over_length", "cuda_graphs"),
}

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
BENCHMARKING = ("max-autotune", "max-autotune-no-cudagraphs")
ROUTES = ("program", "cache")
GRAD_MODES = ("off", "inference")
ATTENTION = ("cudnn", "flash", "efficient", "math")
MATH_ATTENTION = ("ignore", "warn", "error")
ON_UNCOVERED = ("error", "eager", "jit")
OVER_LENGTH = ("error", "eager", "chunk")
# The axes that [generate] makes: batch, piece of the prompt, places in the cache.
GENERATE_AXES = {"b": "batch", "s": "prompt", "c": "cache"}

# torch dtype name → smallest and largest finite value. Kept here so that reading a
# configuration doesn't import torch; tests/test_config.py compares it with torch.
RANGES: Mapping[str, tuple[float, float]] = {
    "bool": (0, 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float8_e4m3fn": (-448.0, 448.0),
    "float8_e5m2": (-57344.0, 57344.0),
    "float16": (-65504.0, 65504.0),
    "bfloat16": (-3.3895313892515355e38, 3.3895313892515355e38),
    "float32": (-3.4028234663852886e38, 3.4028234663852886e38),
    "float64": (-1.7976931348623157e308, 1.7976931348623157e308),
    "complex64": (-3.4028234663852886e38, 3.4028234663852886e38),
    "complex128": (-1.7976931348623157e308, 1.7976931348623157e308),
}
INPUT_DTYPES = tuple(RANGES)
MODEL_DTYPES = ("float16", "bfloat16", "float32", "float64")
DTYPE_ALIASES: Mapping[str, str] = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "double": "float64",
    "fp64": "float64",
    "f64": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}

# Inductor options that the program route sets itself, and why a user's value can't
# hold. Only the cache route keeps them.
FORCED_OPTIONS: Mapping[str, str] = {
    "benchmark_kernel": "benchmark code isn't part of a program",
    "compile_threads": "compilekit compiles the kernels; set [build] jobs instead",
    "cpp.dynamic_threads": "set [compile] threads instead (0 = any count)",
    "cpp.march": "the target fixes the instruction set; set [build] targets",
    "cpp.simdlen": "the target fixes the vector width; set [build] targets",
    "cpp.threads": "set [compile] threads instead (0 = any count)",
    "cpp.vec_isa_ok": "the target fixes the instruction set; set [build] targets",
    "cpp_wrapper": "a program keeps Inductor's Python output code",
    "freezing": "set [freeze] weights instead; torch ignores the option",
    "fx_graph_cache": "a program doesn't come from a cache",
    "fx_wrapper": "a program keeps Inductor's Python output code",
    "fallback_random": "random numbers are eager's, so that a seed means the same",
    "graph_partition": "a program is one function",
    "static_launch_user_defined_triton_kernels": "no kernel is launched by Triton",
    "strict_static_cuda_launcher": "no kernel is launched by Triton",
    "triton.cudagraphs": "graphs can't be stored; they're captured at load",
    "triton.descriptive_names": "long kernel names can't be launched statically",
    "triton.unique_kernel_names": "numbered names give one kernel several digests",
}

_NAME = r"[^\W\d]\w*"
_KEY = r"""\[(?:\d+|"[^"'\\]+"|'[^"'\\]+')\]"""
IDENTIFIER = re.compile(_NAME)
FUNCTION = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")
SCRIPT = re.compile(r"(?!/)[^\s'\"]+\.py(?:\s.*)?", re.DOTALL)
# A bucket's size of an axis, in a script's arguments.
PLACEHOLDER = re.compile(r"\{(\w+)\}")
AXIS = re.compile(r"[a-z][a-z0-9_]*")
INPUT_PATH = re.compile(rf"{_NAME}(?:\.{_NAME}|{_KEY})*")
# An output that is one bare tensor has the empty path.
OUTPUT_PATH = re.compile(rf"(?:(?:{_NAME}|{_KEY})(?:\.{_NAME}|{_KEY})*)?")
