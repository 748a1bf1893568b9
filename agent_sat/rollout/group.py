"""A group: siblings of one task, played at once, rewarded, and compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_sat.errors import AgentSatError
from agent_sat.rollout.episode import EpisodeKey, EpisodeRunner
from agent_sat.types import FloatArray, Group, SamplingParams, Task

Advantage = Callable[[NDArray[np.float64], NDArray[np.bool_], list[NDArray[np.float64]]], list[FloatArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """Plays groups of `size` episodes."""

    episodes: EpisodeRunner
    params: SamplingParams
    advantage: Advantage
    run_seed: int

    async def run(self, number: int, task: Task, *, size: int, greedy: bool = False) -> Group:
        """Play `size` siblings of `task`. Raises EngineError when the engine fails; nothing is left running."""
        params = SamplingParams(temperature=0.0) if greedy else self.params
        keys = [EpisodeKey(run_seed=self.run_seed, group=number, member=member) for member in range(size)]
        try:
            async with asyncio.TaskGroup() as siblings:
                running = [siblings.create_task(self.episodes.run(key, task, params)) for key in keys]
        except* AgentSatError as errors:
            raise errors.exceptions[0] from None
        members = tuple(episode.result() for episode in running)
        advantages = self.advantage(
            np.array([member.reward for member in members]),
            np.array([member.valid for member in members]),
            [np.array([turn.reward for turn in member.turns]) for member in members],
        )
        return Group(
            number=number,
            task=task,
            members=members,
            advantages=tuple(advantages),
            temperature=self.params.temperature,
        )
