"""Whole runs with real Ray, real sandboxes and a real model, small enough for a test."""

import os
import signal
from pathlib import Path

import polars as pl
import pytest

from tests.cluster import runs

SEEN = ("step", "group", "member", "turn", "position", "token_id", "version")


def tokens(run_dir: Path) -> pl.DataFrame:
    table = pl.concat([pl.read_parquet(path) for path in sorted((run_dir / "tokens").glob("*.parquet"))])
    return table.sort(SEEN)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_results_do_not_depend_on_ray_or_on_the_number_of_workers(tmp_path: Path):
    printed = runs.train(tmp_path / "ray", "staleness.bound=0", "rollout.num_workers=2")
    runs.train(tmp_path / "local", "staleness.bound=0", local=True)
    ray, local = tokens(tmp_path / "ray"), tokens(tmp_path / "local")
    assert ray.select(SEEN).equals(local.select(SEEN))
    assert ray["lag"].max() == 0
    gap = (ray["behavior_logprob"] - local["behavior_logprob"]).abs().max()
    assert isinstance(gap, float) and gap < 1e-4
    assert "success on held-out tasks" in printed
    assert f"run written to {tmp_path / 'ray'}" in printed


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("bound", "interval"), [(1, 1), (8, 8)])
def test_asynchronous_run_stays_within_its_bound(tmp_path: Path, bound: int, interval: int):
    runs.train(
        tmp_path / "run",
        f"staleness.bound={bound}",
        f"staleness.broadcast_interval={interval}",
        "steps=10",
        "eval.enabled=false",
        local=bound == 8,
    )
    lags = tokens(tmp_path / "run").group_by("step").agg(pl.col("lag").max())["lag"]
    assert 0 < lags.max() <= bound  # type: ignore[operator]
    steps = [line["step"] for line in runs.metrics(tmp_path / "run")]
    assert steps == list(range(1, 11))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_interrupted_run_saves_exits_130_and_resumes_each_step_once(tmp_path: Path):
    run_dir = tmp_path / "run"
    running = runs.start_train(run_dir, "steps=60", "eval.enabled=false", local=True)
    runs.wait_for(running, run_dir / "tokens" / "step_000002.parquet")
    below = runs.descendants(running.pid)
    runs.interrupt(running)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 130, printed
    assert f"agent-sat train --resume {run_dir}" in printed
    assert runs.all_gone(below)
    done = len(runs.metrics(run_dir))
    resumed = runs.start("train", "--resume", str(run_dir), f"steps={done + 2}", "--local")
    printed, _ = resumed.communicate(timeout=100)
    assert resumed.returncode == 0, printed
    assert [line["step"] for line in runs.metrics(run_dir)] == list(range(1, done + 3))
    groups = tokens(run_dir).group_by("step").agg(pl.col("group").unique().sort()).sort("step")["group"]
    assert [number for step in groups.to_list() for number in step] == list(range(3 * (done + 2)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_actor_ends_the_run_with_its_cause_and_leaves_nothing(tmp_path: Path):
    run_dir = tmp_path / "run"
    running = runs.start_train(run_dir, "steps=500", "eval.enabled=false")
    runs.wait_for(running, run_dir / "tokens" / "step_000001.parquet")
    below = runs.descendants(running.pid)
    hosts = runs.actor_pids(running.pid, "ray::Host")
    assert len(hosts) == 3
    os.kill(min(hosts), signal.SIGKILL)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 1, printed
    assert "died" in printed
    assert runs.all_gone(below)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_evaluation_and_analysis_of_a_finished_run(tmp_path: Path):
    runs.train(tmp_path / "run", "steps=1", "eval.enabled=false", local=True)
    evaluated = runs.start("eval", str(tmp_path / "run"), "--tasks", "3", "--samples", "2")
    printed, _ = evaluated.communicate(timeout=60)
    assert evaluated.returncode == 0, printed
    assert "sampled" in printed and "greedy" in printed
    analyzed = runs.start("analyze", str(tmp_path / "run"))
    printed, _ = analyzed.communicate(timeout=60)
    assert analyzed.returncode == 0, printed
    assert "mismatch by tool turn" in printed
