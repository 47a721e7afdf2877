"""The configuration file, as frozen dataclasses.

`load` reads ``compilekit.toml`` and refuses every unknown key with its line and the
nearest right name. `records` is what comes out, `rules` what a file may hold, `read`
goes through the tables, `problems` checks one value, `lines` knows where it stands,
`sources` where a package keeps a model.

Standard library only: reading a configuration is instant.
"""

from compilekit.config.lines import KeyPath, key_lines
from compilekit.config.problems import Problem, is_function, is_script
from compilekit.config.read import check_options, load
from compilekit.config.records import (
    AutotuneConfig,
    BuildConfig,
    CompileConfig,
    Config,
    EntryConfig,
    GatesConfig,
    InputConfig,
    ModelConfig,
    OutputConfig,
    Scalar,
    ServeConfig,
    VerifyConfig,
)
from compilekit.config.rules import (
    FORCED_OPTIONS,
    GRAD_MODES,
    INPUT_DTYPES,
    MATH_ATTENTION,
    MODEL_DTYPES,
    MODES,
    ON_UNCOVERED,
    OVER_LENGTH,
    PLACEHOLDER,
    RANGES,
    ROUTES,
)
from compilekit.config.sources import PACKAGE, is_hub_id, model_directory, package_data

__all__ = [
    "FORCED_OPTIONS",
    "GRAD_MODES",
    "INPUT_DTYPES",
    "MATH_ATTENTION",
    "MODEL_DTYPES",
    "MODES",
    "ON_UNCOVERED",
    "OVER_LENGTH",
    "PACKAGE",
    "PLACEHOLDER",
    "RANGES",
    "ROUTES",
    "AutotuneConfig",
    "BuildConfig",
    "CompileConfig",
    "Config",
    "EntryConfig",
    "GatesConfig",
    "InputConfig",
    "KeyPath",
    "ModelConfig",
    "OutputConfig",
    "Problem",
    "Scalar",
    "ServeConfig",
    "VerifyConfig",
    "check_options",
    "is_function",
    "is_hub_id",
    "is_script",
    "key_lines",
    "load",
    "model_directory",
    "package_data",
]
