"""How steady a run was: best and last reward, collapse by a fixed rule, spikes of the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_sat.analyze.runs import Run, Window

SMOOTH_STEPS = 5
NOISE_FACTOR = 6.0
SPIKE_FACTOR, SPIKE_MEMORY = 5.0, 20
COLLAPSE_RULE = (
    f"A run collapsed if, after its best trailing mean reward over {SMOOTH_STEPS} steps, it fell below "
    "half of the best (measured from the lowest step reward or 0, whichever is lower), stayed there for "
    f"{SMOOTH_STEPS} steps or to the end, and the fall was over {NOISE_FACTOR:g} standard errors of it, "
    "judged by the median step-to-step change; or if the run failed because training diverged."
)
SPIKE_RULE = (
    f"A spike is a gradient norm over {SPIKE_FACTOR:g} times the median of the {SPIKE_MEMORY} before it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """What became of the reward; NaN and -1 where there was nothing to judge."""

    num_steps: int
    first: float  # trailing mean at the first step that has a whole window
    best: float  # highest trailing mean
    best_step: int
    last: float  # trailing mean at the end
    collapsed: bool
    collapse_step: int  # first step of the fall; -1 without collapse
    spikes: tuple[int, ...]  # steps whose gradient norm was a spike
    skipped: int  # optimizer steps that were skipped


def stability(run: Run, window: Window | None = None) -> Stability:
    """The reward and gradient history of a run within a window of steps."""
    rows = [row for row in run.metrics if int(row["step"]) in (window or Window())]
    steps, rewards = series(rows, "reward/mean")
    smooth = trailing_mean(rewards, SMOOTH_STEPS)
    best = int(np.argmax(smooth)) if len(smooth) else -1
    fall = collapse_index(rewards)
    last_session = (run.manifest.get("sessions") or [{}])[-1]
    diverged = (
        run.manifest.get("state") == "failed" and "diverged" in str(last_session.get("cause", "")).lower()
    )
    norm_steps, norms = series(rows, "train/grad_norm")
    return Stability(
        num_steps=len(rows),
        first=float(smooth[min(SMOOTH_STEPS, len(smooth)) - 1]) if len(smooth) else math.nan,
        best=float(smooth[best]) if len(smooth) else math.nan,
        best_step=int(steps[best]) if len(smooth) else -1,
        last=float(smooth[-1]) if len(smooth) else math.nan,
        collapsed=fall is not None or diverged,
        collapse_step=int(steps[fall])
        if fall is not None
        else int(steps[-1])
        if diverged and len(steps)
        else -1,
        spikes=tuple(int(norm_steps[i]) for i in spike_indices(norms)),
        skipped=sum(1 for row in rows if float(row.get("train/skipped", 0) or 0) > 0),
    )


def series(rows: Sequence[dict[str, Any]], name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps and values of one metric where it is a finite number."""
    found = [(int(row["step"]), float(row[name])) for row in rows if isinstance(row.get(name), int | float)]
    finite = [(step, value) for step, value in found if math.isfinite(value)]
    return np.array([s for s, _ in finite], np.int64), np.array([v for _, v in finite], np.float64)


def trailing_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of each value and up to window - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(1, len(values) + 1)
    start = np.maximum(0, index - window)
    return (sums[index] - sums[start]) / (index - start)


def collapse_index(rewards: NDArray[np.float64]) -> int | None:
    """Where the trailing mean first fell for good by COLLAPSE_RULE; None where it did not."""
    if len(rewards) < 2 * SMOOTH_STEPS:
        return None
    smooth = trailing_mean(rewards, SMOOTH_STEPS)
    whole = smooth[SMOOTH_STEPS - 1 :]  # a mean over fewer steps is no basis for a best
    best = int(np.argmax(whole)) + SMOOTH_STEPS - 1
    floor = min(0.0, float(rewards.min()))
    changes = np.diff(rewards)
    spread = 1.4826 * float(
        np.median(np.abs(changes - np.median(changes)))
    )  # a fall itself must not count as noise
    noise = spread / math.sqrt(2 * SMOOTH_STEPS)
    low = (smooth < floor + (smooth[best] - floor) / 2) & (smooth[best] - smooth > NOISE_FACTOR * noise)
    for start in range(best + 1, len(smooth)):
        if low[start : start + SMOOTH_STEPS].all():
            return start
    return None


def spike_indices(norms: NDArray[np.float64]) -> list[int]:
    """Indices of SPIKE_RULE; the first five steps have too little before them to judge."""
    return [
        i
        for i in range(5, len(norms))
        if norms[i] > SPIKE_FACTOR * float(np.median(norms[max(0, i - SPIKE_MEMORY) : i]))
    ]
