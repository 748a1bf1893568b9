"""The policy loss, one line of algebra with a stage behind each factor.

L = - sum_i weights_i keep_i c_i     f(r_i, A_i)  + penalties
            aggregate mask   correct trust(ratio)   penalty
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_sat.algo import reference as sat
from agent_sat.algo.methods import Method
from agent_sat.algo.penalty import KL_ESTIMATORS
from agent_sat.algo.ratio import Terms, at_granularity, clean, read
from agent_sat.algo.settings import AlgorithmConfig
from agent_sat.algo.trust import Surrogate
from agent_sat.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDiagnostics:
    """What the loss did with each token: detached [N], neutral where inactive; None: no such part."""

    active: Tensor  # bool, trained
    turn: Tensor  # int64
    lag: Tensor  # int64
    log_ratio: Tensor  # d = log pi - log mu of the token itself
    objective_log_ratio: Tensor  # g: at the method's granularity and denominator
    ratio: Tensor  # exp(g)
    surrogate: Tensor  # f(r, A)
    clipped: Tensor  # bool, the trust region cut the token
    keep: Tensor | None  # bool, masks let the token through
    correction: Tensor | None  # c of the correction
    contraction: Tensor | None  # SAT's c, on the side of g; 1 where its gate is off
    kl: Tensor | None  # the KL estimator against the reference policy
    strata: sat.Strata | None  # where SAT judges by stratum
    reference: sat.Reference | None  # SAT's, whoever fitted it
    settings: AlgorithmConfig

    @property
    def gate(self) -> Tensor | None:
        """[N] bool: SAT contracted the token's radius."""
        return None if self.contraction is None else (self.contraction < 1) & self.active

    @property
    def q(self) -> Tensor | None:
        """[N] what the gate compared |g| with; 0 gates nothing."""
        if self.reference is None:
            return None
        q = self.reference.q
        by_token = q.repeat(len(self.ratio)) if self.strata is None else self.strata.spread(q)
        return torch.from_numpy(by_token).to(self.ratio)

    @property
    def changed(self) -> Tensor | None:
        """[N] bool: cut by SAT's radii alone: inside the base method's interval, and no mask cut it."""
        if self.contraction is None:
            return None
        inside = (self.ratio <= 1 + self.settings.eps_high) & (self.ratio >= 1 - self.settings.eps_low)
        changed = self.clipped & inside
        if self.keep is not None:
            changed &= self.keep
        return changed if self.correction is None else changed & (self.correction > 0)

    @property
    def c_high(self) -> Tensor:
        """[N] factor on the upper radius."""
        return self._on_side(self.objective_log_ratio > 0)

    @property
    def c_low(self) -> Tensor:
        """[N] factor on the lower radius."""
        return self._on_side(self.objective_log_ratio < 0)

    def _on_side(self, side: Tensor) -> Tensor:
        if self.contraction is None:
            return torch.ones_like(self.ratio)
        return torch.where(side, self.contraction, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    loss: Tensor  # [] of this micro-batch; the step's loss is the sum over micro-batches
    tokens: TokenDiagnostics


def policy_loss(
    method: Method,
    batch: Batch,
    *,
    logprobs: Tensor,  # [N] log pi of the tokens, with gradient; anything where not trained
    entropy: Tensor,  # [N] with gradient where the method has an entropy coefficient
    version: int,  # of the trainer now
    reference: sat.Reference | None = None,
) -> LossOutput:
    """The loss of one micro-batch and what happened to each of its tokens.

    Without a `reference`, SAT fits q on this micro-batch: right for scope "microbatch", and for scope "step"
    when the step is one micro-batch. Masked or missing tokens may hold NaN or infinities: they are selected
    away before any arithmetic and get a gradient of exactly 0. Raises ValueError where log mu~ or reference
    log-probabilities are needed and missing.
    """
    settings = method.settings
    terms = read(
        batch,
        logprobs,
        granularity=settings.granularity,
        denominator=method.denominator,
        needs_recomputed=method.needs_recomputed,
        version=version,
    )
    terms, strata, reference = _contracted(method, terms, reference)
    surrogate: Surrogate = method.trust_region(terms)
    keep, correction, kl = _keep(method, terms), _correction(method, terms), _kl(method, batch, terms)
    loss = -(_product(batch.weights, keep, correction) * surrogate.values).sum()
    if kl is not None:
        loss = loss + settings.kl_coefficient * (batch.weights * kl).sum()
    if settings.entropy_coefficient > 0:
        loss = loss - settings.entropy_coefficient * (batch.weights * clean(entropy, terms.active)).sum()
    tokens = TokenDiagnostics(
        active=terms.active,
        turn=terms.turn,
        lag=terms.lag,
        log_ratio=terms.token_log_ratio,
        objective_log_ratio=terms.log_ratio.detach(),
        ratio=terms.ratio.detach(),
        surrogate=surrogate.values.detach(),
        clipped=torch.zeros_like(terms.active) if surrogate.clipped is None else surrogate.clipped,
        keep=keep,
        correction=correction,
        contraction=terms.contraction,
        kl=None if kl is None else kl.detach(),
        strata=strata,
        reference=reference,
        settings=settings,
    )
    return LossOutput(loss=loss, tokens=tokens)


def _contracted(
    method: Method, terms: Terms, reference: sat.Reference | None
) -> tuple[Terms, sat.Strata | None, sat.Reference | None]:
    """(terms with SAT's contraction, the tokens' strata, the reference used); unchanged without SAT."""
    if not method.uses_sat:
        return terms, None, None
    strata = sat.strata(method.settings, terms.turn)
    if reference is None:
        reference = sat.fit(method.settings, [sat.observe_terms(method.settings, terms, strata)])
    contraction = sat.contract(method.settings, terms.log_ratio, strata, reference)
    return replace(terms, contraction=contraction), strata, reference


def _product(weights: Tensor, keep: Tensor | None, correction: Tensor | None) -> Tensor:
    weights = weights if keep is None else weights * keep
    return weights if correction is None else weights * correction


def _keep(method: Method, terms: Terms) -> Tensor | None:
    if not method.masks:
        return None
    keep = terms.active
    for mask in method.masks:
        keep = keep & mask(terms)
    return keep


def _correction(method: Method, terms: Terms) -> Tensor | None:
    """[N] the detached weight of the method's correction, on the ratio and granularity it names."""
    if method.correction is None:
        return None
    implementation = method.settings.correction_ratio == "implementation"
    log_ratio = at_granularity(
        terms.implementation if implementation else terms.token_log_ratio,
        method.settings.correction_granularity,
        seq=terms.seq,
        turn=terms.turn,
        active=terms.active,
    )
    return method.correction(log_ratio)


def _kl(method: Method, batch: Batch, terms: Terms) -> Tensor | None:
    if not method.needs_reference:
        return None
    if batch.reference_logprobs is None:
        raise ValueError(
            f"{method.name}: kl_coefficient > 0 needs reference_logprobs, and the batch has none"
        )
    estimate: Callable[[Tensor], Tensor] = KL_ESTIMATORS[method.settings.kl_estimator]
    return estimate(terms.logprobs - clean(batch.reference_logprobs, terms.active))
