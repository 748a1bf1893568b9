"""The schema of a method: every part that can be chosen, with its unit and bounds. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Grain = Literal["token", "turn", "sequence"]
RatioName = Literal["policy", "implementation"]


class AlgorithmConfig(BaseModel):
    """Every part of a method; the TOML section [algorithm] overrides the fields of the method it names."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    granularity: Grain = "token"
    """Over what the log-ratio is averaged before it is exponentiated."""
    denominator: Literal["behavior", "recomputed"] | None = None
    """What the ratio divides by: mu, or mu~ (the trainer at the version that sampled). Presets name it."""
    trust_region: str = "clip"
    """none, reinforce, clip, dual_clip, up, spo, drpo, cispo, or my_package.module:function."""
    eps_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip radius of the ratio around 1."""
    eps_high: float = Field(default=0.2, gt=0)
    """Upper clip radius of the ratio around 1."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Dual clip: for A < 0 the surrogate is at least this times A. At 1 or below it would undo the clip."""
    spo_epsilon: float = Field(default=0.2, gt=0)
    """SPO: the ratio's distance from 1 where its surrogate is stationary."""
    drpo_delta: float = Field(default=0.2, gt=0)
    """DRPO: the same in probability."""

    reference: Literal["off", "global", "turn"] = "off"
    """SAT: off, one q for all tokens, or one q per turn index."""
    level: float = Field(default=0.90, gt=0, le=1)
    """SAT: quantile level of q."""
    exponent: float = Field(default=2.0, gt=0)
    """SAT: exponent of the kernel 1 / (1 + (|g| / q)^exponent)."""
    scope: Literal["step", "microbatch"] = "step"
    """SAT: the tokens q is taken over: the whole optimizer step, or (as published) each micro-batch."""
    min_tokens: int = Field(default=32, ge=1)
    """SAT per turn: a turn with fewer tokens takes the global q; below 10 a level of 0.90 gates nothing."""
    max_turn: int = Field(default=32, ge=1, le=4096)
    """SAT per turn and metrics: turns from this one on share one stratum."""
    anchor: Literal["off", "ceiling", "ema", "implementation"] = "off"
    """SAT: what keeps q from growing with the mismatch itself."""
    ceiling: float = Field(default=0.1, gt=0)
    """Anchor ceiling: q is at most this."""
    ema_decay: float = Field(default=0.95, ge=0, lt=1)
    """Anchor ema: weight of the past in the running average of q."""

    correction: str = "none"
    """none, tis, icepop, or my_package.module:function: a detached importance weight on the policy term."""
    correction_ratio: RatioName = "implementation"
    """What the correction weighs by: pi / mu or mu~ / mu."""
    correction_granularity: Grain = "token"
    """Geometric mean over a turn or a sequence before the correction truncates."""
    tis_cap: float = Field(default=2.0, gt=0)
    """TIS: largest weight; inf does not truncate."""
    icepop_low: float = Field(default=0.5, ge=0)
    """IcePop: smallest ratio that is kept."""
    icepop_high: float = Field(default=5.0, gt=0)
    """IcePop: largest ratio that is kept."""

    masks: tuple[str, ...] = ()
    """Any of dppo_tv, dppo_kl, kpop, seqclip, max_lag, or my_package.module:function."""
    dppo_delta: float = Field(default=0.15, gt=0)
    """DPPO: largest divergence of an outward token (a probability for dppo_tv, nats for dppo_kl)."""
    kpop_phi: float = Field(default=0.05, gt=0)
    """KPop: largest Bernoulli KL in either direction, nats. The source names no value."""
    kpop_side: Literal["recomputed", "live"] = "recomputed"
    """KPop: the trainer-side probability, mu~ or pi."""
    seqclip_low: float = Field(default=0.995, ge=0)
    """SeqClip: smallest sequence ratio that is kept."""
    seqclip_high: float = Field(default=1.005, gt=0)
    """SeqClip: largest sequence ratio that is kept."""
    max_lag: int = Field(default=8, ge=0)
    """Mask max_lag: oldest token that is trained, in optimizer updates."""

    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of KL(pi || reference model)."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty; above 0 the learner keeps a frozen reference model."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean", "turn_mean", "constant"] = "token_mean"
    """How token losses become one number."""
    constant: int | None = Field(default=None, gt=0)
    """Aggregation constant: tokens that a sequence's sum is divided by (the generation limit)."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "turn_return"] = "grpo"
    """How a group's rewards become advantages."""
    replay_routes: bool = False
    """R3: the trainer's router selects the experts that the engine recorded."""
    parameters: dict[str, float] = Field(default_factory=dict)
    """Parameters of your own functions, by keyword name."""
