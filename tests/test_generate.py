"""A causal language model behind ``model.generate()``: the unmodified call."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import emulated_graphs
import pytest
import torch

import compilekit
from compilekit import config as configuration
from compilekit.artifact import open_artifact
from compilekit.compiler.build import build
from compilekit.compiler.models import build_real
from compilekit.compiler.verify import verify
from compilekit.errors import (
    CallRefusedError,
    ConfigError,
    MismatchError,
    NoBucketError,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CONFIG = Path(__file__).parent / "generate" / "compilekit.toml"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaMA with grouped heads, its steps built and replayed against eager."""
    config = configuration.load(CONFIG)
    out = tmp_path_factory.mktemp("generate") / "artifact"
    result = build(config, out, verify=False)
    assert result.artifact is not None, result.buckets
    replayed = verify(result.artifact, config=config, threads=(2,))
    assert replayed.passed, replayed.buckets
    return result.artifact


@pytest.fixture(scope="module")
def eager() -> Any:
    """The same model, never attached."""
    return build_real(configuration.load(CONFIG))


@pytest.fixture
def model(eager: Any) -> Any:
    """A copy for one test to attach to."""
    return copy.deepcopy(eager)


def batch(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        words = torch.randint(3, 257, (length,), generator=generator)
        ids[row, longest - length :] = words
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: Any, new: int = 12, **options: Any) -> Any:
    """Greedy ids of the unmodified call."""
    settings = {"do_sample": False, "cache_implementation": "static", **options}
    return model.generate(**inputs, max_new_tokens=new, **settings)


def test_twenty_prompts(artifact: Path, model: Any, eager: Any) -> None:
    """Greedy ids equal eager's for 20 prompts of mixed length, alone and batched, and
    the receipt counts one program call for each step."""
    receipt = compilekit.attach(model, artifact, require="program")
    lengths = [1, 2, 3, 5, 8, 13, 16, 17, 20, 21, 30, 33, 7, 9, 11, 15, 4, 6, 10, 12]
    steps = 0
    groups = [[n] for n in lengths[:12]] + [
        lengths[12:15],
        lengths[15:19],
        lengths[19:],
    ]
    for index, group in enumerate(groups):
        inputs = batch(group, index)
        new = 48 - max(group) if index % 2 else 8
        expected = generate(eager, inputs, new)
        before = sum(receipt.calls.values())
        assert torch.equal(generate(model, inputs, new), expected), group
        made = expected.shape[1] - max(group)
        pieces = -(-max(group) // 16)
        calls = sum(receipt.calls.values()) - before
        # Where the last piece doesn't fit into the cache, its tokens go one by one.
        assert calls == pieces + made - 1 or max(group) > 32, group
        steps += calls
    assert sum(receipt.calls.values()) == steps
    assert receipt.compiles == 0
    assert not receipt.uncovered
    receipt.finish()


def test_rotary_tables_are_computed_once(artifact: Path) -> None:
    """Not in each layer again, where Inductor would compute at each use."""
    opened = open_artifact(artifact).parse_all()
    assert opened.programs
    for (target, entry, bucket), program in opened.programs.items():
        code = artifact / "programs" / target / entry / bucket / "call.py"
        lines = code.read_text().splitlines()
        launched = [
            line
            for name, kernel in program.kernels.items()
            if "cos(" in (artifact / "sources" / f"{kernel.source}.cpp").read_text()
            for line in lines
            if line.strip().startswith(f"{name}(")
        ]
        assert len(launched) == 1, (entry, bucket, launched)


def test_a_tuner_sees_the_graph_that_is_compiled() -> None:
    """Its kernels are known by their source: other ones would tune nothing."""
    from compilekit.compiler.compile import capture_bucket
    from compilekit.compiler.models import build_fake
    from compilekit.plan import buckets
    from compilekit.targets import load_target

    config = configuration.load(CONFIG)
    model = build_fake(config, "cpu")
    for name, entry in config.entries.items():
        bucket = buckets(config, name)[0]
        target = load_target("cpu-x86_64-v3")
        graph = capture_bucket(model, config, entry, bucket, target).graph
        names = [str(node.target) for node in graph.graph.nodes]
        # Cosines and sines.
        assert sum("force_stride_order" in each for each in names) == 2


def test_end_of_sequence(artifact: Path, model: Any, eager: Any) -> None:
    """A sequence that ends early is filled with padding, as in eager."""
    inputs = batch([9, 4, 12])
    free = generate(eager, inputs, 20)
    stop = int(free[1, 15])
    expected = generate(eager, inputs, 20, eos_token_id=stop)
    compilekit.attach(model, artifact)
    found = generate(model, inputs, 20, eos_token_id=stop)
    assert torch.equal(found, expected)
    assert not torch.equal(found[:, : free.shape[1]], free[:, : found.shape[1]])


def test_padding_on_the_right(artifact: Path, model: Any, eager: Any) -> None:
    """A prompt padded on the right gives what eager gives."""
    inputs = batch([9, 9])
    inputs["attention_mask"][1, 6:] = 0
    expected = generate(eager, inputs, 6)
    compilekit.attach(model, artifact)
    assert torch.equal(generate(model, inputs, 6), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20},
        {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_other_ways_to_generate(
    artifact: Path, model: Any, eager: Any, options: dict[str, Any]
) -> None:
    """Beams, sampling and processors are transformers' own, on compiled steps."""
    inputs = batch([7])
    torch.manual_seed(3)
    expected = generate(eager, inputs, 10, **options)
    receipt = compilekit.attach(model, artifact, require="program")
    torch.manual_seed(3)
    assert torch.equal(generate(model, inputs, 10, **options), expected)
    receipt.finish()


def test_a_conversation_goes_on(artifact: Path, model: Any, eager: Any) -> None:
    """A cache that was returned takes further tokens, while another call runs."""

    def talk(model: Any) -> list[torch.Tensor]:
        options = {"return_dict_in_generate": True}
        # transformers makes a cache as long as the longest call so far needed.
        generate(model, batch([6]), 16)
        first = generate(model, batch([6]), 5, **options)
        between = generate(model, batch([11], 1), 5)
        more = torch.cat([first.sequences, batch([4], 2)["input_ids"]], dim=1)
        cache = first.get("past_key_values", first.get("cache"))
        name = "past_key_values" if "past_key_values" in first else "cache"
        second = model.generate(
            more, max_new_tokens=5, do_sample=False, **{name: cache}
        )
        return [first.sequences, between, second]

    expected = talk(eager)
    receipt = compilekit.attach(model, artifact, require="program")
    for found, wanted in zip(talk(model), expected, strict=True):
        assert torch.equal(found, wanted)
    receipt.finish()


def test_nothing_of_an_earlier_call_is_seen(
    artifact: Path, model: Any, eager: Any
) -> None:
    """Infinities that an earlier sequence left in the cache reach no later one."""
    compilekit.attach(model, artifact)
    expected = generate(eager, batch([6]), 6)
    cache = model.forward.new_cache(4, 48)
    for tensor in (*cache.memory.buffers.keys, *cache.memory.buffers.values):
        tensor.fill_(float("nan"))
    del cache
    assert torch.equal(generate(model, batch([6]), 6), expected)


def test_modes_may_alternate(artifact: Path, model: Any, eager: Any) -> None:
    """Memory that a call in inference mode made serves one outside of it, and back."""
    compilekit.attach(model, artifact)
    expected = generate(eager, batch([6]), 6)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert torch.equal(generate(model, batch([6]), 6), expected)


def test_threads_take_turns(artifact: Path, model: Any, eager: Any) -> None:
    """Several threads generate at once, each with a cache of its own."""
    inputs = [batch([n, n + 3], n) for n in (3, 5, 8, 11)]
    expected = [generate(eager, each, 16) for each in inputs]
    compilekit.attach(model, artifact)
    found: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        found[index] = generate(model, inputs[index], 16)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, wanted in enumerate(expected):
        assert torch.equal(found[index], wanted)


def test_refused_by_name(artifact: Path, model: Any) -> None:
    """What no program covers is refused with the largest bucket, or by argument."""
    compilekit.attach(model, artifact)
    with pytest.raises(NoBucketError, match=r"at most 48|of 48"):
        generate(model, batch([20]), 40)
    with pytest.raises(NoBucketError, match="largest bucket holds 4"):
        generate(model, batch([5] * 5), 4)
    with pytest.raises(CallRefusedError, match="cache_implementation"):
        generate(model, batch([5]), 4, cache_implementation=None)
    with pytest.raises(CallRefusedError, match="no cache"):
        model(**batch([5]))
    with pytest.raises(CallRefusedError, match="output_attentions = True"):
        generate(
            model,
            batch([5]),
            4,
            output_attentions=True,
            return_dict_in_generate=True,
        )


def test_policy_eager(artifact: Path, model: Any, eager: Any) -> None:
    """With on_uncovered = eager such calls run eagerly, and the receipt counts them."""
    receipt = compilekit.attach(model, artifact, on_uncovered="eager")
    for inputs, new in ((batch([20]), 40), (batch([5] * 5), 4)):
        expected = generate(eager, inputs, new)
        assert torch.equal(generate(model, inputs, new), expected)
    assert {item.route for item in receipt.uncovered} == {"eager"}
    assert not receipt.calls


def test_detach_and_drift(artifact: Path, model: Any, eager: Any) -> None:
    """Weights may change in place; detach gives the model its own methods back."""
    receipt = compilekit.attach(model, artifact)
    for changed in (model, eager):
        with torch.no_grad():
            changed.lm_head.weight[7] += 1.0
    try:
        expected = generate(eager, batch([6]), 6)
    finally:
        with torch.no_grad():
            eager.lm_head.weight[7] -= 1.0
    assert torch.equal(generate(model, batch([6]), 6), expected)
    receipt.detach()
    assert "forward" not in vars(model)
    assert "_prepare_static_cache" not in vars(model)
    assert torch.equal(generate(model, batch([6]), 6), expected)


def test_activation_checkpointing_is_noticed(artifact: Path, model: Any) -> None:
    """Switched on after attach, it is named, whatever else it changes."""
    compilekit.attach(model, artifact)
    generate(model, batch([5]), 2)
    model.gradient_checkpointing_enable()
    with pytest.raises(MismatchError, match="gradient_checkpointing"):
        generate(model, batch([5]), 2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> emulated_graphs.Device:
    """Attaches from now on capture graphs, on an emulated device."""
    from compilekit.runtime import attach, program

    device = emulated_graphs.Device()
    device.install(monkeypatch)
    for name in ("load_program", "lazy_program"):
        load = getattr(program, name)

        def on_device(*args: Any, load: Any = load) -> Any:
            return device.program(load(*args))

        monkeypatch.setattr(attach, name, on_device)
    monkeypatch.setattr(attach, "_uses_graphs", lambda *_: True)
    return device


@pytest.mark.parametrize("loading", ["eager", "lazy"])
def test_one_graph_for_each_bucket(
    artifact: Path,
    model: Any,
    eager: Any,
    device: emulated_graphs.Device,
    loading: Any,
) -> None:
    """Prompts of fifteen lengths replay the graphs that the buckets have, no others."""
    receipt = compilekit.attach(model, artifact, loading=loading, require="program")
    buckets = {f"{route.entry}/{route.bucket}" for route in receipt.routes}
    assert set(receipt.graphs) == (set() if loading == "lazy" else buckets)
    for length in [1, 2, 3, 5, 8, 13, 16, 17, 20, 21, 30, 33, 7, 9, 11]:
        inputs = batch([length, 1], length)
        expected = generate(eager, inputs, 12)
        assert torch.equal(generate(model, inputs, 12), expected), length
    assert set(receipt.graphs) == buckets
    assert device.captured == len(buckets)
    warm = device.captured if loading == "lazy" else 0
    assert device.replayed == sum(receipt.calls.values()) - warm


def test_graphs_follow_replaced_weights(
    artifact: Path, model: Any, eager: Any, device: emulated_graphs.Device
) -> None:
    """Weights at another address reach every graph that is used from then on."""
    compilekit.attach(model, artifact)
    captured, inputs = device.captured, batch([9, 4])
    before = generate(eager, inputs)
    for seed in (1, 2):
        torch.manual_seed(seed)
        other = torch.nn.Parameter(torch.randn_like(eager.lm_head.weight))
        changed = copy.deepcopy(eager)
        model.lm_head.weight = changed.lm_head.weight = other
        expected = generate(changed, inputs)
        assert not torch.equal(expected, before)
        for _ in range(2):
            assert torch.equal(generate(model, inputs), expected)
        # One prefill and one decode bucket are in use.
        captured += 2
        assert device.captured == captured


def test_a_second_cache_runs_without_graphs(
    artifact: Path, model: Any, eager: Any, device: emulated_graphs.Device
) -> None:
    """What generates while another cache is kept has memory that no graph knows."""
    compilekit.attach(model, artifact)
    inputs = batch([9])
    kept = model.forward.new_cache(1, 24)
    expected = generate(eager, inputs)
    before = device.captured, device.replayed
    assert torch.equal(generate(model, inputs), expected)
    assert (device.captured, device.replayed) == before
    del kept
    assert torch.equal(generate(model, inputs), expected)
    assert device.replayed > before[1]


def test_long_prompt_without_chunks(
    artifact: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without over_length = chunk, a prompt beyond the largest names the largest."""
    compilekit.attach(model, artifact)
    monkeypatch.setattr(model.forward, "chunk", False)
    with pytest.raises(NoBucketError, match="largest prefill bucket takes 16"):
        generate(model, batch([17]), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[generate]\nbatch = [1]\nprompt = [8]", "generate.cache: missing"),
        ("[generate]\nbatch = [1]\nprompt = [64]\ncache = [32]", "a prompt of 64"),
        (
            "[generate]\nbatch = [1]\nprompt = [8]\ncache = [32]\n[axes]\nb = [1]",
            "makes axis b itself",
        ),
        (
            "[generate]\nbatch = [1]\nprompt = [8]\ncache = [32]\n"
            '[build]\nroutes = ["cache"]',
            "its steps are programs",
        ),
        (
            "[generate]\nbatch = [1]\nprompt = [8]\ncache = [32]\n"
            '[entries.forward.inputs.x]\nshape = [1]\ndtype = "float32"',
            "serves the model's forward",
        ),
        (
            '[entries.forward.inputs.x]\nshape = [1]\ndtype = "float32"\n'
            '[serve]\nover_length = "chunk"',
            "only .generate. can take",
        ),
        (
            '[entries.forward.inputs.x]\nshape = [1]\ndtype = "float32"\n'
            "[serve]\ncuda_graphs = true",
            "only .generate.'s steps are replayed",
        ),
        (
            '[entries.forward.inputs.x]\nshape = [1]\ndtype = "float32"\n'
            "[compile]\ndecode_kernels = false",
            "only .generate.'s steps have kernels",
        ),
        (
            '[entries.forward.inputs.x]\nshape = [1]\ndtype = "float32"\n[autotune]',
            "autotune.from: missing",
        ),
    ],
)
def test_configuration(tmp_path: Path, text: str, message: str) -> None:
    """What is wrong with [generate] is said with its line."""
    path = tmp_path / "compilekit.toml"
    path.write_text(f'[model]\nsource = "hf:."\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        configuration.load(path)
