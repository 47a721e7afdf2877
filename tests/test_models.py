"""Models and example calls: `compilekit.compiler.models`, `compilekit._torch.fake`."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from compilekit._torch import fake
from compilekit.compiler import examples, models
from compilekit.compiler.hugging_face import vocabulary_size
from compilekit.config import Config, EntryConfig, InputConfig, ModelConfig
from compilekit.errors import ConfigError
from compilekit.plan import Bucket

BUCKET = Bucket("b2_s8", {"b": 2, "s": 8})
IDS = InputConfig(("b", "s"), "int64", pad=0)

SMALL: dict[str, tuple[str, dict[str, Any], dict[str, InputConfig]]] = {
    # model_type: (class, values of its configuration, inputs)
    "bert": (
        "BertModel",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 97,
        },
        {"input_ids": IDS},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 97,
            "tie_word_embeddings": True,
        },
        {"input_ids": IDS},
    ),
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 97,
        },
        {"input_ids": IDS},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97},
        {"input_ids": IDS},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "num_layers": 2,
            "num_heads": 2,
            "d_kv": 16,
            "d_ff": 64,
            "vocab_size": 97,
        },
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "whisper": (
        "WhisperModel",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 97,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 1,
        },
        {
            "input_features": InputConfig(("b", 16, 40), "float32"),
            "decoder_input_ids": IDS,
        },
    ),
    "vit": (
        "ViTModel",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
        {"pixel_values": InputConfig(("b", 3, 32, 32), "float32")},
    ),
    "resnet": (
        "ResNetModel",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        {"pixel_values": InputConfig(("b", 3, 32, 32), "float32")},
    ),
}


def hugging_face(folder: Path, name: str, **model: Any) -> Config:
    """A configuration for a small random model of the type `name`."""
    cls, values, inputs = SMALL[name]
    content = {"model_type": name, "architectures": [cls], **values}
    (folder / "config.json").write_text(json.dumps(content))
    kwargs = {} if name in {"vit", "resnet"} else {"use_cache": False}
    if name == "bert":
        kwargs = {}
    entry = EntryConfig("forward", "forward", inputs, kwargs=kwargs)
    return Config(
        folder / "compilekit.toml",
        ModelConfig("hf:.", **model),
        {"b": (2,), "s": (8,)},
        {"forward": entry},
    )


def factory(
    folder: Path,
    source: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    **model: Any,
) -> Config:
    """A configuration whose model a function of this file makes."""
    module = types.ModuleType("user_model")
    module.make = source  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_model", module)
    monkeypatch.syspath_prepend(str(folder))
    return Config(
        folder / "compilekit.toml", ModelConfig("user_model:make", **model), {}, {}
    )


def layout(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Name → dtype, shape and stride of every parameter and buffer.

    requires_grad is left out: transformers 5.24 loses Whisper's own when it loads.
    """
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {n: (t.dtype, t.shape, t.stride()) for n, t in named}


def ties(model: nn.Module) -> set[frozenset[str]]:
    """Groups of names that are one tensor object."""
    groups: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def flat(output: Any) -> list[torch.Tensor]:
    """Every tensor of an output."""
    leaves = torch.utils._pytree.tree_leaves(dict(output))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", SMALL)
def test_a_fake_model_has_the_layout_of_a_loaded_one(name: str, tmp_path: Path) -> None:
    """Fake, random and loaded models agree on every dtype, shape, stride and tie."""
    config = hugging_face(tmp_path, name)
    real = models.build_real(config)
    real.save_pretrained(tmp_path / "saved")
    loaded = models.build_real(config, weights="saved")
    faked = models.build_fake(config)
    assert layout(faked) == layout(real) == layout(loaded)
    assert ties(faked) == ties(real) == ties(loaded)
    assert not faked.training
    assert all(
        isinstance(t, fake.FakeTensor) and t.device.type == "cpu"
        for t in (*faked.parameters(), *faked.buffers())
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen2", "t5", "resnet", "whisper"])
def test_dtypes_follow_from_pretrained(name: str, dtype: str, tmp_path: Path) -> None:
    """In half precision the buffers and modules kept in float32 are the same ones."""
    config = hugging_face(tmp_path, name, dtype=dtype)
    models.build_real(config).save_pretrained(tmp_path / "saved")
    loaded = models.build_real(config, weights="saved")
    assert layout(models.build_fake(config)) == layout(loaded)
    assert layout(models.build_real(config)) == layout(loaded)


@pytest.mark.parametrize("name", SMALL)
def test_a_fake_call_gives_the_layout_of_a_real_call(name: str, tmp_path: Path) -> None:
    """Running fake model and fake inputs gives outputs laid out like real ones."""
    config = hugging_face(tmp_path, name)
    entry = config.entries["forward"]
    faked, real = models.build_fake(config), models.build_real(config)
    mode = fake.fake_mode_of(faked)
    with torch.no_grad():
        kwargs = examples.example_kwargs(config, entry, BUCKET, fake=mode)
        with mode:
            fake_out = flat(faked(**kwargs))
        real_out = flat(real(**examples.example_kwargs(config, entry, BUCKET)))
    assert [(t.dtype, t.shape) for t in fake_out] == [
        (t.dtype, t.shape) for t in real_out
    ]


# --- Fake models of user code ---------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A frozen object with slots that holds a tensor."""

    values: torch.Tensor


class Cache:
    """A plain object that holds a tensor."""

    def __init__(self) -> None:
        self.keys = torch.zeros(2, 3)


GLOBAL = {"table": torch.ones(3)}


class Holder(nn.Module):
    """Tensors in every place that a module can keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.frozen = nn.Parameter(torch.empty(4), requires_grad=False)
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("scratch", torch.empty(3, 4).t(), persistent=False)
        self.register_buffer("nothing", None)
        self.plain = torch.arange(5)
        self.nested = {"a": [torch.ones(1), (torch.ones(2), "text")]}
        self.table = Table(torch.ones(6))
        self.cache = Cache()
        self.shared = GLOBAL
        self.same = self.weight
        self.row = self.weight.detach()[1]
        self.computed = torch.linspace(0, 1, 4, device="cpu")
        self.owner = [self]
        self.weight.loader = "custom"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.computed + self.steps


def test_every_tensor_of_a_module_becomes_fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain attributes and tensors inside containers and objects are fake as well."""
    model: Any = models.build_fake(factory(tmp_path, Holder, monkeypatch))
    tensors = [
        model.weight,
        model.frozen,
        model.steps,
        model.scratch,
        model.plain,
        model.nested["a"][0],
        model.nested["a"][1][0],
        model.table.values,
        model.cache.keys,
        model.shared["table"],
        model.row,
        model.computed,
    ]
    assert all(isinstance(tensor, fake.FakeTensor) for tensor in tensors)
    assert {tensor.fake_mode for tensor in tensors} == {fake.fake_mode_of(model)}
    assert {tensor.device for tensor in tensors} == {torch.device("cpu")}
    assert model.nothing is None
    assert model.nested["a"][1][1] == "text"
    assert model.owner == [model]
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.requires_grad
    assert not model.frozen.requires_grad
    assert model.weight.loader == "custom"
    assert model.scratch.stride() == (1, 4)
    assert "scratch" not in model.state_dict()


def test_one_tensor_stays_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias is the same object after it, a view still shares its storage."""
    model: Any = models.build_fake(factory(tmp_path, Holder, monkeypatch))
    assert model.same is model.weight
    assert model.row.untyped_storage()._cdata == model.weight.untyped_storage()._cdata
    assert model.row.storage_offset() == 3


def test_a_global_of_user_code_keeps_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a module shares with the rest of the process stays real there."""
    models.build_fake(factory(tmp_path, Holder, monkeypatch))
    assert type(GLOBAL["table"]) is torch.Tensor


def test_views_of_real_tensors_share_a_fake_storage() -> None:
    """Real tensors that overlap become fake tensors that overlap in the same way."""
    base = torch.arange(12).reshape(3, 4)
    mode = fake.new_fake_mode()
    first, second = fake.make_fake((base, base[1:, ::2]), mode, "cpu")
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert (second.shape, second.stride()) == ((2, 2), (4, 2))
    assert second.storage_offset() == 4


def test_a_fake_model_may_pretend_to_be_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and inputs can be on a device that this machine hasn't got."""
    config = factory(tmp_path, Holder, monkeypatch)
    model: Any = models.build_fake(config, "cuda:0")
    entry = EntryConfig("forward", "forward", {"x": InputConfig(("b", 3), "float32")})
    kwargs = examples.example_kwargs(
        config, entry, BUCKET, fake=fake.fake_mode_of(model), device="cuda:0"
    )
    assert model.weight.device == kwargs["x"].device == torch.device("cuda:0")


def test_a_recurrent_layer_keeps_its_flat_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nn.LSTM lists its parameters twice more, once by weak references."""
    model: Any = models.build_fake(
        factory(tmp_path, lambda: nn.LSTM(4, 5), monkeypatch)
    )
    expected = [id(t) for t in model.parameters()]
    assert [id(t) for t in model._flat_weights] == expected
    assert [id(ref()) for ref in model._flat_weight_refs] == expected


def test_a_model_without_tensors_has_a_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any mode will do for a model that holds no tensor."""
    model = models.build_fake(factory(tmp_path, nn.ReLU, monkeypatch))
    mode = fake.fake_mode_of(model)
    assert isinstance(mode, fake.FakeTensorMode)
    assert mode.shape_env is None


def test_nothing_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 1 TB is made without its memory."""
    config = factory(tmp_path, lambda: nn.Linear(1 << 19, 1 << 19), monkeypatch)
    model: Any = models.build_fake(config)
    assert model.weight.numel() * model.weight.element_size() == 1 << 40


def test_weights_are_never_read(tmp_path: Path) -> None:
    """A fake model needs config.json alone; a damaged checkpoint isn't noticed."""
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert models.build_fake(hugging_face(tmp_path, "bert"))


def test_a_sparse_parameter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout that a fake tensor can't stand for is named."""

    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("mask", torch.eye(2, device="cpu").to_sparse())
        return model

    with pytest.raises(ConfigError, match="mask is a sparse_coo tensor"):
        models.build_fake(factory(tmp_path, make, monkeypatch))


# --- Real models ----------------------------------------------------------------------


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    """One seed gives one model, and the process's own random state is left alone."""
    config = hugging_face(tmp_path, "bert")
    before = torch.random.get_rng_state()
    first, again, other = (models.build_real(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for one, same in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
    different = zip(first.parameters(), other.parameters(), strict=True)
    assert not all(torch.equal(one, two) for one, two in different)


def test_weights_come_from_a_directory(tmp_path: Path) -> None:
    """A saved model is loaded with the values that it was saved with."""
    config = hugging_face(tmp_path, "bert")
    saved = models.build_real(config, seed=3)
    saved.save_pretrained(tmp_path / "saved")
    loaded = models.build_real(config, weights="saved")
    assert not loaded.training
    for one, same in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, same)


def test_missing_weights_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor that the checkpoint lacks is named, as its values are random."""
    body = hugging_face(tmp_path, "bert")
    models.build_real(body).save_pretrained(tmp_path / "saved")
    head = hugging_face(tmp_path, "bert", model_class="BertForMaskedLM")
    with caplog.at_level("WARNING", logger="compilekit"):
        models.build_real(head, weights="saved")
    assert "lack" in caplog.text
    assert "cls.predictions" in caplog.text


def test_a_factory_loads_a_safetensors_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory's model takes its weights from one file, which has to fit."""
    config = factory(tmp_path, lambda: nn.Linear(2, 3), monkeypatch)
    state = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model: Any = models.build_real(config, weights="model.safetensors")
    assert torch.equal(model.weight, state["weight"])
    safetensors.torch.save_file({"other": torch.ones(1)}, tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match="don't fit"):
        models.build_real(config, weights="bad.safetensors")
    with pytest.raises(ConfigError, match="expected a safetensors file"):
        models.build_real(config, weights=".")


def test_a_package_can_ship_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``package:NAME/DIR`` finds data of a package without importing it."""
    package = tmp_path / "ships_a_model"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = hugging_face(package / "model", "bert")
    models.build_real(config).save_pretrained(package / "model")
    config = dataclasses.replace(
        config, model=ModelConfig("hf:package:ships_a_model/model")
    )
    assert models.build_fake(config)
    assert models.build_real(config, weights="package:ships_a_model/model")
    assert "ships_a_model" not in sys.modules


# --- The [model] table ----------------------------------------------------------------


def test_values_are_laid_over_the_configuration(tmp_path: Path) -> None:
    """[model] config changes values, and those that follow from them."""
    config = hugging_face(tmp_path, "qwen2", config={"num_hidden_layers": 1})
    model: Any = models.build_fake(config)
    assert len(model.model.layers) == 1
    assert len(model.config.layer_types) == 1


def test_another_class_can_be_chosen(tmp_path: Path) -> None:
    """[model] class names any class, auto classes included."""
    for name in ("BertForSequenceClassification", "AutoModelForSequenceClassification"):
        config = hugging_face(tmp_path, "bert", model_class=name)
        model = models.build_fake(config)
        assert type(model).__name__ == "BertForSequenceClassification"


def test_a_factory_follows_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[model] dtype is the default dtype while a factory runs, and only then."""
    config = factory(tmp_path, lambda: nn.Linear(2, 2), monkeypatch, dtype="bfloat16")
    for model in (models.build_fake(config), models.build_real(config)):
        assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32


def test_modules_are_found_beside_the_configuration(tmp_path: Path) -> None:
    """The configuration's folder is searched for the user's modules."""
    source = "from torch import nn\ndef make():\n    return nn.Linear(1, 1)\n"
    (tmp_path / "beside_the_config.py").write_text(source)
    config = Config(
        tmp_path / "compilekit.toml", ModelConfig("beside_the_config:make"), {}, {}
    )
    assert models.build_fake(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig("no_such_module:make"), "can't import 'no_such_module'"),
        (ModelConfig("json:make"), "module 'json' has no function 'make'"),
        (ModelConfig("json"), "expected package.module:function, found 'json'"),
        (ModelConfig("json:dumps"), "failed: TypeError"),
        (ModelConfig("modules.foreign:own_error"), "failed: OwnError: no luck"),
        (ModelConfig("modules.foreign:leave"), "failed: SystemExit: 3"),
        (ModelConfig("modules.leaving:make"), "SystemExit: 2"),
        (ModelConfig("hf:.", config={"hidden_size": 1.5}), "expected int, got float"),
        (ModelConfig("builtins:dict"), "it returned dict"),
        (ModelConfig("hf:./missing"), "missing can't be read: No such file"),
        (ModelConfig("hf:~nobody-at-all/x"), "x can't be read: No such file"),
        (ModelConfig(f"hf:./{'long' * 99}"), "can't be read: File name too long"),
        (ModelConfig("hf:package:no_such_package/x"), "no Python package"),
        (ModelConfig("hf:package:json/x"), "package 'json' has no 'x'"),
        (ModelConfig("hf:.", dtype="bfloat61"), "Did you mean 'bfloat16'"),
        (ModelConfig("hf:.", dtype="int64"), "expected a floating-point dtype"),
        (ModelConfig("hf:.", model_class="BertModle"), "Did you mean 'BertModel'"),
        (ModelConfig("hf:.", model_class="BertTokenizer"), "no such model class"),
        (ModelConfig("hf:.", config={"hiden_size": 3}), "Did you mean 'hidden_size'"),
        (ModelConfig("hf:.", config={"hidden_size": 33}), "can't be constructed"),
    ],
)
def test_a_wrong_model_is_refused(
    model: ModelConfig, message: str, tmp_path: Path
) -> None:
    """Each mistake in [model] is an error that names it."""
    config = dataclasses.replace(hugging_face(tmp_path, "bert"), model=model)
    with pytest.raises(ConfigError) as caught:
        models.build_fake(config)
    assert message in str(caught.value)


def test_a_directory_elsewhere_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would take one in the current directory for an id's."""
    config = hugging_face(tmp_path, "bert")
    (tmp_path / "elsewhere" / "other").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = dataclasses.replace(config, model=ModelConfig("hf:other"))
    with pytest.raises(ConfigError, match="other can't be read") as caught:
        models.build_fake(config)
    assert "counts from the configuration's folder" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "bert"}, "names no architecture"),
        ({"model_type": "no-such-type"}, "can't make a configuration from it"),
        (
            {"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}},
            "Code that a checkpoint brings along isn't run",
        ),
    ],
)
def test_an_unusable_config_json_is_refused(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A config.json that names no class says to use [model] class or a factory."""
    config = hugging_face(tmp_path, "bert")
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        models.build_fake(config)
    assert message in str(caught.value)


def test_reading_values_in_a_factory_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory that needs values of tensors is told that there are none, and why."""

    def make() -> nn.Module:
        return nn.Linear(2, int(torch.ones(1).item()))

    with pytest.raises(ConfigError) as caught:
        models.build_fake(factory(tmp_path, make, monkeypatch))
    assert "meta device" in caught.value.hint
    assert models.build_real(factory(tmp_path, make, monkeypatch))


def test_a_method_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry's callable is the model itself or a method; a missing one is refused."""
    model = models.build_fake(factory(tmp_path, Holder, monkeypatch))
    assert models.entry_callable(model, EntryConfig("e", "forward", {})) is model
    method = models.entry_callable(model, EntryConfig("e", "state_dict", {}))
    assert method == model.state_dict
    with pytest.raises(ConfigError, match="Did you mean 'state_dict'"):
        models.entry_callable(model, EntryConfig("e", "state_dicts", {}))


# --- Example calls --------------------------------------------------------------------


def example(
    inputs: Mapping[str, InputConfig], *, seed: int = 0, **parts: Any
) -> dict[str, Any]:
    """The keyword arguments of a call with these inputs, for a model of no type."""
    entry = EntryConfig("forward", "forward", inputs, **parts)
    config = Config(Path("compilekit.toml"), ModelConfig("x:y"), {}, {"forward": entry})
    return examples.example_kwargs(config, entry, BUCKET, seed=seed)


def test_arguments_are_nested_as_their_paths_say() -> None:
    """Keys make dicts and indices make lists, at any depth."""
    rule = InputConfig(("b", 3), "float32")
    kwargs = example(
        {"x": rule, 'batch["a"]': rule, "batch['b'][1]": rule, "batch['b'][0]": rule}
    )
    assert sorted(kwargs) == ["batch", "x"]
    assert sorted(kwargs["batch"]) == ["a", "b"]
    assert isinstance(kwargs["batch"]["b"], list)
    assert [tensor.shape for tensor in kwargs["batch"]["b"]] == [(2, 3), (2, 3)]


def test_values_follow_rule_and_seed() -> None:
    """Values lie between low and high, and one seed gives the same ones again."""
    inputs = {
        "ids": InputConfig(("b", 500), "int64", low=3, high=9),
        "mask": InputConfig(("b", 500), "int32"),
        "flag": InputConfig(("b", 500), "bool"),
        "unit": InputConfig(("b", 500), "float16", low=-2, high=2),
        "normal": InputConfig(("b", 500), "bfloat16"),
    }
    kwargs = example(inputs)
    assert [kwargs[name].dtype for name in inputs] == [
        torch.int64,
        torch.int32,
        torch.bool,
        torch.float16,
        torch.bfloat16,
    ]
    assert kwargs["ids"].unique().tolist() == [3, 4, 5, 6, 7, 8]
    assert kwargs["mask"].unique().tolist() == [0, 1]
    assert kwargs["flag"].unique().tolist() == [False, True]
    assert kwargs["unit"].abs().max() <= 2
    assert kwargs["normal"].float().std() == pytest.approx(1, abs=0.2)
    again, other = example(inputs), example(inputs, seed=1)
    assert all(torch.equal(kwargs[name], again[name]) for name in inputs)
    assert not torch.equal(kwargs["ids"], other["ids"])


def test_masks_are_drawn_as_runs_too() -> None:
    """An odd seed's rows begin with one value and end with that of the padding."""
    inputs = {
        "unpadded": InputConfig(("b", 50), "bool"),
        "padding": InputConfig(("b", 50), "bool", pad=True),
        "real": InputConfig(("b", 50), "bool", pad=False),
        "one": InputConfig((), "bool"),
    }
    kwargs = example(inputs, seed=1)
    for name, last in (("unpadded", 1), ("padding", 1), ("real", 0)):
        steps = kwargs[name].int().diff(dim=1)
        assert steps.abs().sum(1).tolist() == [1] * len(steps)
        assert kwargs[name][:, -1].int().tolist() == [last] * len(steps)
    assert kwargs["one"].shape == ()


def test_token_ids_fill_the_vocabulary(tmp_path: Path) -> None:
    """Names that end in input_ids are drawn from the model's vocabulary."""
    config = hugging_face(tmp_path, "t5")
    bucket = Bucket("b2_s500", {"b": 2, "s": 500})
    kwargs = examples.example_kwargs(config, config.entries["forward"], bucket)
    for name in ("input_ids", "decoder_input_ids"):
        assert 80 < kwargs[name].max() < 97
    assert vocabulary_size(config) == 97


def test_fixed_arguments_are_passed_on() -> None:
    """[entries.NAME] kwargs are part of the call; one name can't be both."""
    rule = InputConfig(("b",), "float32")
    assert example({"x": rule}, kwargs={"use_cache": False})["use_cache"] is False
    with pytest.raises(ConfigError, match="both an input and a fixed argument"):
        example({"x": rule}, kwargs={"x": 1})


def test_an_example_function_makes_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments may be any object; in a fake call their tensors are fake."""

    def make(axes: dict[str, int]) -> dict[str, Any]:
        return {"state": Table(torch.rand(axes["b"], 3))}

    config = factory(tmp_path, make, monkeypatch)
    entry = EntryConfig("forward", "forward", {}, example="user_model:make")
    real = examples.example_kwargs(config, entry, BUCKET)
    again = examples.example_kwargs(config, entry, BUCKET)
    assert torch.equal(real["state"].values, again["state"].values)
    mode = fake.new_fake_mode()
    faked = examples.example_kwargs(config, entry, BUCKET, fake=mode)
    assert isinstance(faked["state"].values, fake.FakeTensor)
    assert faked["state"].values.shape == (2, 3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": InputConfig(("q",), "float32")}, "'q' is no axis"),
        ({"x": InputConfig(("b",), "flaot32")}, "Did you mean 'float32'"),
        ({"state.h": InputConfig(("b",), "float32")}, "is an attribute of an object"),
        ({"[0]": InputConfig(("b",), "float32")}, "the name of an argument first"),
        ({"x[": InputConfig(("b",), "float32")}, "expected a path such as"),
        ({"x[1]": InputConfig(("b",), "float32")}, "expected the indices 0 to 0"),
        (
            {
                "x": InputConfig(("b",), "float32"),
                "x[0]": InputConfig(("b",), "float32"),
            },
            "is an input, and so is a part of it",
        ),
    ],
)
def test_a_wrong_input_is_refused(inputs: dict[str, InputConfig], message: str) -> None:
    """Each mistake in [entries.NAME.inputs] is an error that names it."""
    with pytest.raises(ConfigError) as caught:
        example(inputs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda axes: [axes], "it returned list"),
        (lambda axes: axes["missing"], "failed for bucket b2_s8: KeyError"),
    ],
)
def test_a_wrong_example_function_is_refused(
    source: Callable[..., Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An example function that fails or returns something else is named."""
    config = factory(tmp_path, source, monkeypatch)
    entry = EntryConfig("forward", "forward", {}, example="user_model:make")
    with pytest.raises(ConfigError) as caught:
        examples.example_kwargs(config, entry, BUCKET)
    assert message in str(caught.value)


def test_objects_of_torch_are_followed() -> None:
    """A FlexAttention mask is an object of torch whose tensors are inputs."""
    mask = create_block_mask(causal, 1, 1, 128, 128, device="cpu")
    faked = fake.make_fake({"mask": mask}, fake.new_fake_mode(), "cpu")["mask"]
    assert isinstance(faked.kv_num_blocks, fake.FakeTensor)
    assert type(mask.kv_num_blocks) is torch.Tensor


def causal(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A mask_mod."""
    return q >= kv
