"""Expert routers of transformers models: how they are found, and what they chose."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from agent_sat.errors import EngineError


def find_routers(model: nn.Module) -> list[Any]:
    """The model's routers (classes *TopKRouter or *TopkRouter), in model order; none in a dense model."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def chosen_experts(outputs: object) -> Tensor:
    """The chosen experts [N, top_k] among what a router gives: its one integer tensor."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    found = [part for part in parts if isinstance(part, Tensor) and not part.is_floating_point()]
    if len(found) != 1:
        raise EngineError(
            f"a router gave {len(found)} integer tensors; one, the chosen experts, is understood"
        )
    return found[0]
