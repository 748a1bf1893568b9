"""Runs with a planted truth: mismatch that grows by a known factor per turn, rewards of a known level."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_sat.log.run import RunDirectory
from agent_sat.log.tokens import TokenText, write_episodes, write_tokens
from agent_sat.types import Completion, Ending, Group, Task, ToolCall, ToolResult, Trajectory, Turn

HOSTILE = [
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script><!--",
    "\u202egnp.exe\u2069 \u200fabc\u0000\u0007\u001b[31m",
    "half a pair \ud800 and \udfff, a BOM \ufeff and zero\u200bwidth",
    "\u2028line\u2029paragraph &lt;b&gt; {{x}} ${y} `z`",
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is planted."""

    name: str = "planted"
    method: str = "sat-grpo-turn"
    seed: int = 0
    lag: int = 1
    steps: int = 12
    groups: int = 4
    members: int = 4
    tokens_per_turn: int = 10
    base: float = 0.02  # standard deviation of d in turn 0
    factor: float = 2.0  # by which it grows from turn to turn
    reward_end: float = 0.8  # mean reward at the last step; it starts at 0.2
    collapse_at: int | None = None  # from this step on the reward is 0.02
    recomputed: bool = True
    hostile: bool = False
    max_turns: int = 4


def write(path: Path, plan: Plan) -> Path:
    """A whole run directory."""
    run = RunDirectory.create(path)
    run.config.write_text(
        f'name = {json.dumps(plan.name)}\nmethod = "{plan.method}"\n'
        f"seed = {plan.seed}\nsteps = {plan.steps}\n"
        f"[staleness]\nbound = {plan.lag}\n[env.kwargs]\nmax_turns = {plan.max_turns}\n"
        f"[algorithm]\neps_low = 0.2\neps_high = 0.2\nexponent = 2.0\n"
    )
    run.begin(seed=plan.seed)
    random = np.random.default_rng([plan.seed, zlib.crc32(plan.method.encode())])
    task_luck = np.random.default_rng(
        1234 + plan.seed
    )  # shared by all methods of a seed: what pairing removes
    rows = []
    for step in range(1, plan.steps + 1):
        groups = [_group(step, number, plan, random) for number in range(plan.groups)]
        _write_step(run, step, groups, plan, random)
        level = 0.2 + (plan.reward_end - 0.2) * (step - 1) / max(1, plan.steps - 1)
        if plan.collapse_at is not None and step >= plan.collapse_at:
            level = 0.02
        reward = level + 0.03 * task_luck.standard_normal() + 0.01 * random.standard_normal()
        rows.append(_metrics(step, reward, plan, random))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = [{"kind": "greedy", "stratum": "all", "successes": round(100 * plan.reward_end), "total": 100}]
    run.evaluations.write_text(json.dumps({"step": plan.steps, "scores": scores}) + "\n")
    run.end("finished")
    return path


def _metrics(step: int, reward: float, plan: Plan, random: np.random.Generator) -> dict:
    return {
        "step": step,
        "reward/mean": reward,
        **{f"reward/level={level}": max(0.0, reward - 0.1 * level) for level in (1, 2, 3)},
        "train/grad_norm": float(random.uniform(0.5, 1.0)) * (20 if step == 9 else 1),
        "staleness/lag_mean": plan.lag / 2,
        "staleness/lag_max": plan.lag,
        "rollout/tokens_per_second": 10_000 + 100 * step,
        "train/tokens_per_second": 5_000,
        "time/step_seconds": 2.0,
    }


def _group(step: int, number: int, plan: Plan, random: np.random.Generator) -> Group:
    task = Task(id=f"t{step}-{number}", seed=number, options={"level": 1 + number % 3})
    members = tuple(
        _member(step, number, member, task=task, plan=plan, random=random) for member in range(plan.members)
    )
    advantages = tuple(np.full(len(m.turns), 2.0 * m.reward - 1.0, np.float32) for m in members)
    return Group(
        number=step * 100 + number, task=task, members=members, advantages=advantages, temperature=1.0
    )


def _member(
    step: int, number: int, member: int, *, task: Task, plan: Plan, random: np.random.Generator
) -> Trajectory:
    num_turns = 1 + (member % plan.max_turns)
    answered = member % 2 == 0
    turns = []
    for index in range(num_turns):
        ids = random.integers(97, 122, plan.tokens_per_turn).astype(np.int32)
        text = HOSTILE[(number + index) % len(HOSTILE)] if plan.hostile else bytes(ids.tolist()).decode()
        stdout = text * (1 + 12_000 * (plan.hostile and member == 3 and number == 0)) + "\n"
        result = ToolResult(status="ok" if index % 2 == 0 else "error", stdout=stdout, seconds=0.01)
        last = index == num_turns - 1
        turns.append(
            Turn(
                prompt_ids=np.zeros(3, np.int32),
                completion=Completion(
                    token_ids=ids,
                    behavior_logprobs=-random.exponential(1.0, len(ids)).astype(np.float32),
                    versions=np.full(len(ids), max(0, step - 1 - member % (plan.lag + 1)), np.int32),
                    stop_reason="stop",
                    seconds=0.1,
                ),
                text=text,
                observation="" if last else stdout,
                tool=None if last else ToolCall(code=text, result=result),
                reward=float(answered and last),
            )
        )
    return Trajectory(
        group=step * 100 + number,
        member=member,
        task=task,
        turns=tuple(turns),
        reward=float(answered),
        ending=Ending.ANSWERED if answered else Ending.TURN_LIMIT,
        prompt=HOSTILE[number % len(HOSTILE)] if plan.hostile else "What is 1 + 1?",
        seconds=0.5,
    )


def _write_step(
    run: RunDirectory, step: int, groups: list[Group], plan: Plan, random: np.random.Generator
) -> None:
    parts = []
    for group in groups:
        for member, advantages in zip(group.members, group.advantages, strict=True):
            for number, turn in enumerate(member.turns):
                parts.append(
                    _turn_columns(
                        step,
                        member,
                        number,
                        turn=turn,
                        advantage=float(advantages[number]),
                        plan=plan,
                        random=random,
                    )
                )
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    write_tokens(run.tokens_of(step), {"step": step} | columns)

    def decode(ids):
        return HOSTILE[ids[0] % len(HOSTILE)] if plan.hostile else chr(ids[0])

    write_episodes(run.episodes_of(step), groups, step=step, text=TokenText(decode))


def _turn_columns(
    step: int,
    member: Trajectory,
    number: int,
    *,
    turn: Turn,
    advantage: float,
    plan: Plan,
    random: np.random.Generator,
) -> dict[str, np.ndarray]:
    mu, size = turn.completion.behavior_logprobs.astype(float), len(turn.completion.token_ids)
    d = random.normal(0.0, plan.base * plan.factor**number, size)
    q = np.full(size, 1.5 * plan.base * plan.factor**number)
    gate = np.abs(d) > q
    contraction = np.where(gate, 1 / (1 + (d / q) ** 2), 1.0)
    outward = np.where(advantage > 0, d > np.log1p(0.2 * contraction), d < np.log1p(-0.2 * contraction))
    base_clips = np.where(advantage > 0, d > np.log(1.2), d < np.log(0.8))
    return {
        "group": np.full(size, member.group),
        "member": np.full(size, member.member),
        "turn": np.full(size, number),
        "position": np.arange(size) + 20 * number,
        "token_id": turn.completion.token_ids,
        "version": turn.completion.versions,
        "lag": step - 1 - turn.completion.versions,
        "behavior_logprob": mu,
        "recomputed_logprob": mu + d / 4 if plan.recomputed else np.full(size, np.nan),
        "logprob": mu + d,
        "entropy": random.uniform(0, 1, size),
        "advantage": np.full(size, advantage),
        "weight": np.full(size, 0.01),
        "ratio": np.exp(d),
        "q": q,
        "contraction": contraction,
        "gate": gate,
        "clipped": outward,
        "changed": outward & ~base_clips,
        "reward": np.full(size, member.reward),
    }
