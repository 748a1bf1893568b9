"""SAT's reference q and the contraction factors it gives (equations 3.1 to 3.4 of the SAT article).

q is an order statistic of |g| over the trained tokens of a scope: one for all of them, or one per stratum.
The stratum is any per-token id; here it is the tool turn. Nothing in this module carries gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_sat.algo.ratio import Terms, at_granularity, read
from agent_sat.types import Batch

if TYPE_CHECKING:
    from agent_sat.algo.methods import Method
    from agent_sat.algo.settings import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The mismatch of M trained tokens: all that q needs of a micro-batch, so all that ranks exchange."""

    magnitude: Tensor  # [M] |g|, or |log mu~ - log mu| for the anchor "implementation"
    stratum: Tensor  # [M] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """q by stratum, after fallback and anchor. Its tensors are the state that the anchor "ema" needs back."""

    q: Tensor  # [strata] what the gate compares with; 0 gates nothing
    batch_q: Tensor  # [strata] the order statistic of this scope alone, before anchors
    num_tokens: Tensor  # [strata] int64
    fell_back: Tensor  # [strata] bool, has tokens but fewer than min_tokens: took the global q


def strata(settings: AlgorithmConfig, turn: Tensor) -> Tensor:
    """[N] int64: the turn, those from max_turn on together; 0 for all where the reference is global."""
    if settings.reference == "turn":
        return turn.clamp(0, settings.max_turn)
    return torch.zeros_like(turn)


def observe_terms(settings: AlgorithmConfig, terms: Terms) -> Observed:
    """The mismatch of the trained tokens of one micro-batch."""
    log_ratio = terms.log_ratio.detach()
    if settings.anchor == "implementation":
        log_ratio = at_granularity(
            terms.implementation, settings.granularity, seq=terms.seq, turn=terms.turn, active=terms.active
        )
    return Observed(
        magnitude=log_ratio.abs()[terms.active], stratum=strata(settings, terms.turn)[terms.active]
    )


def observe(method: Method, batch: Batch, logprobs: Tensor) -> Observed:
    """The same from the log-probabilities of a pass without gradient: what scope "step" gathers first."""
    settings = method.settings
    terms = read(
        batch,
        logprobs.detach(),
        granularity=settings.granularity,
        denominator=settings.denominator or "behavior",
        needs_recomputed=method.needs_recomputed,
        version=0,
    )
    return observe_terms(settings, terms)


def rank(level: float, count: int) -> int:
    """ceil(level * count), with `level` taken as the decimal it was written as: 0.7 * 10 is 7, not 8."""
    return math.ceil(Fraction(repr(level)) * count)


def order_statistics(
    values: NDArray[np.floating], stratum: NDArray[np.integer], num_strata: int, level: float
) -> NDArray[np.floating]:
    """[num_strata] inf{x : F(x) >= level} of each stratum's values, 0 for an empty one; equation (3.3).

    One radix sort of the (small) stratum ids brings each stratum together, then each is partitioned: a value
    sort of everything would cost several times as much.
    """
    counts = np.bincount(stratum, minlength=num_strata)
    if num_strata > 1:
        small = stratum.astype(np.uint8 if num_strata <= 256 else np.uint32)
        values = values[np.argsort(small, kind="stable")]
    found = np.zeros(num_strata, values.dtype)
    for k, part in enumerate(np.split(values, np.cumsum(counts)[:-1])):
        if len(part):
            index = max(rank(level, len(part)), 1) - 1
            found[k] = np.partition(part, index)[index]
    return found


def fit(
    settings: AlgorithmConfig, observed: Sequence[Observed], *, previous: Reference | None = None
) -> Reference:
    """q of everything observed: one micro-batch, or all those of a step and of all ranks.

    Selection runs in NumPy on the host, once a step: its partition takes a tenth of torch.kthvalue's time.
    `previous` is the last step's Reference, read by the anchor "ema" alone.
    """
    device = observed[0].magnitude.device
    values = torch.cat([part.magnitude for part in observed]).cpu().numpy()
    stratum = torch.cat([part.stratum for part in observed]).cpu().numpy()
    num_strata = settings.max_turn + 1 if settings.reference == "turn" else 1
    batch_q = order_statistics(values, stratum, num_strata, settings.level)
    counts = np.bincount(stratum, minlength=num_strata)
    fell_back = (counts > 0) & (counts < settings.min_tokens) & (num_strata > 1)
    if fell_back.any():
        overall = order_statistics(values, np.zeros_like(stratum), 1, settings.level)
        batch_q = np.where(fell_back, overall, batch_q)
    q = torch.from_numpy(batch_q).to(device)
    num_tokens = torch.from_numpy(counts).to(device)
    return Reference(
        q=_anchor(settings, q, num_tokens, previous),
        batch_q=q,
        num_tokens=num_tokens,
        fell_back=torch.from_numpy(fell_back).to(device),
    )


def _anchor(settings: AlgorithmConfig, q: Tensor, num_tokens: Tensor, previous: Reference | None) -> Tensor:
    if settings.anchor == "ceiling":
        return q.clamp_max(settings.ceiling)
    if settings.anchor == "ema" and previous is not None:
        past, decay = previous.q.to(q), settings.ema_decay
        average = decay * past + (1 - decay) * q
        # a stratum seen for the first time starts at its own q; one without tokens keeps its past
        return torch.where(num_tokens > 0, torch.where(past > 0, average, q), past)
    return q


def contract(settings: AlgorithmConfig, terms: Terms, reference: Reference) -> tuple[Tensor, Tensor, Tensor]:
    """(c [N] in (0, 1], gate [N] bool, q [N] or []): equations (3.2) and (3.4).

    c is psi(|g|; q) = 1 / (1 + (|g| / q)^exponent) where |g| > q > 0 (strict) and exactly 1 elsewhere; it
    belongs to the end of the clip interval on the side of g.
    """
    magnitude = terms.log_ratio.detach().abs()
    table = reference.q.to(magnitude)
    q = table[strata(settings, terms.turn)] if settings.reference == "turn" else table[0]
    gate = (magnitude > q) & (q > 0) & terms.active
    psi = 1 / (1 + (magnitude / q).pow(settings.exponent))
    return torch.where(gate, psi, 1.0), gate, q
