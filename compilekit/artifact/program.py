"""What ``entry.json`` and ``program.json`` say: the calling convention, as data.

An entry's file holds what all its buckets share: the signature, the live tensors that
the graphs read (parameters and buffers by path), the Python values that capture
depended on, and the ambient state. A program's file holds one bucket: graph inputs in
order, graph outputs, how the caller's output is put together from them, and kernels.

Paths name a place below a root: ``layers.0.weight`` below the model,
``cache.layers[3].keys`` or ``batch["pixel_values"]`` below a call's arguments.

Standard library only.
"""

# Annotations are evaluated: as text, a named tuple would compile each of them, and a
# start pays for it.

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from compilekit import paths
from compilekit.artifact.canonical import plain

SCHEMA = 1


class TensorSpec(NamedTuple):
    """Metadata that a tensor must have; strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str = "cpu"


class InputRule(NamedTuple):
    """How an argument tensor follows the axes.

    Attributes:
        shape: Axis names and fixed sizes.
        pad: Fill value up to the bucket, or None = exact shapes only.
        default: Value of a left-out input, or None = required.
        low, high: Sample range for verify and bench (high exclusive; None = default).
    """

    dtype: str
    shape: tuple[str | int, ...]
    pad: bool | int | float | None = None
    default: bool | int | float | None = None
    low: int | float = 0
    high: int | float | None = None


class Read(NamedTuple):
    """One Python value that capture read and baked into the graph.

    Attributes:
        path: Place below the model (``config.hidden_act``, ``layers.0.eps``), or
            ``module:NAME`` for a module global.
        kind: ``value`` (equal to `value`), ``type`` (`value` is module:qualname),
            ``length`` (`value` is a length), ``keys`` (`value` lists a dict's keys),
            ``repr`` (`value` is how it prints: what JSON can't hold), ``absent``
            (attribute isn't there), ``inherited`` (it is its class's: the instance has
            none of its own).
        value: What it was, as JSON.
    """

    path: str
    kind: str
    value: Any


class Parameter(NamedTuple):
    """One parameter of the compiled method's signature, without ``self``.

    Attributes:
        name: Its name.
        kind: ``positional``, ``keyword`` (keyword only), ``args`` or ``kwargs``.
        required: True without a default.
        default: The default as JSON, None when it isn't a scalar.
    """

    name: str
    kind: str
    required: bool
    default: Any = None


class KernelRef(NamedTuple):
    """A kernel as a program names it.

    Attributes:
        digest: sha256 of ``kernels/<digest>.so`` (or ``.cubin``).
        source: sha256 of ``sources/<source>.cpp`` (or ``.py``).
        launch: Route-specific launch facts; CPU: ``{"argtypes": [...]}``.
    """

    digest: str
    source: str
    launch: Mapping[str, Any]


class Entry(NamedTuple):
    """``programs/<target>/<entry>/entry.json``.

    Attributes:
        method: Method of the model that was compiled.
        axes: Axis names in configuration order.
        signature: Parameters of the method.
        inputs: Argument path → rule; only tensors that a call passes.
        fixed: Argument path → value that was baked in; a call may leave it out or
            pass the same.
        cuts: Output path → {dimension: axis}.
        tensors: Path below the model → metadata of every live tensor a graph reads.
        frozen: Those whose values the programs were built for → digest of its bytes.
        aliases: Groups of paths that must be one tensor (tied weights), and only they.
        reads: Python values the graphs depend on.
        code: ``module:qualname`` of every traced function outside torch → digest of
            its bytecode and defaults.
        ambient: Name → value of process-wide state (``grad_mode``, ``autocast``, …).
        training: False = every module was in eval mode.
        mutates_model: True if any bucket writes a parameter or buffer.
        custom_ops: ``namespace::name`` of an operator outside torch → ``module`` that
            registers it and its ``schema``.
        role: ``prefill`` or ``decode`` for a step of a causal language model, whose
            arguments docs/generate.md describes; empty for a method of the model.
        output: ``module:qualname`` of what such a model's forward returns.
        native: C++ for what a call does besides its program (runtime/calls.cpp),
            compiled for the target; None = Python and torch do it.
        layout: Reserved: rank, world size, tensor subclasses, adapters.
    """

    name: str
    target: str
    method: str
    axes: tuple[str, ...]
    signature: tuple[Parameter, ...]
    inputs: Mapping[str, InputRule]
    fixed: Mapping[str, Any]
    cuts: Mapping[str, Mapping[str, str]]
    tensors: Mapping[str, TensorSpec]
    aliases: tuple[tuple[str, ...], ...]
    reads: tuple[Read, ...]
    code: Mapping[str, str]
    ambient: Mapping[str, Any]
    frozen: Mapping[str, str] = {}
    training: bool = False
    mutates_model: bool = False
    custom_ops: Mapping[str, Mapping[str, str]] = {}
    role: str = ""
    output: str = ""
    native: KernelRef | None = None
    layout: Mapping[str, Any] = {}
    schema: int = SCHEMA


class GraphInput(NamedTuple):
    """One graph input, in call order.

    Attributes:
        kind: ``tensor`` (path below the model, metadata in the entry) or ``argument``
            (path below the call's arguments).
        path: Where it is taken from.
        spec: Metadata of an argument; None for a model tensor.
        mutated: True if the program writes it in place.
        aligned: True if its address must be a multiple of 16 bytes.
    """

    kind: str
    path: str
    spec: TensorSpec | None = None
    mutated: bool = False
    aligned: bool = False


class GraphOutput(NamedTuple):
    """One output of the graph.

    Attributes:
        spec: Its metadata.
        source: ``program`` (the program returns it at position `index`), ``input``
            (graph input `index` itself) or ``view`` (a view of graph input `index`
            with the shape and stride of `spec`, `offset` elements into its storage).
        index: See `source`.
        offset: Storage offset in elements, for ``view``.
    """

    spec: TensorSpec
    source: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    offset: int = 0


class Constant(NamedTuple):
    """A tensor that belongs to a program.

    Attributes:
        digest: sha256 of ``constants/<digest>.safetensors``.
        key: Its name in that file.
        order: Its dimensions in the order of the file's; empty = as they are.
    """

    digest: str
    key: str
    order: tuple[int, ...] = ()


class Program(NamedTuple):
    """``programs/<target>/<entry>/<bucket>/program.json``.

    Attributes:
        axes: Axis → size of this bucket.
        inputs: Graph inputs in call order.
        outputs: Graph outputs in graph order.
        result: The caller's output as a tree; each node has ``kind``: ``out`` (index
            into `outputs`), ``argument`` (path), ``tensor`` (path below the model),
            ``value`` (JSON), ``tuple``, ``list``, ``dict`` (``class``, ``items``),
            ``namedtuple`` and ``dataclass`` (``class``, ``items``).
        kernels: Name in ``call.py`` → kernel.
        constants: Name in ``call.py`` → tensor.
        externs: Names outside the kernels that ``call.py`` uses.
    """

    target: str
    entry: str
    bucket: str
    axes: Mapping[str, int]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    result: Mapping[str, Any]
    kernels: Mapping[str, KernelRef]
    constants: Mapping[str, Constant] = {}
    externs: tuple[str, ...] = ()
    schema: int = SCHEMA


def to_json(record: Entry | Program) -> dict[str, Any]:
    """An entry or a program as plain JSON values.

    Everything is spelled out, except what is at its default in a graph's inputs and
    outputs: there are hundreds of them, and a start parses them all.
    """
    data = plain(record)
    if isinstance(record, Entry) and record.native is None:
        del data["native"]
    if isinstance(record, Program):
        data["inputs"] = [_without_defaults(item) for item in record.inputs]
        data["outputs"] = [_without_defaults(item) for item in record.outputs]
        data["constants"] = {
            name: [part if isinstance(part, str) else [*part] for part in each if part]
            for name, each in record.constants.items()
        }
    return cast(dict[str, Any], data)


def _without_defaults(record: GraphInput | GraphOutput) -> dict[str, Any]:
    defaults = record._field_defaults
    return {
        name: plain(value)
        for name, value in record._asdict().items()
        if name not in defaults or value != defaults[name]
    }


def output_paths(tree: Mapping[str, Any]) -> dict[str, int]:
    """Path of each output that the graph computes → graph output.

    Args:
        tree: `Program.result`.
    """
    found: dict[str, int] = {}

    def walk(node: Mapping[str, Any], path: str) -> None:
        if node["kind"] == "out":
            found[path] = node["index"]
        elif node["kind"] in ("list", "tuple"):
            for index, part in enumerate(node["items"]):
                walk(part, f"{path}[{index}]")
        else:
            for name, part in node.get("items", ()):
                walk(part, paths.join(path, name, node["kind"]))

    walk(tree, "")
    return found


def entry_from_json(data: Mapping[str, Any]) -> Entry:
    """Rebuild an `Entry`; the schema has been checked by the caller."""
    fields = dict(data)
    fields["axes"] = tuple(data["axes"])
    fields["signature"] = tuple(Parameter(**p) for p in data["signature"])
    fields["inputs"] = {
        path: InputRule(**{**rule, "shape": tuple(rule["shape"])})
        for path, rule in data["inputs"].items()
    }
    fields["tensors"] = {path: _spec(s) for path, s in data["tensors"].items()}
    fields["aliases"] = tuple(tuple(group) for group in data["aliases"])
    fields["reads"] = tuple(Read(**read) for read in data["reads"])
    if data.get("native"):
        fields["native"] = KernelRef(**data["native"])
    return Entry(**fields)


def program_from_json(data: Mapping[str, Any]) -> Program:
    """Rebuild a `Program`; the schema has been checked by the caller."""
    fields = dict(data)
    fields["inputs"] = tuple(
        GraphInput(**{**i, "spec": _spec(i["spec"])})
        if "spec" in i
        else GraphInput(**i)
        for i in data["inputs"]
    )
    fields["outputs"] = tuple(
        GraphOutput(**{**o, "spec": _spec(o["spec"])}) for o in data["outputs"]
    )
    fields["kernels"] = {name: KernelRef(**k) for name, k in data["kernels"].items()}
    fields["constants"] = {
        name: Constant(digest, key, tuple(*order))
        for name, (digest, key, *order) in data["constants"].items()
    }
    fields["externs"] = tuple(data["externs"])
    return Program(**fields)


def _spec(data: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(
        data["dtype"], tuple(data["shape"]), tuple(data["stride"]), data["device"]
    )
