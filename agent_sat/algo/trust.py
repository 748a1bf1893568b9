"""Trust regions: the surrogate f(r, A) of each token, which the loss maximises.

A trust region takes the `Terms` of a micro-batch and, as keyword-only arguments, parameters that are named
like fields of AlgorithmConfig (or like keys of its `parameters`); it returns a `Surrogate`. Write your own as
`my_package.module:function`: no registration. Inactive tokens have r = 1 and A = 0 and count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_sat.algo.ratio import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """What a trust region gives."""

    values: Tensor  # [N] with gradient through the ratio (or log pi) only
    clipped: Tensor | None = None  # [N] bool, the trust region cut this token; None: it never cuts


def boundary(terms: Terms, *, eps_low: float, eps_high: float) -> Tensor:
    """[N] the end of the clip interval in the direction the advantage pushes (SAT, equation 3.5).

    The other end never binds under the minimum with r A. SAT contracts the end on the side of g only; the
    end on the far side is out of reach (r > 1 if and only if g > 0), so one factor serves both.
    """
    dtype = terms.advantages.dtype
    radius = torch.where(
        terms.advantages > 0, torch.tensor(eps_high, dtype=dtype), torch.tensor(-eps_low, dtype=dtype)
    )
    return (radius if terms.contraction is None else radius.mul_(terms.contraction)).add_(1)


def clip(terms: Terms, *, eps_low: float, eps_high: float) -> Surrogate:
    """min(r A, clip(r, 1 - eps_low c_minus, 1 + eps_high c_plus) A): PPO (Schulman et al. 2017, equation 7);
    with contraction factors SAT (equations 3.5 and 3.6).
    """
    end = boundary(terms, eps_low=eps_low, eps_high=eps_high)
    clipped = (terms.ratio.detach() - end) * terms.advantages > 0
    # with weights 0 and 1 lerp chooses exactly; on a CPU torch.where mispredicts and takes 8 times as long
    kept = torch.lerp(terms.ratio, end, clipped.to(end.dtype))
    return Surrogate(values=kept * terms.advantages, clipped=clipped)


def dual_clip(terms: Terms, *, eps_low: float, eps_high: float, dual_clip: float) -> Surrogate:
    """PPO's clip, and for A < 0 never below dual_clip A (Ye et al. 2020)."""
    inner = clip(terms, eps_low=eps_low, eps_high=eps_high)
    floored = (terms.advantages < 0) & (terms.ratio.detach() > dual_clip)
    assert inner.clipped is not None
    return Surrogate(
        values=torch.where(floored, dual_clip * terms.advantages, inner.values),
        clipped=inner.clipped | floored,
    )


def up(terms: Terms, *, eps_low: float, eps_high: float) -> Surrogate:
    """A > 0: (pi / sg(pi)) A, unclipped; else PPO's clip (unbounded positive, section 4.d.iv).

    At a turn's or a sequence's ratio pi / sg(pi) is exp(g - sg(g)): the same gradient, spread over the mean.
    """
    inner = clip(terms, eps_low=eps_low, eps_high=eps_high)
    assert inner.clipped is not None
    positive = terms.advantages > 0
    unit = torch.exp(terms.log_ratio - terms.log_ratio.detach())
    return Surrogate(
        values=torch.where(positive, unit * terms.advantages, inner.values), clipped=inner.clipped & ~positive
    )


def spo(terms: Terms, *, spo_epsilon: float) -> Surrogate:
    """r A - |A| / (2 eps) (r - 1)^2 (Xie et al. 2024; section 4.d.v): stationary at PPO's boundary."""
    penalty = terms.advantages.abs() / (2 * spo_epsilon) * (terms.ratio - 1).square()
    return Surrogate(values=terms.ratio * terms.advantages - penalty)


def drpo(terms: Terms, *, drpo_delta: float) -> Surrogate:
    """r A - |A| / (2 delta) mu (r - 1)^2 (Yao et al. 2026; section 4.d.v): SPO in probability space."""
    scale = terms.advantages.abs() / (2 * drpo_delta) * terms.behavior_logprobs.exp()
    return Surrogate(values=terms.ratio * terms.advantages - scale * (terms.ratio - 1).square())


def cispo(terms: Terms, *, eps_low: float, eps_high: float) -> Surrogate:
    """sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi (MiniMax-M1 2025): no token loses its gradient."""
    ratio = terms.ratio.detach()
    contraction = torch.ones_like(ratio) if terms.contraction is None else terms.contraction
    weight = ratio.clamp(1 - eps_low * contraction, 1 + eps_high * contraction)
    return Surrogate(values=weight * terms.advantages * terms.logprobs, clipped=weight != ratio)


def reinforce(terms: Terms) -> Surrogate:
    """A log pi (Williams 1992): no ratio; a correction may supply it (TIS, section 4.c)."""
    return Surrogate(values=terms.advantages * terms.logprobs)


def none(terms: Terms) -> Surrogate:
    """r A: importance sampling without a trust region."""
    return Surrogate(values=terms.ratio * terms.advantages)


TrustRegion = Callable[..., Surrogate]

TRUST_REGIONS: dict[str, TrustRegion] = {
    "none": none,
    "reinforce": reinforce,
    "clip": clip,
    "dual_clip": dual_clip,
    "up": up,
    "spo": spo,
    "drpo": drpo,
    "cispo": cispo,
}
