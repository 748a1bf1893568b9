"""The loss once more, token by token, straight from the formulas of the design: slow and written apart."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import torch
from torch import Tensor

from agent_sat.algo.settings import AlgorithmConfig
from agent_sat.types import Batch


def slow_loss(s: AlgorithmConfig, batch: Batch, logprobs: Tensor, *, version: int = 0) -> Tensor:
    """The loss of a step of one micro-batch; log-probabilities must be finite where the mask is set."""
    active = [i for i in range(len(batch)) if batch.mask[i]]
    fixed = logprobs.detach()
    behavior, recomputed = batch.behavior_logprobs, batch.recomputed_logprobs
    below = behavior if s.denominator != "recomputed" else recomputed
    assert below is not None and recomputed is not None
    g = averaged({i: logprobs[i] - below[i] for i in active}, s.granularity, batch)
    implementation = {i: recomputed[i] - behavior[i] for i in active}
    judged = implementation if s.anchor == "implementation" else g
    radii = contracted(s, g, batch, {i: abs(float(judged[i].detach())) for i in active})
    policy = {i: fixed[i] - behavior[i] for i in active}
    chosen = implementation if s.correction_ratio == "implementation" else policy
    corrections = averaged(chosen, s.correction_granularity, batch)
    sequence = averaged(policy, "sequence", batch)
    loss = logprobs.new_zeros(())
    for i in active:
        a = float(batch.advantages[i])
        term = surrogate(s, g[i], a=a, logprob=logprobs[i], log_mu=float(behavior[i]), radii=radii[i])
        kept = kept_by_masks(
            s,
            a=a,
            pi=math.exp(float(fixed[i])),
            mu=math.exp(float(behavior[i])),
            recomputed=math.exp(float(recomputed[i])),
            rho=math.exp(float(sequence[i])),
            lag=version - int(batch.versions[i]),
        )
        weight = float(batch.weights[i])
        loss = loss - weight * kept * corrected(s, math.exp(float(corrections[i]))) * term
        if s.kl_coefficient > 0:
            assert batch.reference_logprobs is not None
            x = logprobs[i] - batch.reference_logprobs[i]
            estimate = {"k1": x, "k2": x**2 / 2}.get(s.kl_estimator, torch.exp(-x) - 1 + x)
            loss = loss + s.kl_coefficient * weight * estimate
    return loss


def averaged(values: dict[int, Tensor], granularity: str, batch: Batch) -> dict[int, Tensor]:
    def segment(i: int) -> tuple[int, ...]:
        seq, turn = int(batch.seq[i]), int(batch.turn[i])
        return {"token": (i,), "turn": (seq, turn), "sequence": (seq,)}[granularity]

    members = defaultdict(list)
    for i, value in values.items():
        members[segment(i)].append(value)
    return {i: torch.stack(members[segment(i)]).mean() for i in values}


def contracted(
    s: AlgorithmConfig, g: dict[int, Tensor], batch: Batch, magnitude: dict[int, float]
) -> dict[int, tuple[float, float]]:
    """(c_low, c_high) of each token; q is the order statistic of `magnitude`, on the first step of a run."""
    active = list(g)
    if s.reference == "off":
        return dict.fromkeys(active, (1.0, 1.0))
    everything = sorted(magnitude.values())
    radii = {}
    for i in active:
        group = everything
        if s.reference == "turn":
            own = [
                j
                for j in active
                if min(int(batch.turn[j]), s.max_turn) == min(int(batch.turn[i]), s.max_turn)
            ]
            if len(own) >= s.min_tokens:
                group = sorted(magnitude[j] for j in own)
        # the smallest x with F(x) >= level
        q = next(
            x for x in group if Fraction(sum(y <= x for y in group), len(group)) >= Fraction(str(s.level))
        )
        if s.anchor == "ceiling":
            q = min(q, s.ceiling)
        u = abs(float(g[i].detach()))
        c = 1 / (1 + (u / q) ** s.exponent) if u > q > 0 else 1.0
        radii[i] = (c, 1.0) if float(g[i].detach()) < 0 else (1.0, c)
    return radii


def surrogate(
    s: AlgorithmConfig, g: Tensor, *, a: float, logprob: Tensor, log_mu: float, radii: tuple[float, float]
) -> Tensor:
    r, (c_low, c_high) = torch.exp(g), radii
    clipped = torch.clamp(r, 1 - s.eps_low * c_low, 1 + s.eps_high * c_high)
    ppo = torch.minimum(r * a, clipped * a)
    regions = {
        "none": r * a,
        "reinforce": a * logprob,
        "clip": ppo,
        "dual_clip": torch.clamp(ppo, min=s.dual_clip * a) if a < 0 else ppo,
        "up": a * r / r.detach() if a > 0 else ppo,
        "spo": r * a - abs(a) / (2 * s.spo_epsilon) * (r - 1) ** 2,
        "drpo": r * a - abs(a) / (2 * s.drpo_delta) * math.exp(log_mu) * (r - 1) ** 2,
        "cispo": clipped.detach() * a * logprob,
    }
    return regions[s.trust_region]


def corrected(s: AlgorithmConfig, ratio: float) -> float:
    if s.correction == "tis":
        return min(ratio, s.tis_cap)
    if s.correction == "icepop":
        return ratio if s.icepop_low <= ratio <= s.icepop_high else 0.0
    return 1.0


def kept_by_masks(
    s: AlgorithmConfig, *, a: float, pi: float, mu: float, recomputed: float, rho: float, lag: int
) -> bool:
    def kl(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    outward = a * (pi / mu - 1) > 0
    trainer = recomputed if s.kpop_side == "recomputed" else pi
    keeps = {
        "dppo_tv": not outward or abs(pi - mu) <= s.dppo_delta,
        "dppo_kl": not outward or kl(mu, pi) <= s.dppo_delta,
        "kpop": max(kl(trainer, mu), kl(mu, trainer)) <= s.kpop_phi,
        "seqclip": s.seqclip_low <= rho <= s.seqclip_high,
        "max_lag": lag <= s.max_lag,
    }
    return all(keeps[mask] for mask in s.masks)
