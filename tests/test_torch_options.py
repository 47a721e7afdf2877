"""Tests of the names and types of Inductor's options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compilekit._torch.options import inductor_options
from compilekit._torch.versions import minor
from compilekit.config import (
    FORCED_OPTIONS,
    CompileConfig,
    Config,
    ModelConfig,
    check_options,
)
from compilekit.errors import ConfigError


def configured(**options: object) -> Config:
    return Config(
        path=Path("nowhere/compilekit.toml"),
        model=ModelConfig("m:f"),
        axes={},
        entries={},
        compile=CompileConfig(options=options),
    )


def test_names_and_types() -> None:
    """Options have torch's names, plain types, and object where torch states none."""
    options = inductor_options()
    assert options["max_autotune"] is bool
    assert options["cpp.threads"] is int
    assert options["max_autotune_gemm_backends"] is str
    assert options["cpp.simdlen"] is object
    assert set(options.values()) == {bool, int, float, str, object}


def test_right_options_pass() -> None:
    """What torch.compile accepts passes."""
    config = configured(
        max_autotune=True,
        **{"cpp.min_chunk_size": 64, "cpp.gemm_cache_blocking": "2,2,2"},
    )
    check_options(config, inductor_options())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_autotun", True, "did you mean max_autotune?"),
        ("triton.cudagraph", True, "did you mean triton.cudagraphs?"),
        ("cpp.min_chunksize", 64, "did you mean cpp.min_chunk_size?"),
        ("max_autotune", 1, "expected bool, found 1"),
        ("cpp.min_chunk_size", "64", 'expected int, found "64"'),
    ],
)
def test_wrong_options_are_refused(name: str, value: object, message: str) -> None:
    """A misspelt name gets the nearest right one, a wrong type the right one."""
    with pytest.raises(ConfigError) as caught:
        check_options(configured(**{name: value}), inductor_options())
    assert message in caught.value.message


def test_forced_options_exist() -> None:
    """Every option that a configuration may not set is one of Inductor's."""
    unknown = set(FORCED_OPTIONS) - set(inductor_options())
    # 2.11 always compiles with -march=native and has no option for it.
    newer = {"cpp.march"} if minor(torch.__version__) < (2, 13) else set()
    assert unknown <= newer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_what_the_program_route_sets_is_refused() -> None:
    """The options that the program route sets are those a configuration may not."""
    from compilekit._torch.lower import program_options

    assert set(program_options(0)) <= set(FORCED_OPTIONS)
