"""A learner small enough to step in a test, and groups with known tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_sat.config import Config, parse
from agent_sat.types import Completion, Ending, Group, Task, Trajectory, Turn

VOCABULARY = 107
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}


def config(**changes: Any) -> Config:
    """`changes` by section, e.g. train={"learning_rate": 1.0}."""
    values: dict[str, Any] = {
        "name": "test",
        "steps": 3,
        "method": "sat-grpo-turn",
        "model": {"architecture": "Qwen3MoeForCausalLM", "config": MODEL},
        "train": {"learning_rate": 1e-2},
    }
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change if isinstance(change, dict) else change
    return parse(values)


def groups(
    count: int = 2, *, members: int = 3, turns: int = 2, seed: int = 0, version: int = 0
) -> list[Group]:
    """Random tokens and behaviour log-probabilities, of several lengths."""
    random = np.random.default_rng(seed)
    return [group(random, number, members, turns, version) for number in range(count)]


def group(random: np.random.Generator, number: int, members: int, turns: int, version: int) -> Group:
    task = Task(id=str(number), seed=number)
    trajectories = []
    for member in range(members):
        context = random.integers(8, VOCABULARY, 4).astype(np.int32)
        played = []
        for _ in range(turns):
            length = int(random.integers(3, 9))
            sampled = Completion(
                token_ids=random.integers(8, VOCABULARY, length).astype(np.int32),
                behavior_logprobs=random.normal(-4.7, 0.5, length).astype(np.float32),
                versions=np.full(length, version, np.int32),
                stop_reason="stop",
            )
            played.append(Turn(prompt_ids=context, completion=sampled, text="text"))
            context = np.concatenate([context, sampled.token_ids, np.array([7], np.int32)])
        trajectories.append(
            Trajectory(
                group=number,
                member=member,
                task=task,
                turns=tuple(played),
                reward=float(member % 2),
                ending=Ending.ANSWERED,
            )
        )
    advantages = tuple(np.full(turns, random.normal(), np.float32) for _ in range(members))
    return Group(
        number=number, task=task, members=tuple(trajectories), advantages=advantages, temperature=1.0
    )
