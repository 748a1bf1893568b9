"""SAT's reference, its fallbacks and anchors, and the article's statements as properties."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_sat.algo.loss import LossOutput, policy_loss
from agent_sat.algo.methods import resolve
from agent_sat.algo.reference import (
    Observed,
    Reference,
    Strata,
    by_stratum,
    contract,
    fit,
    order_statistics,
    rank,
)
from agent_sat.algo.settings import AlgorithmConfig
from tests.algo.batches import make_batch

finite = st.floats(-3, 3, allow_nan=False, width=32)
eighths = st.integers(-24, 24).map(lambda n: n / 8)  # sums and products with them are exact, and ties common


def observed(values: Sequence[float], turns: Sequence[int] | None = None) -> Observed:
    stratum = None if turns is None else np.array(turns, np.uint8)
    return Observed(magnitude=np.array(values, np.float64), stratum=stratum)


@pytest.mark.parametrize(
    ("level", "count", "expected"), [(0.7, 10, 7), (0.9, 10, 9), (0.9, 11, 10), (1.0, 3, 3)]
)
def test_rank_takes_the_level_as_it_was_written(level: float, count: int, expected: int):
    assert rank(level, count) == expected  # 0.7 * 10 is 7.000000000000001 in floating point


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(0, 10, width=32), st.integers(0, 4)), min_size=1, max_size=60),
    st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0]),
)
def test_order_statistics_are_the_definition(tokens: list[tuple[float, int]], level: float):
    values = np.array([u for u, _ in tokens], np.float32)
    turns = np.array([k for _, k in tokens], np.uint8)
    grouped, counts = by_stratum(values, turns, 6)
    found = order_statistics(grouped, counts, level)
    for k in range(6):
        own = sorted(float(u) for u, turn in tokens if turn == k)
        # inf{x >= 0 : F(x) >= level}
        share = Fraction(str(level))
        expected = next((x for x in own if Fraction(sum(y <= x for y in own), len(own)) >= share), 0.0)
        assert float(found[k]) == expected


def test_values_are_brought_together_by_stratum_in_their_order():
    values = np.array([1, 2, 3, 4, 5, 6, 7], np.float32)
    grouped, counts = by_stratum(values, np.array([2, 0, 0, 2, 2, 0, 4], np.uint8), 6)
    assert grouped.tolist() == [2, 3, 6, 1, 4, 5, 7]
    assert counts.tolist() == [3, 0, 3, 0, 1, 0]


def test_nothing_to_judge_gives_a_reference_that_gates_nothing():
    for reference in ("global", "turn"):
        config = AlgorithmConfig(reference=reference, max_turn=2)
        found = fit(config, [observed([], [] if reference == "turn" else None)])
        assert not found.q.any()
        assert not found.num_tokens.any()


def test_gate_is_strict_between_neighbouring_floats():
    # |g| = q is not gated, the next larger float is: also where their quotient rounds
    generator = np.random.default_rng(0)
    q = np.exp(generator.uniform(-30, 30, 2000)).astype(np.float32)
    reference = Reference(q=q, batch_q=q, num_tokens=np.ones(2000, int), fell_back=np.zeros(2000, bool))
    each = Strata(ids=np.arange(2000), lengths=np.ones(2000, int))
    config = AlgorithmConfig(reference="turn")
    assert (contract(config, torch.from_numpy(q), each, reference) == 1).all()
    above = torch.from_numpy(np.nextafter(q, np.float32(np.inf)))
    assert (contract(config, -above, each, reference) < 0.51).all()


def test_few_tokens_take_the_global_reference_and_say_so():
    config = AlgorithmConfig(reference="turn", min_tokens=3, max_turn=2, level=0.5)
    reference = fit(config, [observed([1, 2, 3, 4, 9, 9], [0, 0, 0, 0, 1, 1])])
    # turn 0: 2nd of 1 2 3 4; turn 1 has two tokens: 3rd of all six; turn 2 has none
    assert reference.q.tolist() == [2, 3, 0]
    assert reference.fell_back.tolist() == [False, True, False]
    assert reference.num_tokens.tolist() == [4, 2, 0]


def test_turns_from_max_turn_on_share_one_stratum():
    batch = make_batch([0.0] * 4, turn=[0, 1, 2, 7])
    method = resolve("sat-grpo-turn", {"max_turn": 1, "min_tokens": 1, "level": 1.0})
    output = policy_loss(
        method, batch, logprobs=torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), entropy=torch.zeros(4), version=0
    )
    assert output.tokens.q is not None
    assert output.tokens.q.tolist() == pytest.approx([0.1, 0.4, 0.4, 0.4])


def test_reference_does_not_depend_on_how_tokens_arrive():
    config = AlgorithmConfig(reference="turn", min_tokens=2, level=0.9)
    generator = np.random.default_rng(0)
    values, turns = generator.random(200), generator.integers(0, 5, 200)
    whole = fit(config, [observed(values.tolist(), turns.tolist())])
    order = generator.permutation(200)
    parts = [observed(values[i].tolist(), turns[i].tolist()) for i in np.array_split(order, 7)]
    assert np.array_equal(whole.q, fit(config, parts).q)


def test_ceiling_bounds_q():
    config = AlgorithmConfig(reference="global", anchor="ceiling", ceiling=0.1, level=1.0)
    reference = fit(config, [observed([0.05, 0.3])])
    assert (reference.q.tolist(), reference.batch_q.tolist()) == ([0.1], [0.3])


def test_ema_averages_over_steps_and_keeps_what_it_has_not_seen():
    config = AlgorithmConfig(
        reference="turn", anchor="ema", ema_decay=0.75, level=1.0, min_tokens=1, max_turn=2
    )
    first = fit(config, [observed([0.4, 0.8], [0, 1])])
    second = fit(config, [observed([0.8, 0.2], [0, 2])], previous=first)
    assert first.q.tolist() == pytest.approx([0.4, 0.8, 0.0])
    # turn 0: 0.75 * 0.4 + 0.25 * 0.8; turn 1 not seen: kept; turn 2 new: its own
    assert second.q.tolist() == pytest.approx([0.5, 0.8, 0.2])


def test_implementation_anchor_ignores_what_the_policy_moved():
    behavior = torch.full((10,), -2.0, dtype=torch.float64)
    recomputed = behavior + torch.linspace(0.01, 0.10, 10, dtype=torch.float64)
    batch = make_batch(behavior, recomputed=recomputed)
    for shift in (0.0, 1.0):  # however far the policy went, q is the 9th of .01 ... .10
        output = policy_loss(
            resolve("sat-grpo", {"anchor": "implementation"}),
            batch,
            logprobs=recomputed + shift,
            entropy=torch.zeros(10),
            version=0,
        )
        assert output.tokens.q is not None and float(output.tokens.q[0]) == pytest.approx(0.09)


def test_anchor_holds_when_all_mismatch_grows_together():
    # every log-ratio ten times as large: the batch-relative q lets go, the ceiling does not
    base = torch.linspace(-0.05, 0.05, 100, dtype=torch.float64)
    batch = make_batch([-3.0] * 100, advantages=torch.sign(base))

    def changed(scale: float, **overrides: object) -> int:
        output = policy_loss(
            resolve("sat-grpo", overrides),
            batch,
            logprobs=-3.0 + scale * base,
            entropy=torch.zeros(100),
            version=0,
        )
        assert output.tokens.changed is not None
        return int(output.tokens.changed.sum())

    assert changed(10) == 0  # q = 0.45 is beyond log 1.2
    assert changed(10, anchor="ceiling", ceiling=0.05) > 0


def test_no_trained_token_gives_no_gate():
    batch = make_batch([-1.0, -1.0], mask=[False, False])
    for method in ("sat-grpo", "sat-grpo-turn"):
        output = policy_loss(
            resolve(method), batch, logprobs=torch.zeros(2).double(), entropy=torch.zeros(2), version=0
        )
        assert output.loss.item() == 0 and output.tokens.gate is not None and not output.tokens.gate.any()


def run(
    log_ratios: list[float], advantages: list[float], reference: str, q: Reference | None = None
) -> tuple[LossOutput, Tensor]:
    d = torch.tensor(log_ratios, dtype=torch.float64)
    leaf = (d - 4.0).requires_grad_()
    batch = make_batch(
        torch.full_like(d, -4.0), advantages=advantages, turn=[i % 3 for i in range(len(log_ratios))]
    )
    method = resolve("grpo", {"reference": reference, "level": 0.6, "min_tokens": 2, "eps_high": 0.3})
    output = policy_loss(method, batch, logprobs=leaf, entropy=torch.zeros_like(d), version=0, reference=q)
    output.loss.backward()
    assert leaf.grad is not None
    return output, leaf.grad


tokens = st.lists(st.tuples(finite | eighths, finite), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens, st.sampled_from(["global", "turn"]))
def test_sat_statements_hold_for_any_batch(pairs: list[tuple[float, float]], reference: str):
    d, a = [x for x, _ in pairs], [y for _, y in pairs]
    sat, gradient = run(d, a, reference)
    ppo, base_gradient = run(d, a, "off")
    assert sat.tokens.changed is not None
    c_low, c_high, r = sat.tokens.c_low, sat.tokens.c_high, sat.tokens.ratio
    # its interval is inside PPO's, and only the end on the side of d contracts
    assert ((c_low > 0) & (c_low <= 1) & (c_high > 0) & (c_high <= 1)).all()
    assert ((c_low == 1) | (c_high == 1)).all()
    # its surrogate is never above PPO's
    assert (sat.tokens.surrogate <= ppo.tokens.surrogate + 1e-15).all()
    # its gradient differs from PPO's only on the newly cut outward bands
    advantage = torch.tensor(a, dtype=torch.float64)
    band = ((advantage > 0) & (r > 1 + 0.3 * c_high) & (r <= 1.3)) | (
        (advantage < 0) & (r < 1 - 0.2 * c_low) & (r >= 0.8)
    )
    assert torch.equal(gradient[~band], base_gradient[~band])
    assert torch.equal(gradient[band], torch.zeros(int(band.sum()), dtype=torch.float64))
    assert torch.equal(sat.tokens.changed, band)
    # converging tokens keep their pull-back gradient
    converging = advantage * (r - 1) < 0
    torch.testing.assert_close(gradient[converging], (-advantage * r / len(d))[converging])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(eighths, eighths), min_size=1, max_size=40), st.sampled_from([0.5, 2.0, 4.0]))
def test_contraction_does_not_see_a_uniform_rescaling(pairs: list[tuple[float, float]], power: float):
    # the limit the article names in Part 05: q rescales with the mismatch itself
    d, a = [x for x, _ in pairs], [y for _, y in pairs]
    first, _ = run(d, a, "turn")
    second, _ = run([power * x for x in d], a, "turn")
    assert first.tokens.contraction is not None and second.tokens.contraction is not None
    torch.testing.assert_close(first.tokens.contraction, second.tokens.contraction, rtol=1e-9, atol=1e-9)


def test_given_reference_is_used_instead_of_the_micro_batch():
    given_q = Reference(
        q=np.array([0.01]),
        batch_q=np.array([0.01]),
        num_tokens=np.array([1]),
        fell_back=np.array([False]),
    )
    output, _ = run([0.1, 0.1, 0.1], [1.0, 1.0, 1.0], "global", given_q)
    assert output.tokens.gate is not None and output.tokens.gate.all()
    assert output.tokens.reference is given_q
