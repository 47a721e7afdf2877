"""Serve a causal language model: ``model.generate()`` runs prefill and decode programs.

`Generation` stands in the place of the model's forward, and hands out the caches that
``generate(cache_implementation="static")`` asks for. A call goes through

    tokens → pieces that fit a prefill bucket, or one decode step
           → the smallest batch and cache that hold it → program → logits

Lengths are kept on the host, so that no step waits for the device. A batch that is
smaller than its bucket is filled with copies of its first sequence; a piece that is
shorter than its bucket is followed by tokens whose keys lie behind the sequence's end,
where nothing looks before they are overwritten. docs/generate.md says what is served.

Source: transformers/generation/utils.py, ``_prepare_static_cache`` (5.17, 5.24).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from compilekit.errors import (
    CallRefusedError,
    CompilekitError,
    NoBucketError,
)
from compilekit.runtime.dispatch import BoundProgram, Dispatcher, OnRefusal
from compilekit.runtime.graphs import GraphedCall, GraphPool
from compilekit.runtime.kvcache import Buffers, Memory, cache_class
from compilekit.runtime.model import AttachedMethod, own_method
from compilekit.runtime.result import import_class

# What a forward calls its cache: the second since transformers 5.24, model by model.
CACHE_NAMES = ("past_key_values", "cache")
MAKES_CACHE = "_prepare_static_cache"
# Arguments that don't change what a step computes → the values that are fine.
_INDIFFERENT = {"use_cache": (True, None), "return_dict": (True, None)}


class Step:
    """One bucket's program with the tensors that it takes besides the cache.

    Attributes:
        bound: The program.
        graph: The same as a CUDA graph, for the memory that all buckets share; None
            where none is captured.
        batch, length, places: Sizes of its axes; length 1 for decode.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        bound: BoundProgram,
        pool: GraphPool | None,
        on_graph: Callable[[str, str, int], None],
    ) -> None:
        self.dispatcher = dispatcher
        self.bound = bound
        names = (dispatcher.entry.name, bound.bucket.name)
        self.graph = (
            None
            if pool is None
            else GraphedCall(
                "/".join(names),
                bound.call,
                pool,
                functools.partial(on_graph, *names),
            )
        )
        sizes = bound.bucket.axes
        self.batch, self.places = sizes["b"], sizes["c"]
        self.length = sizes.get("s", 1)
        self._fitted: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=dispatcher.device)

        self._own = {
            "input_ids": zeros(self.batch, self.length),
            "attention_mask": zeros(self.batch, self.places),
            "position_ids": zeros(self.batch, self.length),
            "start": zeros(),
            "last": zeros(1),
        }

    def fits(self, rows: int, start: int) -> bool:
        """Whether it takes so many sequences and has room behind `start` tokens."""
        return self.batch >= rows and start + self.length <= self.places

    def run(
        self,
        memory: Memory,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        start: int,
    ) -> torch.Tensor:
        """Logits of the last of `ids`: ``[rows, 1, vocabulary]``.

        Args:
            memory: The cache's.
            ids: ``[rows, n]``, at most the bucket's size.
            mask: ``[rows, start + n]``, None = every token is real.
            positions: ``[rows or 1, n]``, None = those after `start`.
            start: Tokens in the cache before.
        """
        rows, count = ids.shape
        own = self._own
        if mask is None:
            own["attention_mask"].fill_(1)
        else:
            _fill(own["attention_mask"], mask, rows)
        if positions is None:
            own["position_ids"][:, :count] = torch.arange(
                start, start + count, device=ids.device
            )
        else:
            _fill(own["position_ids"], positions, rows)
        _fill(own["input_ids"], ids, rows)
        own["start"].fill_(start)
        own["last"].fill_(count - 1)
        bound = self.bound
        if self.graph is not None and memory.shared:
            bound = bound._replace(call=self.graph)
        logits = self.dispatcher.run_own(bound, self._arguments(memory))[0]
        return logits[:rows]

    def _arguments(self, memory: Memory) -> list[torch.Tensor]:
        """The program's arguments in order: this bucket's windows and own tensors."""
        fitted = self._fitted.get(memory)
        if fitted is None:
            fitted = self._fitted[memory] = [
                self._own[argument.name]
                if argument.name in self._own
                else self._window(memory, argument.name, argument.below)
                for argument in self.dispatcher.arguments.tensors
            ]
        return fitted

    def _window(
        self, memory: Memory, name: str, below: tuple[Any, ...]
    ) -> torch.Tensor:
        whole: torch.Tensor = getattr(memory.buffers, name)[below[0][0]]
        return whole[: self.batch, :, : self.places]


def _fill(whole: torch.Tensor, part: torch.Tensor, rows: int) -> None:
    """Write `part` into the first columns; rows that a batch lacks repeat its first."""
    columns = part.shape[1]
    whole[:rows, :columns] = part
    if rows < whole.shape[0]:
        whole[rows:, :columns] = part[:1]


class Generation(AttachedMethod):
    """The forward of an attached causal language model.

    Args:
        prefill: The dispatcher of entry ``prefill``.
        decode: Likewise.
        chunk: Whether a prompt longer than every prefill bucket goes in pieces.
        graphs: Whether steps are replayed as CUDA graphs.
        on_refusal: What becomes of a call that no program covers.
        count: Told the entry and bucket of each program call.
        on_graph: Told the entry, bucket and bytes of each graph captured.
    Raises:
        AttachError: the class of the model's output can't be imported.
    """

    def __init__(
        self,
        prefill: Dispatcher,
        decode: Dispatcher,
        chunk: bool,
        graphs: bool,
        on_refusal: OnRefusal,
        count: Callable[[str, str], None],
        on_graph: Callable[[str, str, int], None],
    ) -> None:
        self.model = decode.model
        method = own_method(self.model, "forward")
        functools.update_wrapper(self, method, updated=())
        self.__code__ = method.__code__
        self.chunk = chunk
        self.on_refusal = on_refusal
        self.count = count
        self.device = decode.device
        pool = GraphPool(self.device) if graphs else None
        self.prefill = _steps(prefill, pool, on_graph)
        self.decode = _steps(decode, pool, on_graph)
        self.graphs = graphs
        self.largest_batch = max(step.batch for step in self.decode)
        self.longest = max(step.places for step in self.decode)
        self._specs = _cache_specs(decode)
        self._output = import_class(decode.entry.output)
        names = inspect.signature(self._output).parameters
        self._cache_field = next(name for name in CACHE_NAMES if name in names)
        self._signature = inspect.signature(method)
        self._lock = threading.RLock()
        self._shared: Memory | None = None
        self._user: Callable[[], Any] = lambda: None
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step's program; refuse, or hand over, what none covers."""
        try:
            return self._run(args, kwargs)
        except CompilekitError as exc:
            error = exc
        return self.on_refusal(error, args, kwargs)

    def new_cache(self, rows: int, length: int) -> Any:
        """A cache for `rows` sequences of at most `length` tokens.

        One cache at a time uses the memory that all buckets share; another that is
        made meanwhile gets its own.

        Raises:
            NoBucketError: no bucket holds that.
        """
        if rows > self.largest_batch or length > self.longest:
            raise NoBucketError(
                f"generate: {rows} sequences of {length} tokens were asked for; the"
                f" largest bucket holds {self.largest_batch} of {self.longest}",
                hint="Ask for fewer (max_new_tokens, batch), or add the size to"
                " [generate] and build again.",
                entry="generate",
                too_long=length > self.longest,
            )
        with self._lock:
            free = self._user() is None
            memory = self._memory() if free else self._new_memory(self._batch(rows))
            cache = cache_class()(self, memory, rows)
            if free:
                self._user = weakref.ref(cache)
                self._follow_stream()
                memory.clear()
        return cache

    def capture(self) -> None:
        """Capture every step's graph now, the largest first: it sizes the pool."""
        if not self.graphs:
            return
        memory = self._memory()
        steps = sorted(
            [*self.prefill, *self.decode], key=lambda s: -s.batch * s.length * s.places
        )
        with self._lock, torch.no_grad():
            for step in steps:
                ids = torch.zeros(
                    step.batch, step.length, dtype=torch.int64, device=self.device
                )
                step.run(memory, ids, None, None, 0)

    def _memory(self) -> Memory:
        """The memory that all buckets share; graphs are captured on it."""
        if self._shared is None:
            self._shared = self._new_memory(self.largest_batch, shared=True)
        return self._shared

    def _batch(self, rows: int) -> int:
        return min(step.batch for step in self.decode if step.batch >= rows)

    def _new_memory(self, batch: int, shared: bool = False) -> Memory:
        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            full = (batch, shape[1], self.longest, shape[3])
            return torch.zeros(full, dtype=dtype, device=self.device)

        keys, values = self._specs
        # Made by a call in inference mode, it must serve one outside as well.
        with torch.inference_mode(False):
            buffers = Buffers(
                tuple(zeros(*one) for one in keys), tuple(zeros(*one) for one in values)
            )
        return Memory(buffers, shared)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = self._signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                values.update(values.pop(name, {}))
        cache = self._cache(values)
        ids = self._ids(values.pop("input_ids", None), cache)
        rows, count = ids.shape
        start = cache.length
        mask = values.pop("attention_mask", None)
        self._check_shape("attention_mask", mask, (rows,), start + count)
        positions = values.pop("position_ids", None)
        self._check_shape("position_ids", positions, (1, rows), count)
        self._check_rest(values, count)
        if start + count > self.longest:
            raise NoBucketError(
                f"generate: the cache holds {start} of at most {self.longest} tokens,"
                f" and the call adds {count}",
                hint="Ask for a larger cache length in [generate] and build again.",
                entry="generate",
                too_long=True,
            )
        with self._lock, torch.no_grad():
            self._follow_stream()
            logits = self._all(cache, ids, mask, positions)
        fields = {"logits": logits, self._cache_field: cache}
        return self._output(**fields)

    def _follow_stream(self) -> None:
        """Steps share memory: one on another stream waits for the last."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and current != self._stream:
            current.wait_stream(self._stream)
        self._stream = current

    def _all(
        self,
        cache: Any,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run all tokens of a call, piece by piece; logits of the last."""
        rows, count = ids.shape
        done = 0
        while True:
            start = cache.length
            step = self._step(rows, start, count - done, whole=done == 0)
            taken = min(step.length, count - done)
            end = done + taken
            logits = step.run(
                cache.memory,
                ids[:, done:end],
                None if mask is None else mask[:, : start + taken],
                None if positions is None else positions[:, done:end],
                start,
            )
            cache.advance(taken)
            self.count(step.dispatcher.entry.name, step.bound.bucket.name)
            done = end
            if done == count:
                return logits

    def _step(self, rows: int, start: int, count: int, whole: bool) -> Step:
        """The program for the next piece of a call.

        The smallest that takes all of it, or else the longest piece that still fits
        into the cache; one token where no piece does.
        """
        if count > 1:
            fitting = [s for s in self.prefill if s.fits(rows, start)]
            for step in fitting:
                if step.length >= count:
                    return step
            longest = max(step.length for step in self.prefill)
            if whole and count > longest and not self.chunk:
                raise NoBucketError(
                    f"generate: the prompt has {count} tokens; the largest prefill"
                    f" bucket takes {longest}",
                    hint='Set [serve] over_length = "chunk" to take it in pieces, or'
                    " add the size to [generate] prompt; then build again.",
                    entry="prefill",
                    too_long=True,
                )
            if fitting:
                return max(fitting, key=lambda step: (step.length, -step.places))
        return next(step for step in self.decode if step.fits(rows, start))

    def _cache(self, values: dict[str, Any]) -> Any:
        name = next((n for n in CACHE_NAMES if values.get(n) is not None), None)
        cache = None if name is None else values[name]
        for name in CACHE_NAMES:
            values.pop(name, None)
        if getattr(cache, "owner", None) is not self:
            what = "no cache" if cache is None else f"a {type(cache).__name__}"
            raise CallRefusedError(
                f"generate: the call brings {what}, and the programs need a cache that"
                " attach made",
                hint='Call model.generate(..., cache_implementation="static").',
                argument="past_key_values",
            )
        return cache

    def _ids(self, ids: Any, cache: Any) -> torch.Tensor:
        good = (
            isinstance(ids, torch.Tensor)
            and ids.dtype == torch.int64
            and ids.ndim == 2
            and ids.shape[0] == cache.rows
            and ids.shape[1] > 0
            and ids.device == self.device
        )
        if not good:
            raise CallRefusedError(
                f"generate: input_ids must be int64 [{cache.rows}, tokens] on"
                f" {self.device}, got {_shown(ids)}",
                hint="Embeddings instead of tokens aren't supported.",
                argument="input_ids",
            )
        return ids  # type: ignore[no-any-return]

    def _check_shape(
        self, name: str, tensor: Any, rows: tuple[int, ...], columns: int
    ) -> None:
        if tensor is None:
            return
        good = (
            isinstance(tensor, torch.Tensor)
            and tensor.ndim == 2
            and tensor.shape[0] in rows
            and tensor.shape[1] == columns
            and tensor.device == self.device
        )
        if not good:
            raise CallRefusedError(
                f"generate: {name} must be [{rows[-1]}, {columns}] on {self.device},"
                f" got {_shown(tensor)}",
                argument=name,
            )

    def _check_rest(self, values: dict[str, Any], count: int) -> None:
        """What else a call passes must leave the step as it was compiled."""
        for name, value in values.items():
            if name == "logits_to_keep":
                fine = value == 1 or (value == 0 and count == 1)
            elif name in _INDIFFERENT:
                fine = value in _INDIFFERENT[name]
            else:
                parameter = self._signature.parameters.get(name)
                default = None if parameter is None else parameter.default
                fine = value is None or value is False or value is default
            if not fine:
                raise CallRefusedError(
                    f"generate: the programs weren't built with {name} = {value!r}",
                    hint="Leave it out, or call receipt.detach() first.",
                    argument=name,
                )


def _shown(value: Any) -> str:
    """A tensor's dtype, shape and device; the class of anything else."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)} on {value.device}"


def _steps(
    dispatcher: Dispatcher,
    pool: GraphPool | None,
    on_graph: Callable[[str, str, int], None],
) -> list[Step]:
    """A dispatcher's buckets, cheapest first."""
    steps = [
        Step(dispatcher, bound, pool, on_graph)
        for bound in dispatcher.programs.values()
    ]
    return sorted(steps, key=lambda step: (step.batch, step.length, step.places))


def _cache_specs(
    decode: Dispatcher,
) -> tuple[list[tuple[tuple[int, ...], torch.dtype]], ...]:
    """Shape and dtype of each layer's keys, and of its values."""
    bound = next(iter(decode.programs.values()))
    found: dict[str, dict[int, tuple[tuple[int, ...], torch.dtype]]] = {}
    pairs = zip(decode.arguments.tensors, bound.specs, strict=True)
    for argument, spec in pairs:
        if argument.below:
            index = argument.below[0][0]
            dtype = getattr(torch, spec.dtype)
            found.setdefault(argument.name, {})[int(index)] = (spec.shape, dtype)
    return tuple(
        [one for _, one in sorted(found[name].items())] for name in Buffers._fields
    )


class CacheMaker(AttachedMethod):
    """Stands in the place of ``_prepare_static_cache``."""

    def __init__(self, generation: Generation, on_refusal: OnRefusal) -> None:
        self.generation = generation
        self.on_refusal = on_refusal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A cache of ours, or what the policy says."""
        method = own_method(self.generation.model, MAKES_CACHE)
        values = inspect.signature(method).bind(*args, **kwargs).arguments
        try:
            if "offload" in str(values.get("cache_implementation", "")):
                raise CallRefusedError(
                    "generate: a cache on the CPU was asked for, and programs keep"
                    " theirs on the device",
                    hint='Use cache_implementation="static".',
                )
            return self.generation.new_cache(
                values["batch_size"], values["max_cache_len"]
            )
        except CompilekitError as exc:
            error = exc
        return self.on_refusal(error, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.generation.model, MAKES_CACHE)
