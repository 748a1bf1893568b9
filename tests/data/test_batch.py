import numpy as np
import torch

from agent_sat.data.batch import make_batch, micro_batches
from agent_sat.types import Nucleus, Sample


def sample(length: int, *, logprob: float = -1.0, experts: bool = False, nucleus: bool = False) -> Sample:
    """One context token, then sampled ones."""
    turn = np.zeros(length, np.int32)
    turn[0] = -1
    counts = np.minimum(turn + 1, 1)
    return Sample(
        group=0,
        member=0,
        token_ids=np.arange(length, dtype=np.int32),
        turn=turn,
        behavior_logprobs=np.full(length, logprob, np.float32),
        versions=np.zeros(length, np.int32),
        advantages=np.ones(length, np.float32),
        temperature=0.7,
        experts=np.full((length, 1, 2), 255, np.uint8) if experts else None,
        nucleus=Nucleus(ids=np.full(counts.sum(), 9, np.int32), counts=counts) if nucleus else None,
    )


def batch_of(*samples: Sample):
    return make_batch(
        samples, aggregation="token_mean", constant=None, step_advantage=None, device=torch.device("cpu")
    )


def test_batch_is_flat_with_positions_by_sample():
    batch = batch_of(sample(2), sample(3))
    assert batch.token_ids.tolist() == [0, 1, 0, 1, 2]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert batch.seq.tolist() == [0, 0, 1, 1, 1]
    assert batch.mask.tolist() == [False, True, False, True, True]
    torch.testing.assert_close(batch.weights, torch.tensor([0, 1, 0, 1, 1]) / 3)


def test_token_without_a_finite_logprob_is_masked():
    assert batch_of(sample(3, logprob=-np.inf)).mask.tolist() == [False] * 3
    assert batch_of(sample(3, logprob=np.nan)).mask.tolist() == [False] * 3


def test_missing_experts_become_minus_one():
    experts = batch_of(sample(2, experts=True)).experts
    assert experts is not None and experts.eq(-1).all()


def test_routes_need_every_sample_to_have_them():
    assert batch_of(sample(2, experts=True), sample(2)).experts is None


def test_cut_batch_counts_sequences_and_kept_sets_from_zero():
    whole = batch_of(sample(2, nucleus=True), sample(3, nucleus=True))
    part = whole.cut(2, 5)
    assert part.seq.tolist() == [0, 0, 0]
    assert part.nucleus_offsets is not None and part.nucleus_ids is not None
    assert part.nucleus_offsets.tolist() == [0, 0, 1, 2]
    assert part.nucleus_ids.tolist() == [9, 9]
    assert torch.equal(part.weights, whole.weights[2:])


def test_micro_batches_hold_whole_samples_within_the_padded_size():
    assert micro_batches([2, 3, 3, 8, 20], max_tokens=9) == [(0, 3), (3, 4), (4, 5)]
    assert micro_batches([2, 2, 2], max_tokens=100) == [(0, 3)]
    assert micro_batches([], max_tokens=9) == []
