"""From logits to the distribution a token is really drawn from, and to the token; all in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_sat.algo.logprobs import temper
from agent_sat.types import FloatArray


def behavior_logprobs(
    logits: Tensor, *, temperature: FloatArray, top_p: FloatArray, top_k: NDArray[np.int64]
) -> Tensor:
    """Log mu [R, V] float32: after temperature, top-k, then top-p, renormalised; -inf outside the kept set.

    logits [R, V]; temperature, top_p, top_k [R] (top_k < 1: all). Temperature 0 gives the distribution of
    temperature 1 without truncation, which is what a greedy token's log-probability refers to.
    Top-p keeps the fewest most probable tokens whose mass, renormalised after top-k, reaches top_p;
    ties keep the lower id.
    """
    greedy = temperature == 0
    scale = np.where(greedy, np.float32(1), temperature)
    logprobs = torch.log_softmax(temper(logits, _like(logits, scale)), dim=-1)
    rows = np.flatnonzero(((top_p < 1) | (top_k > 0)) & ~greedy)
    if not len(rows):
        return logprobs
    places = _like(logits, rows)
    kept = _kept(logprobs[places], _like(logits, top_p[rows]), _like(logits, top_k[rows]))
    logprobs[places] = torch.log_softmax(logprobs[places].masked_fill(~kept, float("-inf")), dim=-1)
    return logprobs


def draw(logprobs: Tensor, *, uniform: NDArray[np.float64], greedy: NDArray[np.bool_]) -> Tensor:
    """The token [R] where each row's cumulative distribution passes `uniform`; the mode where greedy.

    logprobs [R, V], uniform [R], greedy [R]. A token of probability 0 is never drawn.
    """
    if greedy.all():
        return logprobs.argmax(dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = _like(logprobs, uniform)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return torch.where(_like(logprobs, greedy), logprobs.argmax(dim=-1), drawn) if greedy.any() else drawn


def _kept(logprobs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """The kept sets as a mask [R, V]."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
    in_top_k = (ranks < top_k[:, None]) | (top_k[:, None] < 1)
    mass = ordered.exp().masked_fill(~in_top_k, 0.0)
    before = mass.cumsum(dim=-1) - mass  # of the more probable tokens
    in_top_p = (before < top_p[:, None] * mass.sum(dim=-1, keepdim=True)) | (ranks == 0)
    return torch.zeros_like(in_top_k).scatter_(-1, order, in_top_k & in_top_p)


def _like(tensor: Tensor, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(tensor.device)
