"""SAT's reference q and the contraction factors it gives (equations 3.1 to 3.4 of the SAT article).

q is an order statistic of |g| over the trained tokens of a scope: one for all of them, or one per stratum.
The stratum is any per-token id; here it is the tool turn. Nothing in this module carries gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

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

    magnitude: NDArray[np.floating]  # [M] |g|, or |log mu~ - log mu| for the anchor "implementation"
    stratum: NDArray[np.integer] | None  # [M]; None: one q for all


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """q by stratum, after fallback and anchor; on the host. The anchor "ema" needs the last one back."""

    q: NDArray[np.floating]  # [strata] what the gate compares with; 0 gates nothing
    batch_q: NDArray[np.floating]  # [strata] the order statistic of this scope alone, before anchors
    num_tokens: NDArray[np.integer]  # [strata]
    fell_back: NDArray[np.bool_]  # [strata] has tokens, but fewer than min_tokens: took the global q


def strata(settings: AlgorithmConfig, turn: Tensor) -> Tensor | None:
    """[N] int64: the turn, those from max_turn on together; None where one q serves all tokens."""
    return turn.clamp(0, settings.max_turn) if settings.reference == "turn" else None


def observe_terms(settings: AlgorithmConfig, terms: Terms, stratum: Tensor | None) -> Observed:
    """The mismatch of the trained tokens of one micro-batch; `stratum` as `strata` gives it."""
    log_ratio = terms.log_ratio.detach()
    if settings.anchor == "implementation":
        log_ratio = at_granularity(
            terms.implementation, settings.granularity, seq=terms.seq, turn=terms.turn, active=terms.active
        )
    magnitude = log_ratio.abs().cpu().numpy()
    active = terms.active.cpu().numpy()
    small = np.uint8 if settings.max_turn < 256 else np.uint16  # NumPy sorts small integers by radix
    ids = None if stratum is None else stratum.cpu().numpy().astype(small)
    if active.all():
        return Observed(magnitude=magnitude, stratum=ids)
    return Observed(magnitude=magnitude[active], stratum=None if ids is None else ids[active])


def observe(method: Method, batch: Batch, logprobs: Tensor) -> Observed:
    """The same from the log-probabilities of a pass without gradient: what scope "step" gathers first."""
    settings = method.settings
    terms = read(
        batch,
        logprobs.detach(),
        granularity=settings.granularity,
        denominator=method.denominator,
        needs_recomputed=method.needs_recomputed,
        version=0,
    )
    return observe_terms(settings, terms, strata(settings, batch.turn))


def rank(level: float, count: int) -> int:
    """ceil(level * count), with `level` taken as the decimal it was written as: 0.7 * 10 is 7, not 8."""
    numerator, denominator = Decimal(repr(level)).as_integer_ratio()
    return -(-numerator * count // denominator)


def smallest(values: NDArray[np.floating], rank: int) -> np.floating:
    """The rank-th smallest value, counted from 1."""
    return np.partition(values, rank - 1)[rank - 1]


def count(stratum: NDArray[np.integer], num_strata: int) -> NDArray[np.integer]:
    """[strata] number of tokens, counted by runs: tokens of one turn stand together."""
    starts = np.flatnonzero(np.concatenate([[len(stratum) > 0], stratum[1:] != stratum[:-1]]))
    lengths = np.diff(starts, append=len(stratum))
    return np.bincount(stratum[starts], weights=lengths, minlength=num_strata).astype(np.int64)


def order_statistics(
    values: NDArray[np.floating], stratum: NDArray[np.integer], counts: NDArray[np.integer], level: float
) -> NDArray[np.floating]:
    """[strata] inf{x : F(x) >= level} of each stratum's values, 0 for an empty one; equation (3.3).

    Exact without sorting the values. Only the upper tail of everything, three times as wide as a stratum's
    own, is brought together by stratum; a stratum so calm that its q lies below that tail is selected alone.
    """
    tail_rank = max(3 * rank(level, len(values)) - 2 * len(values), 1)
    tail = np.flatnonzero(values >= smallest(values, tail_rank))
    tail_values, tail_stratum = values[tail], stratum[tail]
    tail_counts = np.bincount(tail_stratum, minlength=len(counts))
    ends = np.cumsum(tail_counts)
    tail_values = tail_values[np.argsort(tail_stratum, kind="stable")]
    found = np.zeros(len(counts), values.dtype)
    for k in np.flatnonzero(counts):
        wanted = rank(level, int(counts[k]))
        below_tail = counts[k] - tail_counts[k]
        if wanted > below_tail:
            found[k] = smallest(tail_values[ends[k] - tail_counts[k] : ends[k]], wanted - below_tail)
        else:
            found[k] = smallest(values[stratum == k], wanted)
    return found


def fit(
    settings: AlgorithmConfig, observed: Sequence[Observed], *, previous: Reference | None = None
) -> Reference:
    """q of everything observed: one micro-batch, or all those of a step and of all ranks.

    Selection runs in NumPy on the host: its partition takes a tenth of torch.kthvalue's time.
    `previous` is the last step's Reference, read by the anchor "ema" alone.
    """
    values = _joined([part.magnitude for part in observed])
    ids = [part.stratum for part in observed if part.stratum is not None]
    stratum = _joined(ids) if ids else None
    counts = np.array([len(values)]) if stratum is None else count(stratum, settings.max_turn + 1)
    fell_back = (counts > 0) & (counts < settings.min_tokens) & (stratum is not None)
    batch_q = np.zeros(len(counts), values.dtype)
    if len(values) and stratum is not None:
        batch_q = order_statistics(values, stratum, counts, settings.level)
    if len(values) and (stratum is None or fell_back.any()):
        overall = smallest(values, rank(settings.level, len(values)))
        batch_q = np.where(fell_back | (stratum is None), overall, batch_q)
    return Reference(
        q=_anchor(settings, batch_q, counts, previous),
        batch_q=batch_q,
        num_tokens=counts,
        fell_back=fell_back,
    )


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _anchor(
    settings: AlgorithmConfig,
    q: NDArray[np.floating],
    counts: NDArray[np.integer],
    previous: Reference | None,
) -> NDArray[np.floating]:
    if settings.anchor == "ceiling":
        return np.minimum(q, q.dtype.type(settings.ceiling))
    if settings.anchor == "ema" and previous is not None:
        past, decay = previous.q, settings.ema_decay
        average = decay * past + (1 - decay) * q
        # a stratum seen for the first time starts at its own q; one without tokens keeps its past
        return np.where(counts > 0, np.where(past > 0, average, q), past).astype(q.dtype)
    return q


def contract(
    settings: AlgorithmConfig, log_ratio: Tensor, stratum: Tensor | None, reference: Reference
) -> Tensor:
    """[N] c in (0, 1]: equations (3.2) and (3.4).

    c is psi(|g|; q) = 1 / (1 + (|g| / q)^exponent) where |g| > q > 0 (strict) and exactly 1 elsewhere; it
    belongs to the end of the clip interval on the side of g.
    """
    magnitude = log_ratio.detach().abs()
    # a q of 0 gates nothing: compare with infinity instead
    usable = torch.from_numpy(np.where(reference.q > 0, reference.q, np.inf)).to(magnitude)
    q = usable[0] if stratum is None else usable.index_select(0, stratum)
    # sign(relu(u - q)) is 1 where u > q and 0 elsewhere, exactly, and much faster on a CPU than a comparison
    gate = (magnitude - q).clamp_min_(0).sign_()
    return magnitude.div_(q).pow_(settings.exponent).mul_(gate).add_(1).reciprocal_()
