"""The key-value cache that programs write, as transformers sees it.

transformers is never imported here: the model brought it along. Source of what it asks
of a cache: transformers/cache_utils.py, CacheLayerMixin and Cache (5.17, 5.24).
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compilekit.errors import AttachError

if TYPE_CHECKING:
    from compilekit.runtime.generate import Generation


class Buffers(NamedTuple):
    """A cache's memory: keys and values of each layer, ``[b, heads, c, head size]``.

    Attributes:
        keys: One for each layer, at the largest cache length.
        values: Likewise.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class Memory:
    """Buffers that one cache uses at a time.

    Attributes:
        shared: True for those that graphs were captured on.
    """

    def __init__(self, buffers: Buffers, shared: bool) -> None:
        self.buffers = buffers
        self.shared = shared

    def clear(self) -> None:
        """Zero all of it: a place that is masked counts 0 times what it holds, and an
        earlier sequence may have left infinities there."""
        for tensor in (*self.buffers.keys, *self.buffers.values):
            tensor.zero_()


@functools.cache
def cache_class() -> Any:
    """`ProgramCache`: a class that transformers takes for a cache.

    Raises:
        AttachError: transformers isn't loaded, so the model isn't one of its.
    """
    utils: Any = sys.modules.get("transformers.cache_utils")
    if utils is None:
        raise AttachError(
            "the artifact holds a language model's steps, and the model isn't one of"
            " transformers",
            hint="Attach it to the class that it was built from.",
        )

    class ProgramLayer(utils.CacheLayerMixin):  # type: ignore[misc]
        """One layer of a `ProgramCache`; what eager code sees of it.

        To eager code it is a cache that grows, up to what the programs were built for:
        a call that the policy runs eagerly goes on where programs left off.
        """

        # False, or generate would compile the decode step and build its masks itself.
        is_compileable = False
        is_sliding = False
        is_croppable = True

        def __init__(
            self, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], i: int
        ) -> None:
            self._keys, self._values = keys, values
            self._lengths, self._index = lengths, i
            self.is_initialized = True

        @property
        def length(self) -> int:
            return self._lengths[self._index]

        @property
        def keys(self) -> torch.Tensor:
            return self._keys[:, :, : self.length]

        @property
        def values(self) -> torch.Tensor:
            return self._values[:, :, : self.length]

        @property
        def dtype(self) -> torch.dtype:
            return self._keys.dtype

        @property
        def device(self) -> torch.device:
            return self._keys.device

        def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
            """Nothing to do: the memory is there."""

        def update(self, key_states: Any, value_states: Any, *a: Any, **k: Any) -> Any:
            start, end = self.length, self.length + key_states.shape[-2]
            self._keys[:, :, start:end] = key_states
            self._values[:, :, start:end] = value_states
            self._lengths[self._index] = end
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.length + query_length, 0

        def get_seq_length(self) -> int:
            return self.length

        def get_max_length(self) -> int:
            return int(self._keys.shape[2])

        def reset(self) -> None:
            self._lengths[self._index] = 0

        def crop(self, tokens_to_remove: int) -> None:
            """Forget so many tokens at the end; negative, as transformers has it."""
            self._lengths[self._index] = max(0, self.length - abs(tokens_to_remove))

        def reorder_cache(self, beam_idx: torch.Tensor) -> None:
            for used in (self.keys, self.values):
                used.copy_(used.index_select(0, beam_idx.to(used.device)))

    class ProgramCache(utils.Cache):  # type: ignore[misc]
        """Keys and values of a batch, in memory that programs write.

        Attributes:
            owner: The `Generation` that made it.
            memory: Where it lies.
            rows: Sequences.
        """

        def __init__(self, owner: Generation, memory: Memory, rows: int) -> None:
            self.owner, self.memory, self.rows = owner, memory, rows
            # A list of their own: layers that knew the cache would keep it alive.
            self._lengths = [0] * len(memory.buffers.keys)
            wholes = zip(*memory.buffers, strict=True)
            layers = [
                ProgramLayer(keys[:rows], values[:rows], self._lengths, i)
                for i, (keys, values) in enumerate(wholes)
            ]
            super().__init__(layers=layers)

        @property
        def length(self) -> int:
            """Tokens of each sequence."""
            return self._lengths[0]

        def advance(self, count: int) -> None:
            """Note that a program has written so many tokens into every layer."""
            self._lengths[:] = [length + count for length in self._lengths]

    return ProgramCache
