"""Success on held-out tasks, greedy and sampled, with intervals: the same tasks and seeds every time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agent_sat.config import Config
from agent_sat.data.tasks import TaskStream
from agent_sat.protocols import Rollouts
from agent_sat.types import Metrics

FIRST_NUMBER = 1_000_000_000  # group numbers of evaluations: apart from those of training
ALL = "all"

Kind = Literal["greedy", "sampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Successes (reward above 0) among the valid episodes of one kind and stratum."""

    kind: Kind
    stratum: str  # value of the environment's first choice, or "all"
    successes: int
    total: int

    @property
    def rate(self) -> float:
        return self.successes / self.total if self.total else math.nan

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """Wilson score interval of the rate, 95 % by default."""
        if not self.total:
            return 0.0, 1.0
        n, p = self.total, self.rate
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


async def evaluate(
    rollouts: Rollouts, config: Config, *, num_samples: int, advance: Callable[[int], None] = lambda n: None
) -> list[Score]:
    """One greedy episode and `num_samples` sampled ones of each held-out task; `advance` hears of each task."""
    tasks = TaskStream(seed=config.seed, stream="eval", choices=config.env.choices)

    async def rewards_of(kind: Kind, size: int) -> list[tuple[str, float]]:
        room = asyncio.Semaphore(max(1, config.max_sessions // size))
        rewards: list[tuple[str, float]] = []

        async def play(index: int) -> None:
            task = tasks.task(index)
            async with room:
                summary, _ = await rollouts.run_group(
                    FIRST_NUMBER + index, task, size=size, greedy=kind == "greedy"
                )
            stratum = str(task.options.get(config.env.stratum or "", ALL))
            rewards.extend((stratum, reward) for reward in summary.valid_rewards)
            advance(1)

        await asyncio.gather(*(play(index) for index in range(config.eval.num_tasks)))
        return rewards

    greedy = await rewards_of("greedy", 1)
    sampled = await rewards_of("sampled", num_samples)
    return [*tally("greedy", greedy), *tally("sampled", sampled)]


def tally(kind: Kind, rewards: list[tuple[str, float]]) -> list[Score]:
    """The score over all strata, then each stratum's, in order."""
    strata = sorted({stratum for stratum, _ in rewards} - {ALL})
    scores = []
    for stratum in (ALL, *strata):
        found = [reward > 0 for name, reward in rewards if stratum in (ALL, name)]
        scores.append(Score(kind=kind, stratum=stratum, successes=sum(found), total=len(found)))
    return scores


def as_metrics(scores: list[Score], option: str | None) -> Metrics:
    """`eval/<kind>` and `eval/<kind>/<option>=<value>`: success rates."""
    return {f"eval/{s.kind}" + ("" if s.stratum == ALL else f"/{option}={s.stratum}"): s.rate for s in scores}


def as_record(step: int, scores: list[Score]) -> dict[str, Any]:
    """One line of eval.jsonl."""
    return {
        "step": step,
        "scores": [
            {"kind": s.kind, "stratum": s.stratum, "successes": s.successes, "total": s.total} for s in scores
        ],
    }
