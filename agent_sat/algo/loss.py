"""The policy loss: L = -sum_i weights_i keep_i c_i f(r_i, A_i) + penalties.

aggregate  mask  correct trust(ratio)  penalty
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
    contraction: Tensor | None  # SAT's c, on the side of g
    gate: Tensor | None  # bool, SAT's gate
    q: Tensor | None  # SAT's reference for the token: [N], or [] where it is global
    changed: Tensor | None  # bool, SAT took this token's gradient and its base method would not have
    kl: Tensor | None  # the KL estimator against the reference policy

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
    reference: sat.Reference | None  # the one used, whoever fitted it


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
    gate = q = None
    if method.uses_sat:
        if reference is None:
            reference = sat.fit(settings, [sat.observe_terms(settings, terms)])
        contraction, gate, q = sat.contract(settings, terms, reference)
        terms = replace(terms, contraction=contraction)
    surrogate: Surrogate = method.trust_region(terms)
    keep, correction = _keep(method, terms), _correction(method, terms)
    factor = _product(keep, correction)
    weights = batch.weights
    loss = -((weights if factor is None else weights * factor) * surrogate.values).sum()
    kl = _kl(method, batch, terms)
    if kl is not None:
        loss = loss + settings.kl_coefficient * (weights * kl).sum()
    if settings.entropy_coefficient > 0:
        loss = loss - settings.entropy_coefficient * (weights * clean(entropy, terms.active)).sum()
    tokens = TokenDiagnostics(
        active=terms.active,
        turn=terms.turn,
        lag=terms.lag,
        log_ratio=terms.token_log_ratio,
        objective_log_ratio=terms.log_ratio.detach(),
        ratio=terms.ratio.detach(),
        surrogate=surrogate.values.detach(),
        clipped=_or_false(surrogate.clipped, terms),
        keep=keep,
        correction=correction,
        contraction=terms.contraction,
        gate=gate,
        q=q,
        changed=None if gate is None else _changed(method, terms, surrogate, factor),
        kl=None if kl is None else kl.detach(),
    )
    return LossOutput(loss=loss, tokens=tokens, reference=reference)


def _product(keep: Tensor | None, correction: Tensor | None) -> Tensor | None:
    if keep is None or correction is None:
        return correction if keep is None else keep
    return keep * correction


def _or_false(clipped: Tensor | None, terms: Terms) -> Tensor:
    return torch.zeros_like(terms.active) if clipped is None else clipped


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


def _changed(method: Method, terms: Terms, surrogate: Surrogate, factor: Tensor | None) -> Tensor | None:
    """[N] bool: cut by SAT's radii alone: inside the base method's interval, and no mask cut it."""
    if surrogate.clipped is None:
        return None
    ratio, settings = terms.ratio.detach(), method.settings
    changed = surrogate.clipped & (ratio <= 1 + settings.eps_high) & (ratio >= 1 - settings.eps_low)
    return changed if factor is None else changed & (factor > 0)
