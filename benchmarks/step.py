"""What SAT costs in a whole training step of the quickstart's model: forward, loss, backward, metrics, AdamW.

One micro-batch: SAT per turn against plain clip (goal: at most 1.05). Several micro-batches: what scope "step"
adds, whose q needs a pass without gradient first, against "microbatch". CPU time, interleaved, one thread.

    python benchmarks/step.py --repeats 15
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from agent_sat.config import load
from agent_sat.train.learner import PolicyLearner
from agent_sat.types import Completion, Ending, Group, Task, Trajectory, Turn

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 16, 8, 4
ONE, SEVERAL = 1_000_000, 2048
CASES = {
    "clip, one micro-batch": ["method=grpo", f"train.micro_batch_tokens={ONE}"],
    "SAT per turn, one micro-batch": ["method=sat-grpo-turn", f"train.micro_batch_tokens={ONE}"],
    "SAT per turn, several, scope microbatch": [
        "method=sat-grpo-turn",
        f"train.micro_batch_tokens={SEVERAL}",
        "algorithm.scope=microbatch",
    ],
    "SAT per turn, several, scope step": ["method=sat-grpo-turn", f"train.micro_batch_tokens={SEVERAL}"],
}
RATIOS = (
    ("SAT per turn, one micro-batch", "clip, one micro-batch"),
    ("SAT per turn, several, scope step", "SAT per turn, several, scope microbatch"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    groups = make_groups()
    learners = {name: PolicyLearner(load(QUICKSTART, overrides)) for name, overrides in CASES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for repeat in range(options.repeats + 2):  # two rounds of warm-up
        for name, learner in learners.items():
            started = time.process_time()
            learner.step(repeat + 1, groups)
            if repeat >= 2:
                seconds[name].append(time.process_time() - started)
    for name, found in seconds.items():
        print(
            f"{name:42} {1000 * statistics.median(found):7.1f} ms ({1000 * min(found):.1f} to {1000 * max(found):.1f})"
        )
    for one, other in RATIOS:
        pairs = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
        print(f"{one} / {other}: {statistics.median(pairs):.3f} ({min(pairs):.2f} to {max(pairs):.2f})")


def make_groups() -> list[Group]:
    """Episodes of four turns of 10 to 20 random tokens with 10 tokens of tool output between them."""
    random = np.random.default_rng(0)
    groups = []
    for number in range(NUM_GROUPS):
        task = Task(id=str(number), seed=number)
        members = tuple(make_trajectory(random, number, member, task) for member in range(GROUP_SIZE))
        advantages = tuple(np.full(NUM_TURNS, random.normal(), np.float32) for _ in members)
        groups.append(
            Group(number=number, task=task, members=members, advantages=advantages, temperature=1.0)
        )
    return groups


def make_trajectory(random: np.random.Generator, group: int, member: int, task: Task) -> Trajectory:
    context = random.integers(8, 100, 20).astype(np.int32)
    turns = []
    for _ in range(NUM_TURNS):
        length = int(random.integers(10, 21))
        sampled = Completion(
            token_ids=random.integers(8, 100, length).astype(np.int32),
            behavior_logprobs=random.normal(-4.7, 0.1, length).astype(np.float32),
            versions=np.zeros(length, np.int32),
            stop_reason="stop",
        )
        turns.append(Turn(prompt_ids=context, completion=sampled, text=""))
        context = np.concatenate([context, sampled.token_ids, random.integers(8, 100, 10).astype(np.int32)])
    return Trajectory(
        group=group, member=member, task=task, turns=tuple(turns), reward=0.0, ending=Ending.ANSWERED
    )


if __name__ == "__main__":
    main()
