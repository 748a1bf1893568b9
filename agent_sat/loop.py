"""The loop: keep rollouts going within the staleness bound, train on groups in the order they were started,
publish new weights. Synchronous training is this loop with bound 0. It knows nothing of Ray or torch.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_sat.data.buffer import Finished, StalenessBuffer
from agent_sat.data.staleness import predicted_lag, tailness
from agent_sat.data.tasks import TaskStream
from agent_sat.errors import AgentSatError, WorkerError, boundary
from agent_sat.protocols import Learner, RolloutEngine, Rollouts
from agent_sat.types import Metrics, Position, StepReport

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The numbers the loop works by."""

    steps: int
    groups_per_step: int
    group_size: int
    bound: int  # optimizer updates
    broadcast_interval: int  # optimizer updates
    concurrency: int  # groups in flight
    stratum: str | None = None  # the task option by which rewards are reported
    group_timeout_seconds: float = 3600.0
    step_timeout_seconds: float = 3600.0


StepDone = Callable[[Metrics, Position], Awaitable[None]]  # called after each step: where the run stands now


@dataclass(slots=True, kw_only=True)
class Loop:
    """One run's loop; `run` goes from `position` to the last step, or until `stop` is set."""

    settings: LoopSettings
    engine: RolloutEngine
    rollouts: Rollouts
    learner: Learner
    tasks: TaskStream
    position: Position
    step_done: StepDone
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    buffer: StalenessBuffer = field(init=False)
    published: int = field(init=False)
    _playing: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _num_needed: int = field(init=False)  # groups that the remaining steps use
    _closing: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.published = self.position.version
        self._num_needed = self.settings.groups_per_step * (self.settings.steps - self.position.step)
        self.buffer = StalenessBuffer(
            bound=self.settings.bound,
            groups_per_step=self.settings.groups_per_step,
            next_number=self.position.next_group,
            version=self.position.version,
        )

    async def run(self) -> Position:
        """Train; returns where the run stands. Raises what ended it; no task is left running."""
        try:
            await self.publish()
            while self.position.step < self.settings.steps and not self.stop.is_set():
                await self.one_step()
        finally:
            self._closing = True
            for playing in self._playing:
                playing.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
        return self.position

    async def one_step(self) -> None:
        started = time.monotonic()
        self.fill()
        groups = await self.take()
        if groups is None:
            return
        waited = time.monotonic() - started
        self.fill()  # the groups just taken made room: rollout goes on while the learner works
        step = self.position.step + 1
        async with timeout(self.settings.step_timeout_seconds, f"training step {step}"):
            report = await self.learner.step(step, [group.payload for group in groups])
        self.buffer.next_version = report.version  # a skipped step leaves it where it was
        self.position = Position(step=step, version=report.version, next_group=self.buffer.first_number)
        if report.version - self.published >= self.settings.broadcast_interval:
            await self.publish()
        self.fill()
        metrics = self.metrics(groups, report, waited=waited, seconds=time.monotonic() - started)
        metrics |= await self.rollouts.metrics()
        await self.step_done(metrics, self.position)

    async def publish(self) -> None:
        """Give the engine the learner's weights; they are used from the next token on."""
        version, weights = await self.learner.publish()
        await self.engine.load_weights(version, weights)
        self.published = version

    def fill(self) -> None:
        """Start as many groups as the bound, the engine and the remaining steps allow."""
        while (
            len(self._playing) < self.settings.concurrency
            and self.buffer.num_started < self._num_needed
            and self.buffer.may_start(self.published)
        ):
            number = self.buffer.start()
            playing = asyncio.create_task(self.play(number), name=f"group {number}")
            self._playing.add(playing)
            playing.add_done_callback(self._left)

    def _left(self, playing: asyncio.Task[None]) -> None:
        """A group that ended made room for the next."""
        self._playing.discard(playing)
        if not self._closing:
            self.fill()

    async def play(self, number: int) -> None:
        """One group; whatever goes wrong with it reaches whoever takes from the buffer."""
        try:
            with boundary(WorkerError, "rollout"):
                async with timeout(self.settings.group_timeout_seconds, f"group {number}"):
                    summary, payload = await self.rollouts.run_group(
                        number, self.tasks.task(number), size=self.settings.group_size
                    )
        except AgentSatError as error:
            self.buffer.fail(number, error)
            return
        self.buffer.finish(number, summary, payload)

    async def take(self) -> list[Finished] | None:
        """The next step's groups; None when `stop` was set while waiting."""
        return await unless(self.stop, self.buffer.take(version=self.position.version))

    def metrics(
        self, groups: list[Finished], report: StepReport, *, waited: float, seconds: float
    ) -> Metrics:
        """What the loop knows of a step, beside what the learner reports."""
        summaries = [group.summary for group in groups]
        rewards = [reward for summary in summaries for reward in summary.valid_rewards]
        num_sampled = sum(sum(summary.num_sampled) for summary in summaries)
        endings = Counter(ending for summary in summaries for ending in summary.endings)
        statuses = Counter(status for summary in summaries for status in summary.tool_statuses)
        num_episodes, num_calls = sum(endings.values()), sum(statuses.values())
        return {
            **report.metrics,
            "reward/mean": sum(rewards) / len(rewards),
            **by_option(groups, self.settings.stratum),
            "rollout/tokens": num_sampled,
            "rollout/tokens_per_second": num_sampled / seconds,
            "rollout/turns_mean": sum(sum(s.num_turns) for s in summaries) / num_episodes,
            **{f"rollout/ending/{ending}": count / num_episodes for ending, count in endings.items()},
            **{f"tool/{status}": count / num_calls for status, count in statuses.items()},
            "tool/calls": num_calls,
            "tool/seconds_mean": sum(s.tool_seconds for s in summaries) / max(1, num_calls),
            **self.staleness(groups, report, seconds),
            "train/tokens_per_second": report.num_tokens / report.seconds,
            "train/skipped": float(bool(report.skipped)),
            "time/train_seconds": report.seconds,
            "time/wait_seconds": waited,
            "time/step_seconds": seconds,
        }

    def staleness(self, groups: list[Finished], report: StepReport, seconds: float) -> Metrics:
        """The lag that passed in the queue, beside the one a steady state at these rates would have."""
        lengths = [group.summary.num_sampled for group in groups]
        num_sampled = max(1, sum(map(sum, lengths)))
        version_at_use = report.version - (not report.skipped)
        waited = sum(sum(g.summary.num_sampled) * (version_at_use - g.version_at_finish) for g in groups)
        responses = self.settings.groups_per_step * self.settings.group_size
        predicted = predicted_lag(
            throughput_ratio=num_sampled / seconds * report.seconds / max(1, report.num_tokens),
            concurrency=self.settings.concurrency * self.settings.group_size,
            pull=responses,
            queue_capacity=(self.settings.bound + 1) * responses,
            tailness=tailness(lengths),
        )
        return {
            "staleness/in_queue": max(0.0, waited / num_sampled),
            "staleness/predicted_in_queue": predicted.in_queue,
            "staleness/predicted_pre_queue": predicted.pre_queue,
            "staleness/published_version": self.published,
            "staleness/groups_invalid": self.buffer.num_invalid,
            "staleness/groups_too_old": self.buffer.num_too_old,
        }


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` gives; None, and `work` is cancelled, when `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def by_option(groups: list[Finished], option: str | None) -> Metrics:
    """`reward/<option>=<value>`: the mean over the valid members of its tasks."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        if option is not None and option in group.summary.task.options:
            value = str(group.summary.task.options[option])
            rewards.setdefault(value, []).extend(group.summary.valid_rewards)
    return {f"reward/{option}={value}": sum(found) / len(found) for value, found in sorted(rewards.items())}


@asynccontextmanager
async def timeout(seconds: float, what: str) -> AsyncIterator[None]:
    """Bound a wait; its expiry is a WorkerError that says what took too long."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise WorkerError(f"{what} did not finish within {seconds:g} s") from error
