"""The in-process engine: the contract of every engine, and what is its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from agent_sat.errors import EngineError
from agent_sat.rollout.local import LocalEngine
from agent_sat.rollout.local_experts import grouped_experts
from agent_sat.types import SamplingParams
from tests.rollout.engine_contract import (  # noqa: F401
    MAX_LENGTH,
    Subject,
    assert_logprobs,
    episode,
    logprob_of,
    plain_logits,
    random_ids,
    run,
    test_a_prompt_that_departs_from_the_session_is_computed_from_there,
    test_a_session_has_one_turn_at_a_time,
    test_a_session_too_many_waits_for_a_release,
    test_a_turn_ends_at_a_stop_token_at_max_tokens_and_at_max_length,
    test_cancelling_gives_the_slot_to_the_next,
    test_closing_fails_what_is_outstanding_and_what_comes_later,
    test_kept_sets_are_what_top_p_and_top_k_leave,
    test_logprobs_equal_a_plain_forward_while_episodes_join_and_leave,
    test_new_weights_take_effect_at_a_token_and_the_versions_show_it,
    test_pause_holds_turns_and_resume_lets_them_go_on,
    test_releasing_a_session_ends_its_turn_and_frees_its_slot,
    test_requests_that_cannot_be_served_say_why,
    test_routes_are_the_routers_own_and_join_without_a_gap,
    test_same_seeds_give_same_tokens_in_any_company_and_order,
    test_temperature_zero_is_greedy_and_tells_the_logprob_at_temperature_one,
    test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on,
)
from tests.rollout.tiny import tiny_dense, tiny_moe


@asynccontextmanager
async def serving(model: PreTrainedModel, max_sessions: int, **options: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(model, max_sessions=max_sessions, max_length=MAX_LENGTH, **options)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(make=lambda n: serving(tiny_moe(0), n), reference=tiny_moe(0), other=tiny_moe(1))


def test_long_prompts_are_fed_in_pieces_beside_those_who_decode() -> None:
    reference = tiny_moe(0)

    async def work() -> Any:
        async with serving(tiny_moe(0), 3, max_prefill_tokens=8) as engine:
            long = [
                episode(engine, f"l{i}", [SamplingParams(max_tokens=3)], prompt=50 + 13 * i) for i in range(2)
            ]
            short = episode(engine, "s", [SamplingParams(max_tokens=30)], prompt=5)
            return await asyncio.gather(short, *long)

    for (turn,) in run(work()):
        assert_logprobs(turn, logprob_of(plain_logits(reference, turn), turn.completion.token_ids))
        assert len(turn.completion.routes.experts) == len(turn.tokens) - 1


def test_a_lone_episode_among_many_open_ones_is_right() -> None:
    reference = tiny_moe(0)

    async def work() -> Any:
        async with serving(tiny_moe(0), 8) as engine:
            one = SamplingParams(max_tokens=2)
            await asyncio.gather(*(engine.generate(random_ids(30, i), one, f"open{i}") for i in range(7)))
            return await episode(engine, "lone", [SamplingParams(max_tokens=9, seed=s) for s in range(2)])

    for turn in run(work()):
        assert_logprobs(turn, logprob_of(plain_logits(reference, turn), turn.completion.token_ids))


def test_a_dense_model_has_no_routes() -> None:
    async def work() -> Any:
        async with serving(tiny_dense(0), 1) as engine:
            return await episode(engine, "s", [SamplingParams(max_tokens=6)] * 2)

    reference = tiny_dense(0)
    for turn in run(work()):
        assert turn.completion.routes is None
        assert_logprobs(turn, logprob_of(plain_logits(reference, turn), turn.completion.token_ids))


def test_routes_are_not_recorded_when_not_wanted() -> None:
    async def work() -> Any:
        async with serving(tiny_moe(0), 1, record_routes=False) as engine:
            return await episode(engine, "s", [SamplingParams(max_tokens=2)])

    assert run(work())[0].completion.routes is None


def test_an_error_in_the_decode_thread_fails_every_turn_with_its_cause() -> None:
    weights = {name: torch.full_like(w, torch.nan) for name, w in tiny_moe(0).state_dict().items()}

    async def work() -> None:
        async with serving(tiny_moe(0), 2) as engine:
            await engine.pause()
            turns = [
                asyncio.create_task(engine.generate(random_ids(9, 0), SamplingParams(), n)) for n in "abc"
            ]
            await engine.load_weights(1, weights)
            await engine.resume()
            for turn in turns:
                with pytest.raises(EngineError, match="not finite"):
                    await turn
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate(random_ids(9, 0), SamplingParams(), "d")
            with pytest.raises(EngineError, match="not finite"):
                await engine.load_weights(2, weights)

    run(work())


def test_foreign_errors_in_the_decode_thread_keep_their_kind() -> None:
    model = tiny_moe(0)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("from the model")

    async def work() -> None:
        async with serving(model, 1) as engine:
            model.get_input_embeddings().register_forward_hook(broken)
            with pytest.raises(EngineError, match="ZeroDivisionError: from the model") as caught:
                await engine.generate(random_ids(9, 0), SamplingParams(), "s")
            assert isinstance(caught.value.__cause__, ZeroDivisionError)

    run(work())


def test_an_idle_engine_costs_no_cpu_time() -> None:
    async def work() -> float:
        async with serving(tiny_moe(0), 2) as engine:
            await engine.generate(random_ids(9, 0), SamplingParams(max_tokens=2), "open")
            started = time.process_time()
            await asyncio.sleep(0.5)
            return time.process_time() - started

    assert run(work()) < 0.1


def test_models_it_cannot_serve_are_refused() -> None:
    small: Any = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    small |= {"vocab_size": 32, "intermediate_size": 16}
    windowed = MistralForCausalLM(MistralConfig(**small, sliding_window=64))
    with pytest.raises(EngineError, match="64 tokens only; max_length 192"):
        LocalEngine(windowed, max_sessions=1, max_length=192)
    short = MistralForCausalLM(MistralConfig(**small, sliding_window=None, max_position_embeddings=100))
    with pytest.raises(EngineError, match="positions for 100 tokens; max_length 192"):
        LocalEngine(short, max_sessions=1, max_length=192)
    scaled = GraniteForCausalLM(GraniteConfig(**small, logits_scaling=8.0))
    with pytest.raises(EngineError, match="logits_scaling"):
        LocalEngine(scaled, max_sessions=1, max_length=64)


def test_attention_with_sinks_is_refused_at_the_first_turn() -> None:
    config = GptOssConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=112,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=192,
    )

    async def work() -> None:
        async with serving(GptOssForCausalLM(config), 1) as engine:
            with pytest.raises(EngineError, match="s_aux"):
                await engine.generate(random_ids(9, 0), SamplingParams(), "s")

    run(work())


def test_grouped_experts_equal_the_models_own_in_value_and_gradient() -> None:
    model = tiny_moe(0)
    model.set_experts_implementation("eager")
    experts: Any = model.model.layers[0].mlp.experts
    torch.manual_seed(0)
    index = torch.tensor([[0, 3], [3, 7], [7, 0]])  # experts 1, 2, 4, 5, 6 get no row
    results = []
    hidden, weights = torch.randn(3, 96), torch.rand(3, 2)
    for function in (lambda *a: grouped_experts(experts, *a), experts):
        inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        experts.zero_grad()
        output = function(inputs[0], index, inputs[1])
        output.square().sum().backward()
        results.append((output, inputs[0].grad, inputs[1].grad, experts.gate_up_proj.grad.clone()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
