"""From logits to the distribution a token is really drawn from, and to the token; all in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_sat.algo.logprobs import temper


def behavior_logprobs(logits: Tensor, *, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Log mu [R, V] float32: after temperature, top-k, then top-p, renormalised; -inf outside the kept set.

    logits [R, V]; temperature, top_p, top_k [R] (top_k < 1: all). Temperature 0 gives the distribution of
    temperature 1 without truncation, which is what a greedy token's log-probability refers to.
    Top-p keeps the fewest most probable tokens whose mass, renormalised after top-k, reaches top_p;
    ties keep the lower id.
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(temper(logits, torch.where(greedy, 1.0, temperature)), dim=-1)
    truncates = ((top_p < 1) | (top_k > 0)) & ~greedy
    if not bool(truncates.any()):
        return logprobs
    kept = torch.ones_like(logprobs, dtype=torch.bool)
    kept[truncates] = _kept(logprobs[truncates], top_p[truncates], top_k[truncates])
    return torch.log_softmax(logprobs.masked_fill(~kept, float("-inf")), dim=-1)


def draw(logprobs: Tensor, *, uniform: Tensor, greedy: Tensor) -> Tensor:
    """The token [R] where each row's cumulative distribution passes `uniform`; the mode where greedy.

    logprobs [R, V], uniform [R] float64, greedy [R] bool. A token of probability 0 is never drawn.
    """
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return torch.where(greedy, logprobs.argmax(dim=-1), drawn) if bool(greedy.any()) else drawn


def _kept(logprobs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """The kept sets as a mask [R, V]."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
    in_top_k = (ranks < top_k[:, None]) | (top_k[:, None] < 1)
    mass = ordered.exp().masked_fill(~in_top_k, 0.0)
    before = mass.cumsum(dim=-1) - mass  # of the more probable tokens
    in_top_p = (before < top_p[:, None] * mass.sum(dim=-1, keepdim=True)) | (ranks == 0)
    return torch.zeros_like(in_top_k).scatter_(-1, order, in_top_k & in_top_p)
