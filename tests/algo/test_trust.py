"""Trust regions, masks and corrections on single tokens, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agent_sat.algo.loss import LossOutput, policy_loss
from agent_sat.algo.methods import resolve
from agent_sat.algo.ratio import bernoulli_kl, exponential
from agent_sat.algo.segments import segment_ids, segment_mean
from agent_sat.errors import ConfigError
from tests.algo.batches import make_batch


def one_token(
    method: str, *, ratio: float, advantage: float, mu: float = 0.05, **overrides: object
) -> tuple[LossOutput, float]:
    """Loss and gradient with respect to log pi of a single token."""
    logprob = torch.tensor([math.log(mu * ratio)], dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        resolve(method, overrides),
        make_batch([math.log(mu)], advantages=advantage),
        logprobs=logprob,
        entropy=torch.zeros(1),
        version=0,
    )
    output.loss.backward()
    assert logprob.grad is not None
    return output, float(logprob.grad[0])


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss"),
    [(1, 10, -1.2), (1, 0.5, -0.5), (1, 1.1, -1.1), (-1, 10, 3), (-1, 0.5, 0.8), (-1, 2, 2)],
)
def test_dual_clip_table(advantage: float, ratio: float, loss: float):
    output, _ = one_token("dual_clip", ratio=ratio, advantage=advantage, dual_clip=3.0)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)


def test_dual_clip_at_or_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.dual_clip = 0\.5"):
        resolve("dual_clip", {"dual_clip": 0.5})


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient", "clipped"),
    [
        (1, 1.1, -1.1, False),
        (1, 1.3, 0.0, True),  # outward and beyond the boundary
        (1, 0.5, -0.5, False),  # pull-back: kept however far away
        (-1, 0.9, 0.9, False),
        (-1, 0.7, 0.0, True),
        (-1, 3.0, 3.0, False),
    ],
)
def test_clip_cuts_outward_tokens_only(advantage: float, ratio: float, gradient: float, clipped: bool):
    output, found = one_token("grpo", ratio=ratio, advantage=advantage)
    assert found == pytest.approx(gradient, abs=1e-12)
    assert bool(output.tokens.clipped[0]) is clipped


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_spo_is_stationary_on_the_clip_boundary(sign: float):
    assert one_token("spo", ratio=1 + sign * 0.2, advantage=sign)[1] == pytest.approx(0, abs=1e-12)
    # d/dr at r = 1.4, A = 1: 1 - 0.4 / 0.2 = -1, times r, negated
    assert one_token("spo", ratio=1.4, advantage=1.0)[1] == pytest.approx(1.4, abs=1e-12)


def test_drpo_is_stationary_where_the_probability_moved_by_delta():
    # mu 0.4, delta 0.2: pi = 0.6, ratio 1.5
    assert one_token("drpo", ratio=1.5, advantage=1.0, mu=0.4)[1] == pytest.approx(0, abs=1e-12)


def test_up_never_cuts_a_positive_advantage():
    output, gradient = one_token("up", ratio=9.0, advantage=2.0)
    assert (output.loss.item(), gradient) == pytest.approx((-2.0, -2.0))
    assert one_token("up", ratio=0.5, advantage=-1.0)[1] == 0


def test_cispo_weighs_log_pi_by_the_clipped_ratio():
    output, gradient = one_token("cispo", ratio=2.0, advantage=1.0, mu=0.25, eps_high=0.28)
    assert output.loss.item() == pytest.approx(-1.28 * math.log(0.5))
    assert gradient == pytest.approx(-1.28)


@pytest.mark.parametrize(
    ("rollout", "train", "advantage", "keep"),
    [(0.01, 0.03, 1, 1), (0.5, 0.75, 1, 0), (0.5, 0.75, -1, 1), (0.75, 0.5, -1, 0), (0.75, 0.5, 1, 1)],
)
def test_dppo_table(rollout: float, train: float, advantage: float, keep: int):
    output, gradient = one_token(
        "dppo-tv", ratio=train / rollout, advantage=advantage, mu=rollout, dppo_delta=0.2
    )
    assert output.tokens.keep is not None
    assert bool(output.tokens.keep[0]) is bool(keep)
    assert gradient == pytest.approx(-keep * advantage * train / rollout)


def test_bernoulli_kl_of_the_sampled_token():
    # KL(0.5 || 0.25) = 0.5 ln 2 + 0.5 ln(0.5 / 0.75)
    log_p, log_q = torch.tensor([[0.5], [0.25]], dtype=torch.float64).log()
    assert float(bernoulli_kl(log_p, log_q)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


def test_bernoulli_kl_does_not_blow_up_on_a_rounded_certainty():
    # float32 rounds a probability of 1 - 1e-9 to 1; the other side is 1 - 1e-6: the true KL is about 1e-6
    certain, sure = torch.tensor([0.0]), torch.tensor([-1e-6])
    assert 0 <= float(bernoulli_kl(sure, certain)) < 1e-5
    assert 0 <= float(bernoulli_kl(certain, sure)) < 1e-5


def test_sequence_ratio_is_the_geometric_mean_of_active_tokens():
    # log-ratios .1, 99 (masked), .3: mean .2, ratio 1.221403
    output = policy_loss(
        resolve("gspo"),
        make_batch([0.0, 0.0, 0.0], mask=[True, False, True]),
        logprobs=torch.tensor([0.1, 99.0, 0.3], dtype=torch.float64),
        entropy=torch.zeros(3),
        version=0,
    )
    assert output.tokens.ratio.tolist() == pytest.approx([1.221403] * 3, abs=1e-6)


def test_turn_ratio_averages_within_sequence_and_turn():
    values = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0])
    seq, turn = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 0, -1])
    active = torch.tensor([True, True, True, True, False])
    mean = segment_mean(values, segment_ids("turn", seq=seq, turn=turn), active)
    assert mean[:4].tolist() == [2.0, 2.0, 5.0, 7.0]


def test_ratio_saturates_and_keeps_its_gradient():
    log_ratio = torch.tensor([-200.0, 0.5, 300.0], requires_grad=True)
    ratio = exponential(log_ratio)
    ratio.sum().backward()
    expected = torch.tensor([0.0, math.exp(0.5), math.exp(20.0)])
    torch.testing.assert_close(ratio.detach(), expected)
    torch.testing.assert_close(log_ratio.grad, expected)


@pytest.mark.parametrize("behavior", [-201.0, -float("inf"), float("nan")])
def test_overflow_at_a_masked_token_changes_nothing(behavior: float):
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = make_batch([-1.0, behavior], mask=[True, False], dtype=torch.float32)
    output = policy_loss(resolve("grpo"), batch, logprobs=logprobs, entropy=torch.zeros(2), version=0)
    output.loss.backward()
    assert output.loss.item() == -1
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1, 0]


@pytest.mark.parametrize("method", ["grpo", "sat-grpo", "spo", "drpo", "dual_clip", "gspo"])
def test_overflow_at_a_trained_token_stays_finite(method: str):
    # pull-back at ratio exp(200): float32 would overflow, and the gradient must keep its direction
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = make_batch([-1.0, -201.0], advantages=-1.0, seq=[0, 1], dtype=torch.float32)
    output = policy_loss(resolve(method), batch, logprobs=logprobs, entropy=torch.zeros(2), version=0)
    output.loss.backward()
    assert logprobs.grad is not None
    assert output.loss.isfinite() and logprobs.grad.isfinite().all()
    assert logprobs.grad[1] > 0 or method == "dual_clip"


def kl_token(policy: float, reference: float) -> tuple[float, Tensor]:
    logprobs = torch.tensor([policy], requires_grad=True)
    batch = make_batch([policy], advantages=0.0, reference=torch.tensor([reference]), dtype=torch.float32)
    method = resolve("grpo", {"kl_coefficient": 1.0, "kl_estimator": "low_var_kl"})
    output = policy_loss(method, batch, logprobs=logprobs, entropy=torch.zeros(1), version=0)
    output.loss.backward()
    assert logprobs.grad is not None
    return output.loss.item(), logprobs.grad[0]


def test_k3_value_and_gradient():
    value, gradient = kl_token(-1.2, -1.0)
    assert (value, float(gradient)) == pytest.approx((0.0214027, -0.2214028), abs=1e-6)


def test_k3_stays_finite_and_pulls_the_right_way_far_out():
    value, gradient = kl_token(-201.0, -1.0)
    assert math.isfinite(value) and torch.isfinite(gradient)
    assert gradient < 0  # descending raises log pi, towards the reference


def test_tis_caps_and_icepop_drops():
    # mu~ / mu of 8, 1.5 and 0.1
    behavior = torch.tensor([-3.0, -3.0, -3.0], dtype=torch.float64)
    recomputed = behavior + torch.tensor([8.0, 1.5, 0.1], dtype=torch.float64).log()
    batch = make_batch(behavior, recomputed=recomputed)
    weights = {}
    for name in ("grpo+tis", "icepop"):
        output = policy_loss(resolve(name), batch, logprobs=recomputed, entropy=torch.zeros(3), version=0)
        assert output.tokens.correction is not None
        weights[name] = output.tokens.correction.tolist()
    assert weights["grpo+tis"] == pytest.approx([2.0, 1.5, 0.1])
    assert weights["icepop"] == pytest.approx([0.0, 1.5, 0.0])


def test_a_mask_does_not_change_the_denominator():
    # two tokens, one dropped by lag: the loss is half of the kept one's, not all of it
    batch = make_batch([-1.0, -1.0], versions=[0, 8])
    method = resolve("grpo", {"masks": ("max_lag",), "max_lag": 4})
    output = policy_loss(
        method, batch, logprobs=torch.tensor([-1.0, -1.0]).double(), entropy=torch.zeros(2), version=9
    )
    assert output.loss.item() == pytest.approx(-0.5)
