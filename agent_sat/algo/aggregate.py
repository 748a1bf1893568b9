"""Aggregation: the weight of every token in the loss, made once over a whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from agent_sat.algo.segments import segment_ids, segment_sum

Aggregation = Literal["token_mean", "sequence_mean", "turn_mean", "constant"]


def identity(count: Tensor) -> Tensor:
    return count


def token_weights(
    kind: Aggregation,
    *,
    mask: Tensor,  # [N] bool
    seq: Tensor,  # [N] int64
    turn: Tensor,  # [N] int64
    constant: int | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] = identity,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[N] weights; the loss of the step is the sum over tokens, so over micro-batches and ranks too.

    token_mean: every trained token the same. sequence_mean: mean over the tokens of a sequence, then over
    the sequences that have any. turn_mean: the same over (sequence, turn). constant: sum over a sequence's
    tokens divided by `constant`, then the mean over sequences (Dr. GRPO). Masked tokens weigh 0; nothing
    trained gives zeros. The one count that spans ranks goes through `sum_over_ranks`; no sequence is split
    over ranks.
    """
    member = mask.to(dtype)
    granularity = {"token_mean": "token", "turn_mean": "turn"}.get(kind, "sequence")
    if granularity == "token":
        return member / sum_over_ranks(member.sum()).clamp_min(1)
    segment = segment_ids("turn" if granularity == "turn" else "sequence", seq=seq, turn=turn)
    tokens = segment_sum(member, segment)  # [segments]
    num_segments = sum_over_ranks((tokens > 0).sum().to(dtype)).clamp_min(1)
    if kind == "constant":
        assert constant is not None, "AlgorithmConfig refuses aggregation = constant without its constant"
        return member / (constant * num_segments)
    return member / (tokens.clamp_min(1)[segment] * num_segments)
