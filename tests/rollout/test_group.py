import asyncio

import numpy as np
import pytest

from agent_sat.algo.advantage import ADVANTAGES
from agent_sat.errors import EngineError
from agent_sat.rollout.group import GroupRunner
from agent_sat.types import SamplingParams, Task
from tests.rollout.fakes import CountingEnv, ScriptedEngine, runner

TASK = Task(id="t", seed=7, options={"level": 2})


def groups(engine: ScriptedEngine) -> GroupRunner:
    return GroupRunner(
        episodes=runner(engine, lambda: CountingEnv(num_turns=1)),
        params=SamplingParams(temperature=0.7),
        advantage=ADVANTAGES["grpo"],
        run_seed=5,
    )


def test_siblings_share_the_task_and_differ_in_seed():
    engine = ScriptedEngine(["yes<|eos|>"])
    group = asyncio.run(groups(engine).run(4, TASK, size=3))
    assert [(m.group, m.member, m.task) for m in group.members] == [(4, i, TASK) for i in range(3)]
    assert len({params.seed for _, params, _ in engine.requests}) == 3
    assert {params.temperature for _, params, _ in engine.requests} == {0.7}


def test_equal_rewards_give_no_advantage():
    group = asyncio.run(groups(ScriptedEngine(["yes<|eos|>"])).run(0, TASK, size=3))
    assert [advantages.tolist() for advantages in group.advantages] == [[0.0]] * 3


def test_greedy_group_samples_at_temperature_zero():
    engine = ScriptedEngine(["yes<|eos|>"])
    asyncio.run(groups(engine).run(0, TASK, size=1, greedy=True))
    assert engine.requests[0][1].temperature == 0


def test_engine_error_of_one_member_is_raised_as_itself():
    engine = ScriptedEngine(["yes<|eos|>"])
    engine.fail_member = 2
    with pytest.raises(EngineError, match="the engine broke"):
        asyncio.run(groups(engine).run(0, TASK, size=4))


def test_summary_tells_what_the_loop_needs():
    summary = asyncio.run(groups(ScriptedEngine(["yes<|eos|>"])).run(9, TASK, size=2)).summary()
    assert (summary.number, summary.rewards, summary.num_turns) == (9, (1.0, 1.0), (1, 1))
    assert summary.num_sampled == (4, 4)  # y e s and the end of sequence
    assert summary.oldest_version == 0
    assert np.isclose(sum(summary.valid_rewards), 2.0)
