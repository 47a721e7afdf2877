"""Read ``compilekit.toml``, and refuse what is wrong in it, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compilekit import targets
from compilekit.config.entries import read_entries
from compilekit.config.generate import generate_entries, read_generate
from compilekit.config.lines import KeyPath, key_lines
from compilekit.config.problems import (
    File,
    Problem,
    check_keys,
    config_error,
    flatten,
    has_type,
    is_function,
    names_hugging_face,
    read_choices,
    read_dtype,
    read_flag,
    read_integer,
    read_scalars,
    read_table,
    read_text,
    read_tolerance,
    shown,
    syntax_problem,
)
from compilekit.config.records import (
    AutotuneConfig,
    BuildConfig,
    CompileConfig,
    Config,
    FreezeConfig,
    GatesConfig,
    ModelConfig,
    ServeConfig,
    VerifyConfig,
)
from compilekit.config.rules import (
    ATTENTION,
    AXIS,
    BENCHMARKING,
    FORCED_OPTIONS,
    IDENTIFIER,
    MATH_ATTENTION,
    MODEL_DTYPES,
    MODES,
    ON_UNCOVERED,
    OVER_LENGTH,
    ROUTES,
)
from compilekit.errors import ConfigError, nearest_name


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
        raise config_error(
            path, [Problem(line, "", "not UTF-8, which TOML is")]
        ) from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise config_error(path, [syntax_problem(text, str(error))]) from error

    file = File(key_lines(text), [])
    config = _read_config(file, path.absolute(), data)
    if file.problems:
        raise config_error(path, file.problems)
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
    file = File(lines, [])
    for name, value in config.compile.options.items():
        # The file may nest the name ([compile.options.triton]) or quote it.
        nested: KeyPath = ("compile", "options", *name.split("."))
        quoted: KeyPath = ("compile", "options", name)
        key = quoted if quoted in lines else nested
        if name not in known:
            message = "Inductor has no such option in this version of torch"
            file.report(key, message, nearest_name(name, known))
        elif not has_type(value, known[name]):
            message = f"expected {known[name].__name__}, found {shown(value)}"
            file.report(key, message)
    if file.problems:
        raise config_error(config.path, file.problems)


def _read_config(file: File, path: Path, data: Mapping[str, Any]) -> Config:
    check_keys(file, data, (), "")
    build = _read_build(file, data)
    axes = _read_axes(file, data)
    made = read_generate(file, data, build.routes, _sizes)
    entries = generate_entries() if made else {}
    freeze = _read_freeze(file, data, build.routes)
    if "entries" in data or not made:
        entries |= read_entries(file, data, axes, build.routes)
    return Config(
        path=path,
        model=_read_model(file, data),
        axes=axes | made,
        entries=entries,
        compile=_read_compile(file, data, build.routes),
        gates=_read_gates(file, data),
        verify=_read_verify(file, data, freeze),
        build=build,
        serve=_read_serve(file, data),
        autotune=_read_autotune(file, data),
        freeze=freeze,
    )


def _read_model(file: File, data: Mapping[str, Any]) -> ModelConfig:
    table = read_table(file, data, ("model",), "model")
    source = read_text(file, table, ("model", "source"))
    factory = is_function(source)
    expected = 'expected "hf:DIRECTORY-OR-ID" or "package.module:factory"'
    entries = data.get("entries")
    warm = isinstance(entries, dict) and all(
        isinstance(entry, dict) and "warmup" in entry for entry in entries.values()
    )
    if "source" not in table:
        # Entries that call torch.compile themselves bring their models along.
        if not (warm and entries):
            file.report(("model", "source"), f"missing; {expected}")
    elif (
        isinstance(table["source"], str)
        and not factory
        and not names_hugging_face(source)
    ):
        nearest = f"hf:{source}" if source and ":" not in source else ""
        file.report(("model", "source"), f'{expected}, found "{source}"', nearest)
    if factory:
        for name in ("class", "config"):
            if name in table:
                message = 'only for "hf:" sources; let the factory decide'
                file.report(("model", name), message)
    model_class = read_text(file, table, ("model", "class"))
    if model_class and not IDENTIFIER.fullmatch(model_class):
        message = f'expected a class name of transformers, found "{model_class}"'
        file.report(("model", "class"), message)
    return ModelConfig(
        source=source,
        dtype=read_dtype(file, table, ("model", "dtype"), MODEL_DTYPES),
        model_class=model_class,
        config=read_scalars(file, table, ("model", "config")),
    )


def _read_axes(file: File, data: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    axes: dict[str, tuple[int, ...]] = {}
    letters: dict[str, str] = {}
    for name, sizes in read_table(file, data, ("axes",)).items():
        key = ("axes", name)
        if not AXIS.fullmatch(name):
            file.report(key, "an axis name is a lower-case letter, then a-z, 0-9 or _")
        # Bucket names carry the letter alone (b1_s128), so two axes can't share it.
        elif (other := letters.setdefault(name[0], name)) != name:
            message = f'begins with "{name[0]}" like axis {other}; bucket names clash'
            file.report(key, message)
        axes[name] = _sizes(file, sizes, key)
    return axes


def _sizes(file: File, sizes: object, key: KeyPath) -> tuple[int, ...]:
    """The sizes of an axis, without those that it reports."""
    if not isinstance(sizes, list) or not sizes:
        what = "an empty one" if sizes == [] else shown(sizes)
        message = f"expected a non-empty array of sizes, found {what}"
        file.report(key, message)
        return ()
    for index, size in enumerate(sizes):
        if not has_type(size, int) or size < 1:
            message = f"expected an integer from 1, found {shown(size)}"
            file.report((*key, index), message)
        elif size in sizes[:index]:
            message = f"size {size} is listed twice; both would be one bucket"
            file.report((*key, index), message)
    return tuple(size for size in sizes if has_type(size, int) and size > 0)


def _read_compile(
    file: File, data: Mapping[str, Any], routes: tuple[str, ...]
) -> CompileConfig:
    table = read_table(file, data, ("compile",), "compile")
    default = CompileConfig()
    fullgraph = read_flag(file, table, ("compile", "fullgraph"), default.fullgraph)
    if not fullgraph and "program" in routes:
        message = 'a program is one whole graph; false needs routes = ["cache"]'
        file.report(("compile", "fullgraph"), message)
    mode = read_text(file, table, ("compile", "mode"), default.mode, MODES)
    if mode in BENCHMARKING and "program" in routes:
        message = (
            f'"{mode}" measures kernels on the target\'s device while it compiles,'
            ' which a build doesn\'t; with "default", [autotune] from = a file of'
            " `compilekit tune` takes what won"
        )
        file.report(("compile", "mode"), message)
    options = flatten(file, table, ("compile", "options"))
    if "cache" not in routes:
        for name, place in options.items():
            if reason := FORCED_OPTIONS.get(name):
                file.report(place[0], f"the program route sets this itself: {reason}")
    key: KeyPath = ("compile", "decode_kernels")
    if key[-1] in table and "generate" not in data:
        file.report(key, "only [generate]'s steps have kernels of their own")
    attention: tuple[str, ...] = ()
    if "attention" in table:
        attention = read_choices(file, table, ("compile", "attention"), (), ATTENTION)
        if "cache" in routes:
            message = (
                "for programs; with torch.compile the process that runs it chooses, by"
                " torch.nn.attention.sdpa_kernel"
            )
            file.report(("compile", "attention"), message)
    return CompileConfig(
        mode=mode,
        fullgraph=fullgraph,
        threads=read_integer(file, table, ("compile", "threads"), default.threads),
        attention=attention,
        decode_kernels=read_flag(file, table, key, default.decode_kernels),
        options={name: value for name, (_, value) in options.items()},
    )


def _read_gates(file: File, data: Mapping[str, Any]) -> GatesConfig:
    table = read_table(file, data, ("gates",), "gates")
    default = GatesConfig()
    return GatesConfig(
        graph_breaks=read_integer(
            file, table, ("gates", "graph_breaks"), default.graph_breaks
        ),
        math_attention=read_text(
            file,
            table,
            ("gates", "math_attention"),
            default.math_attention,
            MATH_ATTENTION,
        ),
    )


def _read_freeze(
    file: File, data: Mapping[str, Any], routes: tuple[str, ...]
) -> FreezeConfig:
    table = read_table(file, data, ("freeze",), "freeze")
    if "freeze" in data and "weights" not in table:
        file.report(("freeze", "weights"), "missing; the weights that are folded in")
    if "freeze" in data and "program" not in routes:
        message = 'torch\'s caches hold no weights; it needs routes = ["program"]'
        file.report(("freeze",), message)
    return FreezeConfig(weights=read_text(file, table, ("freeze", "weights")))


def _read_verify(
    file: File, data: Mapping[str, Any], freeze: FreezeConfig
) -> VerifyConfig:
    table = read_table(file, data, ("verify",), "verify")
    weights = read_text(file, table, ("verify", "weights"), freeze.weights)
    if freeze.weights and weights != freeze.weights:
        message = (
            "programs for the weights of [freeze] run with no others; leave it out"
        )
        file.report(("verify", "weights"), message)
    return VerifyConfig(
        atol=read_tolerance(file, table, ("verify", "atol")),
        rtol=read_tolerance(file, table, ("verify", "rtol")),
        weights=weights,
    )


def _read_build(file: File, data: Mapping[str, Any]) -> BuildConfig:
    table = read_table(file, data, ("build",), "build")
    default = BuildConfig()
    known = ("native", *targets.list_targets())
    return BuildConfig(
        targets=read_choices(file, table, ("build", "targets"), default.targets, known),
        routes=read_choices(file, table, ("build", "routes"), default.routes, ROUTES),
        jobs=read_integer(file, table, ("build", "jobs"), default.jobs),
    )


def _read_autotune(file: File, data: Mapping[str, Any]) -> AutotuneConfig:
    table = read_table(file, data, ("autotune",), "autotune")
    if "autotune" in data and "from" not in table:
        file.report(("autotune", "from"), "missing; the file that tune wrote")
    return AutotuneConfig(source=read_text(file, table, ("autotune", "from")))


def _read_serve(file: File, data: Mapping[str, Any]) -> ServeConfig:
    table = read_table(file, data, ("serve",), "serve")
    default = ServeConfig()
    over_length = read_text(
        file, table, ("serve", "over_length"), default.over_length, OVER_LENGTH
    )
    if "generate" not in data:
        if over_length == "chunk":
            message = "only [generate] can take an input in pieces"
            file.report(("serve", "over_length"), message)
        if "cuda_graphs" in table:
            message = "only [generate]'s steps are replayed as graphs"
            file.report(("serve", "cuda_graphs"), message)
    return ServeConfig(
        on_uncovered=read_text(
            file, table, ("serve", "on_uncovered"), default.on_uncovered, ON_UNCOVERED
        ),
        over_length=over_length,
        cuda_graphs=read_flag(
            file, table, ("serve", "cuda_graphs"), default.cuda_graphs
        ),
    )
