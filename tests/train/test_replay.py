"""Routing replay on tiny random models of the families whose routers differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, tensor

from agent_sat.errors import ConfigError
from agent_sat.rollout.local import LocalEngine
from agent_sat.rollout.routers import chosen_experts, find_routers
from agent_sat.train.replay import replay_routes, route_overlap
from agent_sat.types import SamplingParams
from tests.rollout.engine_contract import Said, episode, run
from tests.rollout.tiny import tiny_moe

NUM_EXPERTS, TOP_K, LAYERS, TOKENS = 8, 2, 2, 2 * 7

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
    "n_routed_experts": NUM_EXPERTS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "num_experts": NUM_EXPERTS,
        "moe_intermediate_size": 16,
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "Mixtral": {"num_local_experts": NUM_EXPERTS},
    "Olmoe": {"num_experts": NUM_EXPERTS, "norm_topk_prob": False},
    "Qwen2Moe": {
        "num_experts": NUM_EXPERTS,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": False,
    },
    "DeepseekV3": LATENT | {"norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "DeepseekV2": LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "GptOss": {"num_local_experts": NUM_EXPERTS, "head_dim": 16},
    "GraniteMoe": {"num_local_experts": NUM_EXPERTS},
}


def of_set(logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(-1, experts).softmax(-1)


def of_all(logits: Tensor, experts: Tensor) -> Tensor:
    return logits.softmax(-1).gather(-1, experts)


def sigmoid_shares(logits: Tensor, experts: Tensor) -> Tensor:
    chosen = logits.sigmoid().gather(-1, experts)
    return 1.5 * chosen / chosen.sum(-1, keepdim=True)


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # each family's convention, from its paper or code
    "Qwen3Moe": of_set,
    "Mixtral": of_set,
    "Olmoe": of_all,
    "Qwen2Moe": of_all,
    "DeepseekV3": sigmoid_shares,
    "DeepseekV2": lambda logits, experts: 1.5 * of_all(logits, experts),
    "GptOss": of_set,
    "GraniteMoe": of_set,
}


def tiny(family: str) -> Any:
    """A random model; routers that start at zero or without a bias get random ones."""
    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    for router in find_routers(model):
        for name, value in (*router.named_parameters(), *router.named_buffers()):
            torch.nn.init.normal_(value, std=0.5 if "bias" in name else 0.3)
    return model


def token_ids() -> Tensor:
    return torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(1))


def random_routes(seed: int = 2) -> Tensor:
    """Distinct experts for each token and layer, none of them related to what the model would choose."""
    scores = torch.rand(TOKENS, LAYERS, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(TOP_K, dim=-1).indices


def router_outputs(model: Any) -> list[tuple[Tensor, ...]]:
    """Filled with each router's outputs, in the order they run."""
    found: list[tuple[Tensor, ...]] = []
    for router in find_routers(model):
        router.register_forward_hook(lambda _router, _inputs, outputs: found.append(outputs))
    return found


def live_routes(model: Any) -> Tensor:
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _router, _inputs, outputs: found.append(chosen_experts(outputs)))
        for router in find_routers(model)
    ]
    with torch.no_grad():
        model(token_ids(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_taken_with_the_models_own_gates(family: str) -> None:
    model, recorded = tiny(family), random_routes()
    found = router_outputs(model)
    with replay_routes(model, recorded):
        model(token_ids(), use_cache=False)
    assert len(found) == LAYERS
    for layer, (logits, gates, experts) in enumerate(found):
        assert torch.equal(experts, recorded[:, layer])
        assert not torch.equal(experts.sort(-1).values, logits.topk(TOP_K).indices.sort(-1).values)
        torch.testing.assert_close(gates, GATES[family](logits, experts), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_live_routes_changes_nothing(family: str) -> None:
    model = tiny(family)
    live = live_routes(model)
    plain = model(token_ids(), use_cache=False).logits
    with replay_routes(model, live) as replay:
        replayed = model(token_ids(), use_cache=False).logits
    assert torch.equal(plain, replayed)
    assert replay.overlap(torch.ones(TOKENS, dtype=torch.bool)).num_differing == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_gets_gradient_for_experts_it_would_not_have_chosen(family: str) -> None:
    model = tiny(family)
    found = router_outputs(model)
    with torch.no_grad():
        model(token_ids(), use_cache=False)
    recorded = random_routes()
    recorded[:, 0] = (-found[0][0]).topk(TOP_K).indices  # in the first layer, the least likely of all
    with replay_routes(model, recorded) as replay:
        logits = model(token_ids(), use_cache=False).logits
    logits.square().mean().backward()
    assert not (replay.live[0][:, :, None] == recorded[:, 0][:, None]).any()
    router = find_routers(model)[0]
    gradient = next(p for n, p in router.named_parameters() if n.endswith("weight")).grad
    assert all(float(gradient[expert].abs().max()) > 0 for expert in recorded[:, 0].unique())


def test_the_routers_gradient_is_the_derivative_of_the_replayed_loss() -> None:
    model, recorded = tiny("Qwen3Moe").double(), random_routes()
    model.set_experts_implementation("eager")
    weight = find_routers(model)[0].weight
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def loss() -> Tensor:
        with replay_routes(model, recorded):
            return model(token_ids(), use_cache=False).logits.square().mean()

    loss().backward()
    slope = float((weight.grad * direction).sum())
    with torch.no_grad():
        weight += 1e-4 * direction
        above = float(loss())
        weight -= 2e-4 * direction
        below = float(loss())
    # the router computes its probabilities in float32, hence the tolerance
    assert slope == pytest.approx((above - below) / 2e-4, rel=2e-2)
    assert abs(slope) > 1e-4


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_missing_rows_are_routed_live(family: str) -> None:
    model, recorded = tiny(family), random_routes()
    recorded[3] = -1
    recorded[5, 1] = -1
    recorded[9, 0, 1] = -1  # half a row is no row
    missing = (recorded < 0).any(-1)
    found = router_outputs(model)
    with replay_routes(model, recorded) as replay:
        model(token_ids(), use_cache=False)
    routed = torch.stack([experts for _, _, experts in found[-LAYERS:]], dim=1)
    live = torch.stack([replay.live[layer] for layer in range(LAYERS)], dim=1)
    assert torch.equal(routed[missing], live[missing])
    assert torch.equal(routed[~missing], recorded[~missing])
    real = torch.arange(TOKENS) != 0
    overlap = replay.overlap(real)
    assert (overlap.num_rows, overlap.num_recorded) == (26, 22)  # 13 tokens, 2 layers, 4 rows missing
    assert 0 < overlap.num_differing <= 22


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_sees_the_same_rows_after_the_block(reentrant: bool) -> None:
    recorded = random_routes()
    gradients = []
    for checkpointed in (False, True):
        model = tiny("Qwen3Moe")
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with replay_routes(model, recorded):
            logits = model(token_ids(), use_cache=False).logits
        found = router_outputs(model)
        logits.square().mean().backward()
        assert len(found) == (LAYERS if checkpointed else 0)  # it was computed again, outside the block
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, atol=1e-7, rtol=1e-5)


def test_two_micro_batches_keep_their_own_rows_until_their_backward_passes() -> None:
    rows = (random_routes(2), random_routes(3))
    model = tiny("Qwen3Moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for recorded in rows:
        with replay_routes(model, recorded):
            losses.append(model(token_ids(), use_cache=False).logits.square().mean())
    found = router_outputs(model)
    for loss in losses:
        loss.backward()
    again = [experts for _, _, experts in found]  # backward runs the last layer first
    for micro_batch, recorded in enumerate(rows):
        assert torch.equal(again[2 * micro_batch], recorded[:, 1])
        assert torch.equal(again[2 * micro_batch + 1], recorded[:, 0])


def test_after_the_block_the_model_routes_live_again_also_after_an_error() -> None:
    model = tiny("Qwen3Moe")
    plain = model(token_ids(), use_cache=False).logits
    with replay_routes(model, random_routes()):
        assert not torch.equal(plain, model(token_ids(), use_cache=False).logits)
    assert torch.equal(plain, model(token_ids(), use_cache=False).logits)
    with pytest.raises(KeyError), replay_routes(model, random_routes()):
        raise KeyError
    assert torch.equal(plain, model(token_ids(), use_cache=False).logits)


def test_what_cannot_be_replayed_is_refused() -> None:
    dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=16))
    with pytest.raises(ConfigError, match="2 layers cannot be replayed in Qwen3ForCausalLM, which has 0"):
        replay_routes(dense, random_routes()).__enter__()
    model = tiny("Qwen3Moe")
    with pytest.raises(ConfigError, match="1 layers cannot be replayed"):
        replay_routes(model, random_routes()[:, :1]).__enter__()
    message = "13 tokens were given for a forward pass over 14"
    with pytest.raises(ValueError, match=message), replay_routes(model, random_routes()[1:]):
        model(token_ids(), use_cache=False)


def test_a_router_that_does_not_select_by_topk_is_refused() -> None:
    config = transformers.PhimoeConfig(**COMMON, num_local_experts=NUM_EXPERTS)
    model = transformers.PhimoeForCausalLM(config)
    message = "PhimoeTopKRouter did not select 2 of 8 experts"
    with pytest.raises(ConfigError, match=message), replay_routes(model, random_routes()):
        model(token_ids(), use_cache=False)


def test_overlap_compares_sets_and_counts_rows() -> None:
    recorded = tensor([[[0, 1], [2, 3]], [[4, 5], [-1, -1]]])
    live = tensor([[[1, 0], [2, 4]], [[4, 5], [6, 7]]])
    overlap = route_overlap(recorded, live)
    assert (overlap.num_rows, overlap.num_recorded, overlap.num_differing) == (4, 3, 1)
    assert overlap.coverage == 0.75
    assert overlap.differing == pytest.approx(1 / 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_live_choice_is_told_beside_the_replayed_one(family: str) -> None:
    # on the inputs that each router really saw under replay, also where recorded experts decide the groups
    model = tiny(family)
    inputs: list[Tensor] = []
    for router in find_routers(model):
        router.register_forward_pre_hook(lambda _router, args: inputs.append(args[0].detach()))
    with torch.no_grad(), replay_routes(model, random_routes()) as replay:
        model(token_ids(), use_cache=False)
    for layer, (router, seen) in enumerate(zip(find_routers(model), inputs, strict=True)):
        alone = chosen_experts(type(router).forward(router, seen))
        assert torch.equal(replay.live[layer].sort(-1).values, alone.sort(-1).values)
    assert 0 < replay.overlap(torch.arange(TOKENS)).num_differing <= TOKENS * LAYERS


def engine_and_trainer(engine_model: Any, trainer: Any, *, replay: bool) -> Tensor:
    """|log pi - log mu| [T] of an episode of three turns, by engine and trainer of the same weights."""

    async def work() -> list[Said]:
        engine = LocalEngine(engine_model, max_sessions=1, max_length=160)
        said = await episode(engine, "s", [SamplingParams(max_tokens=30, seed=seed) for seed in range(3)])
        await engine.close()
        return said

    said = run(work())
    tokens = torch.from_numpy(said[-1].tokens).long()
    deltas = [
        torch.from_numpy(turn.completion.routes.experts).long() for turn in said if turn.completion.routes
    ]
    recorded = torch.cat([*deltas, torch.full_like(deltas[0][:1], -1)])
    recorded = recorded if replay else torch.full_like(recorded, -1)
    with torch.no_grad(), replay_routes(trainer, recorded):
        logits = trainer(tokens[None], use_cache=False).logits[0]
    logprobs = logits.float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    return torch.cat(
        [
            (
                logprobs[len(turn.prompt) - 1 :][:30] - torch.from_numpy(turn.completion.behavior_logprobs)
            ).abs()
            for turn in said
        ]
    )


def test_an_exact_engines_routes_replay_to_its_own_logprobs() -> None:
    assert engine_and_trainer(tiny_moe(0), tiny_moe(0), replay=True).max() < 1e-5


def test_replay_takes_away_what_noise_in_the_engines_routers_adds() -> None:
    def sharp(*, noise: float) -> Any:
        model = tiny_moe(0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
            for router in find_routers(model):
                router.weight += noise * torch.randn(router.weight.shape, generator=generator)
        return model

    live = engine_and_trainer(sharp(noise=0.02), sharp(noise=0.0), replay=False)
    replayed = engine_and_trainer(sharp(noise=0.02), sharp(noise=0.0), replay=True)
    assert replayed.mean() < 0.5 * live.mean()
    assert replayed.max() < live.max()


def test_replay_bounds_the_mismatch_of_a_half_precision_engine() -> None:
    replayed = engine_and_trainer(tiny_moe(0).bfloat16(), tiny_moe(0), replay=True)
    assert 1e-4 < replayed.max() < 0.1
