"""Our own kernels in a language model's steps, built without a GPU.

They need a CUDA build of torch: ``scripts/check-cuda`` runs them. Where a GPU is, the
kernels run on it as well.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from compilekit import config as configuration
from compilekit.artifact import Artifact, open_artifact
from compilekit.compiler.build import build
from compilekit.compiler.tuning import Tuning
from compilekit.compiler.verify import verify
from compilekit.errors import ConfigError

pytestmark = pytest.mark.cuda

MODEL = Path(__file__).parent / "generate" / "config.json"
CONFIG = """
[model]
source = "hf:."
dtype = "bfloat16"
[model.config]
hidden_size = 256
head_dim = 64
intermediate_size = 512
vocab_size = 512
[generate]
batch = [1, 4]
prompt = [20]
cache = [24, 48]
[build]
targets = ["nvidia-h200"]
jobs = 2
[compile]
{more}
"""
OURS = {"one_row", "few_rows", "write_token", "split_attention", "join_attention"}


def built(folder: Path, more: str = "", choices: Any = None) -> Artifact:
    """An artifact of a two-layer LLaMA with two key heads."""
    shutil.copy(MODEL, folder / "config.json")
    text = CONFIG.format(more=more)
    if choices is not None:
        tuning = {"schema": 1, "target": "nvidia-h200", "torch": "2.11.0"}
        (folder / "tuned.json").write_text(
            json.dumps({**tuning, "kernels": {}, "choices": choices})
        )
        text += '[autotune]\nfrom = "tuned.json"\n'
    path = folder / "compilekit.toml"
    path.write_text(text)
    result = build(configuration.load(path), folder / "artifact", verify=False)
    assert result.artifact is not None, result.buckets
    return open_artifact(result.artifact).parse_all()


def launches(artifact: Artifact, entry: str, bucket: str) -> Counter[str]:
    """How often a program's host code launches each of our kernels."""
    code = host_code(artifact, entry, bucket)
    program = artifact.programs["nvidia-h200", entry, bucket]
    counts: Counter[str] = Counter()
    for name, kernel in program.kernels.items():
        counts[kernel.launch["symbol"]] += code.count(f"    {name}((")
    return Counter({name: counts[name] for name in OURS if counts[name]})


def host_code(artifact: Artifact, entry: str, bucket: str) -> str:
    """A program's ``call.py``."""
    folder = Path(artifact.root) / "programs" / "nvidia-h200" / entry / bucket
    return (folder / "call.py").read_text()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Built once."""
    return built(tmp_path_factory.mktemp("decode"))


@pytest.mark.parametrize(
    ("bucket", "kernel"), [("b1_c48", "one_row"), ("b4_c48", "few_rows")]
)
def test_a_decode_step_calls_no_library(
    artifact: Artifact, bucket: str, kernel: str
) -> None:
    """A layer has four launches of products: q, k and v, o, gate and up, down."""
    assert launches(artifact, "decode", bucket) == {
        kernel: 2 * 4 + 1,
        "write_token": 2,
        "split_attention": 2,
        "join_attention": 2,
    }
    code = host_code(artifact, "decode", bucket)
    # Rotary angles are an outer product, once for all layers; 2.13 fuses it.
    assert len(re.findall(r"extern_kernels\.\w+\(", code)) <= 1
    assert "torch.ops.aten" not in code


@pytest.mark.parametrize("bucket", ["b1_c24", "b4_c24", "b4_c48"])
def test_the_cache_is_read_where_it_lies(artifact: Artifact, bucket: str) -> None:
    """A window of a larger cache isn't copied: kernels get the graph's own inputs."""
    calls = re.findall(
        r"(?:write_token|split_attention)_\d+\(\((.*)\), \w*stream0",
        host_code(artifact, "decode", bucket),
    )
    assert len(calls) == 4
    for call in calls:
        assert len(re.findall(r"\barg\d+_1\b", call)) >= 2, call


def test_a_prompts_last_token_has_the_heads_kernel(artifact: Artifact) -> None:
    """Of a prefill only the output layer has few rows."""
    assert launches(artifact, "prefill", "b1_s20_c24") == {"one_row": 1}
    assert launches(artifact, "prefill", "b4_s20_c24") == {"few_rows": 1}


def test_the_report_names_the_kernel(artifact: Artifact) -> None:
    """A token's attention isn't missing among the attention calls."""
    report = Path(artifact.root) / "reports" / "nvidia-h200" / "attention.json"
    found = json.loads(report.read_text())
    assert found["decode"]["b1_c48"]["backends"] == {"decode": 2}


def test_our_own_values_are_no_factor(artifact: Artifact) -> None:
    """What tracing read in our modules isn't compared with a model that is served."""
    for entry in artifact.entries.values():
        assert not [read for read in entry.reads if "compilekit" in read.path]


def test_off_by_an_option(tmp_path: Path) -> None:
    """Then a step is what torch.compile would run."""
    plain = built(tmp_path, "decode_kernels = false")
    for entry, bucket in [("decode", "b1_c48"), ("prefill", "b4_s20_c24")]:
        assert launches(plain, entry, bucket) == {}


def test_a_tuning_file_chooses(artifact: Artifact, tmp_path: Path) -> None:
    """A product that the library won is the library's; another is cut as it says."""
    choices = {
        "bfloat16 1 x 256 @ 512 512": {"blocks": []},
        "bfloat16 1 x 512 @ 256": {"blocks": [4, 512, 2, 4]},
    }
    tuned = built(tmp_path, choices=choices)
    assert launches(tuned, "decode", "b1_c48")["one_row"] == 2 * 3 + 1
    assert launches(tuned, "decode", "b4_c48") == launches(artifact, "decode", "b4_c48")
    default, chosen = (
        {
            kernel.launch["grid"][0]: kernel.launch["tuned"]
            for kernel in each.programs[
                "nvidia-h200", "decode", "b1_c48"
            ].kernels.values()
            if kernel.launch["symbol"] == "one_row"
        }
        for each in (artifact, tuned)
    )
    # The down projection: 256 columns, one to a block, and four.
    assert default[256] == ""
    assert chosen[64] == "nvidia-h200"
    # The others are cut as they would be without a file.
    others = {grid: origin for grid, origin in chosen.items() if grid != 64}
    assert others
    assert set(others.values()) == {""}


def traced(between: str, *, width: int = 256) -> list[Any]:
    """Products found in two projections of one input, with something between them."""
    from compilekit._torch.fake import FakeTensorMode
    from compilekit.compiler.decode_kernels import find

    linear = torch.nn.functional.linear
    with FakeTensorMode():
        x, weight = (
            torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((1, 1, width), (128, width))
        )
        result = torch.empty(1, 1, 128, device="cuda", dtype=torch.bfloat16)
    graph = torch.fx.Graph()
    row, first, second = (graph.placeholder(name) for name in ("x", "w0", "w1"))
    row.meta["example_value"] = x
    for given in (first, second):
        given.meta["example_value"] = weight
    products = [graph.call_function(linear, (row, first))]
    graph.call_method(between, (row, row))
    products.append(graph.call_function(linear, (row, second)))
    for product in products:
        product.meta["example_value"] = result
    return find(torch.fx.GraphModule({}, graph))


def test_projections_of_one_input_are_one_product() -> None:
    """Query, key and value; but not across a write into what they read."""
    assert [product.columns for product in traced("add")] == [(128, 128)]
    assert [product.columns for product in traced("add_")] == [(128,), (128,)]
    assert traced("add", width=100) == []


def test_blocks_that_do_not_fit_are_refused() -> None:
    """A tuning file can't make a kernel read past a weight."""
    from compilekit.compiler.decode_kernels import choose

    (product,) = traced("add")
    for blocks in ([3, 256, 1, 4], [1, 512, 1, 4]):
        tuning = Tuning(choices={product.key: {"blocks": blocks}})
        with pytest.raises(ConfigError, match="is to be cut into"):
            choose(product, tuning)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
def test_every_step_is_right(artifact: Artifact) -> None:
    """Replayed against eager, windows of the cache and padded batches included."""
    folder = Path(artifact.root).parent
    config = configuration.load(folder / "compilekit.toml")
    replayed = verify(Path(artifact.root), config=config)
    assert replayed.passed, replayed.buckets


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("columns", [(256,), (512, 256), (256, 128, 128)])
def test_products_are_right(rows: int, columns: tuple[int, ...]) -> None:
    """Every way of cutting one gives what a float32 product gives, rounded."""
    from compilekit.kernels.blocks import candidates
    from compilekit.kernels.products import product

    torch.manual_seed(0)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(n, 512, device="cuda", dtype=x.dtype) for n in columns]
    biases = [
        torch.randn(n, device="cuda", dtype=x.dtype) if i != 1 else None
        for i, n in enumerate(columns)
    ]
    for blocks in candidates(rows, columns, 512):
        flat = product(x, weights, biases, list(blocks))
        at = 0
        for weight, bias in zip(weights, biases, strict=True):
            count = rows * weight.shape[0]
            found = flat[at : at + count].view(rows, -1).float()
            expected = x.float() @ weight.float().T
            if bias is not None:
                expected += bias.float()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
            at += count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
@pytest.mark.parametrize("places", [40, 640, 5000])
@pytest.mark.parametrize(("heads", "groups"), [(4, 7), (8, 1), (2, 20)])
def test_attention_is_right(places: int, heads: int, groups: int) -> None:
    """As float32 attention; the cache's strides are a larger cache's."""
    from compilekit.kernels.attention import attention

    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(3, heads * groups, 1, 128, **make)
    key, value = (torch.randn(3, heads, places + 24, 128, **make) for _ in range(2))
    key, value = key[:, :, :places], value[:, :, :places]
    mask = torch.rand(3, 1, 1, places, device="cuda") < 0.7
    mask[0, :, :, places // 2 :] = False
    mask[..., 0] = True
    found = attention(query, key, value, mask, 0.1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.view(3, heads, groups, 128).float(),
        key.float(),
        value.float(),
        attn_mask=mask,
        scale=0.1,
    )
    torch.testing.assert_close(
        found.float(), expected.reshape(query.shape), rtol=2e-2, atol=2e-2
    )
