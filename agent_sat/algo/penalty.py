"""Penalties: per-token estimators of KL(pi || reference)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_EXPONENT = 20.0


def k1(log_ratio: Tensor) -> Tensor:
    """x = log pi - log reference (Schulman 2020): unbiased in value; as a loss its gradient has mean zero."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """x^2 / 2: biased in value, and its gradient is that of the KL on policy."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x (also called low_var_kl): unbiased in value, never negative.

    Beyond -x = 20 it goes on along its tangent: finite, and the gradient keeps its direction. Libraries that
    clamp there give no gradient or, with x unclamped, one that pushes the wrong way.
    """
    inverse = -log_ratio
    bounded = inverse.clamp_max(MAX_EXPONENT)
    return torch.exp(bounded) * (1 + (inverse - bounded)) - 1 - inverse


Estimator = Callable[[Tensor], Tensor]

KL_ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}
