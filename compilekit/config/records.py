"""What a configuration says, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from compilekit.config.rules import PLACEHOLDER, SCRIPT

Scalar = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """``[model]``: what is compiled.

    Attributes:
        source: ``hf:DIR-OR-ID`` or ``package.module:factory``.
        dtype: Parameter dtype, e.g. ``float32``; empty = the checkpoint's own.
        model_class: Class in ``transformers``; empty = the config's architecture
            (TOML key ``class``).
        config: Values laid over the Hugging Face ``config.json``.
    """

    source: str
    dtype: str = ""
    model_class: str = ""
    config: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """``[entries.NAME.inputs.PATH]``: one tensor that a call passes in.

    Attributes:
        shape: Axis names and fixed sizes, e.g. ``("b", "s")`` or
            ``("b", 3, 224, 224)``.
        dtype: torch dtype name, e.g. ``int64``.
        pad: Value that fills up to the bucket; None = only exact shapes are accepted.
        default: Value that fills the whole (unpadded) input when a call leaves it out;
            None = the input is required.
        low: Smallest sample value that verify and bench draw.
        high: Exclusive upper bound of samples; None = 1.0 for floats (normal draw),
            2 for integers unless the model's vocabulary is known.
    """

    shape: tuple[str | int, ...]
    dtype: str
    pad: bool | int | float | None = None
    default: bool | int | float | None = None
    low: int | float = 0
    high: int | float | None = None


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """``[entries.NAME.outputs.PATH]``: dimension → axis whose real size it's cut to."""

    cut: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class EntryConfig:
    """``[entries.NAME]``: one callable that is compiled.

    Attributes:
        name: The entry's name.
        method: Method of the model that is compiled; the entry's name by default.
        inputs: Argument path (``input_ids``, ``batch["x"]``, ``state.h``) → tensor.
        outputs: Output path → cut rule.
        kwargs: Fixed keyword arguments, baked into the graph (``use_cache = false``).
        example: ``package.module:function`` that makes the keyword arguments for one
            bucket, for inputs that dicts and lists can't express (dataclasses):
            ``function(axes: dict[str, int]) -> dict[str, object]``; empty = built
            from ``inputs``.
        warmup: Code that calls ``torch.compile`` itself, for the cache route:
            ``package.module:function``, a ``function(axes: dict[str, int])`` that runs
            what one bucket needs and returns outputs to compare; or a script and its
            arguments, ``train.py --batch {b}``; empty = the method is compiled.
        grad: Mode that the cache route compiles the method in: ``off``
            (``torch.no_grad``) or ``inference`` (``torch.inference_mode``).
        role: ``prefill`` or ``decode`` for an entry that ``[generate]`` makes; empty =
            one of the configuration's own.
    """

    name: str
    method: str
    inputs: Mapping[str, InputConfig]
    outputs: Mapping[str, OutputConfig] = dataclasses.field(default_factory=dict)
    kwargs: Mapping[str, Scalar | None] = dataclasses.field(default_factory=dict)
    example: str = ""
    warmup: str = ""
    grad: str = "off"
    role: str = ""

    def used_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of the configuration's axes that the entry's buckets are made of.

        A warm-up function is given all of them, a script those its arguments name.
        """
        if self.warmup and not SCRIPT.fullmatch(self.warmup):
            return tuple(axes)
        used = {axis for rule in self.inputs.values() for axis in rule.shape}
        used |= {*PLACEHOLDER.findall(self.warmup)}
        return tuple(axis for axis in axes if axis in used)


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """``[compile]``: what is compiled, and how.

    Attributes:
        mode: Whose options Inductor gets, e.g. ``default``.
        fullgraph: Whether a graph break is an error.
        threads: Of CPU code; 0 = any thread count.
        attention: Backends that ``scaled_dot_product_attention`` may take, with
            boolean causal masks said to be that; empty = all, and masks as they are.
        decode_kernels: Whether ``[generate]``'s steps for a GPU take our own kernels
            for products of few rows and for a token's attention.
        options: Inductor's.
    """

    mode: str = "default"
    fullgraph: bool = True
    threads: int = 0
    attention: tuple[str, ...] = ()
    decode_kernels: bool = True
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GatesConfig:
    """``[gates]``: graph breaks allowed, and what to do about math attention."""

    graph_breaks: int = 0
    math_attention: str = "warn"


@dataclasses.dataclass(frozen=True)
class VerifyConfig:
    """``[verify]``: tolerances against eager, and on which weights.

    Attributes:
        atol: Absolute tolerance; None = by dtype.
        rtol: Relative tolerance; None = by dtype.
        weights: Directory for ``from_pretrained``; empty = those of ``[freeze]``, or
            random ones, seeded.
    """

    atol: float | None = None
    rtol: float | None = None
    weights: str = ""


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """``[build]``: targets, routes, and how many jobs run beside each other."""

    targets: tuple[str, ...] = ("native",)
    routes: tuple[str, ...] = ("program",)
    jobs: int = 0


@dataclasses.dataclass(frozen=True)
class AutotuneConfig:
    """``[autotune]``: what ``compilekit tune`` found (TOML key ``from``).

    Attributes:
        source: Its file, relative to the configuration's folder; empty = none.
    """

    source: str = ""


@dataclasses.dataclass(frozen=True)
class FreezeConfig:
    """``[freeze]``: weights that are folded into the programs, which then need them.

    Attributes:
        weights: As in `VerifyConfig`; empty = nothing is folded.
    """

    weights: str = ""


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """``[serve]``: defaults that the artifact carries for ``attach``.

    Attributes:
        on_uncovered: What becomes of a call that no program covers.
        over_length: What becomes of one that is longer than every bucket; ``chunk``
            is for a prompt, which goes through ``[generate]``'s prefill in pieces.
        cuda_graphs: Whether ``[generate]``'s steps are replayed as CUDA graphs.
    """

    on_uncovered: str = "error"
    over_length: str = "error"
    cuda_graphs: bool = True


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole configuration.

    Attributes:
        path: The file it came from; relative paths in it are relative to its folder.
        axes: Axis name → sizes, in the order of the file.
    """

    path: Path
    model: ModelConfig
    axes: Mapping[str, tuple[int, ...]]
    entries: Mapping[str, EntryConfig]
    compile: CompileConfig = CompileConfig()
    gates: GatesConfig = GatesConfig()
    verify: VerifyConfig = VerifyConfig()
    build: BuildConfig = BuildConfig()
    serve: ServeConfig = ServeConfig()
    autotune: AutotuneConfig = AutotuneConfig()
    freeze: FreezeConfig = FreezeConfig()
