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


@dataclass(frozen=True, slots=True, kw_only=True)
class Strata:
    """The stratum of each of N tokens, told once a run: tokens of one turn stand together."""

    ids: NDArray[np.integer]  # [runs]
    lengths: NDArray[np.integer]  # [runs], their sum is N

    def tokens(self) -> NDArray[np.integer]:
        """[N]"""
        return np.repeat(self.ids, self.lengths)

    def spread(self, table: NDArray[Any]) -> NDArray[Any]:
        """[N] each token's entry of a table by stratum."""
        return np.repeat(table[self.ids], self.lengths)


def runs(values: NDArray[Any]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """(first place, length) of each run of equal values."""
    starts = np.flatnonzero(np.concatenate([[len(values) > 0], values[1:] != values[:-1]]))
    return starts, np.diff(starts, append=len(values))


def strata(settings: AlgorithmConfig, turn: Tensor) -> Strata | None:
    """The turn, those from max_turn on together; None where one q serves all tokens."""
    if settings.reference != "turn":
        return None
    turns = turn.cpu().numpy()
    starts, lengths = runs(turns)
    small = np.uint8 if settings.max_turn < 256 else np.uint16
    return Strata(ids=turns[starts].clip(0, settings.max_turn).astype(small), lengths=lengths)


def observe_terms(settings: AlgorithmConfig, terms: Terms, stratum: Strata | None) -> Observed:
    """The mismatch of the trained tokens of one micro-batch; `stratum` as `strata` gives it."""
    log_ratio = terms.log_ratio.detach()
    if settings.anchor == "implementation":
        log_ratio = at_granularity(
            terms.implementation, settings.granularity, seq=terms.seq, turn=terms.turn, active=terms.active
        )
    magnitude = log_ratio.abs().cpu().numpy()
    active = terms.active.cpu().numpy()
    ids = None if stratum is None else stratum.tokens()
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


def by_stratum(
    values: NDArray[np.floating], stratum: NDArray[np.integer], num_strata: int
) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
    """(values brought together by stratum [M], tokens of each stratum [strata]); whole runs are moved."""
    starts, lengths = runs(stratum)
    order = np.argsort(stratum[starts], kind="stable")
    counts = np.bincount(stratum[starts], weights=lengths, minlength=num_strata).astype(np.int64)
    starts, lengths = starts[order], lengths[order]
    index = np.repeat((starts - np.cumsum(lengths) + lengths).astype(np.int32), lengths)
    index += np.arange(len(values), dtype=np.int32)
    # torch gathers by 32-bit places, NumPy would widen them first: twice as long
    return torch.from_numpy(values).index_select(0, torch.from_numpy(index)).numpy(), counts


def order_statistics(
    grouped: NDArray[np.floating], counts: NDArray[np.integer], level: float
) -> NDArray[np.floating]:
    """[strata] inf{x : F(x) >= level} of each stratum's values, 0 for an empty one; equation (3.3).

    `grouped` [M] holds the strata one after the other; a partition of each selects without sorting.
    """
    ends = np.cumsum(counts)
    found = np.zeros(len(counts), grouped.dtype)
    for k in np.flatnonzero(counts):
        found[k] = smallest(grouped[ends[k] - counts[k] : ends[k]], rank(level, int(counts[k])))
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
    counts = np.array([len(values)])
    if ids:
        values, counts = by_stratum(values, _joined(ids), settings.max_turn + 1)
    fell_back = (counts > 0) & (counts < settings.min_tokens) & bool(ids)
    batch_q = order_statistics(values, counts, settings.level)
    if fell_back.any():
        batch_q = np.where(fell_back, smallest(values, rank(settings.level, len(values))), batch_q)
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
    settings: AlgorithmConfig, log_ratio: Tensor, stratum: Strata | None, reference: Reference
) -> Tensor:
    """[N] c in (0, 1]: equations (3.2) and (3.4).

    c is psi(|g|; q) = 1 / (1 + (|g| / q)^exponent) where |g| > q > 0 (strict) and exactly 1 elsewhere; it
    belongs to the end of the clip interval on the side of g.
    """
    usable = np.where(reference.q > 0, reference.q, np.inf)  # a q of 0 gates nothing
    q = torch.from_numpy(usable if stratum is None else stratum.spread(usable)).to(log_ratio)
    # the quotient of two floats is above 1 exactly where the first is larger
    excess = torch.threshold_(torch.div(log_ratio.detach(), q).abs_(), 1.0, 0.0)
    return excess.pow_(settings.exponent).add_(1).reciprocal_()
