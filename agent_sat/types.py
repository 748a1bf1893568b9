"""The records that flow from prompt to gradient; entry i of every aligned array speaks of token i.

A missing value is NaN (log-probability) or -1 (version, turn; expert in a Batch) and never 0.
Nothing here imports torch, so that reading a run or driving an episode does not pay for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
RouteArray = NDArray[np.unsignedinteger[Any]]  # uint8, or uint16 where experts are many

StopReason = Literal["stop", "length", "abort"]
ToolStatus = Literal[
    "ok",
    "error",
    "invalid_call",  # the text asked for a tool in a form nobody can execute
    "interrupted",  # soft time limit, state kept
    "timeout",  # hard time limit, state lost
    "memory",
    "output_limit",
    "crashed",
    "exited",
    "infra",  # the sandbox's own fault, never the model's
]

# The interpreter is gone after these; the next run starts a fresh one.
STATE_LOST: frozenset[ToolStatus] = frozenset({"timeout", "memory", "crashed", "exited", "infra"})


class Ending(StrEnum):
    """How an episode ended; the last three are not the model's doing and do not vote in a group."""

    ANSWERED = "answered"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TOOL_FAILURE = "tool_failure"
    ENVIRONMENT_FAILURE = "environment_failure"
    ABORTED = "aborted"


NOT_THE_MODELS_FAULT = frozenset({Ending.TOOL_FAILURE, Ending.ENVIRONMENT_FAILURE, Ending.ABORTED})


def require_equal_lengths(record: object, **lengths: int) -> None:
    """Raise a ValueError that names every array and its length unless all are equal."""
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{type(record).__name__}: aligned arrays differ in length: {told}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of the task stream; siblings of a group share it."""

    id: str
    seed: int
    options: dict[str, Any] = field(
        default_factory=dict
    )  # given to the environment's reset, e.g. {"level": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one turn is sampled; temperature 0 is greedy and only for evaluation."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # a function of (run, step, group, member, turn): see rollout.episode

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nucleus:
    """The kept sets of T sampled tokens, joined; an empty set means no restriction."""

    ids: IntArray  # [sum(counts)] token ids
    counts: IntArray  # [T]

    def __post_init__(self) -> None:
        if int(self.counts.sum()) != len(self.ids):
            raise ValueError(f"Nucleus: counts add up to {int(self.counts.sum())}, ids hold {len(self.ids)}")

    def __len__(self) -> int:
        return len(self.counts)

    def cut(self, start: int, stop: int) -> Nucleus:
        bounds = np.concatenate([[0], np.cumsum(self.counts)])
        start, stop = min(start, len(self)), min(stop, len(self))
        return Nucleus(ids=self.ids[bounds[start] : bounds[stop]], counts=self.counts[start:stop])

    @staticmethod
    def unrestricted(length: int) -> Nucleus:
        return Nucleus(ids=np.zeros(0, np.int32), counts=np.zeros(length, np.int32))

    @staticmethod
    def join(parts: list[Nucleus]) -> Nucleus:
        return Nucleus(
            ids=np.concatenate([part.ids for part in parts]),
            counts=np.concatenate([part.counts for part in parts]),
        )


def route_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """The smallest unsigned type whose largest value stays free: it marks a missing row."""
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Delta rows of routed experts: row j is the forward pass whose input was token start + j.

    The row of position i belongs to the pass that gave the log-probability of token i + 1. The pass over
    the last sampled token has not happened when a turn ends: its row arrives with the next turn.
    """

    start: int
    experts: RouteArray  # [rows, layers, top_k]; the dtype's largest value is "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine really sampled for one turn: the behaviour policy's own record."""

    token_ids: IntArray  # [T]
    behavior_logprobs: (
        FloatArray  # [T] log mu after temperature, top-p and top-k; NaN if the engine gave none
    )
    versions: IntArray  # [T] weights version that sampled the token
    stop_reason: StopReason
    routes: Routes | None = None
    nucleus: Nucleus | None = None  # over T tokens
    seconds: float = 0.0

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "behavior_logprobs": len(self.behavior_logprobs),
            "versions": len(self.versions),
        }
        if self.nucleus is not None:
            lengths["nucleus"] = len(self.nucleus)
        require_equal_lengths(self, **lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a sandbox says of one run."""

    status: ToolStatus
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    truncated: bool = False  # output was cut to its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the model and what came of it."""

    code: str
    result: ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant turn: all context before it, what was sampled, and the environment's answer."""

    prompt_ids: IntArray  # [P] every token before the first sampled one
    completion: Completion
    text: str  # the sampled tokens as text, as the environment saw them
    observation: str = ""  # what the environment answered; empty after the last turn
    tool: ToolCall | None = None
    reward: float = 0.0  # reward of this turn alone
    env_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode."""

    group: int
    member: int
    task: Task
    turns: tuple[Turn, ...]
    reward: float  # outcome: the sum of the turn rewards
    ending: Ending
    prompt: str = ""  # the first observation as text
    failure: str = ""  # the cause, where the ending is not the model's fault
    seconds: float = 0.0

    @property
    def valid(self) -> bool:
        return self.ending not in NOT_THE_MODELS_FAULT

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Siblings of one task, with their advantages by member and turn."""

    number: int  # order of start within the run
    task: Task
    members: tuple[Trajectory, ...]
    advantages: tuple[FloatArray, ...]  # one [turns] array a member
    temperature: float

    def __post_init__(self) -> None:
        require_equal_lengths(self, members=len(self.members), advantages=len(self.advantages))
        for member, advantages in zip(self.members, self.advantages, strict=True):
            require_equal_lengths(self, turns=len(member.turns), advantages=len(advantages))

    def summary(self) -> GroupSummary:
        versions = [turn.completion.versions for member in self.members for turn in member.turns]
        calls = [turn.tool for member in self.members for turn in member.turns if turn.tool]
        return GroupSummary(
            number=self.number,
            task=self.task,
            rewards=tuple(member.reward for member in self.members),
            endings=tuple(member.ending for member in self.members),
            num_turns=tuple(len(member.turns) for member in self.members),
            num_sampled=tuple(member.num_sampled for member in self.members),
            oldest_version=min((int(v.min()) for v in versions if len(v)), default=-1),
            tool_statuses=tuple(call.result.status for call in calls),
            tool_seconds=sum(call.result.seconds for call in calls),
            seconds=max((member.seconds for member in self.members), default=0.0),
            failures=tuple(member.failure for member in self.members if member.failure),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """All that the loop and the buffer hold of a finished group; its arrays stay where they were made."""

    number: int
    task: Task
    rewards: tuple[float, ...]
    endings: tuple[Ending, ...]
    num_turns: tuple[int, ...]
    num_sampled: tuple[int, ...]  # tokens the model wrote, by member
    oldest_version: int  # -1 where nothing was sampled
    tool_statuses: tuple[ToolStatus, ...]
    tool_seconds: float
    seconds: float
    failures: tuple[str, ...]

    @property
    def valid_rewards(self) -> tuple[float, ...]:
        return tuple(
            r for r, e in zip(self.rewards, self.endings, strict=True) if e not in NOT_THE_MODELS_FAULT
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One append-only token run cut from a trajectory; a sampled token is trained in exactly one sample."""

    group: int
    member: int
    token_ids: IntArray  # [N]
    turn: IntArray  # [N] assistant turn from 0; -1 for context, which counts nowhere
    behavior_logprobs: FloatArray  # [N] NaN where not sampled or missing
    versions: IntArray  # [N] -1 where not sampled
    advantages: FloatArray  # [N] 0 where not sampled
    temperature: float
    experts: RouteArray | None = None  # [N, layers, top_k]; the dtype's largest value is "missing"
    nucleus: Nucleus | None = None  # over N tokens, empty sets at context

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("token_ids", "turn", "behavior_logprobs", "versions", "advantages")
        }
        lengths |= {n: len(v) for n in ("experts", "nucleus") if (v := getattr(self, n)) is not None}
        require_equal_lengths(self, **lengths)

    def __len__(self) -> int:
        return len(self.token_ids)

    def truncate(self, length: int) -> Sample:
        """The first `length` tokens, every aligned array cut together."""
        aligned = ("token_ids", "turn", "behavior_logprobs", "versions", "advantages")
        cut: dict[str, Any] = {name: getattr(self, name)[:length] for name in aligned}
        if self.experts is not None:
            cut["experts"] = self.experts[:length]
        if self.nucleus is not None:
            cut["nucleus"] = self.nucleus.cut(0, length)
        return replace(self, **cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Flat tensors over the N tokens of S samples, without padding, all on one device."""

    token_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, from 0 in each sample
    seq: Tensor  # [N] int64 sample index 0..S-1, ascending
    turn: Tensor  # [N] int64, -1 for context
    mask: Tensor  # [N] bool, True where the token is trained: sampled, with a finite behaviour logprob
    advantages: Tensor  # [N] float32, detached
    behavior_logprobs: Tensor  # [N] float32, NaN where not sampled or missing
    versions: Tensor  # [N] int64, -1 where not sampled
    weights: Tensor  # [N] float32 aggregation weight, made once over the whole optimizer step
    temperature: Tensor  # [N] float32
    recomputed_logprobs: Tensor | None = None  # [N] float32 log mu~: the trainer at the version that sampled
    reference_logprobs: Tensor | None = None  # [N] float32 of the frozen reference model
    experts: Tensor | None = None  # [N, layers, top_k] int64, -1 where missing
    nucleus_ids: Tensor | None = None  # [sum of kept sets] int64
    nucleus_offsets: Tensor | None = (
        None  # [N + 1] int64; kept set of token i is ids[offsets[i]:offsets[i + 1]]
    )

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, start: int, stop: int) -> Batch:
        """Tokens start to stop, which must be whole samples; `seq` counts from 0 again."""
        per_token = {
            f.name: value[start:stop]
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None and not f.name.startswith("nucleus")
        }
        per_token["seq"] = per_token["seq"] - per_token["seq"][0]
        if self.nucleus_ids is not None and self.nucleus_offsets is not None:
            offsets = self.nucleus_offsets[start : stop + 1]
            per_token["nucleus_ids"] = self.nucleus_ids[offsets[0] : offsets[-1]]
            per_token["nucleus_offsets"] = offsets - offsets[0]
        return Batch(**per_token)


Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    step: int
    version: int  # after the step
    skipped: str  # why no update was made; empty if one was
    num_tokens: int  # trained tokens
    metrics: Metrics
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStep:
    """One supervised step of the warm start done."""

    step: int  # from 1
    loss: float  # mean negative log-probability of the tokens the model is to write


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands: what a checkpoint holds beside weights and optimizer."""

    step: int  # optimizer steps done
    version: int  # updates behind the weights
    next_group: int  # first group of the task stream not yet used


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Hard limits of one sandboxed episode."""

    timeout_seconds: float = 5.0  # of one run
    memory_mib: int = 512
    num_processes: int = 32
    output_bytes: int = 8192  # shown to the model, head and tail
    file_mib: int = 16
    episode_seconds: float = 60.0  # of all runs of one episode together
