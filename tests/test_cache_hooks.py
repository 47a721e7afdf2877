"""What the cache route changes in torch: it holds everywhere, and is put back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from compilekit.errors import PolicyError

# What torch's compiler warns of when it's imported is torch's own affair.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def patches() -> Iterator[contextlib.ExitStack]:
    """Closed after the test, and Dynamo's caches with it."""
    import torch._dynamo.config

    with contextlib.ExitStack() as stack:
        yield stack
    torch._dynamo.reset()


def in_a_thread(name: str) -> object:
    """An option of Dynamo's as another thread sees it."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(getattr, torch._dynamo.config, name).result()


def test_an_option_holds_in_every_thread(patches: contextlib.ExitStack) -> None:
    """torch 2.13 keeps an assignment to the thread that made it; a server has many."""
    from compilekit._torch.caches import settings

    config = torch._dynamo.config
    before = config.recompile_limit, config.automatic_dynamic_shapes
    settings.compile_all_buckets_once(patches, 77)
    assert (config.recompile_limit, in_a_thread("recompile_limit")) == (77, 77)
    assert in_a_thread("automatic_dynamic_shapes") is False
    patches.close()
    assert (config.recompile_limit, config.automatic_dynamic_shapes) == before
    assert in_a_thread("recompile_limit") == before[0]


def test_what_is_replaced_in_torch_is_put_back(
    patches: contextlib.ExitStack, tmp_path: Path
) -> None:
    """Every name that the four modules replace is torch's own again."""
    from torch._dynamo import convert_frame
    from torch._inductor import codecache, compile_fx
    from torch._inductor.runtime import benchmarking

    from compilekit._torch.caches import events, kernels, keys

    places = (
        (convert_frame, "_compile"),
        (compile_fx, "fx_codegen_and_compile"),
        (compile_fx, "InductorError"),
        (codecache.BypassFxGraphCache, "__init__"),
        (codecache.FxGraphCachePickler, "get_hash"),
        (codecache.CppCodeCache, "load_async"),
        (benchmarking.Benchmarker, "benchmark"),
    )
    if hasattr(codecache.FxGraphCachePickler, "get_key"):  # torch 2.13
        places += ((codecache.FxGraphCachePickler, "get_key"),)
    before = [getattr(owner, name) for owner, name in places]
    events.watch(patches, lambda code, local: None, lambda kind, detail: None)
    keys.watch(patches, lambda kind, key: False, lambda key: None)
    kernels.record(patches, tmp_path / "kernels")
    assert [getattr(owner, name) for owner, name in places] != before
    assert all(
        getattr(owner, name) != was
        for (owner, name), was in zip(places, before, strict=True)
    )
    patches.close()
    assert [getattr(owner, name) for owner, name in places] == before


def test_a_refusal_to_cache_names_the_object(patches: contextlib.ExitStack) -> None:
    """Where a key can't be pickled, the type of what couldn't be is in the reason."""
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCachePickler
    from torch.fx import GraphModule

    from compilekit._torch.caches import events

    seen: list[tuple[str, str]] = []
    events.watch(patches, lambda *_: None, lambda *event: seen.append(event))
    pickler = FxGraphCachePickler(GraphModule({}, torch.fx.Graph()))
    with pytest.raises(BypassFxGraphCache):
        pickler.dumps(threading.Lock())
    [(kind, reason)] = seen
    assert kind == "bypass"
    assert "lock" in reason


@pytest.mark.slow
def test_a_backward_compiled_late_raises_our_error(
    patches: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no frame that could raise it again: torch's wrapper must let it pass."""
    from compilekit._torch.caches import events

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    strict = False

    def on_event(kind: str, detail: str) -> None:
        if strict and kind == "compile":
            raise PolicyError("the reason", hint="the next step")

    events.watch(patches, lambda code, local: None, on_event)
    x = torch.ones(3, requires_grad=True)
    loss = torch.compile(lambda x: (x * 2).sin().sum())(x)
    strict = True
    with pytest.raises(PolicyError, match="the reason"):
        loss.backward()
