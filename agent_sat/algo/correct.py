"""Corrections: detached importance weights c >= 0 on each token's policy term.

A correction takes the log of its ratio ([N], detached, averaged where `correction_granularity` says so) and
parameters named like fields of AlgorithmConfig.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agent_sat.algo.ratio import exponential


def tis(log_ratio: Tensor, *, tis_cap: float) -> Tensor:
    """min(ratio, cap): truncated importance sampling (section 4.c); cap = inf corrects fully."""
    return exponential(log_ratio).clamp_max(tis_cap)


def icepop(log_ratio: Tensor, *, icepop_low: float, icepop_high: float) -> Tensor:
    """ratio where low <= ratio <= high, else 0 (IcePop; section 4.c)."""
    ratio = exponential(log_ratio)
    return torch.where((ratio >= icepop_low) & (ratio <= icepop_high), ratio, 0.0)


Correction = Callable[..., Tensor]

CORRECTIONS: dict[str, Correction] = {"tis": tis, "icepop": icepop}
