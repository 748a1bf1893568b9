"""A transformers model as the in-process engine runs it: packed rows in, logits and routes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from agent_sat.errors import EngineError
from agent_sat.rollout.distribution import behavior_logprobs, draw
from agent_sat.rollout.local_cache import ATTENTION, SlotCache, slot_attention
from agent_sat.rollout.local_experts import EXPERTS, grouped_experts
from agent_sat.rollout.local_slots import Drawn, Feed, RouteShape, Settings
from agent_sat.rollout.routers import chosen_experts, find_routers
from agent_sat.rollout.sampling import uniforms
from agent_sat.types import Nucleus


class SlotModel:
    """The model with its slot cache; not thread-safe. Raises EngineError for a model it cannot serve."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_length: int, record_routes: bool
    ) -> None:
        require_servable(model, max_length)
        AttentionInterface.register(ATTENTION, slot_attention)
        model.set_attn_implementation(ATTENTION)
        if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
            ExpertsInterface.register(EXPERTS, grouped_experts)
            model.set_experts_implementation(EXPERTS)
        self._model = model.eval().requires_grad_(False)
        self._device = model.device
        self._cache = SlotCache(
            num_slots=num_slots, max_length=max_length, device=model.device, dtype=model.dtype
        )
        # decoder and head, as the trainer calls them: what the causal model adds to them is time
        self._decoder: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        embeddings: Any = model.get_input_embeddings()
        self.vocab_size = int(embeddings.weight.shape[0])
        routers = find_routers(model) if record_routes else []
        self.route_shape = route_shape(routers)
        self._experts: list[Tensor] = []  # [N, top_k] of each router, in the order they ran
        for router in routers:
            router.register_forward_hook(
                lambda _router, _inputs, outputs: self._experts.append(chosen_experts(outputs))
            )

    def forward(self, feed: Feed) -> tuple[Tensor | None, NDArray[np.int64] | None]:
        """Logits [R, V] of the rows that sample (None if none does) and routed experts [N, layers, top_k]."""
        self._experts.clear()
        self._cache.begin(feed.rows)
        hidden = self._decoder(
            input_ids=self._tensor(feed.token_ids)[None],
            position_ids=self._tensor(feed.rows.positions)[None],
            use_cache=False,
            slot_cache=self._cache,
        ).last_hidden_state[0]
        experts = torch.stack(self._experts, dim=1).cpu().numpy() if self._experts else None
        if not len(feed.samples):
            return None, experts
        return self._head(hidden.index_select(0, self._tensor(feed.sample_rows))), experts

    def sample(self, logits: Tensor, settings: Settings) -> Drawn:
        """Draw one token a row of logits [R, V]."""
        greedy = settings.temperature == 0
        logprobs = behavior_logprobs(
            logits, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k
        )
        tokens = draw(logprobs, uniform=uniforms(settings.seeds, settings.counters), greedy=greedy)
        # without finite logits nothing is passed, and the index found is one past the last
        chosen = logprobs.gather(-1, tokens.clamp_(max=logprobs.shape[-1] - 1)[:, None])[:, 0].cpu().numpy()
        if not np.isfinite(chosen).all():
            raise EngineError("the model's logits are not finite; were the last weights?")
        truncates = ((settings.top_p < 1) | (settings.top_k > 0)) & ~greedy
        return Drawn(
            token_ids=tokens.cpu().numpy(),
            logprobs=chosen,
            nucleus=kept_sets(logprobs) if truncates.any() else None,
        )

    def load(self, weights: dict[str, Tensor]) -> None:
        """Overwrite the weights; all are checked before the first is touched."""
        state = self._model.state_dict()
        check_weights(state, weights)
        with torch.no_grad():
            for name, weight in weights.items():
                state[name].copy_(weight)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def kept_sets(logprobs: Tensor) -> Nucleus:
    """The finite entries of each row of [R, V], ids ascending."""
    kept = torch.isfinite(logprobs)
    return Nucleus(
        ids=kept.nonzero()[:, 1].to(torch.int32).cpu().numpy(),
        counts=kept.sum(dim=-1).to(torch.int32).cpu().numpy(),
    )


def route_shape(routers: list[Any]) -> RouteShape | None:
    """What the routers choose for a token; None without routers."""
    if not routers:
        return None
    return RouteShape(layers=len(routers), top_k=routers[0].top_k, num_experts=routers[0].num_experts)


def require_servable(model: PreTrainedModel, max_length: int) -> None:
    """Raise unless every layer attends to a whole context of `max_length`: all that slot_attention does."""
    config: Any = model.config
    name = type(model).__name__
    for scale in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, scale, None) not in (None, 1, 1.0):
            raise EngineError(f"{name} has {scale}, which the engine would leave out of its logits")
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise EngineError(f"only attention layers are served; {name} has {', '.join(sorted(kinds))}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_length:
        raise EngineError(f"{name} attends to {window} tokens only; max_length {max_length} is larger")
    if max_length > config.max_position_embeddings:
        positions = config.max_position_embeddings
        raise EngineError(f"{name} has positions for {positions} tokens; max_length {max_length} is larger")


def check_weights(state: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Raise unless `weights` covers `state` by name and shape; of tied tensors one name is enough."""
    if unknown := sorted(weights.keys() - state.keys()):
        raise EngineError(f"the model has no weight {unknown[0]!r} ({len(unknown)} such names)")
    given = {state[name].data_ptr() for name in weights}
    if missing := [name for name, tensor in state.items() if tensor.data_ptr() not in given]:
        raise EngineError(f"the weight {missing[0]!r} was not given ({len(missing)} such names)")
    for name, weight in weights.items():
        if weight.shape != state[name].shape:
            shapes = f"{tuple(weight.shape)}, the model's {tuple(state[name].shape)}"
            raise EngineError(f"the weight {name!r} has shape {shapes}")
