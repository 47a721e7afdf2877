"""Tests of bucket choice, compared with brute force."""

from __future__ import annotations

import itertools
import pickle
import random
import threading
import time
from collections.abc import Mapping

import pytest

from compilekit import buckets as buckets_module
from compilekit.artifact.program import InputRule
from compilekit.buckets import bucket_table, choose, no_bucket_error
from compilekit.config import InputConfig
from compilekit.plan import Bucket, bucket

Rules = Mapping[str, InputConfig]


def product(**axes: tuple[int, ...]) -> list[Bucket]:
    return [
        bucket(dict(zip(axes, sizes, strict=True)))
        for sizes in itertools.product(*axes.values())
    ]


def padded(shape: tuple[str | int, ...], pad: int | None = 0) -> InputConfig:
    return InputConfig(shape, "int64", pad=pad)


def brute_force(
    buckets: list[Bucket], wanted: Mapping[str, int], rules: Rules
) -> Bucket | None:
    """The definition, word for word: count the padded elements of every input."""

    def size(rule: InputConfig, axes: Mapping[str, int]) -> int:
        count = 1
        for dimension in rule.shape:
            count *= axes[dimension] if isinstance(dimension, str) else dimension
        return count

    best: tuple[tuple[int, ...], Bucket] | None = None
    for candidate in buckets:
        fits = True
        wasted = 0
        for rule in rules.values():
            for dimension in rule.shape:
                if isinstance(dimension, str):
                    have, need = candidate.axes[dimension], wanted[dimension]
                    fits &= have == need if rule.pad is None else have >= need
            wasted += size(rule, candidate.axes) - size(rule, wanted)
        rank = (wasted, *candidate.axes.values())
        if fits and (best is None or rank < best[0]):
            best = (rank, candidate)
    return best and best[1]


def test_smallest_that_holds() -> None:
    """A call goes to the bucket that pads least, an exact one with no padding."""
    buckets = product(b=(1, 8), s=(32, 64, 128))
    rules = {"ids": padded(("b", "s"))}
    expected = {
        (1, 1): "b1_s32",
        (1, 32): "b1_s32",
        (1, 33): "b1_s64",
        (2, 5): "b8_s32",
        (8, 128): "b8_s128",
        (0, 0): "b1_s32",
    }
    for (b, s), name in expected.items():
        chosen = choose(buckets, {"b": b, "s": s}, rules)
        assert chosen is not None
        assert chosen.name == name
    assert choose(buckets, {"b": 9, "s": 1}, rules) is None
    assert choose(buckets, {"b": 1, "s": 129}, rules) is None


def test_waste_is_summed_over_inputs() -> None:
    """A wide input decides: fewer rows of it outweigh a longer sequence."""
    buckets = [bucket({"b": 4, "s": 10}), bucket({"b": 2, "s": 19})]
    ids = {"ids": padded(("b", "s"))}
    both = {**ids, "image": padded(("b", 1000))}
    wanted = {"b": 2, "s": 10}
    assert choose(buckets, wanted, ids) == buckets[1]
    narrow = [bucket({"b": 4, "s": 10}), bucket({"b": 2, "s": 21})]
    assert choose(narrow, wanted, ids) == narrow[0]
    assert choose(narrow, wanted, both) == narrow[1]


def test_equal_waste_takes_the_smaller_batch() -> None:
    """With the same padding the bucket with the smaller first axis wins."""
    buckets = [bucket({"b": 8, "s": 32}), bucket({"b": 4, "s": 64})]
    chosen = choose(buckets, {"b": 1, "s": 1}, {"ids": padded(("b", "s"))})
    assert chosen == buckets[1]


def test_without_pad_value_only_exact() -> None:
    """An axis of one input without a pad value must match exactly, others may pad."""
    buckets = product(b=(1, 4), s=(32, 64))
    rules = {"ids": padded(("b", "s")), "bias": padded(("s",), None)}
    assert choose(buckets, {"b": 3, "s": 64}, rules) == bucket({"b": 4, "s": 64})
    assert choose(buckets, {"b": 3, "s": 63}, rules) is None


def test_entry_without_axes() -> None:
    """The static bucket holds the one shape there is."""
    table = bucket_table([bucket({})], {"x": padded((3, 4), None)})
    assert table.choose(()) == Bucket("static", {})


@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force(seed: int) -> None:
    """Every call size gives the bucket that the definition gives, by exhaustion."""
    draw = random.Random(seed)
    names = "bst"[: draw.randint(1, 3)]
    grid = product(
        **{a: tuple(draw.sample(range(1, 9), draw.randint(1, 3))) for a in names}
    )
    # Some buckets of a build may have failed, so the grid can have holes.
    buckets = draw.sample(grid, draw.randint(1, len(grid)))
    dimensions: list[str | int] = [*names, 1, 3]
    rules = {
        f"x{index}": padded(
            tuple(draw.choices(dimensions, k=draw.randint(0, 3))),
            None if draw.random() < 0.2 else 0,
        )
        for index in range(draw.randint(1, 3))
    }
    rules["all"] = padded(tuple(names))
    table = bucket_table(buckets, rules)
    for values in itertools.product(range(1, 10), repeat=len(names)):
        wanted = dict(zip(names, values, strict=True))
        expected = brute_force(buckets, wanted, rules)
        assert table.choose(values) == expected
        assert table.choose(values) == expected, "the remembered answer differs"
        assert choose(buckets, wanted, rules) == expected


def test_artifact_rules_work_as_well() -> None:
    """The rules of an artifact's entry take the place of a configuration's."""
    rules = {"ids": InputRule("int64", ("b", "s"), pad=0)}
    assert choose(product(b=(1,), s=(8,)), {"b": 1, "s": 3}, rules) is not None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who sends ever new shapes can't make the table grow without end."""
    monkeypatch.setattr(buckets_module, "_MEMO_SIZE", 8)
    table = bucket_table(product(s=(4,)), {"x": padded(("s",))})
    for size in range(100):
        assert (table.choose((size,)) is None) == (size > 4)
    assert len(table._memo) <= 8


def test_threads_agree() -> None:
    """Threads that ask one fresh table at the same time get the right answers."""
    buckets = product(b=(1, 2, 4), s=(8, 16, 32))
    rules = {"x": padded(("b", "s"))}
    table = bucket_table(buckets, rules)
    asked = list(itertools.product(range(1, 6), range(1, 36)))
    wrong: list[tuple[int, int]] = []

    def ask() -> None:
        for b, s in asked:
            if table.choose((b, s)) != brute_force(buckets, {"b": b, "s": s}, rules):
                wrong.append((b, s))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_choice_is_fast() -> None:
    """A shape seen before is answered in well under the dispatcher's 50 µs."""
    sizes = tuple(2**power for power in range(12))
    table = bucket_table(product(b=sizes, s=sizes), {"x": padded(("b", "s"))})
    table.choose((3, 100))
    start = time.perf_counter()
    for _ in range(1000):
        table.choose((3, 100))
    assert (time.perf_counter() - start) / 1000 < 5e-6


def test_table_keeps_its_order() -> None:
    """Buckets lie from the smallest to the largest, whatever order they came in."""
    buckets = product(b=(8, 1), s=(64, 32))
    rules = {"x": padded(("b", "s"))}
    orders = itertools.permutations(buckets)
    names = {
        tuple(bucket.name for bucket in bucket_table(order, rules).buckets)
        for order in orders
    }
    assert names == {("b1_s32", "b1_s64", "b8_s32", "b8_s64")}


# --- The refusal ----------------------------------------------------------------------


def test_too_long() -> None:
    """A call that is too long is told the largest bucket and what can be done."""
    table = bucket_table(product(b=(1, 8), s=(32, 256)), {"x": padded(("b", "s"))})
    error = no_bucket_error(table, (2, 300), "forward")
    assert error.exit_code == 10
    assert error.message == (
        "forward: no bucket holds b = 2, s = 300: s goes up to 256. The largest bucket"
        " is b8_s256."
    )
    for step in ("[axes]", 'on_uncovered = "eager"', '"jit"'):
        assert step in error.hint
    assert error.fields == {
        "entry": "forward",
        "wanted": {"b": 2, "s": 300},
        "largest": "b8_s256",
        "too_long": True,
        "buckets": ["b1_s32", "b1_s256", "b8_s32", "b8_s256"],
    }
    assert pickle.loads(pickle.dumps(error)).fields == error.fields


def test_every_axis_that_fails_is_named() -> None:
    """Each axis that doesn't fit is named with its reason."""
    rules = {"x": padded(("b", "s")), 'c["y"]': padded(("s",), None)}
    table = bucket_table(product(b=(1, 8), s=(32, 64)), rules)
    message = no_bucket_error(table, (9, 40), "forward").message
    assert "b goes up to 8; " in message
    assert 's must be one of 32, 64, because input c["y"] has no pad value.' in message


def test_hole_in_the_grid() -> None:
    """When each size exists but not together, the message says that."""
    buckets = [bucket({"b": 1, "s": 64}), bucket({"b": 8, "s": 32})]
    table = bucket_table(buckets, {"x": padded(("b", "s"))})
    assert table.choose((8, 64)) is None
    message = no_bucket_error(table, (8, 64), "forward").message
    assert "no bucket has all of them" in message
