"""One episode: the model writes a turn, the environment answers, until it ends; every end is data."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np

from agent_sat.errors import EnvironmentFailure, SandboxError, boundary
from agent_sat.protocols import RolloutEngine
from agent_sat.rollout.chat import Chat
from agent_sat.rollout.sampling import seed_for
from agent_sat.types import Ending, IntArray, SamplingParams, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

MakeEnvironment = Callable[[], gymnasium.Env[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an episode may use."""

    max_response_tokens: int  # after the first prompt, tool output included
    max_length: int  # prompt and response
    step_timeout_seconds: float  # of one environment step


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Which episode this is; with the run's seed it fixes every random number of its sampling."""

    run_seed: int
    group: int
    member: int

    def session(self) -> str:
        return f"{self.run_seed}/{self.group}/{self.member}"

    def seed(self, turn: int) -> int:
        return seed_for(self.run_seed, self.group, self.member, turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """What episodes of a worker share; `run` plays one."""

    engine: RolloutEngine
    chat: Chat
    make_environment: MakeEnvironment
    executor: Executor  # where environment steps block
    room: asyncio.Semaphore  # episodes at once: no more than threads and sandboxes
    limits: Limits

    async def run(self, key: EpisodeKey, task: Task, params: SamplingParams) -> Trajectory:
        """Play one episode; failures that are not the model's become the trajectory's ending, too."""
        async with self.room:
            return await self._run(key, task, params)

    async def _run(self, key: EpisodeKey, task: Task, params: SamplingParams) -> Trajectory:
        started = time.monotonic()
        turns: list[Turn] = []
        prompt = failure = ""
        environment: gymnasium.Env[str, str] | None = None
        try:
            what = f"task {task.id}: start"
            environment = opened = await self._open(what)
            prompt, _ = await self._blocking(what, opened.reset, seed=task.seed, options=task.options)
            ending = await self._play(opened, prompt, key, params, turns)
        except SandboxError as error:
            ending, failure = Ending.TOOL_FAILURE, str(error)
        except EnvironmentFailure as error:
            ending, failure = Ending.ENVIRONMENT_FAILURE, str(error)
        finally:
            await self.engine.release(key.session())
            if environment is not None:
                await self._close(environment)
        return Trajectory(
            group=key.group,
            member=key.member,
            task=task,
            turns=tuple(turns),
            reward=sum(turn.reward for turn in turns),
            ending=ending,
            prompt=prompt,
            failure=failure,
            seconds=time.monotonic() - started,
        )

    async def _play(
        self,
        environment: gymnasium.Env[str, str],
        prompt: str,
        key: EpisodeKey,
        params: SamplingParams,
        turns: list[Turn],
    ) -> Ending:
        context = self.chat.prompt(prompt)
        num_prompt = len(context)
        while True:
            room = budget(num_prompt, len(context) - num_prompt, self.limits)
            if room == 0:
                return Ending.TOKEN_LIMIT
            asked = replace(
                params, max_tokens=room, stop_token_ids=self.chat.stop_ids, seed=key.seed(len(turns))
            )
            completion = await self.engine.generate(context, asked, key.session())
            text = self.chat.decode(completion.token_ids)
            turn = Turn(prompt_ids=context, completion=completion, text=text)
            if completion.stop_reason != "stop":  # a cut command is never run
                turns.append(turn)
                return Ending.TOKEN_LIMIT if completion.stop_reason == "length" else Ending.ABORTED
            turn, ending = await self._step(environment, turn)
            turns.append(turn)
            if ending is not None:
                return ending
            context = self._next_context(context, turn)

    async def _step(self, environment: gymnasium.Env[str, str], turn: Turn) -> tuple[Turn, Ending | None]:
        started = time.monotonic()
        answer = await self._blocking("environment step", environment.step, turn.text)
        with boundary(EnvironmentFailure, "environment step"):
            observation, reward, terminated, truncated, info = answer
            if not isinstance(observation, str) or not math.isfinite(reward):
                raise EnvironmentFailure(f"environment step gave {observation!r:.60} and reward {reward!r}")
            turn = replace(
                turn,
                observation=observation,
                tool=info.get("tool"),
                reward=float(reward),
                env_seconds=time.monotonic() - started,
            )
            default = Ending.ANSWERED if terminated else Ending.TURN_LIMIT
            return turn, Ending(info.get("ending", default)) if terminated or truncated else None

    def _next_context(self, context: IntArray, turn: Turn) -> IntArray:
        sampled = turn.completion.token_ids
        return np.concatenate([context, sampled, self.chat.bridge(sampled, turn.observation)])

    async def _close(self, environment: gymnasium.Env[str, str]) -> None:
        try:
            await self._blocking("environment close", environment.close)
        except (EnvironmentFailure, SandboxError) as error:
            logger.warning("%s", error)  # the episode is over; there is nothing left to fail

    async def _open(self, what: str) -> gymnasium.Env[str, str]:
        """A new environment; one that comes too late, after a timeout or a cancellation, is closed when it comes."""
        opening = asyncio.get_running_loop().run_in_executor(self.executor, self.make_environment)
        try:
            return await self._bounded(what, asyncio.shield(opening))
        except (EnvironmentFailure, asyncio.CancelledError):
            opening.add_done_callback(self._close_late)
            raise

    def _close_late(self, opening: asyncio.Future[gymnasium.Env[str, str]]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.executor.submit(opening.result().close)

    async def _blocking(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running = functools.partial(call, *args, **kwargs)
        return await self._bounded(what, asyncio.get_running_loop().run_in_executor(self.executor, running))

    async def _bounded(self, what: str, running: asyncio.Future[Any]) -> Any:
        """Await environment code in its thread. Whatever it raises, or taking too long, is EnvironmentFailure."""
        seconds = self.limits.step_timeout_seconds
        limit = asyncio.timeout(seconds)
        try:
            with boundary(EnvironmentFailure, what):
                async with limit:
                    return await running
        except EnvironmentFailure as error:
            if limit.expired():
                raise EnvironmentFailure(f"{what} did not finish within {seconds:g} s") from error
            raise


def budget(num_prompt: int, num_response: int, limits: Limits) -> int:
    """Tokens that may still be sampled: bounded by the response and by the context, never negative."""
    room = min(limits.max_response_tokens - num_response, limits.max_length - num_prompt - num_response)
    return max(0, room)
