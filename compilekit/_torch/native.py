"""Private Inductor names for comparisons with ``torch.compile`` on a real device."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch.fx import GraphModule

from compilekit._torch.lower import mode_options, program_options
from compilekit._torch.triton_kernels import config_of


@contextlib.contextmanager
def same_configs(
    sources: dict[str, str], tuned: Mapping[str, Mapping[str, Any]]
) -> Iterator[None]:
    """``torch.compile`` with a program's kernel configs: the tuned one, or the first.

    By itself it would benchmark the candidates and take whichever won. Padding isn't
    benchmarked either.

    Args:
        sources: Filled with the digest of each kernel's source → its name.
        tuned: Digest of a kernel's source → its config; not with kernels that other
            processes compile (``compile_threads = 1``).
    Source: torch/_inductor/runtime/triton_heuristics.py, CachingAutotuner.precompile
    (2.11, 2.13); torch/_inductor/fx_passes/pad_mm.py, get_cached_should_pad.
    """
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def dont_pad(key: str) -> bool:
        return False

    original = CachingAutotuner.precompile

    def precompile(self: Any, *args: Any, **kwargs: Any) -> Any:
        digest = hashlib.sha256(self.fn.src.encode()).hexdigest()
        if digest in tuned:
            self.configs = [config_of(tuned[digest], self.configs[0])]
        result = original(self, *args, **kwargs)
        self.launchers = self.launchers[:1]
        sources[digest] = self.inductor_meta["kernel_name"]
        return result

    with (
        mock.patch.object(CachingAutotuner, "precompile", precompile),
        mock.patch.object(pad_mm, "get_cached_should_pad", dont_pad),
    ):
        yield


def compile_options(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's options of a program build, for ``torch.compile(options=…)``.

    Compile threads are left as they are: they change nothing but the time.
    """
    forced = program_options(0)
    del forced["compile_threads"]
    return {**mode_options(mode), **options, **forced}


def inductor(graph: GraphModule, examples: list[Any], options: dict[str, Any]) -> Any:
    """``torch.compile``'s default backend, for one of our own that changes the graph.

    Source: torch/_inductor/__init__.py, compile (2.11, 2.13).
    """
    from torch._inductor import compile as compile_graph

    return compile_graph(graph, examples, options=options)
