import asyncio
import time
from typing import Any

import pytest

from agent_sat.errors import EngineError, SandboxError
from agent_sat.rollout.episode import EpisodeKey, Limits, budget
from agent_sat.types import Ending, SamplingParams, Task, Trajectory
from tests.rollout.fakes import TOKENIZER, CountingEnv, ScriptedEngine, runner

TASK = Task(id="t", seed=7)
KEY = EpisodeKey(run_seed=0, group=3, member=1)


def play(engine: ScriptedEngine, environment: Any = None, **limits: Any) -> Trajectory:
    environment = environment or CountingEnv()
    episodes = runner(engine, lambda: environment, **limits)
    return asyncio.run(episodes.run(KEY, TASK, SamplingParams()))


@pytest.mark.parametrize(
    ("num_prompt", "num_response", "room"), [(4, 0, 10), (4, 7, 3), (8, 7, 1), (4, 10, 0), (12, 4, 0)]
)
def test_budget_is_bounded_by_response_and_context(num_prompt: int, num_response: int, room: int):
    limits = Limits(max_response_tokens=10, max_length=16, step_timeout_seconds=1)
    assert budget(num_prompt, num_response, limits) == room


def test_episode_records_each_turn_and_sums_their_rewards():
    engine = ScriptedEngine(["no<|eos|>", "yes<|eos|>"])
    trajectory = play(engine)
    assert [turn.text for turn in trajectory.turns] == ["no", "yes"]
    assert [turn.observation for turn in trajectory.turns] == ["value 1", "value 2"]
    assert (trajectory.reward, trajectory.ending, trajectory.prompt) == (1.0, Ending.ANSWERED, "start 7")
    assert engine.released == [KEY.session()]


def test_each_prompt_continues_the_tokens_before_it():
    engine = ScriptedEngine(["no<|eos|>", "yes<|eos|>"])
    first, second = (turn for turn in play(engine).turns)
    held = [*first.prompt_ids, *first.completion.token_ids]
    assert second.prompt_ids.tolist()[: len(held)] == held
    assert (
        TOKENIZER.decode(second.prompt_ids[len(held) :].tolist()) == "<python_output>value 1</python_output>"
    )


def test_each_turn_has_a_seed_of_its_own_and_the_room_that_is_left():
    engine = ScriptedEngine(["no<|eos|>", "yes<|eos|>"])
    play(engine, max_response_tokens=30)
    (first_ids, first, _), (second_ids, second, _) = engine.requests
    assert first.seed != second.seed
    assert first.max_tokens == 30
    assert second.max_tokens == 30 - (len(second_ids) - len(first_ids))


def test_cut_turn_is_not_executed_and_stays_in_the_record():
    environment = CountingEnv()
    trajectory = play(ScriptedEngine(["<python>print(1"], {0: "length"}), environment)
    assert trajectory.ending is Ending.TOKEN_LIMIT
    assert environment.actions == []
    assert len(trajectory.turns[0].completion.token_ids) > 0
    assert trajectory.valid


def test_no_request_is_sent_when_no_room_is_left():
    engine = ScriptedEngine(["no<|eos|>"] * 9)
    trajectory = play(engine, CountingEnv(num_turns=9), max_response_tokens=20)
    assert trajectory.ending is Ending.TOKEN_LIMIT
    assert len(engine.requests) == len(trajectory.turns) < 9


def test_environment_error_is_data_with_its_cause():
    environment = CountingEnv()
    trajectory = play(ScriptedEngine(["crash<|eos|>"]), environment)
    assert trajectory.ending is Ending.ENVIRONMENT_FAILURE
    assert not trajectory.valid
    assert "ZeroDivisionError: the environment's own mistake" in trajectory.failure
    assert environment.closed


def test_sandbox_that_cannot_start_is_data_with_its_cause():
    def fail() -> Any:
        raise SandboxError("no namespaces here")

    engine = ScriptedEngine(["no"])
    trajectory = asyncio.run(runner(engine, fail).run(KEY, TASK, SamplingParams()))
    assert (trajectory.ending, trajectory.failure) == (Ending.TOOL_FAILURE, "no namespaces here")


def test_step_that_hangs_costs_its_limit_and_is_data():
    class Hanging(CountingEnv):
        def step(self, action: str) -> Any:
            time.sleep(1.0)
            return super().step(action)

    started = time.monotonic()
    trajectory = play(ScriptedEngine(["no<|eos|>"]), Hanging(), step_timeout_seconds=0.1)
    assert trajectory.ending is Ending.ENVIRONMENT_FAILURE
    assert trajectory.failure == "environment step did not finish within 0.1 s"
    assert time.monotonic() - started < 3


def test_reset_that_hangs_costs_its_limit_and_is_data():
    class Hanging(CountingEnv):
        def reset(self, **_: Any) -> Any:
            time.sleep(1.0)
            return "late", {}

    trajectory = play(ScriptedEngine(["no"]), Hanging(), step_timeout_seconds=0.1)
    assert trajectory.failure == "task t: start did not finish within 0.1 s"


def test_environment_that_comes_too_late_is_closed():
    environment = CountingEnv()

    def late() -> CountingEnv:
        time.sleep(0.3)
        return environment

    engine = ScriptedEngine(["no"])
    episodes = runner(engine, late, step_timeout_seconds=0.1)

    async def play_and_wait() -> Trajectory:
        trajectory = await episodes.run(KEY, TASK, SamplingParams())
        await asyncio.sleep(0.5)
        return trajectory

    assert asyncio.run(play_and_wait()).ending is Ending.ENVIRONMENT_FAILURE
    assert environment.closed


@pytest.mark.parametrize(
    "answer", [("text", float("nan"), True, False, {}), (7, 1.0, True, False, {}), ("text", 1.0)]
)
def test_answer_that_makes_no_sense_is_the_environments_failure(answer: tuple):
    class Broken(CountingEnv):
        def step(self, action: str) -> Any:
            return answer

    trajectory = play(ScriptedEngine(["no<|eos|>"]), Broken())
    assert trajectory.ending is Ending.ENVIRONMENT_FAILURE


def test_failing_close_costs_nothing():
    class Leaving(CountingEnv):
        def close(self) -> None:
            raise OSError("already gone")

    assert play(ScriptedEngine(["no<|eos|>", "yes<|eos|>"]), Leaving()).reward == 1.0


def test_engine_error_ends_the_episode_for_all_and_releases_its_session():
    engine = ScriptedEngine(["no"])
    engine.fail_member = KEY.member
    with pytest.raises(EngineError, match="the engine broke"):
        play(engine)
    assert engine.released == [KEY.session()]


def test_aborted_turn_does_not_count_against_the_model():
    trajectory = play(ScriptedEngine(["no"], {0: "abort"}))
    assert (trajectory.ending, trajectory.valid) == (Ending.ABORTED, False)
