"""The configuration file, as frozen dataclasses.

`load` reads ``compilekit.toml`` and refuses every unknown key with its line and the
nearest right name. Standard library only: reading a configuration is instant.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compilekit import paths, targets
from compilekit.errors import ConfigError

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
    """

    name: str
    method: str
    inputs: Mapping[str, InputConfig]
    outputs: Mapping[str, OutputConfig] = dataclasses.field(default_factory=dict)
    kwargs: Mapping[str, Scalar | None] = dataclasses.field(default_factory=dict)
    example: str = ""


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """``[compile]``: Inductor's mode and options; ``threads`` 0 = any thread count."""

    mode: str = "default"
    fullgraph: bool = True
    threads: int = 0
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GatesConfig:
    """``[gates]``: graph breaks allowed, and what to do about math attention."""

    graph_breaks: int = 0
    math_attention: str = "warn"


@dataclasses.dataclass(frozen=True)
class VerifyConfig:
    """``[verify]``: tolerances against eager; ``weights`` = real ones, "" = random.

    Attributes:
        atol: Absolute tolerance; None = by dtype.
        rtol: Relative tolerance; None = by dtype.
        weights: Directory for ``from_pretrained``; empty = random, seeded.
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
class ServeConfig:
    """``[serve]``: defaults that the artifact carries for ``attach``."""

    on_uncovered: str = "error"
    over_length: str = "error"


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


# What each table may hold; the loader refuses everything else.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "": ("model", "axes", "entries", "compile", "gates", "verify", "build", "serve"),
    "model": ("source", "dtype", "class", "config"),
    "entries.*": ("method", "inputs", "outputs", "kwargs", "example"),
    "entries.*.inputs.*": ("shape", "dtype", "pad", "default", "low", "high"),
    "entries.*.outputs.*": ("cut",),
    "compile": ("mode", "fullgraph", "threads", "options"),
    "gates": ("graph_breaks", "math_attention"),
    "verify": ("atol", "rtol", "weights"),
    "build": ("targets", "routes", "jobs"),
    "serve": ("on_uncovered", "over_length"),
}

# Planned tables and keys, refused with the reason instead of "unknown".
_NOT_YET: Mapping[str, str] = {
    "autotune": "tuning files belong to GPU targets, which this version can't build",
    "freeze": "this version can't fold weights into a program",
    "serve.cuda_graphs": "CUDA graphs belong to GPU targets, which this version"
    " can't build",
}

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ROUTES = ("program", "cache")
MATH_ATTENTION = ("ignore", "warn", "error")
ON_UNCOVERED = ("error", "eager", "jit")
OVER_LENGTH = ("error", "eager")

# torch dtype name → smallest and largest finite value. Kept here so that reading a
# configuration doesn't import torch; tests/test_config.py compares it with torch.
_RANGES: Mapping[str, tuple[float, float]] = {
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
INPUT_DTYPES = tuple(_RANGES)
MODEL_DTYPES = ("float16", "bfloat16", "float32", "float64")
_DTYPE_ALIASES: Mapping[str, str] = {
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
    "freezing": "torch ignores it without a word when it's given as an option",
    "fx_graph_cache": "a program doesn't come from a cache",
    "fx_wrapper": "a program keeps Inductor's Python output code",
    "fallback_random": "random numbers are eager's, so that a seed means the same",
    "graph_partition": "a program is one function",
    "static_launch_user_defined_triton_kernels": "no kernel is launched by Triton",
    "triton.cudagraphs": "graphs can't be stored; they're captured at load",
    "triton.descriptive_names": "long kernel names can't be launched statically",
    "triton.unique_kernel_names": "numbered names give one kernel several digests",
}

_NAME = r"[^\W\d]\w*"
_KEY = r"""\[(?:\d+|"[^"'\\]+"|'[^"'\\]+')\]"""
_IDENTIFIER = re.compile(_NAME)
_FUNCTION = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")
_AXIS = re.compile(r"[a-z][a-z0-9_]*")
_INPUT_PATH = re.compile(rf"{_NAME}(?:\.{_NAME}|{_KEY})*")
# An output that is one bare tensor has the empty path.
_OUTPUT_PATH = re.compile(rf"(?:(?:{_NAME}|{_KEY})(?:\.{_NAME}|{_KEY})*)?")

KeyPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration file.

    Attributes:
        line: Line in the file, from 1.
        key: Dotted key, e.g. ``model.dtpye``; empty for a syntax error.
        message: What was expected and what was found.
        nearest: The right name that is closest, or "".
    """

    line: int
    key: str
    message: str
    nearest: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}: {self.key}: " if self.key else f"line {self.line}: "
        nearest = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{where}{self.message}{nearest}"


def load(path: Path) -> Config:
    """Read a configuration file and check all of it.

    Input and output paths are brought into one form: ``batch['x']`` becomes
    ``batch["x"]``. Tables below ``[compile.options]`` and ``[model.config]`` become
    dotted names. TOML has no null: a keyword argument that is left out keeps the
    default of the compiled method.

    Args:
        path: A TOML file.

    Returns:
        The configuration; its `path` is absolute.

    Raises:
        ConfigError: The file can't be read, isn't TOML, or holds at least one
            problem. ``fields["problems"]`` lists every one as line, key, message and
            nearest right name.
    """
    import tomllib  # 3 ms that `compilekit --help`, which imports this module, saves

    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read: {error.strerror}",
            hint="`compilekit init MODEL` writes a configuration to start from.",
            path=str(path),
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _error(path, [Problem(line, "", "not UTF-8, which TOML is")]) from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _error(path, [_syntax_problem(text, str(error))]) from error

    file = _File(key_lines(text), [])
    config = _read_config(file, path.absolute(), data)
    if file.problems:
        raise _error(path, file.problems)
    return config


def check_options(config: Config, known: Mapping[str, type]) -> None:
    """Refuse Inductor options whose name or type this torch doesn't know.

    Kept apart from `load` because the names need torch.

    Args:
        config: A loaded configuration.
        known: Dotted option name → type; ``object`` accepts any value.

    Raises:
        ConfigError: With the line and the nearest right name of every bad option.
    """
    try:
        lines = key_lines(config.path.read_text(encoding="utf-8"))
    except OSError:
        # A configuration made in Python has no file, thus no lines.
        lines = {}
    file = _File(lines, [])
    for name, value in config.compile.options.items():
        # The file may nest the name ([compile.options.triton]) or quote it.
        nested: KeyPath = ("compile", "options", *name.split("."))
        quoted: KeyPath = ("compile", "options", name)
        key = quoted if quoted in lines else nested
        if name not in known:
            message = "Inductor has no such option in this version of torch"
            file.report(key, message, _nearest(name, known))
        elif not _fits(value, known[name]):
            message = f"expected {known[name].__name__}, found {_found(value)}"
            file.report(key, message)
    if file.problems:
        raise _error(config.path, file.problems)


def is_function(source: str) -> bool:
    """True if a model's source has the form ``package.module:function``."""
    # hf:bert has the form too: no module can be called hf.
    return not _names_hf(source) and _FUNCTION.fullmatch(source) is not None


def _names_hf(source: str) -> bool:
    return source.startswith("hf:") and len(source) > len("hf:")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Find the line of every table, key and array item in a valid TOML text.

    tomllib gives no positions, so this walks the text a second time. It reads what
    tomllib has accepted and checks nothing. Items of an array of tables share the
    path of the array.

    Returns:
        Key path → line, from 1; the line of a key is where it first appears.
    """
    lines: dict[KeyPath, int] = {}
    scan = _Scan(text, [match.start() for match in re.finditer("\n", text)], lines)
    table: KeyPath = ()
    position = scan.skip(0)
    while position < len(text):
        if text[position] == "[":
            brackets = 2 if text.startswith("[[", position) else 1
            table, position = scan.key(position + brackets, ())
            position = text.index("]", position) + brackets
        else:
            position = scan.pair(position, table)
        position = scan.skip(position)
    return lines


_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(
    r"""[ \t]*("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*"""
)
_STRING = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}(?!")'
    r"|'''[\s\S]*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
)
_BARE_VALUE = re.compile(r"[^,\]}#\n]*")


@dataclasses.dataclass(frozen=True)
class _Scan:
    """One walk over a TOML text; every method returns the position after it."""

    text: str
    newlines: list[int]
    lines: dict[KeyPath, int]

    def skip(self, position: int) -> int:
        """Blank space, line ends and comments."""
        return _match(_BLANK, self.text, position).end()

    def note(self, path: KeyPath, position: int) -> None:
        line = bisect.bisect_left(self.newlines, position) + 1
        self.lines.setdefault(path, line)

    def key(self, position: int, table: KeyPath) -> tuple[KeyPath, int]:
        """A dotted key; every prefix of it gets a line."""
        path = table
        while True:
            part = _match(_KEY_PART, self.text, position)
            name = part[1]
            if name[0] in "\"'":
                import tomllib

                name = tomllib.loads(f"key = {name}")["key"]
            path = (*path, name)
            self.note(path, part.start(1))
            position = part.end()
            if not self.text.startswith(".", position):
                return path, position
            position += 1

    def pair(self, position: int, table: KeyPath) -> int:
        """``key = value``."""
        path, position = self.key(position, table)
        return self.value(self.skip(position + 1), path)

    def value(self, position: int, path: KeyPath) -> int:
        text = self.text
        if text[position] == "[":
            return self.array(position + 1, path)
        if text[position] == "{":
            return self.inline_table(position + 1, path)
        string = _STRING.match(text, position)
        return (string or _match(_BARE_VALUE, text, position)).end()

    def array(self, position: int, path: KeyPath) -> int:
        index = 0
        position = self.skip(position)
        while self.text[position] != "]":
            self.note((*path, index), position)
            position = self.skip(self.value(position, (*path, index)))
            if self.text[position] == ",":
                position = self.skip(position + 1)
            index += 1
        return position + 1

    def inline_table(self, position: int, path: KeyPath) -> int:
        position = self.skip(position)
        while self.text[position] != "}":
            position = self.skip(self.pair(position, path))
            if self.text[position] == ",":
                position = self.skip(position + 1)
        return position + 1


def _match(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str]:
    match = pattern.match(text, position)
    if match is None:
        raise ValueError(f"not TOML at character {position}: {pattern.pattern}")
    return match


@dataclasses.dataclass(frozen=True)
class _File:
    """Where keys are, and what is wrong so far."""

    lines: Mapping[KeyPath, int]
    problems: list[Problem]

    def report(self, key: KeyPath, message: str, nearest: str = "") -> None:
        """Add a problem at a key, or at the closest table above it."""
        place = key
        while place and place not in self.lines:
            place = place[:-1]
        line = self.lines.get(place, 1)
        self.problems.append(Problem(line, _dotted(key), message, nearest))


def _error(path: Path, problems: list[Problem]) -> ConfigError:
    problems = sorted(problems, key=lambda problem: problem.line)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listing = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(
        f"{path}: {count}\n{listing}",
        path=str(path),
        problems=[dataclasses.asdict(problem) for problem in problems],
    )


def _syntax_problem(text: str, message: str) -> Problem:
    """tomllib puts the position at the end of its message, as words."""
    place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    if place is None:
        return Problem(1, "", f"not TOML: {message}")
    line = int(place[1]) if place[1] else text.rstrip().count("\n") + 1
    return Problem(line, "", f"not TOML: {message[: place.start()]}")


def _dotted(key: KeyPath) -> str:
    dotted = ""
    for part in key:
        if isinstance(part, int):
            dotted += f"[{part}]"
            continue
        bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
        quote = "'" if '"' in part else '"'
        name = part if bare else f"{quote}{part}{quote}"
        dotted += f".{name}" if dotted else name
    return dotted


def _nearest(name: str, known: Iterable[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), 1)), "")


def _found(value: object) -> str:
    """A value as the writer of a TOML file knows it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return f'"{value}"'
    names: dict[type, str] = {list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")


def _fits(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _table(
    file: _File, parent: Mapping[str, Any], key: KeyPath, keys: str = ""
) -> Mapping[str, Any]:
    """A table below `parent`; with `keys`, its unknown keys are reported."""
    value = parent.get(str(key[-1]), {})
    if not isinstance(value, dict):
        file.report(key, f"expected a table, found {_found(value)}")
        return {}
    if keys:
        _check_keys(file, value, key, keys)
    return value


def _check_keys(
    file: _File, table: Mapping[str, Any], place: KeyPath, keys: str
) -> None:
    known = _KEYS[keys]
    for name in table:
        if name in known:
            continue
        key = (*place, name)
        if reason := _NOT_YET.get(_dotted(key)):
            file.report(key, f"not supported: {reason}")
            continue
        nearest = _nearest(name, known)
        elsewhere = [t for t, names in _KEYS.items() if t and name in names]
        if not nearest and elsewhere:
            nearest = f"{elsewhere[0].replace('*', 'NAME')}.{name}"
        table_name = f"[{_dotted(place)}]" if place else "the file"
        message = f"unknown key; {table_name} takes {', '.join(known)}"
        file.report(key, message, nearest)


def _text(
    file: _File,
    table: Mapping[str, Any],
    key: KeyPath,
    default: str = "",
    choices: Iterable[str] = (),
) -> str:
    value = table.get(str(key[-1]), default)
    if not isinstance(value, str):
        file.report(key, f"expected a string, found {_found(value)}")
        return default
    choices = tuple(choices)
    if choices and value not in choices and value != default:
        _report_choice(file, key, value, choices)
    return value


def _report_choice(
    file: _File, key: KeyPath, value: str, choices: tuple[str, ...]
) -> None:
    message = f'expected one of {", ".join(choices)}, found "{value}"'
    file.report(key, message, _nearest(value, choices))


def _integer(
    file: _File, table: Mapping[str, Any], key: KeyPath, default: int, least: int = 0
) -> int:
    value = table.get(str(key[-1]), default)
    if not _fits(value, int) or value < least:
        file.report(key, f"expected an integer from {least}, found {_found(value)}")
        return default
    return int(value)


def _flag(file: _File, table: Mapping[str, Any], key: KeyPath, default: bool) -> bool:
    value = table.get(str(key[-1]), default)
    if not isinstance(value, bool):
        file.report(key, f"expected true or false, found {_found(value)}")
        return default
    return value


def _tolerance(file: _File, table: Mapping[str, Any], key: KeyPath) -> float | None:
    value = table.get(str(key[-1]))
    if value is None:
        return None
    if not _fits(value, float) or not 0 <= value <= _RANGES["float64"][1]:
        file.report(key, f"expected a finite number from 0, found {_found(value)}")
        return None
    return float(value)


def _choices(
    file: _File,
    table: Mapping[str, Any],
    key: KeyPath,
    default: tuple[str, ...],
    choices: tuple[str, ...],
) -> tuple[str, ...]:
    """A non-empty array of distinct names."""
    value = table.get(str(key[-1]), list(default))
    if not isinstance(value, list) or not value:
        file.report(key, f"expected a non-empty array, found {_found(value)}")
        return default
    for index, item in enumerate(value):
        place = (*key, index)
        if not isinstance(item, str):
            file.report(place, f"expected a string, found {_found(item)}")
        elif item not in choices:
            _report_choice(file, place, item, choices)
        elif item in value[:index]:
            file.report(place, f'"{item}" is listed twice')
    return tuple(str(item) for item in value)


def _scalars(file: _File, parent: Mapping[str, Any], key: KeyPath) -> dict[str, Scalar]:
    """A table of booleans, finite numbers and strings; nested names get dots."""
    scalars: dict[str, Scalar] = {}
    for name, (place, value) in _flat(file, parent, key).items():
        if not isinstance(value, bool | int | float | str):
            message = f"expected a boolean, number or string, found {_found(value)}"
            file.report(place, message)
        elif isinstance(value, float) and not math.isfinite(value):
            file.report(place, f"expected a finite number, found {value}")
        else:
            scalars[name] = value
    return scalars


def _flat(
    file: _File, parent: Mapping[str, Any], key: KeyPath, prefix: str = ""
) -> dict[str, tuple[KeyPath, object]]:
    """Dotted name → its key in the file and its value, for a table of tables.

    ``a.b = 1``, ``"a.b" = 1`` and ``a = { b = 1 }`` mean the same.
    """
    flat: dict[str, tuple[KeyPath, object]] = {}
    for name, value in _table(file, parent, key).items():
        place = (*key, name)
        if isinstance(value, dict):
            below = _flat(file, {name: value}, place, f"{prefix}{name}.")
        else:
            below = {f"{prefix}{name}": (place, value)}
        for dotted, found in below.items():
            if dotted in flat:
                file.report(found[0], f"{dotted} is given twice")
            flat[dotted] = found
    return flat


def _read_config(file: _File, path: Path, data: Mapping[str, Any]) -> Config:
    _check_keys(file, data, (), "")
    build = _read_build(file, data)
    axes = _read_axes(file, data)
    return Config(
        path=path,
        model=_read_model(file, data),
        axes=axes,
        entries=_read_entries(file, data, axes),
        compile=_read_compile(file, data, build.routes),
        gates=_read_gates(file, data),
        verify=_read_verify(file, data),
        build=build,
        serve=_read_serve(file, data),
    )


def _read_model(file: _File, data: Mapping[str, Any]) -> ModelConfig:
    table = _table(file, data, ("model",), "model")
    source = _text(file, table, ("model", "source"))
    factory = is_function(source)
    expected = 'expected "hf:DIRECTORY-OR-ID" or "package.module:factory"'
    if "source" not in table:
        file.report(("model", "source"), f"missing; {expected}")
    elif isinstance(table["source"], str) and not factory and not _names_hf(source):
        nearest = f"hf:{source}" if source and ":" not in source else ""
        file.report(("model", "source"), f'{expected}, found "{source}"', nearest)
    if factory:
        for name in ("class", "config"):
            if name in table:
                message = 'only for "hf:" sources; let the factory decide'
                file.report(("model", name), message)
    model_class = _text(file, table, ("model", "class"))
    if model_class and not _IDENTIFIER.fullmatch(model_class):
        message = f'expected a class name of transformers, found "{model_class}"'
        file.report(("model", "class"), message)
    return ModelConfig(
        source=source,
        dtype=_dtype(file, table, ("model", "dtype"), MODEL_DTYPES),
        model_class=model_class,
        config=_scalars(file, table, ("model", "config")),
    )


def _dtype(
    file: _File, table: Mapping[str, Any], key: KeyPath, known: tuple[str, ...]
) -> str:
    value = _text(file, table, key)
    if not value or value in known:
        return value
    name = value.removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    nearest = name if name in known else _nearest(name, known)
    message = f'expected one of {", ".join(known)}, found "{value}"'
    file.report(key, message, nearest)
    return ""


def _read_axes(file: _File, data: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    axes: dict[str, tuple[int, ...]] = {}
    letters: dict[str, str] = {}
    for name, sizes in _table(file, data, ("axes",)).items():
        key = ("axes", name)
        if not _AXIS.fullmatch(name):
            file.report(key, "an axis name is a lower-case letter, then a-z, 0-9 or _")
        # Bucket names carry the letter alone (b1_s128), so two axes can't share it.
        elif (other := letters.setdefault(name[0], name)) != name:
            message = f'begins with "{name[0]}" like axis {other}; bucket names clash'
            file.report(key, message)
        axes[name] = _sizes(file, sizes, key)
    return axes


def _sizes(file: _File, sizes: object, key: KeyPath) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not sizes:
        message = f"expected a non-empty array of sizes, found {_found(sizes)}"
        file.report(key, message)
        return ()
    for index, size in enumerate(sizes):
        if not _fits(size, int) or size < 1:
            message = f"expected an integer from 1, found {_found(size)}"
            file.report((*key, index), message)
        elif size in sizes[:index]:
            message = f"size {size} is listed twice; both would be one bucket"
            file.report((*key, index), message)
    return tuple(sizes)


def _read_entries(
    file: _File, data: Mapping[str, Any], axes: Mapping[str, tuple[int, ...]]
) -> dict[str, EntryConfig]:
    tables = _table(file, data, ("entries",))
    if not tables:
        message = "missing; name at least one callable, e.g. [entries.forward]"
        file.report(("entries",), message)
    entries = {name: _read_entry(file, tables, name, axes) for name in tables}
    used = {
        axis
        for entry in entries.values()
        for rule in entry.inputs.values()
        for axis in rule.shape
    }
    for axis in axes:
        if entries and axis not in used:
            message = "no input uses this axis, so it makes no bucket"
            file.report(("axes", axis), message)
    return entries


def _read_entry(
    file: _File,
    tables: Mapping[str, Any],
    name: str,
    axes: Mapping[str, tuple[int, ...]],
) -> EntryConfig:
    key: KeyPath = ("entries", name)
    if not _IDENTIFIER.fullmatch(name):
        file.report(key, "an entry's name is letters, digits and _, no digit first")
    table = _table(file, tables, key, "entries.*")
    method = _text(file, table, (*key, "method"), name)
    if "method" in table and not _IDENTIFIER.fullmatch(method):
        message = f'expected the name of a method, found "{method}"'
        file.report((*key, "method"), message)
    example = _text(file, table, (*key, "example"))
    if example and not is_function(example):
        message = f'expected "package.module:function", found "{example}"'
        file.report((*key, "example"), message)
    if "inputs" not in table and not example:
        message = f"missing; name the tensors that {name} takes, or give an example"
        file.report((*key, "inputs"), message)
    inputs = _read_inputs(file, table, (*key, "inputs"), axes)
    kwargs = _scalars(file, table, (*key, "kwargs"))
    # Up to the first dot or bracket; the path may be malformed.
    roots = {re.split(r"[.\[]", path, maxsplit=1)[0]: path for path in inputs}
    for argument in kwargs:
        if not _IDENTIFIER.fullmatch(argument):
            message = "expected the name of a keyword argument"
            file.report((*key, "kwargs", argument), message)
        elif argument in roots:
            message = f"also an input ({roots[argument]}); an argument is one or other"
            file.report((*key, "kwargs", argument), message)
    return EntryConfig(
        name=name,
        method=method,
        inputs=inputs,
        outputs=_read_outputs(file, table, (*key, "outputs"), inputs),
        kwargs=kwargs,
        example=example,
    )


def _read_inputs(
    file: _File,
    entry: Mapping[str, Any],
    key: KeyPath,
    axes: Mapping[str, tuple[int, ...]],
) -> dict[str, InputConfig]:
    tables = _table(file, entry, key)
    inputs: dict[str, InputConfig] = {}
    taken: dict[tuple[paths.Step, ...], str] = {}
    for written in tables:
        place = (*key, written)
        path = written
        if _INPUT_PATH.fullmatch(written):
            steps = paths.parse(written)
            path = paths.render(steps)
            _check_input_path(file, place, steps, taken, "example" in entry)
            taken[steps] = path
        else:
            message = (
                'expected an argument path such as input_ids, batch["x"], state.h'
                " or layers[0]"
            )
            file.report(place, message)
        table = _table(file, tables, place, "entries.*.inputs.*")
        inputs[path] = _read_input(file, table, place, axes)
    return inputs


def _check_input_path(
    file: _File,
    place: KeyPath,
    steps: tuple[paths.Step, ...],
    taken: Mapping[tuple[paths.Step, ...], str],
    example: bool,
) -> None:
    for other, path in taken.items():
        shorter = min(len(steps), len(other))
        if steps[:shorter] == other[:shorter]:
            message = f"overlaps {path}, which is given above"
            file.report(place, message)
    if not example and any(isinstance(step, str) for step in steps[1:]):
        message = (
            "an attribute can't be made from dicts and lists; give example ="
            ' "package.module:function", which makes the arguments'
        )
        file.report(place, message)


def _read_input(
    file: _File,
    table: Mapping[str, Any],
    key: KeyPath,
    axes: Mapping[str, tuple[int, ...]],
) -> InputConfig:
    for name in ("shape", "dtype"):
        if name not in table:
            file.report((*key, name), "missing")
    shape = _shape(file, table.get("shape", []), (*key, "shape"), axes)
    dtype = _dtype(file, table, (*key, "dtype"), INPUT_DTYPES)
    values: dict[str, Any] = {}
    for name in ("pad", "default", "low", "high"):
        value = table.get(name)
        if value is None or not dtype:
            continue
        if problem := _outside(value, dtype, exclusive=name == "high"):
            file.report((*key, name), problem)
        else:
            values[name] = value
    if "pad" in values and not any(isinstance(size, str) for size in shape):
        file.report((*key, "pad"), "no axis in the shape, so nothing is ever padded")
    _check_samples(file, key, dtype, values)
    return InputConfig(shape=shape, dtype=dtype, **values)


def _shape(
    file: _File, value: object, key: KeyPath, axes: Mapping[str, tuple[int, ...]]
) -> tuple[str | int, ...]:
    if not isinstance(value, list):
        message = f"expected an array of axis names and sizes, found {_found(value)}"
        file.report(key, message)
        return ()
    shape: list[str | int] = []
    for index, size in enumerate(value):
        place = (*key, index)
        if isinstance(size, str):
            shape.append(size)
            if size not in axes:
                declared = ", ".join(axes) or "none"
                message = f'axis "{size}" isn\'t declared; [axes] has {declared}'
                file.report(place, message, _nearest(size, axes))
        elif not _fits(size, int) or size < 1:
            message = f"expected an axis name or a size from 1, found {_found(size)}"
            file.report(place, message)
        else:
            shape.append(size)
    return tuple(shape)


def _outside(value: object, dtype: str, *, exclusive: bool) -> str:
    """Why `value` isn't one of `dtype`'s, or ""."""
    if dtype == "bool":
        ok = isinstance(value, bool)
        return "" if ok else f"expected true or false (bool), found {_found(value)}"
    whole = dtype.startswith(("int", "uint"))
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "an integer" if whole else "a number"
        return f"expected {kind} ({dtype}), found {_found(value)}"
    low, high = _RANGES[dtype]
    # An infinite value would not survive JSON; the comparison also refuses NaN.
    if not low <= value <= high + (1 if whole and exclusive else 0):
        return f"expected {low} to {high} ({dtype}), found {_found(value)}"
    return ""


def _check_samples(
    file: _File, key: KeyPath, dtype: str, values: Mapping[str, Any]
) -> None:
    if dtype == "bool":
        for name in ("low", "high"):
            if name in values:
                message = "a bool has no sample range; both values are drawn"
                file.report((*key, name), message)
        return
    low, high = values.get("low", 0), values.get("high")
    if high is not None and low >= high:
        file.report((*key, "high"), f"expected more than low ({low}), found {high}")
    elif high is None and low >= 2 and dtype.startswith(("int", "uint")):
        message = f"samples below the default bound 2 can't start at {low}; give high"
        file.report((*key, "low"), message)


def _read_outputs(
    file: _File,
    entry: Mapping[str, Any],
    key: KeyPath,
    inputs: Mapping[str, InputConfig],
) -> dict[str, OutputConfig]:
    tables = _table(file, entry, key)
    sizes = [size for rule in inputs.values() for size in rule.shape]
    used = dict.fromkeys(size for size in sizes if isinstance(size, str))
    outputs: dict[str, OutputConfig] = {}
    for written in tables:
        place = (*key, written)
        path = written
        if _OUTPUT_PATH.fullmatch(written):
            path = paths.render(paths.parse(written))
            if path in outputs:
                file.report(place, f"the same output as {path}, which is given above")
        else:
            message = 'expected an output path such as logits, ["x"], [0] or ""'
            file.report(place, message)
        table = _table(file, tables, place, "entries.*.outputs.*")
        if "cut" not in table:
            message = 'missing; e.g. cut = { 1 = "s" } cuts dimension 1 to the real s'
            file.report((*place, "cut"), message)
        cut: dict[int, str] = {}
        for dimension, axis in _table(file, table, (*place, "cut")).items():
            at = (*place, "cut", dimension)
            if not re.fullmatch(r"\d+", dimension, re.ASCII):
                message = f'expected a dimension from 0, found "{dimension}"'
                file.report(at, message)
            elif not isinstance(axis, str):
                file.report(at, f"expected an axis name, found {_found(axis)}")
            elif axis not in used:
                named = ", ".join(used) or "none"
                message = f'no input of this entry has axis "{axis}"; they use {named}'
                file.report(at, message, _nearest(axis, used))
            else:
                cut[int(dimension)] = axis
        outputs[path] = OutputConfig(cut)
    return outputs


def _read_compile(
    file: _File, data: Mapping[str, Any], routes: tuple[str, ...]
) -> CompileConfig:
    table = _table(file, data, ("compile",), "compile")
    default = CompileConfig()
    fullgraph = _flag(file, table, ("compile", "fullgraph"), default.fullgraph)
    if not fullgraph and "program" in routes:
        message = 'a program is one whole graph; false needs routes = ["cache"]'
        file.report(("compile", "fullgraph"), message)
    options = _flat(file, table, ("compile", "options"))
    if "cache" not in routes:
        for name, place in options.items():
            if reason := FORCED_OPTIONS.get(name):
                file.report(place[0], f"the program route sets this itself: {reason}")
    return CompileConfig(
        mode=_text(file, table, ("compile", "mode"), default.mode, MODES),
        fullgraph=fullgraph,
        threads=_integer(file, table, ("compile", "threads"), default.threads),
        options={name: value for name, (_, value) in options.items()},
    )


def _read_gates(file: _File, data: Mapping[str, Any]) -> GatesConfig:
    table = _table(file, data, ("gates",), "gates")
    default = GatesConfig()
    return GatesConfig(
        graph_breaks=_integer(
            file, table, ("gates", "graph_breaks"), default.graph_breaks
        ),
        math_attention=_text(
            file,
            table,
            ("gates", "math_attention"),
            default.math_attention,
            MATH_ATTENTION,
        ),
    )


def _read_verify(file: _File, data: Mapping[str, Any]) -> VerifyConfig:
    table = _table(file, data, ("verify",), "verify")
    return VerifyConfig(
        atol=_tolerance(file, table, ("verify", "atol")),
        rtol=_tolerance(file, table, ("verify", "rtol")),
        weights=_text(file, table, ("verify", "weights")),
    )


def _read_build(file: _File, data: Mapping[str, Any]) -> BuildConfig:
    table = _table(file, data, ("build",), "build")
    default = BuildConfig()
    known = ("native", *targets.list_targets())
    return BuildConfig(
        targets=_choices(file, table, ("build", "targets"), default.targets, known),
        routes=_choices(file, table, ("build", "routes"), default.routes, ROUTES),
        jobs=_integer(file, table, ("build", "jobs"), default.jobs),
    )


def _read_serve(file: _File, data: Mapping[str, Any]) -> ServeConfig:
    table = _table(file, data, ("serve",), "serve")
    default = ServeConfig()
    return ServeConfig(
        on_uncovered=_text(
            file, table, ("serve", "on_uncovered"), default.on_uncovered, ON_UNCOVERED
        ),
        over_length=_text(
            file, table, ("serve", "over_length"), default.over_length, OVER_LENGTH
        ),
    )
