"""Weights on their way to the engine."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def snapshot(model: PreTrainedModel) -> dict[str, Tensor]:
    """Host copies of every weight by name, safe from the trainer's next update."""
    with torch.no_grad():
        return {name: weight.detach().to("cpu", copy=True) for name, weight in model.state_dict().items()}


def num_bytes(weights: dict[str, Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights.values())
