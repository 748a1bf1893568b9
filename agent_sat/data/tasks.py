"""The task stream: task i of a run is a pure function of (seed, i), so a resumed run goes on where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from agent_sat.types import Task

Stream = Literal["train", "eval", "warm_start"]
STREAMS: dict[Stream, int] = {"train": 0, "eval": 1, "warm_start": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStream:
    """An endless sequence of tasks; each option takes its choices in turn, in one shuffled round after another."""

    seed: int
    stream: Stream
    choices: dict[str, list[Any]]

    def task(self, index: int) -> Task:
        options = {
            name: self._choice(i, values, index) for i, (name, values) in enumerate(self.choices.items())
        }
        seed = int(self._random(index).integers(2**31))
        return Task(id=f"{self.stream}-{index}", seed=seed, options=options)

    def _choice(self, option: int, values: list[Any], index: int) -> Any:
        position, place = divmod(index, len(values))
        order = self._random(position, option + 1).permutation(len(values))
        return values[order[place]]

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence([self.seed, STREAMS[self.stream], *key]))
        )
