"""The one place where logits become log-probabilities: temperature, kept set, float32, entropy beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_sat.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLogprobs:
    logprobs: Tensor  # [R] float32, of the target, with gradient
    entropy: Tensor  # [R] float32 nats, of the same (restricted, tempered) distribution


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] float32 logits / temperature; float32 (or better) before the division, as the engine does it."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide / temperature.to(wide.dtype)[:, None]


def take_sets(ids: Tensor, offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The kept sets of `rows` [R], in their order, as (ids, offsets [R + 1])."""
    counts = (offsets[1:] - offsets[:-1])[rows]
    taken = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    # position inside the joined result -> position inside `ids`
    shift = torch.repeat_interleave(offsets[:-1][rows] - taken[:-1], counts)
    return ids[torch.arange(len(shift), device=ids.device) + shift], taken


def kept(ids: Tensor, offsets: Tensor, vocabulary: int) -> Tensor:
    """[R, V] bool, True inside each row's kept set; an empty set keeps everything."""
    counts = offsets[1:] - offsets[:-1]
    rows = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts)
    inside = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=ids.device)
    inside[rows, ids.long()] = True
    return inside | (counts == 0)[:, None]


def target_logprobs(
    logits: Tensor,  # [R, V] the rows that predict the targets, any float dtype
    targets: Tensor,  # [R] int64
    *,
    temperature: Tensor,  # [R] > 0
    nucleus_ids: Tensor | None = None,  # kept sets of the targets, joined
    nucleus_offsets: Tensor | None = None,  # [R + 1]
    entropy_gradient: bool = False,
) -> TargetLogprobs:
    """Log-probability of each target and the entropy there, after temperature and kept set (top-p, Part 04).

    Without `entropy_gradient` the entropy is a plain number and nothing is kept for its backward pass. Raises
    EngineError where a target lies outside its own kept set: such a record cannot have been sampled.
    """
    scaled = temper(logits, temperature)
    if nucleus_ids is not None and nucleus_offsets is not None:
        inside = kept(nucleus_ids, nucleus_offsets, logits.shape[-1])
        outside = ~inside.gather(1, targets[:, None])[:, 0]
        if outside.any():
            first = int(outside.nonzero()[0])
            raise EngineError(
                f"{int(outside.sum())} of {len(targets)} sampled tokens lie outside their kept set; "
                f"first: row {first}, token {int(targets[first])}"
            )
        scaled = scaled.masked_fill(~inside, -torch.inf)
    normalizer = scaled.logsumexp(-1)
    chosen = scaled.gather(1, targets[:, None])[:, 0] - normalizer
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = _entropy(scaled, normalizer)
    return TargetLogprobs(logprobs=chosen, entropy=entropy)


def _entropy(scaled: Tensor, normalizer: Tensor) -> Tensor:
    """[R] -sum p log p; a log p of -inf has p = 0 and is selected away before it meets a product."""
    log_p = scaled - normalizer[:, None]
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
