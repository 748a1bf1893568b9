"""The optimizer and the guard around its step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from agent_sat.config import TrainConfig
from agent_sat.errors import TrainingDiverged


def make_optimizer(model: PreTrainedModel, config: TrainConfig) -> AdamW:
    return AdamW(
        model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )


def set_learning_rate(optimizer: AdamW, config: TrainConfig, version: int) -> float:
    """Linear warm-up over the first updates, then constant; returns the rate of update `version` + 1."""
    rate = config.learning_rate * min(1.0, (version + 1) / max(1, config.warmup_steps))
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def clip_gradient(model: PreTrainedModel, max_norm: float) -> Tensor:
    """Scale the gradient down to `max_norm`; returns its norm before, a scalar that may be non-finite."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def non_finite_gradients(model: PreTrainedModel) -> list[str]:
    """Names of the parameters whose gradient holds NaN or inf."""
    return [
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and not torch.isfinite(weight.grad).all()
    ]


class SkipGuard:
    """Counts steps in a row without an update because something was not finite, and ends the run after a few."""

    def __init__(self, max_in_a_row: int) -> None:
        self.max_in_a_row = max_in_a_row
        self.in_a_row = 0

    def updated(self) -> None:
        self.in_a_row = 0

    def skipped(self, reason: str) -> None:
        """Raises TrainingDiverged after `max_in_a_row` calls without an update between them."""
        self.in_a_row += 1
        if self.in_a_row >= self.max_in_a_row:
            raise TrainingDiverged(
                f"{self.in_a_row} steps in a row made no update, the last because of {reason}; "
                "lower train.learning_rate, or resume from an earlier checkpoint"
            )
