"""What ``[generate]`` compiles: one step of a causal language model, twice.

``prefill`` takes a piece of the prompt, ``decode`` one token of each sequence; both
write their keys and values into a cache that the caller owns and return the logits of
the last token. A step is the model's own forward, given a cache that lives in plain
tensors:

    input_ids       int64 [b, s]     decode: [b, 1]
    attention_mask  int64 [b, c]     1 where a place of the cache holds a real token
    position_ids    int64 [b, s]
    start           int64 []         tokens in the cache before this step
    last            int64 [1]        prefill only: which token's logits are wanted
    keys[i]         [b, heads, c, head size], one for each layer; written in place
    values[i]       likewise

The cache tensors are windows onto tensors of the largest cache length, so that a
sequence grows into the next bucket without a copy: their strides are those of the
largest. Grouped heads (fewer keys than queries) are never expanded in memory.

Checked with transformers 5.17 and 5.24: cache_utils.py, masking_utils.py,
integrations/sdpa_attention.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from compilekit._torch.fake import FakeTensorMode, fake_mode_of
from compilekit._torch.ops import compute_once
from compilekit.compiler.attention import GROUPED
from compilekit.config import Config, EntryConfig, InputConfig
from compilekit.errors import UnsupportedByProgramError
from compilekit.plan import Bucket
from compilekit.runtime.generate import CACHE_NAMES
from compilekit.runtime.result import class_name

_TABLES = (torch.cos, torch.sin, "cos", "sin")

Attention = Callable[..., tuple[torch.Tensor, None]]
"""One of transformers' attention functions."""


class LayerShape(NamedTuple):
    """Heads and head sizes of one layer's keys and values, and their dtype."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


class CausalModel(NamedTuple):
    """What serving a causal language model needs to know about it.

    Attributes:
        layers: One for each layer that has a cache, in the cache's order.
        output: ``module:qualname`` of what its forward returns.
    """

    layers: tuple[LayerShape, ...]
    output: str


class Window(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One layer of the cache, in tensors that the caller passed.

    Args:
        keys: ``[b, heads, c, head size]``; written in place.
        values: Likewise.
        start: How many tokens are there already; a tensor, so that no graph is
            specialised to it.
    """

    is_compileable = True
    is_sliding = False

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor
    ) -> None:
        super().__init__()
        self.keys, self.values, self.start = keys, values, start
        self.is_initialized = True

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Nothing to do: the tensors are there."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values behind those that are there; all of them."""
        count = key_states.shape[-2]
        places = torch.arange(count, device=key_states.device) + self.start
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.start

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def prefill(model: torch.nn.Module, kwargs: dict[str, Any]) -> torch.Tensor:
    """Logits ``[b, 1, vocabulary]`` of token `last`, after a piece of the prompt."""
    return step(model, kwargs, kwargs["last"], Window)


def decode(model: torch.nn.Module, kwargs: dict[str, Any]) -> torch.Tensor:
    """Logits ``[b, 1, vocabulary]`` after one token of each sequence."""
    return step(model, kwargs, 1, Window)


STEPS: Mapping[str, Callable[..., torch.Tensor]] = {
    "prefill": prefill,
    "decode": decode,
}


def step(
    model: torch.nn.Module,
    kwargs: dict[str, Any],
    logits_to_keep: Any,
    window: type[Window],
) -> torch.Tensor:
    """The model's forward on a cache of `window` layers."""
    start = kwargs["start"]
    layers = [
        window(keys, values, start)
        for keys, values in zip(kwargs["keys"], kwargs["values"], strict=True)
    ]
    output = model(
        input_ids=kwargs["input_ids"],
        attention_mask=kwargs["attention_mask"],
        position_ids=kwargs["position_ids"],
        use_cache=True,
        logits_to_keep=logits_to_keep,
        **{cache_name(model): Cache(layers=layers)},
    )
    logits: torch.Tensor = output.logits
    return logits


def cache_name(model: torch.nn.Module) -> str:
    """What the model's forward calls its cache; empty if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention, without copies of the keys for each query head.

    Query heads that share keys become further rows of one head: the same products,
    read once. ``repeat_kv`` would write and read the whole cache again in each layer.

    Args:
        query: ``[b, heads, s, head size]``.
        key: ``[b, key heads, c, head size]``.
        value: Likewise.
        attention_mask: Boolean ``[b, 1, s, c]``.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    if (
        groups == 1
        or attention_mask is None
        or attention_mask.shape[1] != 1
        or kwargs.get("position_bias") is not None
    ):
        kwargs.update(dropout=dropout, scaling=scaling)
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, **kwargs
        )
    rows = query.reshape(batch, key.shape[1], groups * length, size)
    mask = attention_mask
    if length > 1:
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1)
        mask = mask.reshape(batch, 1, groups * length, mask.shape[-1])
    output = scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    output = output.reshape(batch, heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def native_groups_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention where cuDNN's kernel reads grouped heads as they are.

    As further rows they would have to be copied next to each other first.
    """
    if attention_mask is None or kwargs.get("position_bias") is not None:
        kwargs.update(dropout=dropout, scaling=scaling)
        return grouped_attention(module, query, key, value, attention_mask, **kwargs)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def attention_on(device: str, backends: Sequence[str]) -> Attention:
    """What a model's layers call instead of SDPA.

    cuDNN is what PyTorch chooses for masked attention on Hopper and Blackwell only;
    its other backends would expand the groups.

    Args:
        backends: Names of ``[compile] attention``; empty = all.
    """
    takes_cudnn = "cudnn" in backends if backends else True
    if (
        device != "cpu"
        and takes_cudnn
        and torch.cuda.get_device_capability()[0] in (9, 10)
    ):
        return native_groups_attention
    return grouped_attention


@contextlib.contextmanager
def grouped(model: torch.nn.Module, attention: Attention) -> Iterator[None]:
    """Have a model's layers call another function where they call SDPA."""
    config: Any = model.config
    if config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(GROUPED, attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    model.set_attn_implementation(GROUPED)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")  # type: ignore[operator]


def store_tables(graph: GraphModule) -> None:
    """Compute a captured step's cosines and sines once, not in each layer again.

    Inductor computes at each use what is cheap to compute. The tables of rotary
    embeddings are shared by all heads of all layers.
    """
    for node in list(graph.graph.nodes):
        if node.target not in _TABLES:
            continue
        while len(node.users) == 1 and _is_as_large(
            only := next(iter(node.users)), node
        ):
            node = only
        if len(node.users) > 1:
            compute_once(graph, node)
    graph.recompile()


def _is_as_large(one: Node, other: Node) -> bool:
    tensors = [node.meta.get("example_value") for node in (one, other)]
    sizes = {x.numel() if isinstance(x, torch.Tensor) else -1 for x in tensors}
    return len(sizes) == 1 and -1 not in sizes


def describe(model: torch.nn.Module) -> CausalModel:
    """Run a fake model once, without a cache of ours, and look at what it keeps.

    Raises:
        UnsupportedByProgramError: it isn't a causal language model with keys and
            values in every layer.
    """
    parameters = inspect.signature(model.forward).parameters
    wanted = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")
    missing = [name for name in wanted if name not in parameters]
    if not cache_name(model):
        missing.append("past_key_values")
    if missing:
        raise _refusal(model, f"its forward doesn't take {', '.join(missing)}")
    mode = fake_mode_of(model)
    device = next(model.parameters()).device
    config: Any = model.config
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    with torch.no_grad(), mode, _simple_experts(model):
        ones = torch.ones(1, 2, dtype=torch.int64, device=device)
        output = model(input_ids=ones, use_cache=True, **{cache_name(model): cache})
    layers = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise _refusal(model, f"layer {index} keeps a {type(layer).__name__}")
        if keys.ndim != 4 or values.ndim != 4:
            raise _refusal(model, f"layer {index} keeps keys of {keys.ndim} dimensions")
        layers.append(
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        )
    if not layers:
        raise _refusal(model, "it keeps no keys and values")
    return CausalModel(tuple(layers), class_name(type(output)))


@contextlib.contextmanager
def _simple_experts(model: torch.nn.Module) -> Iterator[None]:
    """Have a mixture of experts multiply as fake tensors can in every dtype.

    Outside of Dynamo transformers takes torch's grouped product, which has fakes of
    bfloat16 only.
    """
    usual = getattr(model.config, "_experts_implementation", None)
    if usual is None:
        yield
        return
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(usual)  # type: ignore[operator]


def _refusal(model: torch.nn.Module, why: str) -> UnsupportedByProgramError:
    return UnsupportedByProgramError(
        f"[generate] compiles causal language models of transformers, and"
        f" {type(model).__name__} isn't one: {why}",
        hint="Compile its methods with [entries.NAME] instead.",
        thing=type(model).__name__,
    )


def with_cache(entry: EntryConfig, causal: CausalModel) -> EntryConfig:
    """An entry of ``[generate]`` with the cache's tensors among its inputs."""
    inputs = dict(entry.inputs)
    for index, layer in enumerate(causal.layers):
        dtype = str(layer.dtype).removeprefix("torch.")
        shape = ("b", layer.heads, "c", layer.key_size)
        inputs[f"keys[{index}]"] = InputConfig(shape, dtype)
        shape = ("b", layer.heads, "c", layer.value_size)
        inputs[f"values[{index}]"] = InputConfig(shape, dtype)
    return dataclasses.replace(entry, inputs=inputs)


def example(
    config: Config,
    entry: EntryConfig,
    bucket: Bucket,
    causal: CausalModel,
    mode: FakeTensorMode,
    device: str,
) -> dict[str, Any]:
    """Fake arguments of one step at a bucket's shape."""
    sizes = bucket.axes
    longest = max(config.axes["c"])

    def window(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (sizes["b"], heads, sizes["c"], size)
        stride = (heads * longest * size, longest * size, size, 1)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    with mode:
        arguments: dict[str, Any] = {
            "input_ids": integers(sizes["b"], sizes.get("s", 1)),
            "attention_mask": integers(sizes["b"], sizes["c"]),
            "position_ids": integers(sizes["b"], sizes.get("s", 1)),
            "start": integers(),
            "keys": [window(x.heads, x.key_size, x.dtype) for x in causal.layers],
            "values": [window(x.heads, x.value_size, x.dtype) for x in causal.layers],
        }
        if entry.role == "prefill":
            arguments["last"] = integers(1)
    return arguments
