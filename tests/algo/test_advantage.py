"""Advantages by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from agent_sat.algo.advantage import ADVANTAGES, STEP_ADVANTAGES, whiten

ONE_TURN = [np.zeros(1)] * 4


def by_member(name: str, rewards: list[float], valid: list[bool] | None = None) -> list[float]:
    votes = [True] * len(rewards) if valid is None else valid
    found = ADVANTAGES[name](np.array(rewards), np.array(votes), [np.zeros(1)] * len(rewards))
    return [float(turns[0]) for turns in found]


@pytest.mark.parametrize("name", ["dr_grpo", "grpo"])  # std of 1, 3, 2 with n - 1 is 1
def test_invalid_members_do_not_vote(name: str):
    assert by_member(name, [1, 3, 2, 0], [True, True, True, False]) == [-1, 1, 0, 0]


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_groups_without_contrast_give_exactly_zero(name: str):
    assert by_member(name, [0.1, 0.1, 0.1]) == [0, 0, 0]  # the mean of three 0.1 is not 0.1
    assert by_member(name, [0.1 + 0.2, 0.3, 0.3]) == [0, 0, 0]  # differ by rounding alone
    assert by_member(name, [5, 3], [True, False]) == [0, 0]
    assert by_member(name, [5, 3], [False, False]) == [0, 0]


def test_rloo_compares_with_the_others():
    assert by_member("rloo", [1, 0, 0]) == [1, -0.5, -0.5]


def test_every_turn_gets_the_members_advantage():
    found = ADVANTAGES["dr_grpo"](np.array([1.0, 0.0]), np.array([True, True]), [np.zeros(3), np.zeros(0)])
    assert found[0].tolist() == [0.5, 0.5, 0.5] and found[1].shape == (0,)
    assert found[0].dtype == np.float32


def test_turn_return_credits_each_turn_with_its_own_return():
    # returns from turns 0, 1: member 0 has 3, 2; member 1 has 1, 1; it took no reward before turn 1
    found = ADVANTAGES["turn_return"](
        np.array([3.0, 1.0]), np.array([True, True]), [np.array([1.0, 2.0]), np.array([0.0, 1.0])]
    )
    std = np.sqrt(2.0)
    assert found[0].tolist() == pytest.approx([1 / std, 0.5 / std])
    assert found[1].tolist() == pytest.approx([-1 / std, -0.5 / std])


def test_turn_return_without_intermediate_rewards_is_grpo_bit_for_bit():
    generator = np.random.default_rng(3)
    for group in (2, 7, 8, 33):
        rewards, valid = generator.random(group), generator.random(group) > 0.2
        lengths = generator.integers(1, 6, group)
        nothing = [np.zeros(n) for n in lengths]
        at_the_end = [np.append(np.zeros(n - 1), r) for n, r in zip(lengths, rewards, strict=True)]
        plain = ADVANTAGES["grpo"](rewards, valid, nothing)
        for turn_rewards in (nothing, at_the_end):
            by_turn = ADVANTAGES["turn_return"](rewards, valid, turn_rewards)
            assert all(np.array_equal(a, b) for a, b in zip(by_turn, plain, strict=True))


def test_whitening_scales_the_step_to_unit_spread():
    advantages, trained = np.array([2, -2, 4, 99], np.float32), np.array([True, True, True, False])
    white = whiten(advantages, trained)
    assert white[trained].std(ddof=1) == pytest.approx(1)
    assert white[0] == pytest.approx(2 / np.std([2, -2, 4], ddof=1))
    assert whiten(np.zeros(3, np.float32), np.ones(3, bool)).tolist() == [0, 0, 0]
    assert set(STEP_ADVANTAGES) <= set(ADVANTAGES)


def test_workers_that_run_episodes_do_not_import_torch():
    code = "import agent_sat.algo.advantage, agent_sat.algo.methods, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
