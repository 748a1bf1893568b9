"""Every method of the table trains, end to end in this process: real sandboxes, engine, learner and loop."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import polars as pl
import pytest

from agent_sat import commands
from agent_sat.algo.methods import METHODS
from agent_sat.config import load

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
SMALL = (
    "steps=3",
    "warm_start.steps=0",
    "eval.enabled=false",
    "rollout.tasks_per_step=2",
    "rollout.group_size=3",
    "rollout.max_response_tokens=25",
    "model.config.hidden_size=16",
    "model.config.head_dim=8",
    "model.config.num_experts=4",
    "model.config.moe_intermediate_size=16",
)


def trained(run_dir: Path, *overrides: str) -> list[dict]:
    config = load(QUICKSTART, [*SMALL, f"run_dir={run_dir}", *overrides])
    asyncio.run(commands.train(config, local=True))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "sat-grpo-turn+r3", "gspo+tis+r3"])
def test_preset_trains_asynchronously(method: str, tmp_path: Path):
    metrics = trained(tmp_path / "run", f"method={method}")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(math.isfinite(line["loss/policy"]) and line["train/skipped"] == 0 for line in metrics)


@pytest.mark.slow
def test_mismatch_is_split_into_its_causes(tmp_path: Path):
    """An exact engine has no implementation mismatch; what is left at lag 1 is policy lag, at lag 0 nothing."""
    trained(
        tmp_path / "run", "method=grpo", "log.mismatch_causes=true", "train.learning_rate=1e-2", "steps=5"
    )
    tokens = pl.concat([pl.read_parquet(path) for path in sorted((tmp_path / "run" / "tokens").glob("*"))])
    assert tokens["recomputed_logprob"].is_finite().all()
    implementation = (tokens["recomputed_logprob"] - tokens["behavior_logprob"]).abs().max()
    assert isinstance(implementation, float) and implementation < 1e-4
    gap = (pl.col("logprob") - pl.col("recomputed_logprob")).abs().max().alias("gap")
    by_lag = dict(tokens.group_by("lag").agg(gap).iter_rows())
    assert by_lag[0] == 0.0
    assert set(by_lag) == {0, 1}


@pytest.mark.slow
def test_truncated_sampling_is_replayed_exactly(tmp_path: Path):
    metrics = trained(
        tmp_path / "run", "method=grpo", "rollout.top_p=0.7", "rollout.top_k=20", "staleness.bound=0"
    )
    assert max(line["mismatch/log_ratio_abs_max"] for line in metrics) < 1e-4


@pytest.mark.slow
def test_replayed_routes_leave_an_exact_engine_exact(tmp_path: Path):
    metrics = trained(tmp_path / "run", "method=grpo+r3", "staleness.bound=0")
    assert max(line["mismatch/log_ratio_abs_max"] for line in metrics) < 1e-4


@pytest.mark.slow
def test_coarser_engine_shows_as_implementation_mismatch_alone(tmp_path: Path):
    changes = ("engine.dtype=bfloat16", "staleness.bound=0", "log.mismatch_causes=true", "steps=2")
    metrics = trained(tmp_path / "run", "method=grpo", *changes)[-1]
    assert metrics["split/policy_lag_variance"] == metrics["split/policy_lag_mean"] == 0.0
    assert metrics["split/implementation_variance"] > 0
    assert metrics["mismatch/log_ratio_abs_mean"] > 1e-5
