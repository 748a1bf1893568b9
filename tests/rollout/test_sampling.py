"""Random numbers and the distribution tokens are drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

from agent_sat.rollout.distribution import behavior_logprobs, draw
from agent_sat.rollout.sampling import seed_for, uniforms


def logprobs_of(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = -1) -> Tensor:
    rows = len(logits)
    return behavior_logprobs(
        logits,
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k),
    )


def test_seeds_tell_parts_order_and_number_apart() -> None:
    seeds = {seed_for(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed_for(), seed_for(0), seed_for(0, 0), seed_for(-1), seed_for(2**64 - 2)}) == 5
    assert seed_for(1, 2) == seed_for(1, 2)


def test_uniforms_are_splitmix64() -> None:
    # an independent splitmix64, started at the mix of seed 5
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    state, expected = mix(5), []
    for _ in range(4):
        state = (state + 0x9E3779B97F4A7C15) & mask
        expected.append((mix(state) >> 12) / 2**52)
    found = uniforms(np.full(4, 5, np.uint64), np.arange(4, dtype=np.uint64))
    assert found.tolist() == expected


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    # neighbouring seeds and counters: 40 x 500 numbers, 20 bins of 1000 expected
    seeds, counters = (
        np.repeat(np.arange(40, dtype=np.uint64), 500),
        np.tile(np.arange(500, dtype=np.uint64), 40),
    )
    found = uniforms(seeds, counters)
    assert found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi square, 19 degrees of freedom, p = 0.001
    by_seed = found.reshape(40, 500)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.142932), (1.0, -0.407606), (2.0, -0.680270)])
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    found = logprobs_of(tensor([[2.0, 1.0, 0.0]]), temperature)
    assert found[0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_temperature_zero_gives_the_plain_distribution() -> None:
    found = logprobs_of(tensor([[2.0, 1.0, 0.0]]), 0.0, top_p=0.1, top_k=1)
    assert found[0, 0].item() == pytest.approx(-0.407606, abs=1e-6)


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    found = logprobs_of(logits, 1.0, top_p=0.7)[0]
    assert torch.isfinite(found).tolist() == [False, True, False, True]  # 0.5 < 0.7 <= 0.8
    assert found[1].item() == pytest.approx(math.log(0.5 / 0.8), abs=1e-6)


def test_top_p_counts_what_top_k_left() -> None:
    # top-k 2 leaves 0.4 and 0.2: shares 2/3 and 1/3, so 0.6 needs one token (of all four it would need two)
    logits = tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert torch.isfinite(logprobs_of(logits, 1.0, top_p=0.6, top_k=2))[0].tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_rows_are_truncated_each_by_its_own_settings() -> None:
    logits = tensor([[3.0, 2.0, 1.0, 0.0]]).expand(3, 4)
    found = behavior_logprobs(
        logits, temperature=np.ones(3, np.float32), top_p=np.ones(3, np.float32), top_k=np.array([1, -1, 3])
    )
    assert torch.isfinite(found).sum(dim=1).tolist() == [1, 4, 3]
    torch.testing.assert_close(found[1], logits[1].log_softmax(-1))


def test_half_precision_logits_become_float32_before_the_division() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(logprobs_of(logits, 0.3), (logits.float() / 0.3).log_softmax(-1))


def test_draw_finds_the_token_where_the_distribution_passes_the_number() -> None:
    # cumulative 0.25, 0.25, 0.75, 1.0
    logprobs = tensor([0.25, 0.0, 0.5, 0.25]).log().expand(6, 4)
    uniform = np.array([0.0, 0.2499, 0.25, 0.7499, 0.7501, 1 - 2**-52])
    found = draw(logprobs, uniform=uniform, greedy=np.zeros(6, bool))
    assert found.tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_never_takes_a_token_of_probability_zero_at_either_end() -> None:
    logprobs = tensor([-torch.inf, 0.3, 0.7, -torch.inf]).clone()
    logprobs[1:3] = logprobs[1:3].log()
    uniform = np.array([0.0, 1 - 2**-52])
    found = draw(logprobs.expand(2, 4), uniform=uniform, greedy=np.zeros(2, bool))
    assert found.tolist() == [1, 2]


def test_draw_takes_the_mode_where_greedy() -> None:
    logprobs = tensor([0.1, 0.2, 0.7]).log().expand(2, 3)
    uniform = np.zeros(2)
    assert draw(logprobs, uniform=uniform, greedy=np.array([True, False])).tolist() == [2, 0]
