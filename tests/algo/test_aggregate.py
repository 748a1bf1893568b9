"""Aggregation weights: hand-worked sums, and independence of every split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agent_sat.algo.aggregate import Aggregation, token_weights

LOSSES = torch.tensor([4.0, 1.0, 1.0, 1.0])
SEQ, TURN = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 0, 1])
ALL = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", 7 / 4),
        ("sequence_mean", (4 + 1) / 2),
        ("turn_mean", (4 + 1 + 1) / 3),
        ("constant", (4 / 10 + 3 / 10) / 2),
    ],
)
def test_kinds_of_mean(kind: Aggregation, expected: float):
    weights = token_weights(kind, mask=ALL, seq=SEQ, turn=TURN, constant=10)
    assert (weights * LOSSES).sum().item() == pytest.approx(expected)


def on_ranks(kind: Aggregation, ranks: list[slice], mask: Tensor) -> list[Tensor]:
    """Weights that each rank computes for its own tokens, with the counts summed over ranks."""

    def weights(rank: slice, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        return token_weights(
            kind,
            mask=mask[rank],
            seq=SEQ[rank],
            turn=TURN[rank],
            constant=10,
            sum_over_ranks=sum_over_ranks,
        )

    counts: list[Tensor] = []
    for rank in ranks:  # a first round collects what an all-reduce would add up
        weights(rank, lambda count: counts.append(count) or count)
    total = torch.stack(counts).sum()
    return [weights(rank, lambda _: total) for rank in ranks]


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "turn_mean", "constant"])
@pytest.mark.parametrize("ranks", [[slice(0, 1), slice(1, 4)], [slice(0, 0), slice(0, 4)]])
def test_ranks_add_up_to_the_whole(kind: Aggregation, ranks: list[slice]):
    whole = token_weights(kind, mask=ALL, seq=SEQ, turn=TURN, constant=10)
    torch.testing.assert_close(torch.cat(on_ranks(kind, ranks, ALL)), whole)


def test_masked_tokens_count_nowhere():
    losses = torch.tensor([1.0, 100.0, 1.0, -50.0])
    mask, seq = torch.tensor([True, False, True, False]), torch.tensor([0, 0, 1, 1])
    for kind in ("token_mean", "sequence_mean", "turn_mean"):
        weights = token_weights(kind, mask=mask, seq=seq, turn=torch.zeros(4, dtype=torch.int64))
        assert (weights * losses).sum().item() == 1.0
        assert weights.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_a_sequence_without_trained_tokens_is_no_sequence():
    mask = torch.tensor([False, True, True, True])
    weights = token_weights("sequence_mean", mask=mask, seq=SEQ, turn=TURN)
    assert weights.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "turn_mean", "constant"])
def test_nothing_trained_gives_zeros(kind: Aggregation):
    weights = token_weights(kind, mask=~ALL, seq=SEQ, turn=TURN, constant=10)
    assert weights.tolist() == [0.0] * 4
