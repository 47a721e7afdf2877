"""The tuning file: what a build accepts, and what it refuses with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compilekit import config as configuration
from compilekit.compiler.tuning import Tuning, load_tuning, read_tuning
from compilekit.errors import ConfigError

KERNELS = {"a" * 64: {"config": {"XBLOCK": 64, "num_warps": 4, "num_stages": 1}}}
CHOICES: dict[str, Any] = {
    "bfloat16 1 x 64 @ 128b": {"blocks": [1, 64, 1, 4]},
    "bfloat16 1 x 64 @ 32": {"blocks": []},
}
GOOD: dict[str, Any] = {
    "schema": 1,
    "target": "nvidia-h200",
    "torch": "2.11.0",
    "kernels": KERNELS,
    "choices": CHOICES,
}


def write(folder: Path, data: Any) -> Path:
    path = folder / "tuned.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_read_back(tmp_path: Path) -> None:
    """What was written comes back, config by source digest."""
    tuning = load_tuning(write(tmp_path, GOOD))
    assert tuning == Tuning("nvidia-h200", "2.11.0", KERNELS, CHOICES)
    assert tuning.as_json() == GOOD
    assert tuning.configs() == {"a" * 64: KERNELS["a" * 64]["config"]}


def test_a_file_from_before_choices(tmp_path: Path) -> None:
    """One without choices is taken; it chooses nothing."""
    older = {name: value for name, value in GOOD.items() if name != "choices"}
    assert load_tuning(write(tmp_path, older)).choices == {}


def test_without_a_file(tmp_path: Path) -> None:
    """A configuration without [autotune] tunes nothing; one with it looks beside it."""
    text = """
[model]
source = "models:make"
[entries.forward.inputs.x]
shape = [1]
dtype = "float32"
"""
    path = tmp_path / "compilekit.toml"
    path.write_text(text)
    assert read_tuning(configuration.load(path)) == Tuning()
    path.write_text(text + '[autotune]\nfrom = "tuned.json"\n')
    with pytest.raises(ConfigError, match=r"tuned.json can't be read"):
        read_tuning(configuration.load(path))
    write(tmp_path, GOOD)
    assert read_tuning(configuration.load(path)).target == "nvidia-h200"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("{", "isn't JSON"),
        ([], "found list"),
        ({**GOOD, "schema": 2}, "expected schema 1, found 2"),
        ({**GOOD, "target": 7}, "must be names"),
        ({**GOOD, "kernels": []}, "must be a table"),
        ({**GOOD, "kernels": {"b" * 64: {}}}, "kernel bbbbbbbbbbbb has no config"),
        (
            {**GOOD, "kernels": {"b" * 64: {"config": {"XBLOCK": 1}}}},
            "num_warps and num_stages",
        ),
        ({**GOOD, "choices": []}, "choices must be a table"),
        ({**GOOD, "choices": {"x": {}}}, "choice x has no blocks"),
        ({**GOOD, "choices": {"x": {"blocks": [1, 2]}}}, "four numbers, or none"),
        ({**GOOD, "choices": {"x": {"blocks": [1, 2, 3, "4"]}}}, "four numbers"),
    ],
    ids=str,
)
def test_refused(tmp_path: Path, data: Any, problem: str) -> None:
    """Anything else isn't taken for a tuning file."""
    with pytest.raises(ConfigError, match=problem):
        load_tuning(write(tmp_path, data))
