"""Sums and means over runs of tokens: a sequence, or a turn within a sequence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Granularity = Literal["token", "turn", "sequence"]


def turn_ids(seq: Tensor, turn: Tensor) -> Tensor:
    """[N] int64, one id per (sequence, turn); context (turn -1) shares turn 0's and must be masked."""
    width = int(turn.max()) + 1 if len(turn) else 1
    return seq * max(width, 1) + turn.clamp_min(0)


def segment_ids(granularity: Granularity, *, seq: Tensor, turn: Tensor) -> Tensor:
    """[N] int64: the segment each token belongs to, counted from 0 and not necessarily dense."""
    if granularity == "token":
        return torch.arange(len(seq), device=seq.device)
    return seq if granularity == "sequence" else turn_ids(seq, turn)


def segment_sum(values: Tensor, segment: Tensor) -> Tensor:
    """[segments] sum of `values` [N] by segment; gradient flows to the values."""
    num_segments = int(segment.max()) + 1 if len(segment) else 0
    return values.new_zeros(num_segments).index_add(0, segment, values)


def segment_mean(values: Tensor, segment: Tensor, active: Tensor) -> Tensor:
    """[N] mean of `values` over each segment's active tokens, broadcast; gradient flows through it.

    `values` must be finite where inactive (they are multiplied by 0, not selected); empty segments give 0.
    """
    member = active.to(values.dtype)
    counts = segment_sum(member, segment).clamp_min(1)
    return (segment_sum(values * member, segment) / counts)[segment]
