"""Scripted stand-ins that run: an engine that says what it is told, and an environment that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agent_sat.data.tokenizer import character_tokenizer
from agent_sat.errors import EngineError
from agent_sat.rollout.chat import chat_of
from agent_sat.rollout.episode import EpisodeRunner, Limits, MakeEnvironment
from agent_sat.types import Completion, IntArray, SamplingParams, StopReason

TOKENIZER = character_tokenizer()
CHAT = chat_of(TOKENIZER, ["</python>"])


class ScriptedEngine:
    """Answers each session's turns with the texts given, in order; `stop_reasons` overrides "stop" by turn."""

    def __init__(self, texts: Sequence[str], stop_reasons: dict[int, StopReason] | None = None) -> None:
        self.texts = list(texts)
        self.stop_reasons = stop_reasons or {}
        self.requests: list[tuple[IntArray, SamplingParams, str]] = []
        self.turns: dict[str, int] = {}
        self.released: list[str] = []
        self.fail_member: int | None = None

    async def generate(self, prompt_ids: IntArray, params: SamplingParams, session: str) -> Completion:
        await asyncio.sleep(0)
        if self.fail_member is not None and session.endswith(f"/{self.fail_member}"):
            raise EngineError("the engine broke")
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        self.requests.append((prompt_ids, params, session))
        token_ids = np.array(TOKENIZER.encode(self.texts[turn], add_special_tokens=False), np.int32)
        return Completion(
            token_ids=token_ids,
            behavior_logprobs=np.full(len(token_ids), -0.5, np.float32),
            versions=np.zeros(len(token_ids), np.int32),
            stop_reason=self.stop_reasons.get(turn, "stop"),
        )

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def load_weights(self, version: int, weights: Any) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class CountingEnv(gymnasium.Env[str, str]):
    """Rewards 1 for the action "yes"; ends after `num_turns` actions; raises for "crash"."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(100)

    def __init__(self, num_turns: int = 2) -> None:
        self.num_turns = num_turns
        self.actions: list[str] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        return f"start {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise ZeroDivisionError("the environment's own mistake")
        self.actions.append(action)
        return (
            f"value {len(self.actions)}",
            float(action == "yes"),
            len(self.actions) >= self.num_turns,
            False,
            {},
        )

    def close(self) -> None:
        self.closed = True


def runner(engine: ScriptedEngine, make_environment: MakeEnvironment, **limits: Any) -> EpisodeRunner:
    values = {"max_response_tokens": 100, "max_length": 200, "step_timeout_seconds": 10.0} | limits
    return EpisodeRunner(
        engine=engine,
        chat=CHAT,
        make_environment=make_environment,
        executor=ThreadPoolExecutor(4),
        room=asyncio.Semaphore(4),
        limits=Limits(**values),
    )
