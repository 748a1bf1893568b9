"""A whole run in one process, without Ray: the same objects, the learner in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agent_sat.cluster.parts import Worker, build_engine
from agent_sat.config import Config
from agent_sat.log.run import RunDirectory
from agent_sat.protocols import Learner, RolloutEngine, Rollouts
from agent_sat.train.learner import PolicyLearner
from agent_sat.types import Group, Position, StepReport, WarmStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a loop works with."""

    engine: RolloutEngine
    rollouts: Rollouts
    learner: Learner


class ThreadedLearner:
    """A PolicyLearner whose calls do not block the event loop."""

    def __init__(self, learner: PolicyLearner) -> None:
        self.learner = learner

    async def warm_start(self, num_steps: int) -> WarmStep | None:
        return await asyncio.to_thread(self.learner.warm_start, num_steps)

    async def step(self, step: int, payloads: list[Group]) -> StepReport:
        return await asyncio.to_thread(self.learner.step, step, payloads)

    async def publish(self) -> tuple[int, Any]:
        return await asyncio.to_thread(self.learner.publish)

    async def save(self, path: str, position: Position) -> None:
        await asyncio.to_thread(self.learner.save, path, position)

    async def load(self, path: str) -> Position:
        return await asyncio.to_thread(self.learner.load, path)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def in_process(config: Config, run: RunDirectory | None) -> AsyncIterator[Parts]:
    """Build the parts here; on leaving, nothing of them is left running."""
    engine = build_engine(config)
    worker = Worker(config, engine)
    try:
        yield Parts(engine=engine, rollouts=worker, learner=ThreadedLearner(PolicyLearner(config, run)))
    finally:
        await engine.close()
        await worker.close()
