import numpy as np
import pytest

from agent_sat.analyze.runs import Window, open_run
from agent_sat.analyze.stability import collapse_index, spike_indices, stability, trailing_mean
from tests.analyze.planted import write_run


def test_a_trailing_mean_is_short_at_the_start():
    assert trailing_mean(np.array([1.0, 2.0, 6.0, 4.0]), 2).tolist() == [1.0, 1.5, 4.0, 5.0]


def climb_then(tail: list[float]) -> np.ndarray:
    return np.array([0.1 * i for i in range(1, 10)] + tail)


def test_a_fall_that_stays_is_a_collapse_at_the_step_where_the_mean_crossed_half():
    """Best mean of five: (0.5 + ... + 0.9) / 5 = 0.7; with zeros after it 0.6, 0.48, 0.34, 0.18, 0."""
    rewards = climb_then([0.0] * 8)
    assert trailing_mean(rewards, 5)[9:12].round(2).tolist() == [0.6, 0.48, 0.34]
    assert collapse_index(rewards) == 11  # 0.34 is the first below 0.35


def test_a_dip_that_recovers_and_a_plateau_are_no_collapse():
    assert collapse_index(climb_then([0.0, 0.0, 0.0, 0.9, 0.9, 0.9, 0.9, 0.9])) is None
    assert collapse_index(climb_then([0.6] * 20)) is None


def test_a_fall_to_the_last_step_counts_though_it_is_short():
    assert collapse_index(climb_then([0.0, 0.0, 0.0])) == 11


def test_a_noisy_run_that_never_learned_did_not_collapse():
    noise = np.random.default_rng(0).uniform(0, 0.1, (200, 60))
    assert [i for i in range(200) if collapse_index(noise[i]) is not None] == []


def test_negative_rewards_are_measured_from_the_lowest():
    assert collapse_index(climb_then([0.6] * 8) - 2.0) is None
    assert collapse_index(climb_then([0.0] * 8) - 2.0) == 11


def test_a_short_run_is_not_judged():
    assert collapse_index(np.array([1.0, 1.0, 1.0, 0.0, 0.0])) is None


def test_a_spike_is_five_times_the_median_before_it():
    assert spike_indices(np.array([1.0, 1, 1, 1, 1, 4.9, 5.1, 1, 1])) == [6]
    assert spike_indices(np.array([1.0, 50, 1, 1])) == []  # too little before it


def rows(rewards, **more):
    return [
        {"step": i, "reward/mean": r, "train/grad_norm": 1.0, **more} for i, r in enumerate(rewards, start=1)
    ]


def test_stability_tells_best_last_and_collapse_of_a_run(tmp_path):
    run = open_run(write_run(tmp_path / "run", metrics=rows(climb_then([0.0] * 8))))
    found = stability(run)
    assert (found.num_steps, found.best_step, found.collapse_step) == (17, 9, 12)
    assert found.collapsed and found.best == pytest.approx(0.7) and found.last == pytest.approx(0.0)
    assert found.first == pytest.approx(0.3)
    assert not stability(run, Window(1, 10)).collapsed


def test_a_run_that_diverged_collapsed_at_its_last_step(tmp_path):
    path = write_run(tmp_path / "run", metrics=rows([0.1, 0.2, 0.3]))
    (path / "manifest.json").write_text(
        '{"state": "failed", "sessions": [{"cause": "TrainingDiverged: loss is not finite"}]}'
    )
    found = stability(open_run(path))
    assert found.collapsed and found.collapse_step == 3


def test_a_run_without_rewards_has_nothing_to_judge(tmp_path):
    found = stability(open_run(write_run(tmp_path / "run", metrics=[{"step": 1, "reward/mean": "NaN"}])))
    assert not found.collapsed and found.best_step == -1 and np.isnan(found.best)
