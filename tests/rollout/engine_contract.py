"""What every rollout engine must do: tests over a `subject` fixture, for an engine's test file to import."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from agent_sat.errors import EngineError
from agent_sat.protocols import RolloutEngine
from agent_sat.types import Completion, IntArray, SamplingParams

MAX_LENGTH = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine to make (arguments: max_sessions), and the same model in plain transformers."""

    make: Callable[[int], AbstractAsyncContextManager[RolloutEngine]]
    reference: PreTrainedModel  # the weights the engine starts with, version 0
    other: PreTrainedModel  # different weights of the same model


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn: what was asked and what came."""

    prompt: IntArray
    completion: Completion

    @property
    def tokens(self) -> IntArray:
        return np.concatenate([self.prompt, self.completion.token_ids])


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def random_ids(length: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).integers(2, 112, length).astype(np.int32)


async def episode(
    engine: RolloutEngine, session: str, params: list[SamplingParams], *, prompt: int = 20, tool: int = 7
) -> list[Said]:
    """As many turns as there are `params`, random tool output between them."""
    said: list[Said] = []
    context = random_ids(prompt, seed=len(session) + prompt)
    for turn, asked in enumerate(params):
        said.append(Said(prompt=context, completion=await engine.generate(context, asked, session)))
        context = np.concatenate([said[-1].tokens, random_ids(tool, seed=turn)])
    await engine.release(session)
    return said


@torch.no_grad()
def plain_logits(model: PreTrainedModel, turn: Said) -> Tensor:
    """The logits [T, V] that predict a turn's sampled tokens."""
    ids = torch.from_numpy(turn.tokens).long()[None]
    return model(input_ids=ids, use_cache=False).logits[0, len(turn.prompt) - 1 : -1]


def logprob_of(logits: Tensor, token_ids: IntArray) -> Tensor:
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(token_ids).long()[:, None])[:, 0]


def assert_logprobs(turn: Said, expected: Tensor) -> None:
    torch.testing.assert_close(
        torch.from_numpy(turn.completion.behavior_logprobs), expected, atol=1e-5, rtol=0
    )


def test_logprobs_equal_a_plain_forward_while_episodes_join_and_leave(subject: Subject) -> None:
    async def work() -> list[list[Said]]:
        async with subject.make(3) as engine:

            async def one(i: int) -> list[Said]:
                params = [
                    SamplingParams(temperature=0.7, max_tokens=4 + 3 * i, seed=10 * i + t) for t in range(3)
                ]
                return await episode(engine, f"s{i}", params, prompt=12 + 5 * i)

            return await asyncio.gather(*(one(i) for i in range(6)))

    for said in run(work()):
        for turn in said:
            assert_logprobs(
                turn, logprob_of(plain_logits(subject.reference, turn) / 0.7, turn.completion.token_ids)
            )
            assert turn.completion.versions.tolist() == [0] * len(turn.completion.token_ids)
            assert turn.completion.nucleus is None


def test_routes_are_the_routers_own_and_join_without_a_gap(subject: Subject) -> None:
    async def work() -> list[Said]:
        async with subject.make(2) as engine:
            others = asyncio.gather(
                *(episode(engine, f"o{i}", [SamplingParams(max_tokens=30, seed=i)]) for i in range(3))
            )
            said = await episode(engine, "s", [SamplingParams(max_tokens=9, seed=i) for i in range(3)])
            await others
            return said

    said = run(work())
    deltas = [turn.completion.routes for turn in said]
    assert [delta.start for delta in deltas] == [0, 28, 44]  # 20 + 9 - 1, then 7 + 9 more
    recorded = np.concatenate([delta.experts for delta in deltas])
    assert len(recorded) == len(said[-1].tokens) - 1
    assert recorded.dtype == np.uint8
    expected = plain_routes(subject.reference, said[-1].tokens)[:-1]
    np.testing.assert_array_equal(np.sort(recorded, axis=-1), np.sort(expected, axis=-1))


@torch.no_grad()
def plain_routes(model: PreTrainedModel, tokens: IntArray) -> IntArray:
    """Experts [N, layers, top_k] of a full forward, from the router logits transformers gives."""
    ids = torch.from_numpy(tokens).long()[None]
    logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, dim=-1).indices for layer in logits], dim=1).numpy()


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, -1), (1.0, 5), (0.5, 5), (1e-6, -1)])
def test_kept_sets_are_what_top_p_and_top_k_leave(subject: Subject, top_p: float, top_k: int) -> None:
    params = SamplingParams(temperature=0.7, top_p=top_p, top_k=top_k, max_tokens=12, seed=3)

    async def work() -> list[Said]:
        async with subject.make(2) as engine:
            plain = episode(engine, "o", [SamplingParams(max_tokens=12)])  # a neighbour that is not truncated
            return (await asyncio.gather(episode(engine, "s", [params, params]), plain))[0]

    for turn in run(work()):
        logits = plain_logits(subject.reference, turn) / 0.7
        kept = [expected_kept(row, top_p, top_k) for row in logits]
        nucleus = turn.completion.nucleus
        assert nucleus is not None
        assert [set(nucleus.cut(i, i + 1).ids.tolist()) for i in range(12)] == kept
        assert all(int(token) in ids for token, ids in zip(turn.completion.token_ids, kept, strict=True))
        masked = torch.full_like(logits, -torch.inf)
        for row, ids in enumerate(kept):
            masked[row, sorted(ids)] = logits[row, sorted(ids)]
        assert_logprobs(turn, logprob_of(masked, turn.completion.token_ids))


def expected_kept(logits: Tensor, top_p: float, top_k: int) -> set[int]:
    """The definition, token by token: top-k, then the fewest whose share of it reaches top_p."""
    ranked = sorted(range(len(logits)), key=lambda i: -float(logits[i]))[: top_k if top_k > 0 else None]
    shares = torch.softmax(logits[ranked].double(), dim=-1).tolist()
    kept: set[int] = set()
    mass = 0.0
    for token, share in zip(ranked, shares, strict=True):
        kept.add(token)
        mass += share
        if mass >= top_p:
            break
    return kept


def test_temperature_zero_is_greedy_and_tells_the_logprob_at_temperature_one(subject: Subject) -> None:
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, max_tokens=10)

    async def work() -> list[Said]:
        async with subject.make(2) as engine:
            hot = episode(engine, "o", [SamplingParams(temperature=2.0, max_tokens=10)])
            return (await asyncio.gather(episode(engine, "s", [params]), hot))[0]

    (turn,) = run(work())
    logits = plain_logits(subject.reference, turn)
    assert turn.completion.token_ids.tolist() == logits.argmax(-1).tolist()
    assert turn.completion.nucleus is None
    assert_logprobs(turn, logprob_of(logits, turn.completion.token_ids))


def test_same_seeds_give_same_tokens_in_any_company_and_order(subject: Subject) -> None:
    def params(i: int) -> list[SamplingParams]:
        return [SamplingParams(max_tokens=10, seed=100 * i + t) for t in range(2)]

    async def work(order: list[int], max_sessions: int) -> dict[int, list[list[int]]]:
        async with subject.make(max_sessions) as engine:
            found = await asyncio.gather(*(episode(engine, f"s{i:02d}", params(i)) for i in order))
            tokens = [[turn.completion.token_ids.tolist() for turn in said] for said in found]
            return dict(zip(order, tokens, strict=True))

    together = run(work(list(range(16)), 16))
    assert len({str(tokens) for tokens in together.values()}) == 16
    assert run(work(list(reversed(range(16))), 5)) == together
    assert run(work([7], 1)) == {7: together[7]}


def test_new_weights_take_effect_at_a_token_and_the_versions_show_it(subject: Subject) -> None:
    models = (subject.reference, subject.other)

    async def work() -> Said:
        async with subject.make(2) as engine:
            prompt = random_ids(20, seed=0)
            turn = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=100), "s"))
            for version in range(1, 1000):
                await asyncio.sleep(0.03)
                if turn.done():
                    break
                await engine.load_weights(version, models[version % 2].state_dict())
            return Said(prompt=prompt, completion=await turn)

    turn = run(work())
    versions = turn.completion.versions
    assert len(versions) == 100
    assert len(set(versions.tolist())) > 1
    assert (np.diff(versions) >= 0).all()
    assert_logprobs(turn, mixed_logprobs(models, turn))


@torch.no_grad()
def mixed_logprobs(models: tuple[PreTrainedModel, PreTrainedModel], turn: Said) -> Tensor:
    """Log-probabilities when token i was sampled by models[version_i % 2], each keeping the cache it met."""
    ids, cache, found = torch.from_numpy(turn.tokens).long(), DynamicCache(), []
    versions = turn.completion.versions
    fed = torch.cat(
        [torch.zeros(len(turn.prompt) - 1).long() + int(versions[0]), torch.from_numpy(versions).long()]
    )
    start = 0
    while start < len(fed):
        stop = start + int((fed[start:] == fed[start]).sum())
        out = models[int(fed[start]) % 2](ids[None, start:stop], None, None, cache, use_cache=True)
        found.append(out.logits[0])
        start = stop
    logits = torch.cat(found)[len(turn.prompt) - 1 :]
    return logprob_of(logits, turn.completion.token_ids)


def test_pause_holds_turns_and_resume_lets_them_go_on(subject: Subject) -> None:
    async def work() -> None:
        async with subject.make(2) as engine:
            await engine.pause()
            turn = asyncio.create_task(engine.generate(random_ids(9, 0), SamplingParams(max_tokens=2), "s"))
            await asyncio.sleep(0.1)
            assert not turn.done()
            await engine.resume()
            assert len((await turn).token_ids) == 2

    run(work())


def test_a_session_too_many_waits_for_a_release(subject: Subject) -> None:
    async def work() -> None:
        async with subject.make(2) as engine:
            params = SamplingParams(max_tokens=2)
            await asyncio.gather(*(engine.generate(random_ids(9, 0), params, name) for name in "ab"))
            third = asyncio.create_task(engine.generate(random_ids(9, 0), params, "c"))
            fourth = asyncio.create_task(engine.generate(random_ids(9, 0), params, "d"))
            await asyncio.sleep(0.1)
            assert not third.done()
            await engine.release("a")
            await third
            assert not fourth.done()
            await engine.release("b")
            await fourth

    run(work())


def test_cancelling_gives_the_slot_to_the_next(subject: Subject) -> None:
    async def work() -> None:
        async with subject.make(1) as engine:
            long = SamplingParams(max_tokens=180)
            first = asyncio.create_task(engine.generate(random_ids(9, 0), long, "a"))
            await asyncio.sleep(0.02)
            second = asyncio.create_task(engine.generate(random_ids(9, 0), SamplingParams(max_tokens=2), "b"))
            first.cancel()
            assert len((await second).token_ids) == 2
            with pytest.raises(asyncio.CancelledError):
                await first

    run(work())


def test_closing_fails_what_is_outstanding_and_what_comes_later(subject: Subject) -> None:
    async def work() -> None:
        async with subject.make(1) as engine:
            await engine.pause()
            names = ("running", "waiting")
            turns = [
                asyncio.create_task(engine.generate(random_ids(9, 0), SamplingParams(), n)) for n in names
            ]
            await asyncio.sleep(0.02)
            await engine.close()
            for turn in turns:
                with pytest.raises(EngineError, match="closed"):
                    await turn
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(random_ids(9, 0), SamplingParams(), "later")
            await engine.close()

    run(work())


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(subject: Subject) -> None:
    good = subject.other.state_dict()
    norm = "model.norm.weight"
    bad = {
        norm: {k: v for k, v in good.items() if k != norm},
        "model.nrom.weight": {**good, "model.nrom.weight": good[norm]},
        r"\(3,\)": {**good, norm: torch.zeros(3)},
    }

    async def work() -> list[Said]:
        async with subject.make(1) as engine:
            for message, weights in bad.items():
                with pytest.raises(EngineError, match=message):
                    await engine.load_weights(1, weights)
            return await episode(engine, "s", [SamplingParams(max_tokens=5)])

    (turn,) = run(work())
    assert turn.completion.versions.tolist() == [0] * 5
    assert_logprobs(turn, logprob_of(plain_logits(subject.reference, turn), turn.completion.token_ids))


def test_requests_that_cannot_be_served_say_why(subject: Subject) -> None:
    async def work() -> None:
        async with subject.make(1) as engine:
            with pytest.raises(EngineError, match=f"{MAX_LENGTH} tokens.*{MAX_LENGTH - 1}"):
                await engine.generate(random_ids(MAX_LENGTH, 0), SamplingParams(), "s")
            with pytest.raises(EngineError, match="0 tokens"):
                await engine.generate(random_ids(0, 0), SamplingParams(), "s")
            with pytest.raises(EngineError, match=r"outside 0\.\.111"):
                await engine.generate(np.array([5, 112], np.int32), SamplingParams(), "s")
            with pytest.raises(EngineError, match=r"outside 0\.\.111"):
                await engine.generate(np.array([5, -1], np.int32), SamplingParams(), "s")
            assert (
                await engine.generate(random_ids(9, 0), SamplingParams(max_tokens=1), "s")
            ).token_ids.size == 1

    run(work())


def test_a_turn_ends_at_a_stop_token_at_max_tokens_and_at_max_length(subject: Subject) -> None:
    async def work() -> tuple[Completion, Completion, Completion]:
        async with subject.make(3) as engine:
            prompt = random_ids(MAX_LENGTH - 12, seed=0)
            free = await engine.generate(prompt, SamplingParams(max_tokens=10, seed=1), "a")
            stops = (111, int(free.token_ids[4]))
            stopped = await engine.generate(
                prompt, SamplingParams(max_tokens=10, seed=1, stop_token_ids=stops), "b"
            )
            full = await engine.generate(prompt, SamplingParams(max_tokens=99, seed=1), "c")
            return free, stopped, full

    free, stopped, full = run(work())
    assert (free.stop_reason, len(free.token_ids)) == ("length", 10)
    first = free.token_ids.tolist().index(free.token_ids[4])
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert stopped.stop_reason == "stop"
    assert (full.stop_reason, len(full.token_ids)) == ("length", 12)
    assert full.token_ids[:10].tolist() == free.token_ids.tolist()


def test_a_prompt_that_departs_from_the_session_is_computed_from_there(subject: Subject) -> None:
    async def work() -> tuple[Said, Said]:
        async with subject.make(1) as engine:
            params, prompt = SamplingParams(max_tokens=8, seed=1), random_ids(20, 0)
            await engine.generate(prompt, params, "s")
            other = np.concatenate([prompt[:15], (prompt[15:] + 1) % 112])
            departed = Said(prompt=other, completion=await engine.generate(other, params, "s"))
            again = Said(prompt=other, completion=await engine.generate(other, params, "s"))
            return departed, again

    departed, again = run(work())
    for turn, start in ((departed, 15), (again, 19)):
        assert_logprobs(turn, logprob_of(plain_logits(subject.reference, turn), turn.completion.token_ids))
        routes = turn.completion.routes
        assert routes is not None
        assert (routes.start, len(routes.experts)) == (start, 27 - start)
    assert again.completion.token_ids.tolist() == departed.completion.token_ids.tolist()


def test_a_session_has_one_turn_at_a_time(subject: Subject) -> None:
    async def work() -> None:
        async with subject.make(1) as engine:
            await engine.pause()
            first = asyncio.create_task(engine.generate(random_ids(9, 0), SamplingParams(max_tokens=2), "s"))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="in progress"):
                await engine.generate(random_ids(9, 0), SamplingParams(max_tokens=2), "s")
            await engine.resume()
            assert len((await first).token_ids) == 2

    run(work())


def test_releasing_a_session_ends_its_turn_and_frees_its_slot(subject: Subject) -> None:
    async def work() -> None:
        async with subject.make(1) as engine:
            await engine.pause()
            turn = asyncio.create_task(engine.generate(random_ids(9, 0), SamplingParams(max_tokens=2), "a"))
            await asyncio.sleep(0)
            await engine.release("a")
            await engine.release("unknown")
            with pytest.raises(EngineError, match="released"):
                await turn
            await engine.resume()
            assert (
                len((await engine.generate(random_ids(9, 0), SamplingParams(max_tokens=2), "b")).token_ids)
                == 2
            )

    run(work())
