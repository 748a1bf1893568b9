"""Masks: which trained tokens keep their policy term. A mask never changes the denominator of the mean.

Like trust regions, masks read `Terms` and take parameters named like fields of AlgorithmConfig; they give
[N] bool, no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from agent_sat.algo.ratio import Terms, at_granularity, bernoulli_kl


def dppo_tv(terms: Terms, *, dppo_delta: float) -> Tensor:
    """A (r - 1) <= 0 or |pi - mu| <= delta (Qi et al. 2026; section 4.d.ii), of the sampled token.

    r is the token's own pi / mu here, whatever the granularity of the objective.
    """
    moved = terms.logprobs.detach().exp() - terms.behavior_logprobs.exp()
    return (terms.advantages * moved <= 0) | (moved.abs() <= dppo_delta)


def dppo_kl(terms: Terms, *, dppo_delta: float) -> Tensor:
    """A (r - 1) <= 0 or KL(mu || pi) <= delta, the Bernoulli KL of the sampled token (Qi et al. 2026)."""
    divergence = bernoulli_kl(terms.behavior_logprobs, terms.logprobs)
    return (terms.advantages * terms.token_log_ratio <= 0) | (divergence <= dppo_delta)


def kpop(terms: Terms, *, kpop_phi: float, kpop_side: Literal["recomputed", "live"]) -> Tensor:
    """Both Bernoulli KLs between the trainer's and the engine's probability <= phi (KPop; section 4.c)."""
    trainer = terms.logprobs if kpop_side == "live" else terms.recomputed_logprobs
    assert trainer is not None  # Method.needs_recomputed
    forward = bernoulli_kl(trainer, terms.behavior_logprobs)
    backward = bernoulli_kl(terms.behavior_logprobs, trainer)
    return (forward <= kpop_phi) & (backward <= kpop_phi)


def seqclip(terms: Terms, *, seqclip_low: float, seqclip_high: float) -> Tensor:
    """low <= rho <= high; rho the geometric mean of pi / mu over the sequence (SeqClip; section 4.b)."""
    mean = at_granularity(
        terms.token_log_ratio, "sequence", seq=terms.seq, turn=terms.turn, active=terms.active
    )
    ratio = mean.exp()
    return (ratio >= seqclip_low) & (ratio <= seqclip_high)


def max_lag(terms: Terms, *, max_lag: int) -> Tensor:
    """Tokens sampled at most `max_lag` optimizer updates ago."""
    return terms.lag <= max_lag


Mask = Callable[..., Tensor]

MASKS: dict[str, Mask] = {
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "kpop": kpop,
    "seqclip": seqclip,
    "max_lag": max_lag,
}
