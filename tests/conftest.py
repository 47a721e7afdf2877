"""What several test modules share: artifacts that are built once per run."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from compilekit.runtime.program import Native


@pytest.fixture(scope="session")
def zoo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every entry of tests/runtime_zoo.toml, by the real build."""
    from compilekit import config as configuration
    from compilekit.compiler.build import build

    path = Path(__file__).with_name("runtime_zoo.toml")
    out = tmp_path_factory.mktemp("zoo") / "zoo.artifact"
    result = build(configuration.load(path), out, verify=False)
    assert result.artifact is not None, result.buckets
    return result.artifact


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """runtime/calls.cpp, compiled."""
    from compilekit.compiler.worker import NATIVE

    library = tmp_path_factory.mktemp("native") / "kernel.so"
    torch_folder = Path(torch.__file__).parent
    folders = [sysconfig.get_path("include"), torch_folder / "include"]
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC"]
    command += [f"-I{folder}" for folder in folders]
    link = [f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run([*command, "-o", library, NATIVE, *link], check=True)
    loader = ExtensionFileLoader("native.kernel", str(library))
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(module)
    return Native(module.changed, module.call)


@pytest.fixture(params=["torch", "native"])
def changed(
    request: pytest.FixtureRequest, native: Native
) -> Callable[[int], bool] | None:
    """What compares words: torch's operators, or the artifact's own C++."""
    return None if request.param == "torch" else native.changed


@pytest.fixture
def make_zoo() -> Callable[..., Any]:
    """Makes `runtime_models.Zoo`, with the same weights each time, in eval mode."""
    from runtime_models import Zoo

    def make(steps: int = 2) -> Zoo:
        torch.manual_seed(0)
        return Zoo(steps).eval()

    return make


@pytest.fixture
def attached(
    zoo_artifact: Path, make_zoo: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """Makes a zoo with one entry attached; detached again after the test."""
    import compilekit

    receipts = []

    def make(entry: str, **options: Any) -> Any:
        model = make_zoo()
        receipts.append(compilekit.attach(model, zoo_artifact, entry=entry, **options))
        return model

    yield make
    for receipt in receipts:
        receipt.detach()
