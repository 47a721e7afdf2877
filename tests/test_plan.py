"""Tests of buckets and of the order of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from compilekit import targets
from compilekit.config import BuildConfig, Config, EntryConfig, InputConfig, ModelConfig
from compilekit.errors import ConfigError
from compilekit.plan import Bucket, bucket, buckets, elements, make_plan


def configured(
    axes: dict[str, tuple[int, ...]],
    entries: dict[str, dict[str, tuple[str | int, ...]]],
    build_targets: tuple[str, ...] = ("cpu-x86_64-v3",),
) -> Config:
    return Config(
        path=Path("compilekit.toml"),
        model=ModelConfig("m:f"),
        axes=axes,
        entries={
            name: EntryConfig(
                name,
                name,
                {path: InputConfig(shape, "int64") for path, shape in inputs.items()},
            )
            for name, inputs in entries.items()
        },
        build=BuildConfig(targets=build_targets),
    )


def test_buckets_are_the_product_of_sizes() -> None:
    """Each combination of sizes is a bucket, in configuration order."""
    config = configured({"b": (8, 1), "s": (32, 64)}, {"forward": {"x": ("s", "b")}})
    assert buckets(config, "forward") == (
        Bucket("b8_s32", {"b": 8, "s": 32}),
        Bucket("b8_s64", {"b": 8, "s": 64}),
        Bucket("b1_s32", {"b": 1, "s": 32}),
        Bucket("b1_s64", {"b": 1, "s": 64}),
    )


def test_buckets_of_an_entry_use_its_axes_only() -> None:
    """An axis that an entry's inputs don't use multiplies nothing."""
    config = configured(
        {"b": (1, 8), "s": (32, 64)},
        {"prefill": {"x": ("b", "s")}, "decode": {"x": ("b", 1)}},
    )
    assert len(buckets(config, "prefill")) == 4
    assert [bucket.name for bucket in buckets(config, "decode")] == ["b1", "b8"]


def test_bucket_without_axes() -> None:
    """An entry of fixed shapes has one bucket, called static."""
    config = configured({"b": (1, 8)}, {"forward": {"x": (3, 4)}, "g": {}})
    assert buckets(config, "forward") == (Bucket("static", {}),)
    assert buckets(config, "g") == (Bucket("static", {}),)


def test_bucket_name_takes_the_letter() -> None:
    """A bucket's name has each axis's first letter."""
    assert bucket({"batch": 1, "seq": 128}).name == "b1_s128"


def test_elements() -> None:
    """Elements are summed over inputs, a scalar counts as one."""
    inputs = [InputConfig(shape, "int64") for shape in [("b", "s"), ("b", 3), ()]]
    assert elements(inputs, {"b": 2, "s": 5}) == 10 + 6 + 1


def test_plan_runs_the_largest_bucket_last() -> None:
    """Within an entry jobs grow; targets and entries keep the file's order."""
    config = configured(
        {"b": (8, 1), "s": (64, 32)},
        {"z": {"x": ("b", "s")}, "a": {"x": ("b",)}},
        ("cpu-x86_64-v4", "cpu-x86_64-v3"),
    )
    jobs = [
        (job.target[-2:], job.entry, job.bucket.name) for job in make_plan(config).jobs
    ]
    assert jobs == [
        (target, entry, name)
        for target in ("v4", "v3")
        for entry, names in (
            ("z", ("b1_s32", "b1_s64", "b8_s32", "b8_s64")),
            ("a", ("b1", "b8")),
        )
        for name in names
    ]


def test_native_is_resolved_and_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``native`` becomes this machine's target, without a second build of it."""
    v3 = targets.load_target("cpu-x86_64-v3")
    monkeypatch.setattr(targets, "native_target", lambda: v3)
    config = configured(
        {"b": (1,)}, {"forward": {"x": ("b",)}}, ("native", "cpu-x86_64-v3")
    )
    assert [job.target for job in make_plan(config).jobs] == ["cpu-x86_64-v3"]


def test_unknown_target_is_refused() -> None:
    """A configuration made in Python is checked for its targets too."""
    config = configured({"b": (1,)}, {"forward": {"x": ("b",)}}, ("cpu-x86_64-v5",))
    with pytest.raises(ConfigError, match="cpu-x86_64-v5") as caught:
        make_plan(config)
    assert "cpu-x86_64-v4" in caught.value.hint or "v3" in caught.value.hint
