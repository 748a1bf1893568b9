"""The mean lag that a steady state predicts, to stand beside the measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedLag:
    """In optimizer updates, split as the article's Part 01 does."""

    pre_queue: float  # passed while a response is generated
    in_queue: float  # passed while it waits

    @property
    def mean(self) -> float:
        return self.pre_queue + self.in_queue


def predicted_lag(
    *, throughput_ratio: float, concurrency: int, pull: int, queue_capacity: int, tailness: float
) -> PredictedLag:
    """Steady-state mean lag (Part 01, mean staleness).

    `throughput_ratio` is rollout over trainer tokens/s, `concurrency` responses in flight, `pull` responses a
    step, `queue_capacity` responses waiting at most, `tailness` as in `tailness`. At ratio 1 the
    rollout-bound branch is taken.
    """
    if throughput_ratio <= 1:
        return PredictedLag(pre_queue=concurrency * tailness / pull, in_queue=throughput_ratio)
    return PredictedLag(
        pre_queue=concurrency * tailness / (throughput_ratio * pull),
        in_queue=(2 * queue_capacity / pull + throughput_ratio - 1) / (2 * throughput_ratio),
    )


def tailness(lengths_by_group: Sequence[Sequence[int]]) -> float:
    """Longest response of a group over the mean response, averaged over groups; 1 where all are equal."""
    longest = np.mean([max(lengths) for lengths in lengths_by_group])
    mean = np.mean([np.mean(lengths) for lengths in lengths_by_group])
    return float(longest / mean) if mean > 0 else 1.0
