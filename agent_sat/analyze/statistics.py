"""Intervals and paired differences over a handful of seeds, without pretending to know more than they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

LEAST_PAIRS = 3  # below it no interval is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds with a Student interval; the bounds are NaN below two values."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean and Student t interval of independent values; NaN values are left out."""
    known = np.array([value for value in values if math.isfinite(value)], np.float64)
    if not len(known):
        return Estimate(mean=math.nan, low=math.nan, high=math.nan, count=0)
    mean = float(known.mean())
    if len(known) == 1:
        return Estimate(mean=mean, low=math.nan, high=math.nan, count=1)
    half = (
        student_quantile(0.5 + level / 2, len(known) - 1) * float(known.std(ddof=1)) / math.sqrt(len(known))
    )
    return Estimate(mean=mean, low=mean - half, high=mean + half, count=len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Paired differences, candidate minus baseline, over the seeds that both have."""

    pairs: int
    estimate: Estimate  # simultaneous: the level is that of all comparisons together

    @property
    def separable(self) -> bool:
        return self.pairs >= LEAST_PAIRS and (self.estimate.low > 0 or self.estimate.high < 0)


def paired(
    candidate: dict[int, float], baseline: dict[int, float], *, comparisons: int = 1, level: float = 0.95
) -> Difference:
    """The difference over common seeds; with several comparisons each interval is widened (Bonferroni)."""
    seeds = sorted(set(candidate) & set(baseline))
    differences = [candidate[seed] - baseline[seed] for seed in seeds]
    known = [value for value in differences if math.isfinite(value)]
    return Difference(pairs=len(known), estimate=estimate(known, 1 - (1 - level) / max(1, comparisons)))


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """The value that a Student t variable stays below with this probability.

    By t = sqrt(n) tan(a) the density becomes cos(a)^(n-1), smooth on a finite interval: its integral is
    inverted on a grid. The error is below 1e-6 relative for probabilities up to 0.99995.
    """
    angle = np.linspace(-math.pi / 2, math.pi / 2, 400_001)
    density = np.cos(angle) ** (degrees - 1)
    area: NDArray[np.float64] = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(float(np.interp(probability, area / area[-1], angle)))
