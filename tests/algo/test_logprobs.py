"""From logits to log-probabilities: temperature, kept sets, gradients."""

from __future__ import annotations

import math
from typing import TypedDict

import pytest
import torch
from torch import Tensor

from agent_sat.algo.logprobs import take_sets, target_logprobs
from agent_sat.errors import EngineError

LOG_P = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


class KeptSets(TypedDict):
    nucleus_ids: Tensor
    nucleus_offsets: Tensor


def sets(*members: list[int]) -> KeptSets:
    counts = torch.tensor([len(kept) for kept in members])
    return {
        "nucleus_ids": torch.tensor([i for kept in members for i in kept], dtype=torch.int64),
        "nucleus_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
    }


@pytest.mark.parametrize(
    ("temperature", "logprob", "entropy"),
    [(0.5, -0.142932, 0.441057), (1.0, -0.407606, 0.832396), (2.0, -0.680270, 1.020191)],
)
def test_temperature_reaches_logprob_and_entropy(temperature: float, logprob: float, entropy: float):
    found = target_logprobs(
        torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature=torch.tensor([temperature])
    )
    assert (found.logprobs.item(), found.entropy.item()) == pytest.approx((logprob, entropy), abs=1e-6)


def test_kept_set_renormalises():
    found = target_logprobs(
        LOG_P.expand(2, 4), torch.tensor([1, 1]), temperature=torch.ones(2), **sets([0, 1, 2], [])
    )
    # log(.3 / .95), and the empty set restricts nothing
    assert found.logprobs.tolist() == pytest.approx([-1.152680, -1.203973], abs=1e-6)
    inside = [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95]
    assert found.entropy[0].item() == pytest.approx(-sum(p * math.log(p) for p in inside), abs=1e-6)


def test_target_outside_its_kept_set_is_an_error():
    with pytest.raises(EngineError, match=r"1 of 2 sampled tokens .* row 1, token 3"):
        target_logprobs(
            LOG_P.expand(2, 4), torch.tensor([1, 3]), temperature=torch.ones(2), **sets([0, 1, 2], [0, 1, 2])
        )


def test_gradients_are_those_of_the_restricted_distribution():
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    targets, kept, temperature = [2, 0, 5], [[1, 2, 4], [], [5]], [0.7, 1.0, 1.3]
    found = target_logprobs(
        logits,
        torch.tensor(targets),
        temperature=torch.tensor(temperature, dtype=torch.float64),
        entropy_gradient=True,
        **sets(*kept),
    )
    (found.logprobs + 0.3 * found.entropy).sum().backward()
    gradient, other = logits.grad, logits.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, (target, inside, t) in enumerate(zip(targets, kept, temperature, strict=True)):
        support = inside or list(range(6))
        p = torch.softmax(other[row, support] / t, 0)
        total = total + p[support.index(target)].log() - 0.3 * (p * p.log()).sum()
    total.backward()
    assert gradient is not None and gradient.isfinite().all()
    torch.testing.assert_close(gradient, other.grad, rtol=1e-10, atol=1e-12)


def test_entropy_is_a_plain_number_unless_asked():
    logits = torch.randn(2, 5, requires_grad=True)
    found = target_logprobs(logits, torch.tensor([0, 1]), temperature=torch.ones(2))
    assert found.logprobs.requires_grad and not found.entropy.requires_grad


def test_half_precision_logits_are_widened_first():
    logits = torch.tensor([[10.0, 9.96875, -3.0]], dtype=torch.bfloat16)
    found = target_logprobs(logits, torch.tensor([0]), temperature=torch.tensor([0.9]))
    expected = torch.log_softmax(logits.double() / 0.9, -1)[0, 0]
    assert found.logprobs.dtype == torch.float32
    assert found.logprobs.item() == pytest.approx(expected.item(), abs=1e-6)


def test_take_sets_follows_any_order_of_rows():
    ragged = sets([7, 8], [], [1, 2, 3], [9])
    ids, offsets = take_sets(ragged["nucleus_ids"], ragged["nucleus_offsets"], torch.tensor([3, 2, 1, 2]))
    assert ids.tolist() == [9, 1, 2, 3, 1, 2, 3]
    assert offsets.tolist() == [0, 1, 4, 4, 7]
