import time
import warnings
from collections.abc import Iterator

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import agent_sat.envs  # noqa: F401  registers
from agent_sat.envs.lookup import CHARSET, Lookup, Puzzle
from agent_sat.errors import ConfigError, SandboxError
from agent_sat.protocols import Demonstrator
from agent_sat.sandboxes import Pool, local_pool
from agent_sat.types import Ending, SandboxLimits, ToolResult

SEEDS = range(40)
ALL_SLIPS = {"addend": 0.4, "early": 0.3, "mental": 0.3, "key": 0.4}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with local_pool(SandboxLimits(timeout_seconds=1.0), tier="process") as pool:
        yield pool


@pytest.fixture
def env(pool: Pool) -> Iterator[Lookup]:
    with pool.open() as sandbox:
        yield Lookup(sandbox=sandbox)


class ScriptedSandbox:
    """Answers with what it was given, one result a run, after an unremarkable preamble."""

    def __init__(self, *results: ToolResult) -> None:
        self.results = [ToolResult(status="ok"), *results]
        self.codes: list[str] = []

    def run(self, code: str, *, timeout_seconds: float | None = None) -> ToolResult:
        self.codes.append(code)
        return self.results.pop(0)

    def close(self) -> None: ...

    def __enter__(self) -> "ScriptedSandbox":
        return self

    def __exit__(self, *exc: object) -> None: ...


def test_gymnasium_makes_it_by_id_and_its_checker_accepts_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = gymnasium.make("agent_sat.envs:agent_sat/Lookup-v0")
        assert type(made.unwrapped) is Lookup
        check_env(made.unwrapped, skip_render_check=True)
        made.close()


def test_make_passes_the_sandbox_itself(pool: Pool) -> None:
    with pool.open() as sandbox:
        made = gymnasium.make("agent_sat.envs:agent_sat/Lookup-v0", sandbox=sandbox, disable_env_checker=True)
        made.reset(seed=1, options={"level": 1})
        made.step("<python>x = 5</python>")
        assert sandbox.run("x").stdout == "5\n"
        assert made.spec is not None


def test_a_seed_and_a_level_give_one_puzzle_and_the_level_is_in_info() -> None:
    env = Lookup()
    prompt, info = env.reset(seed=7, options={"level": 3})
    assert info == {"level": 3}
    assert env.reset(seed=7, options={"level": 3})[0] == prompt
    assert env.reset(seed=8, options={"level": 3})[0] != prompt
    assert prompt.startswith("start ")
    assert env.reset(seed=7, options={"level": 1})[0].startswith("Compute ")
    assert {env.reset(seed=seed)[1]["level"] for seed in SEEDS} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    "options", [{"level": 0}, {"level": 6}, {"level": "3"}, {"level": True}, {"depth": 2}]
)
def test_a_wrong_option_is_told_with_what_is_allowed(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 5|the only one is 'level'"):
        Lookup().reset(seed=0, options=options)


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_a_puzzle_of_level_l_needs_l_tool_turns(env: Lookup, level: int) -> None:
    observation, _ = env.reset(seed=11, options={"level": level})
    rule = observation.partition("*")[2] if level > 1 else ""
    code = observation.removeprefix("Compute ") if level == 1 else f"get('{observation[6:9]}')"
    for turn in range(level):
        observation, reward, terminated, truncated, info = env.step(f"<python>print({code})</python>")
        assert (reward, terminated, truncated, info["tool"].result.status) == (0.0, False, False, "ok"), turn
        word, _, told = observation.partition(" ")
        code = f"get('{told}')" if word == "next" else f"{told}*{rule}"
    assert observation.isdigit()
    _, reward, terminated, _, info = env.step(f"so it is \\boxed{{{observation}}}")
    assert (reward, terminated, info) == (1.0, True, {"ending": Ending.ANSWERED, "answer": observation})


def test_a_wrong_answer_and_no_answer_end_it_without_reward(env: Lookup) -> None:
    env.reset(seed=1, options={"level": 1})
    assert env.step("\\boxed{12}") == ("", 0.0, True, False, {"ending": Ending.ANSWERED, "answer": "12"})
    env.reset(seed=1, options={"level": 1})
    assert env.step("I do not know") == ("", 0.0, True, False, {"ending": Ending.ANSWERED})


def test_more_calls_than_allowed_truncate_it(pool: Pool) -> None:
    with pool.open() as sandbox:
        env = Lookup(sandbox=sandbox, max_turns=2)
        env.reset(seed=1, options={"level": 1})
        for _ in range(2):
            assert env.step("<python>1</python>")[0] == "1"
        assert env.step("<python>1</python>") == ("", 0.0, False, True, {"ending": Ending.TURN_LIMIT})


@pytest.mark.parametrize(
    ("code", "observation", "status"),
    [
        ("print(get('aaaa'))", "error", "ok"),
        ("get(5)", "'error'", "ok"),
        ("1/0", "ZeroDivisionError: division by zero", "error"),
        ("print(3); y", "3\nNameError: name 'y' is not defined", "error"),
        ("def", "SyntaxError: invalid syntax", "error"),
        ("x = 1", "", "ok"),
        ("print('~é')", "??", "ok"),
        ("print('a' * 300)", "a" * 200, "ok"),
        ("import os; os._exit(0)", "error: exited", "exited"),
    ],
)
def test_a_mistake_is_an_ordinary_observation(env: Lookup, code: str, observation: str, status: str) -> None:
    env.reset(seed=3, options={"level": 2})
    told, reward, terminated, truncated, info = env.step(f"<python>{code}</python>")
    assert (told, reward, terminated, truncated) == (observation, 0.0, False, False)
    assert info["tool"].result.status == status


def test_two_invalid_calls_run_nothing_and_the_loop_goes_on() -> None:  # case T2 (b) and (c)
    sandbox = ScriptedSandbox(ToolResult(status="ok", stdout="9\n"))
    env = Lookup(sandbox=sandbox)
    env.reset(seed=3, options={"level": 1})
    statuses = []
    for arguments in ('"{\\"x\\":"', "[1]"):
        turn = f'<tool_call>{{"name": "python", "arguments": {arguments}}}</tool_call>'
        observation, _, terminated, truncated, info = env.step(turn)
        statuses.append(info["tool"].result.status)
        assert observation.startswith("error: the ") and not terminated and not truncated
    assert statuses == ["invalid_call", "invalid_call"]
    assert sandbox.codes == []
    assert env.step("<python>print(9)</python>")[0] == "9"


def test_the_table_survives_the_loss_of_the_interpreter(env: Lookup) -> None:
    prompt, _ = env.reset(seed=3, options={"level": 2})
    ask = f"<python>print(get('{prompt[6:9]}'))</python>"
    before = env.step(ask)[0]
    assert before.startswith("value ")
    env.step("<python>exit()</python>")
    assert env.step(ask)[0] == before


def test_a_failure_of_the_sandbox_itself_is_raised() -> None:
    env = Lookup(sandbox=ScriptedSandbox(ToolResult(status="infra", stderr="no more memory")))
    env.reset(seed=3)
    with pytest.raises(SandboxError, match="no more memory"):
        env.step("<python>1</python>")


def test_the_hidden_table_cannot_be_read_from_its_code() -> None:
    puzzle = Puzzle.draw(6, 4)
    for secret in (*puzzle.keys, str(puzzle.value), "next ", "value "):
        assert secret not in puzzle.preamble()
    namespace: dict[str, object] = {}
    exec(puzzle.preamble(), namespace)
    get = namespace["get"]
    assert callable(get)
    assert [get(key) for key in puzzle.keys] == [puzzle.look_up(key) for key in puzzle.keys]
    assert get("zzz") == "error"


def test_demonstrations_are_what_the_environment_answers(pool: Pool) -> None:
    for seed in SEEDS:
        with pool.open() as sandbox:
            env = Lookup(sandbox=sandbox)
            turns = env.demonstrate(seed, {}, ALL_SLIPS)
            observation, _ = env.reset(seed=seed)
            assert turns.pop(0) == ("user", observation)
            info = {}
            for role, text in turns:
                if role == "assistant":
                    observation, *_, info = env.step(text)
                else:
                    assert (role, text) == ("tool", observation)
            assert info["ending"] is Ending.ANSWERED


def reward_of(env: Lookup, turns: list[tuple[str, str]], seed: int) -> float:
    env.reset(seed=seed)
    return env.step(turns[-1][1])[1]


def test_without_slips_every_demonstration_is_right() -> None:
    env = Lookup()
    for seed in SEEDS:
        turns = env.demonstrate(seed, {}, {})
        assert reward_of(env, turns, seed) == 1.0
        assert sum(role == "tool" for role, _ in turns) == Puzzle.draw(seed, None).level


@pytest.mark.parametrize("slip", ["addend", "mental"])
def test_a_sure_slip_in_the_sum_makes_every_answer_wrong(slip: str) -> None:
    env = Lookup()
    assert not any(reward_of(env, env.demonstrate(seed, {}, {slip: 1.0}), seed) for seed in SEEDS)


def test_a_mistyped_key_is_tried_again_half_of_the_time() -> None:
    env = Lookup()
    rights = [reward_of(env, env.demonstrate(s, {"level": 2}, {"key": 1.0}), s) for s in range(400)]
    # A typo hits the right letter or digit by chance in 1 of 18 or 10; a rest of half is given up.
    assert 0.45 < sum(rights) / 400 < 0.65


def test_an_early_answer_is_shorter_and_only_possible_in_a_chain() -> None:
    env = Lookup()
    assert [len(env.demonstrate(9, {"level": level}, {"early": 1.0})) for level in (1, 2, 3, 5)] == [
        4,
        6,
        4,
        4,
    ]


@pytest.mark.parametrize("slips", [{"adend": 0.5}, {"key": 1.5}])
def test_an_unknown_slip_is_told_with_the_known_ones(slips: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="addend, early, mental, key"):
        Lookup().demonstrate(0, {}, slips)


def test_demonstrations_use_only_the_charset_and_are_cheap() -> None:
    env = Lookup()
    assert isinstance(env, Demonstrator)
    started = time.process_time()
    texts = {text for seed in range(1280) for _, text in env.demonstrate(seed, {}, ALL_SLIPS)}
    assert time.process_time() - started < 0.4  # 12,800 in 2 s and some
    assert set("".join(texts)) <= CHARSET
