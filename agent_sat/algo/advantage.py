"""Advantages of a group's members, by turn. NumPy: the workers that run episodes do not import torch.

Each takes the rewards [G] of the siblings, which of them vote (a member that failed for reasons that are
not the model's does not, and gets 0), and the rewards of each member's turns; it gives one [turns] float32
array a member. Equal rewards give exactly 0, and so does a group with fewer than two voters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
Valid = NDArray[np.bool_]
Turns = Sequence[NDArray[np.floating]]
Advantages = list[NDArray[np.float32]]

SAME = 1e-8  # rewards that differ by no more than this, relative to the largest, are equal


def _votes(rewards: Rewards, valid: Valid) -> Rewards | None:
    """The voters' rewards, or None where there is nothing to compare."""
    votes = rewards[valid]
    if len(votes) < 2 or np.ptp(votes) <= SAME * max(1.0, float(np.abs(votes).max())):
        return None
    return votes


def _by_turn(scores: Rewards | None, valid: Valid, turn_rewards: Turns) -> Advantages:
    """Every turn of a member gets the member's score."""
    used = np.zeros(len(valid)) if scores is None else np.where(valid, scores, 0.0)
    return [np.full(len(turns), score, np.float32) for score, turns in zip(used, turn_rewards, strict=True)]


def grpo(rewards: Rewards, valid: Valid, turn_rewards: Turns) -> Advantages:
    """(R - mean) / std over the voters, std with n - 1 (Shao et al. 2024); no epsilon in it."""
    votes = _votes(rewards, valid)
    scores = None if votes is None else (rewards - votes.mean()) / votes.std(ddof=1)
    return _by_turn(scores, valid, turn_rewards)


def dr_grpo(rewards: Rewards, valid: Valid, turn_rewards: Turns) -> Advantages:
    """R - mean over the voters (Liu et al. 2025): no std, so an easy or a hard task weighs what it should."""
    votes = _votes(rewards, valid)
    return _by_turn(None if votes is None else rewards - votes.mean(), valid, turn_rewards)


def rloo(rewards: Rewards, valid: Valid, turn_rewards: Turns) -> Advantages:
    """R - mean over the other voters (Ahmadian et al. 2024): n / (n - 1) times dr_grpo's."""
    votes = _votes(rewards, valid)
    scores = None if votes is None else (rewards - votes.mean()) * (len(votes) / (len(votes) - 1))
    return _by_turn(scores, valid, turn_rewards)


def turn_return(rewards: Rewards, valid: Valid, turn_rewards: Turns) -> Advantages:
    """(G_k - mean G_k) / std R: each turn is credited with its own return G_k = R - rewards before turn k.

    A voter that ended before turn k enters the mean with the return of its last turn. The std is that of the
    outcomes, one scale for the group. Without intermediate rewards this is `grpo`, bit for bit.
    """
    votes = _votes(rewards, valid)
    if votes is None:
        return _by_turn(None, valid, turn_rewards)
    num_turns = max(len(turns) for turns in turn_rewards)
    returns = np.repeat(rewards[:, None], max(num_turns, 1), axis=1)  # [G, turns]
    for member, turns in enumerate(turn_rewards):
        before = (
            np.concatenate([[0.0], np.cumsum(np.asarray(turns, np.float64))[:-1]]) if len(turns) else [0.0]
        )
        returns[member, : len(before)] -= before
        returns[member, len(before) :] = returns[member, len(before) - 1]
    # one contiguous column at a time, so that the mean is summed in the same order as grpo's
    baseline = np.array([np.ascontiguousarray(column).mean() for column in returns[valid].T])
    scores = (returns - baseline) / votes.std(ddof=1)
    return [
        (scores[member, : len(turns)] if valid[member] else np.zeros(len(turns))).astype(np.float32)
        for member, turns in enumerate(turn_rewards)
    ]


def whiten(advantages: NDArray[np.float32], trained: Valid) -> NDArray[np.float32]:
    """[N] token advantages over their std across the step's trained tokens: REINFORCE++'s second half.

    Their mean is not removed: the group's baseline did that, and equal groups must stay at 0.
    """
    spread = float(advantages[trained].std(ddof=1)) if int(trained.sum()) > 1 else 0.0
    return advantages if spread == 0.0 else (advantages / np.float32(spread)).astype(np.float32)


Advantage = Callable[[Rewards, Valid, Turns], Advantages]

ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": dr_grpo,
    "turn_return": turn_return,
}
STEP_ADVANTAGES: dict[str, Callable[[NDArray[np.float32], Valid], NDArray[np.float32]]] = {
    "reinforce_plus_plus": whiten,
}
