"""A chain of look-ups in a hidden table, then a product too large for the head: it takes the tool.

Level L needs L tool turns. `print(get('k3x'))` answers `next q7b` or, at the end of the chain, `value 4821`;
then `print(4821*377+51)`; then `\\boxed{1817568}`.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from agent_sat.envs import tool_calls
from agent_sat.errors import ConfigError, SandboxError
from agent_sat.protocols import Sandbox, SandboxPool
from agent_sat.types import STATE_LOST, Ending, ToolCall, ToolResult

MIN_LEVEL, MAX_LEVEL = 1, 5
LETTERS = "bcdfghjkmnpqrtvwxz"
CHARSET = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'()*+-=;:.,{}\\/ \n<>_|%\"[]#!?"
)
OBSERVATION_CHARS = 200
ACTION_CHARS = 4096
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
RETRY_RATE = 0.5  # of a demonstrator that mistyped a key
SLIPS = ("addend", "early", "mental", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """One task, a function of its seed and level."""

    level: int
    keys: tuple[str, ...]  # the chain, empty at level 1
    value: int
    factor: int
    addend: int
    salt: int

    @staticmethod
    def draw(seed: int, level: int | None) -> Puzzle:
        rng = random.Random(seed)
        drawn = rng.randint(MIN_LEVEL, MAX_LEVEL)  # also where it is given: the rest must not depend on that
        level = drawn if level is None else level
        value, factor, addend = rng.randrange(1000, 9999), rng.randrange(101, 999), rng.randrange(10, 99)
        salt = rng.getrandbits(64)
        keys: list[str] = []
        while len(keys) < level - 1:
            key = rng.choice(LETTERS) + rng.choice(LETTERS) + str(rng.randrange(10))
            if key not in keys:
                keys.append(key)
        return Puzzle(level=level, keys=tuple(keys), value=value, factor=factor, addend=addend, salt=salt)

    @property
    def prompt(self) -> str:
        if not self.keys:
            return f"Compute {self.value}*{self.factor}+{self.addend}"
        return f"start {self.keys[0]};then *{self.factor}+{self.addend}"

    @property
    def answer(self) -> str:
        return str(self.value * self.factor + self.addend)

    def look_up(self, key: str) -> str:
        """What `get` answers in the sandbox."""
        if key not in self.keys:
            return "error"
        following = self.keys.index(key) + 1
        return f"next {self.keys[following]}" if following < len(self.keys) else f"value {self.value}"

    def preamble(self) -> str:
        """Code that defines `get` without holding the table in a form that can be read without a key."""
        entries = dict(seal(self.salt, key, self.look_up(key)) for key in self.keys)
        return PREAMBLE.format(entries=dict(sorted(entries.items())), salt=self.salt)


# An entry's name is a salted hash of its key, and its text is masked by the rest of that hash.
PREAMBLE = """\
def get(key, _entries={entries}, _salt={salt}):
    import hashlib
    digest = hashlib.sha256(f"{{_salt}}:{{key}}".encode()).digest()
    masked = _entries.get(digest[:8])
    return "error" if masked is None else bytes(a ^ b for a, b in zip(masked, digest[8:])).decode().rstrip()
"""
ENTRY_BYTES = 24  # what a SHA-256 digest leaves after the eight bytes of a name


def seal(salt: int, key: str, text: str) -> tuple[bytes, bytes]:
    """An entry of the hidden table: its name and its masked text."""
    digest = hashlib.sha256(f"{salt}:{key}".encode()).digest()
    padded = text.encode().ljust(ENTRY_BYTES)
    return digest[:8], bytes(a ^ b for a, b in zip(padded, digest[8:], strict=True))


class Lookup(gymnasium.Env[str, str]):
    """Text in, text out; one puzzle an episode.

    `step` takes the text of an assistant turn. A tool call is executed and its output is the next
    observation; `\\boxed{...}` ends the episode with reward 1.0 if it is right; neither ends it with 0.0;
    more than `max_turns` calls truncate it. `info` holds "tool" (types.ToolCall) where one was asked for,
    "ending" (types.Ending) when it is over, and "answer". Raises SandboxError when the sandbox fails for a
    reason of its own. Without a `sandbox` it opens one.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(self, *, sandbox: Sandbox | None = None, max_turns: int = 8) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns is {max_turns}, at least 1 is needed")
        self.action_space = spaces.Text(ACTION_CHARS, min_length=0, charset=CHARSET)
        self.observation_space = spaces.Text(OBSERVATION_CHARS, min_length=0, charset=CHARSET)
        self._given = sandbox
        self._max_turns = max_turns
        self._pool: SandboxPool | None = None
        self._sandbox: Sandbox | None = None
        self._puzzle: Puzzle | None = None
        self._num_calls = 0
        self._prepared = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        level = read_level(options or {})
        self._puzzle = Puzzle.draw(int(self.np_random.integers(2**63)) if seed is None else seed, level)
        self._release()
        self._num_calls = 0
        self._prepared = False
        return self._puzzle.prompt, {"level": self._puzzle.level}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._puzzle is None:
            raise gymnasium.error.ResetNeeded("call reset before step")
        call = tool_calls.parse(action)
        if call is None:
            boxed = BOXED.findall(action)
            info: dict[str, Any] = {"ending": Ending.ANSWERED} | (
                {"answer": boxed[-1].strip()} if boxed else {}
            )
            return "", float(info.get("answer") == self._puzzle.answer), True, False, info
        if self._num_calls == self._max_turns:
            return "", 0.0, False, True, {"ending": Ending.TURN_LIMIT}
        self._num_calls += 1
        tool = self._execute(call)
        return observe(tool.result), 0.0, False, False, {"tool": tool}

    def demonstrate(
        self, seed: int, options: dict[str, Any], slips: dict[str, float]
    ) -> list[tuple[str, str]]:
        """A demonstrated episode of `reset(seed=seed, options=options)`, without a sandbox.

        `slips` are rates of deliberate mistakes: `addend` forgets it, `early` answers before the chain ends,
        `mental` does the product in the head, `key` mistypes one and tries again half of the time.
        """
        for name, rate in slips.items():
            if name not in SLIPS or not 0 <= rate <= 1:
                raise ConfigError(
                    f"slip {name!r} = {rate}: the slips are {', '.join(SLIPS)}, with rates from 0 to 1"
                )
        puzzle = Puzzle.draw(seed, read_level(options))
        return [("user", puzzle.prompt), *demonstrate(puzzle, random.Random(~seed), slips)]

    def close(self) -> None:
        self._release()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _execute(self, call: tool_calls.PythonCall | tool_calls.InvalidCall) -> ToolCall:
        if isinstance(call, tool_calls.InvalidCall):
            return ToolCall(
                code=call.text, result=ToolResult(status="invalid_call", stderr=f"error: {call.reason}")
            )
        assert self._puzzle is not None
        sandbox = self._open()
        if not self._prepared:
            prepared = sandbox.run(self._puzzle.preamble())
            if prepared.status != "ok":
                raise SandboxError(f"the preamble ended with {prepared.status}: {prepared.stderr}")
            self._prepared = True
        result = sandbox.run(call.code)
        if result.status == "infra":
            raise SandboxError(f"the sandbox failed: {result.stderr or 'no reason given'}")
        self._prepared = result.status not in STATE_LOST
        return ToolCall(code=call.code, result=result)

    def _open(self) -> Sandbox:
        if self._given is not None:
            return self._given
        if self._pool is None:
            from agent_sat.sandboxes import local_pool

            self._pool = local_pool()
        if self._sandbox is None:
            self._sandbox = self._pool.open()
        return self._sandbox

    def _release(self) -> None:
        """Let go of a sandbox of our own: the next episode gets a fresh one."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def read_level(options: dict[str, Any]) -> int | None:
    unknown = sorted(options.keys() - {"level"})
    if unknown:
        raise ConfigError(f"option {unknown[0]!r} of agent_sat/Lookup-v0 is unknown; the only one is 'level'")
    level = options.get("level")
    if level is None or (type(level) is int and MIN_LEVEL <= level <= MAX_LEVEL):
        return level
    raise ConfigError(f"level is {level!r}, it must be a whole number from {MIN_LEVEL} to {MAX_LEVEL}")


def observe(result: ToolResult) -> str:
    """What the model is told of a run: its output, or why there is none, in characters that it knows."""
    text = result.stdout
    if result.status == "invalid_call":
        text = result.stderr
    elif result.status == "error":
        text += result.stderr.rstrip().rpartition("\n")[2]
    elif result.status not in ("ok", "output_limit"):
        text += f"error: {result.status}"
    shown = text.rstrip()[:OBSERVATION_CHARS]
    return "".join(character if character in CHARSET else "?" for character in shown)


def demonstrate(puzzle: Puzzle, rng: random.Random, slips: dict[str, float]) -> list[tuple[str, str]]:
    """The turns after the prompt."""
    turns: list[tuple[str, str]] = []

    def slip(name: str) -> bool:
        return rng.random() < slips.get(name, 0.0)

    def call(code: str, output: str) -> str:
        turns.extend([("assistant", f"<python>{code}</python>"), ("tool", output)])
        return output

    def answer(text: str) -> list[tuple[str, str]]:
        return [*turns, ("assistant", f"\\boxed{{{text}}}")]

    for key in puzzle.keys:
        typed = mistype(key, rng) if slip("key") else key
        output = call(f"print(get('{typed}'))", puzzle.look_up(typed))
        if output == "error":
            if rng.random() >= RETRY_RATE:
                return answer("0")
            output = call(f"print(get('{key}'))", puzzle.look_up(key))
        if output.startswith("next") and slip("early"):
            return answer(str(rng.randrange(1000, 9999)))
    product = puzzle.value * puzzle.factor
    if slip("mental"):
        return answer(str(product // 1000 * 1000 + rng.randrange(1000)))
    if slip("addend"):
        return answer(call(f"print({puzzle.value}*{puzzle.factor})", str(product)))
    return answer(call(f"print({puzzle.value}*{puzzle.factor}+{puzzle.addend})", puzzle.answer))


def mistype(key: str, rng: random.Random) -> str:
    position = rng.randrange(len(key))
    other = rng.choice(LETTERS) if position < 2 else str(rng.randrange(10))
    return key[:position] + other + key[position + 1 :]
