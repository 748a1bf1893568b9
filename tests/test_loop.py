"""The loop without Ray or torch: fakes that run, with random durations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from agent_sat.data.tasks import TaskStream
from agent_sat.errors import EngineError, WorkerError
from agent_sat.loop import Loop, LoopSettings
from agent_sat.types import Ending, GroupSummary, Metrics, Position, StepReport, Task, WarmStep

START = Position(step=0, version=0, next_group=0)


class FakeEngine:
    """Serves a version; remembers what it was given."""

    def __init__(self) -> None:
        self.version = -1
        self.loads: list[int] = []

    async def load_weights(self, version: int, weights: Any) -> None:
        assert weights == f"weights {version}"
        self.version = version
        self.loads.append(version)


class FakeRollouts:
    """Groups that take random time and carry the version at their start."""

    def __init__(self, engine: FakeEngine, seed: int = 0, longest: float = 0.01) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.longest = longest
        self.num_running = self.num_most = 0
        self.tasks: list[Task] = []
        self.fail_number: int | None = None
        self.error: Exception = EngineError("the engine broke")
        self.hang_number: int | None = None

    async def run_group(self, number: int, task: Task, *, size: int, greedy: bool = False) -> Any:
        version = self.engine.version
        self.num_running += 1
        self.num_most = max(self.num_most, self.num_running)
        self.tasks.append(task)
        try:
            if number == self.hang_number:
                await asyncio.sleep(3600)
            await asyncio.sleep(self.random.random() * self.longest)
            if number == self.fail_number:
                raise self.error
        finally:
            self.num_running -= 1
        summary = GroupSummary(
            number=number,
            task=task,
            rewards=(1.0, 0.0),
            endings=(Ending.ANSWERED, Ending.ANSWERED),
            num_turns=(1, 2),
            num_sampled=(3, 5),
            oldest_version=version,
            tool_statuses=("ok", "error"),
            tool_seconds=0.5,
            seconds=0.1,
            failures=(),
        )
        return summary, (number, version)

    async def metrics(self) -> Metrics:
        return {"sandbox/runs": 7.0}


class FakeLearner:
    """Counts updates; asserts the lag of what it is given; may be slow, or skip the update of some steps."""

    def __init__(self, bound: int, seconds: float = 0.0) -> None:
        self.version = 0
        self.bound = bound
        self.seconds = seconds
        self.numbers: list[int] = []
        self.lags: list[int] = []
        self.on_step: Callable[[], None] = lambda: None
        self.skip_steps: set[int] = set()

    async def warm_start(self, num_steps: int) -> WarmStep | None:
        return None

    async def step(self, step: int, payloads: list[Any]) -> StepReport:
        self.on_step()
        await asyncio.sleep(self.seconds)
        self.numbers += [number for number, _ in payloads]
        self.lags += [self.version - version for _, version in payloads]
        skipped = "a test" if step in self.skip_steps else ""
        self.version += not skipped
        return StepReport(
            step=step, version=self.version, skipped=skipped, num_tokens=8, metrics={}, seconds=0.01
        )

    async def publish(self) -> tuple[int, Any]:
        return self.version, f"weights {self.version}"


def build(
    *,
    steps: int = 6,
    bound: int = 1,
    interval: int = 1,
    seconds: float = 0.0,
    position: Position = START,
    timeout: float = 30.0,
    concurrency: int = 12,
) -> tuple[Loop, FakeEngine, FakeRollouts, FakeLearner, list[Metrics]]:
    engine = FakeEngine()
    rollouts, learner = FakeRollouts(engine), FakeLearner(bound, seconds)
    learner.version = position.version
    logged: list[Metrics] = []

    async def step_done(metrics: Metrics, position: Position) -> None:
        logged.append(metrics)

    loop = Loop(
        settings=LoopSettings(
            steps=steps,
            groups_per_step=3,
            group_size=2,
            bound=bound,
            broadcast_interval=interval,
            concurrency=concurrency,
            stratum="level",
            group_timeout_seconds=timeout,
        ),
        engine=engine,  # type: ignore[arg-type]
        rollouts=rollouts,  # type: ignore[arg-type]
        learner=learner,  # type: ignore[arg-type]
        tasks=TaskStream(seed=0, stream="train", choices={"level": [1, 2]}),
        position=position,
        step_done=step_done,
    )
    return loop, engine, rollouts, learner, logged


def run(loop: Loop) -> Position:
    async def bounded() -> Position:
        async with asyncio.timeout(20):
            return await loop.run()

    return asyncio.run(bounded())


@pytest.mark.parametrize(("bound", "interval"), [(0, 1), (1, 1), (8, 1), (8, 8), (7, 8), (3, 2)])
def test_lag_never_exceeds_the_bound(bound: int, interval: int):
    loop, _, _, learner, _ = build(steps=20, bound=bound, interval=interval)
    assert run(loop).step == 20
    assert max(learner.lags) <= bound
    assert loop.buffer.num_too_old == 0


def test_bound_zero_trains_on_the_current_weights_alone():
    loop, engine, rollouts, learner, _ = build(bound=0)
    overlaps = []
    learner.on_step = lambda: overlaps.append(rollouts.num_running)
    run(loop)
    assert set(learner.lags) == {0}
    assert set(overlaps) == {0}
    assert engine.loads == list(range(7))


def test_rollout_goes_on_while_the_learner_works():
    loop, _, rollouts, learner, _ = build(bound=1, seconds=0.01)
    overlaps = []
    learner.on_step = lambda: overlaps.append(rollouts.num_running)
    run(loop)
    assert max(overlaps) > 0


def test_groups_are_trained_in_the_order_they_were_started():
    loop, _, _, learner, _ = build(steps=8, bound=3)
    run(loop)
    assert learner.numbers == list(range(24))


def test_weights_are_published_once_an_interval():
    loop, engine, _, _, _ = build(steps=8, bound=3, interval=4)
    run(loop)
    assert engine.loads == [0, 4, 8]


def test_concurrency_is_never_exceeded():
    loop, _, rollouts, _, _ = build(steps=8, bound=20)
    run(loop)
    assert rollouts.num_most == 12


@pytest.mark.parametrize(("bound", "interval"), [(0, 1), (7, 8), (1, 1)])
def test_skipped_update_does_not_stop_the_run(bound: int, interval: int):
    loop, _, _, learner, _ = build(steps=12, bound=bound, interval=interval)
    learner.skip_steps = {1, 5, 6}
    assert run(loop) == Position(step=12, version=9, next_group=36)
    assert max(learner.lags) <= bound


def test_one_group_at_a_time_is_enough():
    loop, _, rollouts, _, _ = build(steps=4, bound=1, concurrency=1)
    assert run(loop).step == 4
    assert rollouts.num_most == 1


def test_no_group_is_started_that_no_step_will_use():
    loop, _, rollouts, _, _ = build(steps=3, bound=5)
    run(loop)
    assert len(rollouts.tasks) == 9


def test_resumed_run_goes_on_with_its_tasks_and_versions():
    position = Position(step=4, version=4, next_group=12)
    loop, engine, rollouts, learner, _ = build(steps=6, position=position)
    assert run(loop) == Position(step=6, version=6, next_group=18)
    assert learner.numbers == list(range(12, 18))
    assert engine.loads[0] == 4
    assert rollouts.tasks[0].id == "train-12"


def test_resuming_a_finished_run_does_nothing():
    loop, _, _, learner, _ = build(steps=4, position=Position(step=4, version=4, next_group=12))
    assert run(loop).step == 4
    assert learner.numbers == []


def test_failed_group_ends_the_run_with_its_number_and_cause():
    loop, _, rollouts, _, _ = build()
    rollouts.fail_number = 2
    with pytest.raises(WorkerError, match="group 2: the engine broke"):
        run(loop)
    assert rollouts.num_running == 0


def test_foreign_error_of_a_group_ends_the_run_as_well():
    loop, _, rollouts, _, _ = build()
    rollouts.fail_number, rollouts.error = 2, KeyError("a mistake of ours")
    with pytest.raises(WorkerError, match="group 2: rollout: KeyError: 'a mistake of ours'"):
        run(loop)


def test_group_that_hangs_ends_the_run_in_its_time_limit():
    loop, _, rollouts, _, _ = build(timeout=0.2)
    rollouts.hang_number = 1
    with pytest.raises(WorkerError, match=r"group 1 did not finish within 0\.2 s"):
        run(loop)
    assert rollouts.num_running == 0


def test_stop_ends_after_the_step_under_way():
    loop, _, rollouts, learner, logged = build(steps=50, seconds=0.01)
    learner.on_step = lambda: loop.stop.set() if len(logged) == 2 else None
    assert run(loop).step == 3
    assert rollouts.num_running == 0


def test_stop_while_waiting_for_rollouts_ends_at_once():
    loop, _, rollouts, _, _ = build(bound=0)
    rollouts.hang_number = 0

    async def stopped() -> Position:
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(0.05)
        loop.stop.set()
        return await asyncio.wait_for(running, 2)

    assert asyncio.run(stopped()).step == 0
    assert rollouts.num_running == 0


def test_step_metrics_tell_rewards_by_level_tools_and_times():
    loop, _, _, _, logged = build(steps=1)
    run(loop)
    (metrics,) = logged
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/level=1"] == metrics["reward/level=2"] == 0.5
    assert metrics["rollout/tokens"] == 24
    assert metrics["tool/ok"] == metrics["tool/error"] == 0.5
    assert metrics["rollout/ending/answered"] == 1.0
    assert metrics["train/tokens_per_second"] == pytest.approx(800)
    assert metrics["staleness/in_queue"] == 0.0
    assert metrics["sandbox/runs"] == 7.0
