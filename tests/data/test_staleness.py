import pytest

from agent_sat.data.staleness import predicted_lag, tailness


def test_rollout_bound_lag_is_the_concurrency_and_the_throughput_ratio():
    lag = predicted_lag(throughput_ratio=0.5, concurrency=256, pull=128, queue_capacity=128, tailness=1.5)
    assert (lag.pre_queue, lag.in_queue, lag.mean) == (3.0, 0.5, 3.5)


def test_train_bound_lag_waits_in_the_queue():
    # C M / (rho B) = 256 * 1.5 / (2 * 128) = 1.5;  (2 * 1 + 2 - 1) / (2 * 2) = 0.75
    lag = predicted_lag(throughput_ratio=2.0, concurrency=256, pull=128, queue_capacity=128, tailness=1.5)
    assert (lag.pre_queue, lag.in_queue) == (1.5, 0.75)


def test_tailness_is_the_longest_over_the_mean():
    assert tailness([(1, 3), (2, 2)]) == pytest.approx(2.5 / 2.0)
    assert tailness([(0, 0)]) == 1.0
