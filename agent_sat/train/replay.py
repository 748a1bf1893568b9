"""Routing replay (R3): the trainer's routers select the experts that the engine's routers selected.

A router of transformers scores all experts, picks the best by `torch.topk` and turns their scores into gates
in its model's own way. Replay replaces that one selection: scores, normalisation and gradient stay the
model's, also for experts that the live router would not have picked. (Ma et al. 2025, Stabilizing MoE
reinforcement learning by aligning training and inference routers: gates are the softmax over the recorded
set; here the set enters each model's own convention, which for softmax routers is that.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agent_sat.errors import ConfigError
from agent_sat.rollout.routers import chosen_experts, find_routers
from agent_sat.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOverlap:
    """How recorded and live routes compare; counts add up over micro-batches and ranks."""

    num_rows: int  # tokens x layers
    num_recorded: int  # of them with a recorded row
    num_differing: int  # of the recorded, with another set than the live top-k

    def __add__(self, other: RouteOverlap) -> RouteOverlap:
        return RouteOverlap(
            num_rows=self.num_rows + other.num_rows,
            num_recorded=self.num_recorded + other.num_recorded,
            num_differing=self.num_differing + other.num_differing,
        )

    @property
    def coverage(self) -> float:
        return self.num_recorded / max(1, self.num_rows)

    @property
    def differing(self) -> float:
        return self.num_differing / max(1, self.num_recorded)

    def metrics(self) -> Metrics:
        return {"replay/route_coverage": self.coverage, "replay/routes_differing": self.differing}


def route_overlap(recorded: Tensor, live: Tensor) -> RouteOverlap:
    """Compare experts [tokens, layers, top_k] row by row as sets; a recorded row with a -1 is missing."""
    present = (recorded >= 0).all(dim=-1)
    differing = (recorded.sort(dim=-1).values != live.sort(dim=-1).values).any(dim=-1) & present
    return RouteOverlap(
        num_rows=present.numel(), num_recorded=int(present.sum()), num_differing=int(differing.sum())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one forward pass replays, and what its routers would have chosen themselves."""

    routers: list[Any]
    experts: Tensor  # [tokens, layers, top_k] int64, -1 where missing
    live: dict[int, Tensor] = field(default_factory=dict)  # layer -> [tokens, top_k], once it has run

    def overlap(self, real: Tensor) -> RouteOverlap:
        """Recorded against live routes of the tokens that `real` names by place or mask, i.e. without padding."""
        live = torch.stack([self.live[layer] for layer in range(len(self.routers))], dim=1)
        return route_overlap(self.experts[real], live[real])

    def forward(self, layer: int) -> Callable[..., Any]:
        """The forward of a layer's router that selects the recorded experts."""
        router, recorded = self.routers[layer], self.experts[:, layer]
        own = type(router).forward

        def replaying(*args: Any, **kwargs: Any) -> Any:
            grouped = num_groups(router) > 1  # forced groups hide what the router itself would have chosen
            if grouped and layer not in self.live:
                with torch.no_grad():
                    self.live[layer] = chosen_experts(own(router, *args, **kwargs))
            with _Selection(router, recorded) as selection:
                outputs = own(router, *args, **kwargs)
            if selection.live is not None:
                self.live.setdefault(layer, selection.live)
            if selection.live is None:
                raise ConfigError(
                    f"{type(router).__name__} did not select {recorded.shape[-1]} of {router.num_experts} "
                    "experts by torch.topk; routing replay does not know this router"
                )
            return outputs

        return replaying


@contextmanager
def replay_routes(model: nn.Module, experts: Tensor) -> Iterator[Replay]:
    """Route by `experts` while the block runs, and whenever a checkpointed part of it is computed again.

    experts [tokens, layers, top_k] int64, tokens flattened as the routers see them (batch x sequence), layers
    in model order. A row with a -1 is missing: there the router chooses live. Backward may run after the
    block. Raises ConfigError for a model without routers or with another number of them, and in the forward
    pass for a router that does not select by `torch.topk`.
    """
    routers = find_routers(model)
    if len(routers) != experts.shape[1]:
        raise ConfigError(
            f"routes of {experts.shape[1]} layers cannot be replayed in {type(model).__name__}, which has "
            f"{len(routers)} expert routers; a dense model is trained without routing replay"
        )
    replay = Replay(routers=routers, experts=experts)
    with _selecting(replay), _bound_to_checkpoints(model, replay):
        yield replay


@contextmanager
def _selecting(replay: Replay) -> Iterator[None]:
    """Put the replaying forwards on the routers; blocks may be nested."""
    before = [vars(router).get("forward") for router in replay.routers]
    try:
        for layer, router in enumerate(replay.routers):
            router.forward = replay.forward(layer)
        yield
    finally:
        for router, forward in zip(replay.routers, before, strict=True):
            if forward is None:
                del router.forward
            else:
                router.forward = forward


@contextmanager
def _bound_to_checkpoints(model: nn.Module, replay: Replay) -> Iterator[None]:
    """Have every checkpointed call keep its replay: it runs again in the backward pass, after the block."""
    owners: list[Any] = [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
    if not owners and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ConfigError(f"{type(model).__name__} checkpoints in a way that routing replay cannot follow")
    before = [owner._gradient_checkpointing_func for owner in owners]

    def bound(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def replayed(*inputs: Any, **named: Any) -> Any:
                with _selecting(replay):
                    return function(*inputs, **named)

            return checkpoint(replayed, *args, **kwargs)

        return call

    try:
        for owner, checkpoint in zip(owners, before, strict=True):
            owner._gradient_checkpointing_func = bound(checkpoint)
        yield
    finally:
        for owner, checkpoint in zip(owners, before, strict=True):
            owner._gradient_checkpointing_func = checkpoint


def num_groups(router: Any) -> int:
    """Groups of experts that a router first chooses among; 1 for most."""
    return int(getattr(router, "num_group", None) or 1)


class _Selection(TorchFunctionMode):
    """Answers a router's own call of topk over its experts with the recorded ones."""

    def __init__(self, router: Any, recorded: Tensor) -> None:
        super().__init__()
        self._recorded = recorded  # [tokens, top_k]
        self._present = (recorded >= 0).all(dim=-1, keepdim=True)
        self._num_experts = int(router.num_experts)
        self._num_groups = num_groups(router)
        self.live: Tensor | None = None  # [tokens, top_k] what the router would have selected

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        scores: Tensor = args[0] if args else kwargs["input"]
        live = func(*args, **kwargs)
        count = live.indices.shape[-1]
        if scores.ndim != 2:
            return live  # within each group of experts
        if scores.shape[-1] == self._num_experts and count == self._recorded.shape[-1]:
            self.live = live.indices
            return self._selected(scores, live.indices)
        if scores.shape[-1] == self._num_groups:
            return self._groups(scores, count)
        return live

    def _selected(self, scores: Tensor, live: Tensor) -> torch.return_types.topk:
        """The recorded experts where there are any, and their scores, which carry the gradient."""
        if self._recorded.shape[0] != scores.shape[0]:
            rows, tokens = self._recorded.shape[0], scores.shape[0]
            raise ValueError(f"routes of {rows} tokens were given for a forward pass over {tokens}")
        indices = torch.where(self._present, self._recorded, live)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def _groups(self, scores: Tensor, count: int) -> torch.return_types.topk:
        """The best groups, after those that hold recorded experts: some models blot out all other groups."""
        size = self._num_experts // self._num_groups
        holding = torch.zeros_like(scores, dtype=torch.bool)
        holding.scatter_(-1, self._recorded.clamp(min=0) // size, self._present.expand_as(self._recorded))
        indices = scores.detach().masked_fill(holding, torch.inf).topk(count, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, indices), indices))
