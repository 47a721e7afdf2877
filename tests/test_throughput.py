"""``compilekit bench throughput``: figures, claims, and a run on a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compilekit import config as configuration
from compilekit.bench import throughput
from compilekit.cli.bench import throughput_report
from compilekit.compiler.build import build
from compilekit.errors import ConfigError

CONFIG = Path(__file__).parent / "generate" / "compilekit.toml"


def row(strategy: str, prefill: float, decode: float) -> dict[str, Any]:
    """A strategy's row: one batch of 8, milliseconds of its steps."""
    return {
        "strategy": strategy,
        "ready_s": 1.0,
        "prompt": 512,
        "decode_bytes": 14e9,
        "prefill_products": 6.5e9,
        "steps": [
            {"kind": "prefill", "batch": 8, "ms": [prefill, 2 * prefill, prefill]},
            {"kind": "decode", "batch": 8, "ms": [decode]},
        ],
    }


RESULT: dict[str, Any] = {
    "model": "hf:.",
    "prompt": 512,
    "cache": 640,
    "batches": [8],
    "rows": [
        {
            "strategy": "limits",
            "copy_bytes_per_s": 4e12,
            "read_bytes_per_s": 3e12,
            "matmul_flop_per_s": 800e12,
        },
        row("compilekit", 100.0, 4.0),
        row("compilekit-no-graphs", 100.0, 5.0),
        {"strategy": "max-autotune", "error": "not finished after 60 s"},
    ],
}


def test_figures_are_parts_of_what_the_device_can_do() -> None:
    """Decode against reading the weights once, prefill against the matrix rate."""
    found = throughput.figures(RESULT, RESULT["rows"][1])
    assert found["decode", 8]["of_limit"] == pytest.approx(14e9 / 4e12 / 4e-3)
    products = 2 * 6.5e9 * 8 * 512 / 800e12
    assert found["prefill", 8]["of_limit"] == pytest.approx(products / 0.1)
    assert found["decode", 8]["tokens_per_s"] == 2000


def test_claims_are_held_against_what_was_measured() -> None:
    """Graphs by the pair of rows that differ in them; the limit by the best row."""
    graphs, limit = throughput.claims(RESULT)
    assert graphs.measured == (
        ("compilekit against compilekit-no-graphs, prefill 8", 0.0),
        ("compilekit against compilekit-no-graphs, decode 8", pytest.approx(20.0)),
    )
    assert [what for what, _ in limit.measured] == [
        "compilekit, prefill 8",
        "compilekit, decode 8",
    ]
    assert limit.measured[1][1] == pytest.approx(87.5)


def test_a_strategy_that_did_not_finish_is_a_row() -> None:
    """It's in the table and among the failures, and the exit code says so."""
    report = throughput_report(RESULT, Path("x.json"))
    assert report.exit_code != 0
    assert "not finished after 60 s" in str(report.blocks)


def test_the_tuned_row_needs_its_artifact(tmp_path: Path) -> None:
    """Asked for by name and not given, it's an error before anything is measured."""
    with pytest.raises(ConfigError, match="built with a tuning file"):
        throughput.run(
            configuration.load(CONFIG),
            artifact=tmp_path,
            out=tmp_path / "throughput.json",
            strategies=("compilekit-tuned",),
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    """Limits, eager and compilekit; a second run measures nothing again."""
    config = configuration.load(CONFIG)
    built = build(config, tmp_path / "artifact", verify=False)
    assert built.artifact is not None, built.buckets
    out = tmp_path / "throughput.json"
    told: list[str] = []

    def run(**changed: Any) -> dict[str, Any]:
        return throughput.run(
            config,
            artifact=built.artifact or tmp_path,
            out=out,
            tuned=built.artifact,
            strategies=("eager", "compilekit", "compilekit-tuned"),
            device="cpu",
            calls=2,
            new_tokens=4,
            on_event=told.append,
            **changed,
        )

    result = run()
    names = ["limits", "eager", "compilekit", "compilekit-tuned"]
    assert [r["strategy"] for r in result["rows"]] == names
    limits, _, ours, tuned = result["rows"]
    assert tuned["calls"] == ours["calls"]
    assert limits["sustained_matmul_flop_per_s"] > 0
    assert ours["compiles"] == 0
    assert ours["generate"][0]["new_tokens"] == 4
    assert result == json.loads(out.read_text())
    told.clear()
    assert run() == result
    assert all(line.endswith("measured already") for line in told)
    with pytest.raises(ConfigError, match="holds results of another measurement"):
        throughput.run(config, artifact=built.artifact, out=out, calls=3)
