"""What every stage of the loss reads of a batch: cleaned log-probabilities, the log-ratio and its ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agent_sat.algo.segments import Granularity, segment_ids, segment_mean
from agent_sat.types import Batch

Denominator = Literal["behavior", "recomputed"]

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8; float32 overflows at 88, and its square at 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One micro-batch as the loss stages see it: neutral values (0, ratio 1) wherever a token is not trained.

    Only `logprobs`, `log_ratio` and `ratio` carry gradient.
    """

    active: Tensor  # [N] bool, trained tokens with a finite denominator
    seq: Tensor  # [N] int64
    turn: Tensor  # [N] int64
    lag: Tensor  # [N] int64, trainer version now - version that sampled the token
    advantages: Tensor  # [N]
    logprobs: Tensor  # [N] log pi, with gradient
    behavior_logprobs: Tensor  # [N] log mu
    recomputed_logprobs: Tensor | None  # [N] log mu~
    log_ratio: Tensor  # [N] g: log pi - log(denominator), at the method's granularity, with gradient
    ratio: Tensor  # [N] exp(g), with gradient
    contraction: Tensor | None = None  # [N] SAT's c in (0, 1], on the side of g; None: SAT is off

    @property
    def token_log_ratio(self) -> Tensor:
        """[N] d = log pi - log mu of each token, detached."""
        return self.logprobs.detach() - self.behavior_logprobs

    @property
    def implementation(self) -> Tensor:
        """[N] log mu~ - log mu, detached. The method's config guarantees that log mu~ is there."""
        assert self.recomputed_logprobs is not None
        return self.recomputed_logprobs - self.behavior_logprobs


def clean(values: Tensor, active: Tensor) -> Tensor:
    """`values` with 0 where inactive, whatever was there; an inactive token's gradient is exactly 0."""
    return torch.where(active, values, 0.0)


def at_granularity(
    log_ratio: Tensor, granularity: Granularity, *, seq: Tensor, turn: Tensor, active: Tensor
) -> Tensor:
    """[N] the token's own log-ratio, or the mean over its turn or sequence (GSPO, section 4.b), broadcast."""
    if granularity == "token":
        return log_ratio
    return segment_mean(log_ratio, segment_ids(granularity, seq=seq, turn=turn), active)


def exponential(log_ratio: Tensor) -> Tensor:
    """exp(g) that saturates at exp(20) in value and keeps its gradient there.

    A clamp would drop the pull-back gradient of a converging token; a bare exp turns it into NaN.
    """
    excess = (log_ratio.detach() - MAX_LOG_RATIO).clamp_min_(0)
    return torch.exp(log_ratio - excess)


def read(
    batch: Batch,
    logprobs: Tensor,
    *,
    granularity: Granularity,
    denominator: Denominator,
    needs_recomputed: bool,
    version: int,
) -> Terms:
    """The terms of a micro-batch; a token without a behaviour (or needed recomputed) logprob is inactive.

    Raises ValueError where the method needs log mu~ and the batch has none.
    """
    behavior, recomputed = batch.behavior_logprobs, batch.recomputed_logprobs
    active = batch.mask & (behavior > -torch.inf)  # NaN compares false
    if needs_recomputed:
        if recomputed is None:
            raise ValueError("this method needs recomputed_logprobs, and the batch has none")
        active &= recomputed > -torch.inf
    logprobs, behavior = clean(logprobs, active), clean(behavior, active)
    recomputed = None if recomputed is None else clean(recomputed, active)
    below = recomputed if denominator == "recomputed" else behavior
    assert below is not None
    log_ratio = at_granularity(logprobs - below, granularity, seq=batch.seq, turn=batch.turn, active=active)
    return Terms(
        active=active,
        seq=batch.seq,
        turn=batch.turn,
        lag=version - batch.versions,
        advantages=clean(batch.advantages, active),
        logprobs=logprobs,
        behavior_logprobs=behavior,
        recomputed_logprobs=recomputed,
        log_ratio=log_ratio,
        ratio=exponential(log_ratio),
    )


def bernoulli_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[N] KL(Bernoulli(p) || Bernoulli(q)), the sampled token against all others (section 4.c); no gradient.

    Probabilities within one rounding of 1 count as one rounding below it: float32 cannot tell them apart.
    """
    log_p, log_q = log_p.detach(), log_q.detach()
    rounding = torch.finfo(log_p.dtype).eps
    other_p = (-torch.expm1(log_p)).clamp_min(rounding)
    other_q = (-torch.expm1(log_q)).clamp_min(rounding)
    return log_p.exp() * (log_p - log_q) + other_p * (other_p.log() - other_q.log())
