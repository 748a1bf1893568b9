"""Metrics by turn and lag: hand-worked, additive, deaf to what is not trained."""

from __future__ import annotations

import math
import operator
from functools import reduce

import numpy as np
import pytest
import torch
from torch import Tensor

from agent_sat.algo.diagnose import MEASURES, Tally, finish, tally
from agent_sat.algo.loss import policy_loss
from agent_sat.algo.methods import Method, resolve
from agent_sat.algo.reference import fit, observe
from agent_sat.types import Batch, Metrics
from tests.algo.batches import make_batch
from tests.algo.test_loss_invariance import VERSION, example, small


def measure(method: Method, batch: Batch, logprobs: Tensor, version: int = VERSION, **given: object) -> Tally:
    entropy = torch.ones_like(logprobs)
    output = policy_loss(method, batch, logprobs=logprobs, entropy=entropy, version=version, **given)  # pyright: ignore[reportArgumentType]
    return tally(method, batch, output, logprobs=logprobs, entropy=entropy)


def metrics_of(method: Method, batch: Batch, logprobs: Tensor, version: int = VERSION) -> Metrics:
    return finish(measure(method, batch, logprobs, version), method.settings)


def test_tool_tokens_do_not_count_in_the_gap():
    batch = make_batch([-1.0, -1.0, -2.0], mask=[True, False, True], turn=[0, -1, 1])
    found = metrics_of(resolve("grpo"), batch, torch.tensor([-1.1, -30.0, -2.0]).double(), version=0)
    assert found["mismatch/log_ratio_abs_mean"] == pytest.approx(0.05)
    assert found["turn/0/log_ratio_abs_mean"] == pytest.approx(0.1)
    assert found["turn/1/log_ratio_abs_mean"] == 0
    assert found["loss/tokens"] == 2 and found["loss/missing"] == 0


def test_shares_are_over_tokens_not_over_micro_batches():
    # masks keep 1 of 2 tokens in one micro-batch and 6 of 6 in the other
    method = resolve("grpo", {"masks": ("max_lag",), "max_lag": 0})
    first = measure(method, make_batch([-1.0] * 2, versions=[0, 1]), torch.full((2,), -1.0).double(), 1)
    second = measure(method, make_batch([-1.0] * 6, versions=[1] * 6), torch.full((6,), -1.0).double(), 1)
    assert finish(first + second, method.settings)["loss/kept_share"] == 1 - 0.125


@pytest.mark.parametrize("name", ["sat-grpo-turn", "icepop", "seqclip", "sat-gspo"])
def test_metrics_do_not_depend_on_the_split(name: str):
    batch, logprobs = example()
    method = small(name)
    whole = metrics_of(method, batch, logprobs)
    parts = [(slice(a, b), batch.cut(a, b)) for a, b in ((0, 7), (7, 40), (40, 60))]
    reference = None
    if method.needs_step_reference:
        reference = fit(method.settings, [observe(method, part, logprobs[at]) for at, part in parts])
    tallies = [measure(method, part, logprobs[at], reference=reference) for at, part in parts]
    split = finish(reduce(operator.add, tallies), method.settings)
    assert split.keys() == whole.keys()
    assert split == pytest.approx(whole, rel=1e-12, abs=1e-12)


def test_values_by_hand():
    ratios = torch.tensor([1.5, 1.0, 0.5, 1.1], dtype=torch.float64)
    batch = make_batch(
        torch.tensor([math.log(0.5), math.log(1e-4), math.log(0.2), math.log(0.1)]),
        turn=[0, 0, 1, 1],
        versions=[3, 3, 1, 1],
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
    )
    found = metrics_of(resolve("grpo"), batch, batch.behavior_logprobs + ratios.log(), version=4)
    d = ratios.log().numpy()
    expected = {
        "mismatch/log_ratio_abs_mean": np.abs(d).mean(),
        "mismatch/log_ratio_abs_max": math.log(2),
        "mismatch/k1": -d.mean(),
        "mismatch/k3": (ratios.numpy() - 1 - d).mean(),
        "mismatch/share_outside_0.8_1.2": 0.5,
        "mismatch/effective_share": 4.1**2 / (4 * (2.25 + 1 + 0.25 + 1.21)),
        "mismatch/share_pi_below_1e-3": 0.25,
        "mismatch/share_mu_below_1e-3": 0.25,
        "mismatch/entropy_mean": 1.0,
        "staleness/lag_mean": 2.0,
        "staleness/lag_max": 3.0,
        "loss/clipped_share": 0.5,
        "turn/0/clipped_share": 0.5,
        "turn/1/tokens": 2.0,
        "lag/1/tokens": 2.0,
        "lag/3/log_ratio_abs_mean": (math.log(2) + math.log(1.1)) / 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_sat_metrics_by_hand():
    # |d| .1 .2 .3 .4 at level .75: q = .3; only .4 is gated: c = 1 / (1 + (4/3)^2) = .36
    d = torch.tensor([0.1, -0.2, 0.3, -0.4], dtype=torch.float64)
    batch = make_batch([-3.0] * 4, advantages=torch.tensor([1.0, 1.0, 1.0, -1.0]))
    method = resolve("sat-grpo", {"level": 0.75, "eps_low": 0.5, "eps_high": 0.4})
    found = metrics_of(method, batch, -3 + d, version=0)
    expected = {
        "sat/q": 0.3,
        "sat/gate_rate": 0.25,
        "sat/changed_share": 0.25,  # r = .67 is below 1 - .5 * .36 and above .5
        "sat/c_low_mean": (3 + 0.36) / 4,
        "sat/c_low_min": 0.36,
        "sat/c_high_mean": 1.0,
        "sat/c_high_min": 1.0,
        "sat/radius_low_mean": 0.5 * (3 + 0.36) / 4,
        "sat/window_high": math.log(1.4) - 0.3,
        "sat/window_low": math.log(2) - 0.3,
        "sat/fell_back_share": 0.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_window_closes_where_sat_lets_go():
    d = torch.full((4,), 0.5, dtype=torch.float64)
    found = metrics_of(resolve("sat-grpo"), make_batch([-3.0] * 4), -3 + d, version=0)
    assert found["sat/window_high"] == 0 and found["sat/window_low"] == 0


def test_fallback_of_a_short_turn_is_logged():
    batch = make_batch([-3.0] * 5, turn=[0, 0, 0, 0, 1])
    found = metrics_of(
        resolve("sat-grpo-turn", {"min_tokens": 2}), batch, torch.full((5,), -2.9).double(), version=0
    )
    assert found["turn/0/fell_back_share"] == 0 and found["turn/1/fell_back_share"] == 1
    assert found["sat/fell_back_share"] == pytest.approx(0.2)


def test_the_two_causes_add_up():
    # implementation .1, -.1; policy lag .3, .5: covariance of (.1, .3) and (-.1, .5)
    behavior = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    recomputed = behavior + torch.tensor([0.1, -0.1])
    logprobs = recomputed + torch.tensor([0.3, 0.5])
    batch = make_batch(behavior, recomputed=recomputed, versions=[1, 2])
    found = metrics_of(resolve("grpo"), batch, logprobs, version=2)
    assert found["split/policy_lag_mean"] == pytest.approx(0.4)
    assert found["split/implementation_mean"] == pytest.approx(0.0, abs=1e-6)
    assert found["split/policy_lag_variance"] == pytest.approx(0.01)
    assert found["split/implementation_variance"] == pytest.approx(0.01)
    assert found["split/parts_covariance"] == pytest.approx(-0.01)
    assert found["lag/0/policy_lag_mean"] == pytest.approx(0.5)
    assert found["lag/1/policy_lag_mean"] == pytest.approx(0.3)


def test_missing_logprobs_are_counted_and_count_nowhere_else():
    batch = make_batch([-1.0, float("nan"), -1.0], mask=[True, False, True], turn=[0, 1, 1])
    logprobs = torch.tensor([-1.0, float("nan"), -1.5], dtype=torch.float64)
    found = metrics_of(resolve("sat-grpo-turn"), batch, logprobs, version=0)
    assert found["loss/missing"] == 1 and found["turn/1/missing"] == 1 and found["turn/0/missing"] == 0
    assert found["turn/1/log_ratio_abs_mean"] == 0.5
    assert all(math.isfinite(value) for value in found.values())


def test_nothing_trained_gives_counts_only():
    batch = make_batch([-1.0, -1.0], mask=[False, False], turn=[-1, -1])
    found = metrics_of(resolve("sat-grpo"), batch, torch.zeros(2).double(), version=0)
    assert found == {"loss/tokens": 0, "loss/missing": 0}


def test_every_measure_is_reached():
    batch, logprobs = example()
    names: set[str] = set()
    for method in (
        resolve("sat-grpo-turn", {"masks": ("max_lag",), "kl_coefficient": 0.1, "min_tokens": 1}),
        resolve("icepop"),
    ):
        names |= {name.rsplit("/", 1)[1] for name in metrics_of(method, batch, logprobs)}
    assert names >= set(MEASURES)
