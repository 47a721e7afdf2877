"""What the cache route changes in torch: it holds everywhere, and is put back."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

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


def test_no_variable_switches_a_cache_off(
    patches: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch lets some variables win over what a program sets; here they don't."""
    import torch.compiler.config

    from compilekit._torch.caches import settings

    inductor, compiler = torch._inductor.config, torch.compiler.config
    # What torch keeps from a variable when the module is imported.
    for module, name, forced in (
        (inductor, "fx_graph_cache", False),
        (compiler, "force_disable_caches", True),
    ):
        monkeypatch.setattr(module._config[name], "env_value_force", forced)
        assert getattr(module, name) is forced
    settings.compile_all_buckets_once(patches, 8)
    assert inductor.fx_graph_cache is True
    assert compiler.force_disable_caches is False
    patches.close()
    assert inductor.fx_graph_cache is False


def variables_of(path: Path) -> set[str]:
    """Names of environment variables that a config module of torch reads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[ast.expr] = []
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in READERS:
                names += node.args[:1]
            for keyword in node.keywords:
                if str(keyword.arg).startswith("env_name_"):
                    names.append(keyword.value)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == ENVIRONMENT:
            names.append(node.slice)
        for name in names:
            constants = [n for n in ast.walk(name) if isinstance(n, ast.Constant)]
            found |= {one.value for one in constants if isinstance(one.value, str)}
    return found


ENVIRONMENT = "os.environ"
READERS = ("os.environ.get", "os.getenv", "get_tristate_env", "_get_tristate_env")
# Whoever sets one of these means torch's compiler, and a miss names the option.
MEANT = re.compile(
    r"_?(TORCH|PYTORCH|PT2_|AOT_?INDUCTOR_|AOT_PARTITIONER_|INDUCTOR_|CUTLASS_|CUTEDSL_"
    r"|DUMP_AOTI_|ENABLE_\w*TMA_|PARTITIONER_|UNSAFE_SKIP_FSDP_|LOG_TLPARSE"
    r"|LOG_AUTOTUNE_|FAKE_ALLOW_META)"
)


def test_torch_reads_no_other_variable_of_a_ci_system_or_server() -> None:
    """A variable that others set for themselves must not become part of a key.

    The compiler is pinned to the build's, CI's option is set alike on both sides, and
    the last two are read in Meta's own builds only.
    """
    import torch._inductor.config
    import torch.compiler.config
    import torch.fx.experimental._config

    modules = (
        *(torch._dynamo.config, torch._functorch.config, torch._inductor.config),
        *(torch.compiler.config, torch.fx.experimental._config),
    )
    found = set().union(*(variables_of(Path(str(m.__file__))) for m in modules))
    others = {name for name in found if not MEANT.match(name)}
    assert others == {"CI", "CXX", "MAST_HPC_JOB_NAME", "ROLE_RANK"}
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in found


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
        (benchmarking.Benchmarker, "benchmark_cpu"),
        (benchmarking.InductorBenchmarker, "benchmark_gpu"),
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


def test_equal_code_within_bytecode_becomes_one_object() -> None:
    """torch 2.11 finds what follows a graph break by the object, not by a name."""
    from torch._dynamo.package import SerializedCode

    from compilekit._torch.caches.package_record import sharing

    source = "def outer(x):\n    def inner():\n        return x\n    return inner\n"
    first, second = (
        SerializedCode.from_code_object(
            next(
                c
                for c in compile(source, "s", "exec").co_consts
                if hasattr(c, "co_code")
            )
        )
        for _ in range(2)
    )
    (known,) = (c for c in first.co_consts if isinstance(c, SerializedCode))
    (equal,) = (c for c in second.co_consts if isinstance(c, SerializedCode))
    assert (known == equal, known is equal) == (True, False)
    shared = sharing(second, [known])
    assert shared == second
    assert any(const is known for const in shared.co_consts)


def test_every_way_to_time_a_kernel_is_seen(patches: contextlib.ExitStack) -> None:
    """Also a GPU's, which only the class that torch makes one of has."""
    from torch._inductor.runtime.benchmarking import benchmarker

    from compilekit._torch.caches import events

    seen: list[str] = []
    with patch.object(type(benchmarker), "benchmark_gpu", lambda self, call: call()):
        events.watch(
            patches, lambda code, local: None, lambda kind, detail: seen.append(kind)
        )
        assert benchmarker.benchmark_gpu(lambda: 1.5) == 1.5
        benchmarker.benchmark(lambda: None, device="cpu", warmup=0, rep=0)
        patches.close()
    assert seen == ["benchmark", "benchmark"]


def test_a_user_without_a_name_has_a_cache_directory(
    patches: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user id may be in no list; torch 2.11 asks for its name."""
    import getpass

    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from compilekit._torch.caches import settings

    def nobody() -> str:
        raise KeyError("uid not found")

    usual = default_cache_dir()
    monkeypatch.setattr(getpass, "getuser", nobody)
    settings.name_user(patches)
    assert default_cache_dir().endswith(f"torchinductor_uid_{os.getuid()}")
    monkeypatch.undo()
    patches.close()
    assert default_cache_dir() == usual


def test_worker_processes_start_for_a_miss_only(patches: contextlib.ExitStack) -> None:
    """Until then torch compiles by itself, whichever thread asks."""
    from compilekit._torch.caches import settings

    inductor = torch._inductor.config
    usual = inductor.compile_threads
    patches.enter_context(inductor.patch(compile_threads=5))
    allow = settings.compile_in_process(patches)
    assert inductor.compile_threads == 1
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert pool.submit(getattr, inductor, "compile_threads").result() == 1
    allow()
    allow()
    assert inductor.compile_threads == 5
    patches.close()
    assert inductor.compile_threads == usual


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
