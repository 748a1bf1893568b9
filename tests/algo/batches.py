"""Tiny batches for the tests of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agent_sat.algo.aggregate import Aggregation, token_weights
from agent_sat.types import Batch


def make_batch(
    behavior: Tensor | Sequence[float],
    *,
    advantages: Tensor | Sequence[float] | float = 1.0,
    mask: Tensor | Sequence[bool] | None = None,
    seq: Tensor | Sequence[int] | None = None,
    turn: Tensor | Sequence[int] | None = None,
    recomputed: Tensor | None = None,
    reference: Tensor | None = None,
    aggregation: Aggregation = "token_mean",
    constant: int | None = None,
    versions: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    behavior = torch.as_tensor(behavior, dtype=dtype)
    n = len(behavior)
    full_mask = torch.ones(n, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    ids = torch.zeros(n, dtype=torch.int64)
    seq = ids if seq is None else torch.as_tensor(seq)
    turn = ids if turn is None else torch.as_tensor(turn)
    return Batch(
        token_ids=ids,
        position_ids=ids,
        seq=seq,
        turn=turn,
        mask=full_mask,
        advantages=torch.as_tensor(advantages, dtype=dtype).expand(n).clone(),
        behavior_logprobs=behavior,
        versions=ids if versions is None else torch.as_tensor(versions),
        weights=token_weights(
            aggregation, mask=full_mask, seq=seq, turn=turn, constant=constant, dtype=dtype
        ),
        temperature=torch.ones(n),
        recomputed_logprobs=None if recomputed is None else recomputed.to(dtype),
        reference_logprobs=None if reference is None else reference.to(dtype),
    )
