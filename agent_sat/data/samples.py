"""Trajectories into samples: append-only token runs, each sampled token in exactly one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent_sat.types import FloatArray, Group, IntArray, Nucleus, RouteArray, Sample, Trajectory, Turn


def samples_of(group: Group) -> list[Sample]:
    """The samples of a group's valid members; members that failed through no fault of the model train nothing."""
    return [
        sample
        for member, advantages in zip(group.members, group.advantages, strict=True)
        if member.valid
        for sample in cut(member, advantages, group.temperature)
    ]


def cut(trajectory: Trajectory, advantages: FloatArray, temperature: float) -> list[Sample]:
    """Usually one sample. A turn whose prompt does not continue the tokens so far (a template that rewrites
    history) starts another, in which all that came before is context.
    """
    samples: list[Sample] = []
    routes = RouteRows()
    run = TokenRun()
    for number, (turn, advantage) in enumerate(zip(trajectory.turns, advantages, strict=True)):
        num_held = run.common_prefix(turn.prompt_ids)
        if num_held < run.length:
            samples.append(run.sample(trajectory, temperature, routes))
            run = TokenRun()
            routes.cut(num_held)
            num_held = 0
        run.append(turn, number, float(advantage), num_held)
        if turn.completion.routes is not None:
            routes.put(turn.completion.routes.start, turn.completion.routes.experts)
    if run.length:
        samples.append(run.sample(trajectory, temperature, routes))
    return samples


@dataclass(slots=True)
class RouteRows:
    """The routed experts of a session by position, gathered from delta rows."""

    experts: RouteArray | None = None  # [positions, layers, top_k]

    def put(self, start: int, rows: RouteArray) -> None:
        self.experts = self.of_length(max(start, self.num_rows), like=rows)
        joined = [self.experts[:start], rows, self.experts[start + len(rows) :]]
        self.experts = np.concatenate(joined, dtype=rows.dtype)

    def cut(self, length: int) -> None:
        if self.experts is not None:
            self.experts = self.experts[:length]

    @property
    def num_rows(self) -> int:
        return 0 if self.experts is None else len(self.experts)

    def of_length(self, length: int, like: RouteArray) -> RouteArray:
        """The first `length` rows; rows nobody recorded hold the dtype's largest value."""
        rows: RouteArray = np.full_like(like, np.iinfo(like.dtype).max, shape=(length, *like.shape[1:]))
        if self.experts is not None:
            rows[: self.num_rows] = self.experts[:length]
        return rows


@dataclass(slots=True)
class TokenRun:
    """The pieces of a sample while it grows."""

    token_ids: list[IntArray] = field(default_factory=list)
    turn: list[IntArray] = field(default_factory=list)
    behavior_logprobs: list[FloatArray] = field(default_factory=list)
    versions: list[IntArray] = field(default_factory=list)
    advantages: list[FloatArray] = field(default_factory=list)
    nucleus: list[Nucleus] = field(default_factory=list)
    restricted: bool = False
    length: int = 0

    def common_prefix(self, prompt_ids: IntArray) -> int:
        """How many tokens held so far `prompt_ids` begins with."""
        held = np.concatenate(self.token_ids) if self.token_ids else np.zeros(0, np.int32)
        num = min(len(held), len(prompt_ids))
        differs = np.flatnonzero(held[:num] != prompt_ids[:num])
        return int(differs[0]) if len(differs) else num

    def append(self, turn: Turn, number: int, advantage: float, num_held: int) -> None:
        completion = turn.completion
        context = turn.prompt_ids[num_held:]
        num_context, num_sampled = len(context), len(completion.token_ids)
        self.token_ids += [context, completion.token_ids]
        self.turn += [np.full(num_context, -1, np.int32), np.full(num_sampled, number, np.int32)]
        self.behavior_logprobs += [np.full(num_context, np.nan, np.float32), completion.behavior_logprobs]
        self.versions += [np.full(num_context, -1, np.int32), completion.versions]
        self.advantages += [np.zeros(num_context, np.float32), np.full(num_sampled, advantage, np.float32)]
        self.restricted |= completion.nucleus is not None
        self.nucleus += [
            Nucleus.unrestricted(num_context),
            completion.nucleus or Nucleus.unrestricted(num_sampled),
        ]
        self.length += num_context + num_sampled

    def sample(self, trajectory: Trajectory, temperature: float, routes: RouteRows) -> Sample:
        experts = None if routes.experts is None else routes.of_length(self.length, like=routes.experts)
        return Sample(
            group=trajectory.group,
            member=trajectory.member,
            token_ids=np.concatenate(self.token_ids),
            turn=np.concatenate(self.turn),
            behavior_logprobs=np.concatenate(self.behavior_logprobs),
            versions=np.concatenate(self.versions),
            advantages=np.concatenate(self.advantages),
            temperature=temperature,
            experts=experts,
            nucleus=Nucleus.join(self.nucleus) if self.restricted else None,
        )


def active(sample: Sample) -> NDArray[np.bool_]:
    """[N] the tokens that train: sampled, with a finite behaviour log-probability."""
    return (sample.turn >= 0) & np.isfinite(sample.behavior_logprobs)
