"""Samples into one flat batch, and the batch into micro-batches of whole samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_sat.algo.aggregate import Aggregation, token_weights
from agent_sat.data.samples import active
from agent_sat.types import Batch, Nucleus, Sample

# (advantages [N], trained [N]) -> advantages [N], over the tokens of a whole step
StepAdvantage = Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[np.float32]]


def make_batch(
    samples: Sequence[Sample],
    *,
    aggregation: Aggregation,
    constant: int | None,
    step_advantage: StepAdvantage | None,
    device: torch.device,
) -> Batch:
    """The batch of a whole optimizer step; all that depends on the whole of it is made before any cut.

    Shapes as in `types.Batch`, N the tokens of all samples in the order given.
    """

    def joined(arrays: list[NDArray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)

    lengths = [len(sample) for sample in samples]
    seq = joined([np.full(n, i) for i, n in enumerate(lengths)], torch.int64)
    turn = joined([sample.turn for sample in samples], torch.int64)
    trained = np.concatenate([active(sample) for sample in samples])
    mask = joined([trained], torch.bool)
    advantages = np.concatenate([sample.advantages for sample in samples])
    if step_advantage is not None:
        advantages = step_advantage(advantages, trained)
    nucleus_ids, nucleus_offsets = kept_sets(samples, device)
    return Batch(
        token_ids=joined([sample.token_ids for sample in samples], torch.int64),
        position_ids=joined([np.arange(n) for n in lengths], torch.int64),
        seq=seq,
        turn=turn,
        mask=mask,
        advantages=joined([advantages], torch.float32),
        behavior_logprobs=joined([sample.behavior_logprobs for sample in samples], torch.float32),
        versions=joined([sample.versions for sample in samples], torch.int64),
        weights=token_weights(aggregation, mask=mask, seq=seq, turn=turn, constant=constant),
        temperature=joined([np.full(len(sample), sample.temperature) for sample in samples], torch.float32),
        experts=recorded_experts(samples, device),
        nucleus_ids=nucleus_ids,
        nucleus_offsets=nucleus_offsets,
    )


def recorded_experts(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """[N, layers, top_k] int64 with -1 where a row is missing; None unless every sample has routes."""
    if any(sample.experts is None for sample in samples):
        return None
    rows = []
    for sample in samples:
        assert sample.experts is not None
        row = sample.experts.astype(np.int64)
        row[sample.experts == np.iinfo(sample.experts.dtype).max] = -1
        rows.append(row)
    return torch.from_numpy(np.concatenate(rows)).to(device)


def kept_sets(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Ids [sum of sets] and offsets [N + 1] of the kept sets; None where no sample was truncated."""
    if all(sample.nucleus is None for sample in samples):
        return None, None
    joined = Nucleus.join([sample.nucleus or Nucleus.unrestricted(len(sample)) for sample in samples])
    offsets = np.concatenate([[0], np.cumsum(joined.counts, dtype=np.int64)])
    return torch.from_numpy(joined.ids.astype(np.int64)).to(device), torch.from_numpy(offsets).to(device)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Ranges (first, last + 1) of samples whose padded size, count times longest, stays within `max_tokens`.

    A single sample longer than that is a micro-batch of its own.
    """
    ranges: list[tuple[int, int]] = []
    first = longest = 0
    for i, length in enumerate(lengths):
        grown = max(longest, length)
        if i > first and (i + 1 - first) * grown > max_tokens:
            ranges.append((first, i))
            first, grown = i, length
        longest = grown
    if lengths:
        ranges.append((first, len(lengths)))
    return ranges
