import asyncio
import random

import pytest

from agent_sat.data.buffer import MAX_INVALID_IN_A_ROW, StalenessBuffer
from agent_sat.errors import EngineError, WorkerError
from agent_sat.types import Ending, GroupSummary, Task


def summary(number: int, *, oldest_version: int = 0, ending: Ending = Ending.ANSWERED) -> GroupSummary:
    return GroupSummary(
        number=number,
        task=Task(id=str(number), seed=number),
        rewards=(1.0, 0.0),
        endings=(ending, ending),
        num_turns=(1, 1),
        num_sampled=(3, 5),
        oldest_version=oldest_version,
        tool_statuses=(),
        tool_seconds=0.0,
        seconds=0.0,
        failures=("the sandbox is gone",) if ending is Ending.TOOL_FAILURE else (),
    )


def started(buffer: StalenessBuffer, count: int) -> list[int]:
    return [buffer.start() for _ in range(count)]


def taken(buffer: StalenessBuffer, version: int = 0) -> list[int]:
    async def take() -> list[int]:
        async with asyncio.timeout(2):
            return [group.summary.number for group in await buffer.take(version=version)]

    return asyncio.run(take())


def test_groups_leave_in_the_order_they_were_started():
    buffer = StalenessBuffer(bound=1, groups_per_step=3)
    started(buffer, 4)
    for number in (3, 1, 2, 0):
        buffer.finish(number, summary(number), payload=number)
    assert taken(buffer) == [0, 1, 2]
    assert buffer.first_number == 3


def test_take_waits_for_the_slowest_of_the_next_groups():
    async def run() -> None:
        buffer = StalenessBuffer(bound=1, groups_per_step=2)
        started(buffer, 3)
        buffer.finish(0, summary(0), None)
        buffer.finish(2, summary(2), None)
        taking = asyncio.create_task(buffer.take(version=0))
        await asyncio.sleep(0.01)
        assert not taking.done()
        buffer.finish(1, summary(1), None)
        assert [group.summary.number for group in await asyncio.wait_for(taking, 2)] == [0, 1]

    asyncio.run(run())


def test_failed_group_is_raised_at_once_with_its_number_and_cause():
    async def run() -> None:
        buffer = StalenessBuffer(bound=1, groups_per_step=4)
        started(buffer, 5)
        taking = asyncio.create_task(buffer.take(version=0))
        await asyncio.sleep(0)
        buffer.fail(2, EngineError("out of memory"))
        with pytest.raises(WorkerError, match="group 2: out of memory") as raised:
            await asyncio.wait_for(taking, 2)
        assert isinstance(raised.value.__cause__, EngineError)

    asyncio.run(run())


def test_group_without_a_valid_member_is_replaced_and_frees_its_place():
    buffer = StalenessBuffer(bound=0, groups_per_step=4)
    started(buffer, 4)
    assert not buffer.may_start(0)
    for number in (0, 1, 3):
        buffer.finish(number, summary(number), None)
    buffer.finish(2, summary(2, ending=Ending.TOOL_FAILURE), None)
    assert buffer.may_start(0)
    buffer.finish(buffer.start(), summary(4), None)
    assert taken(buffer) == [0, 1, 3, 4]
    assert (buffer.num_invalid, buffer.num_in_flight, buffer.first_number) == (1, 0, buffer.next_number)


def test_many_invalid_groups_in_a_row_end_the_run_with_the_cause():
    buffer = StalenessBuffer(bound=0, groups_per_step=1)
    for _ in range(MAX_INVALID_IN_A_ROW):
        buffer.finish(buffer.start(), summary(0, ending=Ending.TOOL_FAILURE), None)
    with pytest.raises(WorkerError, match="the sandbox is gone"):
        taken(buffer)


@pytest.mark.parametrize(("bound", "allowed"), [(0, 4), (1, 8), (8, 36)])
def test_as_many_groups_may_start_as_the_bound_has_steps(bound: int, allowed: int):
    buffer = StalenessBuffer(bound=bound, groups_per_step=4)
    count = 0
    while buffer.may_start(0):
        buffer.start()
        count += 1
    assert count == allowed


def test_capacity_after_a_resume_is_that_of_a_fresh_start():
    buffer = StalenessBuffer(bound=2, groups_per_step=4, next_number=400, version=100)
    count = 0
    while buffer.may_start(100):
        buffer.start()
        count += 1
    assert count == 12


def test_too_old_group_is_dropped_at_use_and_counted():
    buffer = StalenessBuffer(bound=1, groups_per_step=1)
    started(buffer, 2)
    buffer.finish(0, summary(0, oldest_version=3), None)
    buffer.finish(1, summary(1, oldest_version=4), None)
    assert taken(buffer, version=5) == [1]
    assert buffer.num_too_old == 1


@pytest.mark.parametrize("bound", [0, 1, 8])
def test_lag_at_use_never_exceeds_the_bound_over_random_durations(bound: int):
    random_number = random.Random(bound)
    interval = max(1, bound)
    buffer = StalenessBuffer(bound=bound, groups_per_step=3)
    version = published = 0
    running: dict[int, tuple[float, int]] = {}  # finish time, version at start
    clock = 0.0
    lags = []
    while version < 60:
        while buffer.may_start(published):
            running[buffer.start()] = (clock + random_number.expovariate(1.0) ** 3, published)
        groups = buffer._ready(version)
        if groups is None:
            number = min(running, key=lambda n: running[n][0])
            clock, oldest = running.pop(number)
            buffer.finish(number, summary(number, oldest_version=oldest), None)
            continue
        lags += [version - group.summary.oldest_version for group in groups]
        version += 1
        buffer.next_version = version
        clock += random_number.random()
        if version - published >= interval:
            published = version
    assert max(lags) <= bound
    assert buffer.num_too_old == 0
    assert max(lags) == bound
