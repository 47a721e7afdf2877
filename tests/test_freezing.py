"""``[freeze]``: weights folded into programs, which then run with no others."""

from __future__ import annotations

import ast
import functools
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

import compilekit
from compilekit import config as configuration
from compilekit.artifact import open_artifact
from compilekit.compiler.build import build
from compilekit.compiler.freezing import read_weights
from compilekit.errors import ConfigError, MismatchError, NeedsDeviceError
from compilekit.runtime import frozen
from compilekit.runtime.frozen import value_digest
from compilekit.targets import load_target

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) + x


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 32)
        self.register_buffer("scale", torch.linspace(-1, 1, 32))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))) * self.scale.exp()


class Odd(nn.Module):
    # Writes a buffer, and looks at a weight's bits.
    def __init__(self):
        super().__init__()
        self.block = Block(16)
        self.bits = nn.Parameter(torch.rand(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        odd = self.calls.to(torch.int32) + self.bits.view(torch.int32)
        return self.block(x) + (odd & 7)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        return torch.relu(self.head(x))
"""

CONFIG = """
[model]
source = "frozen_tower:{model}"
[axes]
b = [1, 4]
[entries.forward.inputs.x]
shape = ["b", {shape}]
dtype = "float32"
[freeze]
weights = "weights.safetensors"
"""
TOWER = CONFIG.format(model="Tower", shape="16, 8, 8")


def weights_of(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Its parameters and running statistics, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and name != "scale":
            drawn = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(0.5 + drawn if "var" in name else drawn - 0.5)
    return model.eval()


@functools.cache
def folder() -> Path:
    """Where the configuration, the model and its weights lie."""
    place = Path(tempfile.mkdtemp(prefix="compilekit-tests-"))
    (place / "frozen_tower.py").write_text(MODEL)
    (place / "compilekit.toml").write_text(TOWER)
    return place


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder()))
        yield
    shutil.rmtree(folder())


def live(name: str, seed: int = 1) -> Any:
    import frozen_tower  # type: ignore[import-not-found]

    return weights_of(getattr(frozen_tower, name)(), seed)


@functools.cache
def artifact() -> Path:
    """The tower with its weights folded in, verified against eager."""
    save_model(live("Tower"), str(folder() / "weights.safetensors"))
    config = configuration.load(folder() / "compilekit.toml")
    result = build(config, folder() / "artifact")
    assert (result.exit_code, result.artifact) == (0, folder() / "artifact")
    return folder() / "artifact"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_batch_norm_is_folded_into_convolutions() -> None:
    """The programs read constants, one file for both buckets, and no statistics."""
    opened = open_artifact(artifact()).parse_all()
    first, second = opened.programs.values()
    assert {c.digest for c in first.constants.values()} == {
        c.digest for c in second.constants.values()
    }
    assert any(constant.order for constant in first.constants.values())
    for name in ("b1", "b4"):
        target = first.target
        code = opened.read(f"programs/{target}/forward/{name}/call.py").decode()
        loaded = {
            node.id
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        used = {
            graph_input.path
            for index, graph_input in enumerate(first.inputs)
            if f"arg{index}_1" in loaded
        }
        assert "x" in used
        assert not {path for path in used if "norm" in path or "conv" in path}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_weights_that_were_folded_in_run() -> None:
    """Equal to eager, in every bucket and between them."""
    model = live("Tower")
    x = torch.rand(4, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(x)
        receipt = compilekit.attach(model, artifact(), require="program")
        for size in (1, 4):
            torch.testing.assert_close(model(x[:size]), expected[:size])
        receipt.detach()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_other_weights_are_refused() -> None:
    """At attach, all at once; one changed value is enough."""
    with pytest.raises(MismatchError, match=r"values of blocks\.0\.\S+ and"):
        compilekit.attach(live("Tower", seed=2), artifact())
    model = live("Tower")
    with torch.no_grad():
        model.blocks[1].norm.running_var[3] += 1e-6
    expected = r"values of blocks\.1\.norm\.running_var: "
    with pytest.raises(MismatchError, match=expected) as caught:
        compilekit.attach(model, artifact())
    assert "1 tensors with others" in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_written_after_attach_are_refused() -> None:
    """A program wouldn't see the new values; the old ones back again run."""
    model = live("Tower")
    x = torch.rand(1, 16, 8, 8)
    compilekit.attach(model, artifact())
    with torch.no_grad():
        expected = model(x)
        kept = model.head.bias.clone()
        model.head.bias.add_(1)
        with pytest.raises(MismatchError, match=r"values of head\.bias"):
            model(x)
        model.head.bias.copy_(kept)
        torch.testing.assert_close(model(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_read_as_they_are_stay_inputs(tmp_path: Path) -> None:
    """Nothing is computed from them, so nothing is kept and any weights run."""
    (tmp_path / "frozen_tower.py").write_text(MODEL)
    (tmp_path / "compilekit.toml").write_text(CONFIG.format(model="Plain", shape="16"))
    save_model(live("Plain"), str(tmp_path / "weights.safetensors"))
    config = configuration.load(tmp_path / "compilekit.toml")
    result = build(config, tmp_path / "artifact")
    assert result.exit_code == 0
    opened = open_artifact(tmp_path / "artifact").parse_all()
    assert not any(program.constants for program in opened.programs.values())
    model, x = live("Plain", seed=2), torch.rand(4, 16)
    expected = model(x)
    compilekit.attach(model, tmp_path / "artifact")
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_is_written_stays_live(tmp_path: Path) -> None:
    """Its value is no part of what was folded in; a weight's other views are."""
    (tmp_path / "frozen_tower.py").write_text(MODEL)
    text = CONFIG.format(model="Odd", shape="16, 8, 8")
    (tmp_path / "compilekit.toml").write_text(text)
    save_model(live("Odd"), str(tmp_path / "weights.safetensors"))
    config = configuration.load(tmp_path / "compilekit.toml")
    assert build(config, tmp_path / "artifact").exit_code == 0
    [entry] = open_artifact(tmp_path / "artifact").parse_all().entries.values()
    assert "bits" in entry.frozen
    assert "calls" not in entry.frozen
    model, twin, x = live("Odd"), live("Odd"), torch.rand(4, 16, 8, 8)
    with torch.no_grad():
        receipt = compilekit.attach(model, tmp_path / "artifact", require="program")
        for _ in range(3):
            torch.testing.assert_close(model(x), twin(x))
    assert model.calls == twin.calls > 2
    assert receipt.rebinds == 0


def load(path: Path, text: str) -> configuration.Config:
    (path / "compilekit.toml").write_text(text)
    return configuration.load(path / "compilekit.toml")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[build]\nroutes = ['cache']", "torch's caches hold no weights"),
        ("[verify]\nweights = 'others'", "run with no others"),
    ],
)
def test_what_freezing_goes_without(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, f"{TOWER}\n{more}\n")


def test_missing_weights(tmp_path: Path) -> None:
    text = TOWER.replace('weights = "weights.safetensors"', "")
    with pytest.raises(ConfigError, match=r"freeze\.weights: missing"):
        load(tmp_path, text)


def test_verify_compares_with_the_frozen_weights(tmp_path: Path) -> None:
    assert load(tmp_path, TOWER).verify.weights == "weights.safetensors"


def test_a_gpu_target_needs_its_gpu(tmp_path: Path) -> None:
    """What is folded is computed on the device."""
    target = load_target("nvidia-h200")
    with pytest.raises(NeedsDeviceError, match="no such GPU is here"):
        read_weights(load(tmp_path, TOWER), target, "cuda:0")


LENGTHS = (0, 1, 7, 8, 4096 * 8 - 1, 4096 * 8, 4096 * 8 * 3 + 5)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_digest_sees_every_byte(length: int) -> None:
    """Also the last ones, which fill no word, and how many there are."""
    data = torch.randint(0, 256, (length,), dtype=torch.uint8)
    found = {value_digest(data)}
    places = sorted({0, length // 2, length - 1} & set(range(length)))
    for place, bit in itertools.product(places, (1, 128)):
        changed = data.clone()
        changed[place] ^= bit
        found.add(value_digest(changed))
    longer = torch.cat([data, torch.zeros(1, dtype=torch.uint8)])
    found.add(value_digest(longer))
    assert len(found) == 2 + 2 * len(places)


def test_a_digest_sees_the_order() -> None:
    a, b = torch.rand(4096), torch.rand(4096)
    assert value_digest(torch.cat([a, b])) != value_digest(torch.cat([b, a]))
    assert value_digest(a[:2]) != value_digest(a[:2].flip(0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
def test_a_digest_is_the_same_however_it_is_computed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU takes more rows at a time; a view is as good as its copy."""
    tensor = torch.randint(0, 9, (300, 257)).to(dtype)
    expected = value_digest(tensor)
    monkeypatch.setattr(frozen, "_ROWS", {"cpu": 3})
    assert value_digest(tensor) == expected
    assert value_digest(tensor.T.contiguous().T) == expected
    assert value_digest(torch.cat([tensor, tensor], 1)[:, :257]) == expected
