"""The warm start: supervised steps on an environment's demonstrations, kept on disk by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_sat.config import Config, WarmStartConfig, cache_dir
from agent_sat.data.tasks import TaskStream
from agent_sat.errors import ConfigError
from agent_sat.protocols import Demonstrator
from agent_sat.rollout.chat import Chat
from agent_sat.rollout.environment import make_environment
from agent_sat.train.weights import snapshot
from agent_sat.types import IntArray, WarmStep

WARM_UP_STEPS = 30
FINAL_RATE = 0.1  # of the peak
NUM_FINGERPRINT = 64  # demonstrations whose tokens are part of the cache key


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One demonstrated episode as tokens."""

    token_ids: NDArray[np.int64]  # [N]
    written: NDArray[np.bool_]  # [N] True where the model is to write the token


class Demonstrations:
    """The endless, seeded stream of an environment's demonstrations. Raises ConfigError if it has none."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, chat: Chat) -> None:
        environment: gymnasium.Env = make_environment(config.env.id, config.env.kwargs, None)
        if not isinstance(environment.unwrapped, Demonstrator):
            raise ConfigError(f"env.id {config.env.id!r} offers no demonstrations; set warm_start.steps=0")
        self.demonstrator: Demonstrator = environment.unwrapped
        self.slips = dict(config.warm_start.slips)
        self.tasks = TaskStream(seed=config.seed, stream="warm_start", choices=config.env.choices)
        self.tokenizer = tokenizer
        self.chat = chat

    def __getitem__(self, index: int) -> Demonstration:
        task = self.tasks.task(index)
        pieces: list[tuple[IntArray, bool]] = []
        sampled = np.zeros(0, np.int32)
        for role, text in self.demonstrator.demonstrate(task.seed, task.options, self.slips):
            if role == "assistant":
                sampled = self._written(text)
                pieces.append((sampled, True))
            else:
                context = self.chat.prompt(text) if role == "user" else self.chat.bridge(sampled, text)
                pieces.append((context, False))
        return Demonstration(
            token_ids=np.concatenate([ids for ids, _ in pieces]).astype(np.int64),
            written=np.concatenate([np.full(len(ids), written) for ids, written in pieces]),
        )

    def _written(self, text: str) -> IntArray:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if ids[-1] not in self.chat.stop_ids:
            ids = [*ids, *self.chat.end_ids]
        return np.asarray(ids, np.int32)


def warm_start(
    model: PreTrainedModel, demonstrations: Demonstrations, config: WarmStartConfig
) -> Iterator[WarmStep]:
    """Train `model` in place, one yield a step."""
    optimizer = AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(config.steps):
        first = step * config.batch_size
        batch = [demonstrations[index] for index in range(first, first + config.batch_size)]
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate(step, config.steps)
        optimizer.zero_grad(set_to_none=True)
        loss = supervised_backward(model, batch, config.context_weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield WarmStep(step=step + 1, loss=loss)


def rate(step: int, num_steps: int) -> float:
    """Fraction of the peak learning rate: a linear warm-up, times a linear decay to a tenth."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - (1 - FINAL_RATE) * step / num_steps)


def supervised_backward(model: PreTrainedModel, batch: list[Demonstration], context_weight: float) -> float:
    """Accumulate the weighted mean's gradient over two halves by length; returns the written tokens' mean loss."""
    batch = sorted(batch, key=lambda demonstration: len(demonstration.token_ids))
    middle = (len(batch) + 1) // 2
    num_written = sum(int(d.written[1:].sum()) for d in batch)
    total = sum(len(d.token_ids) - 1 for d in batch) - num_written
    norm = num_written + context_weight * total
    told = 0.0
    for half in filter(None, (batch[:middle], batch[middle:])):
        token_ids, written, real = padded(half)
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
        nll = functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none")
        weight = torch.where(written, 1.0, context_weight) * real
        (nll * weight[:, 1:].flatten() / norm).sum().backward()
        told += float(nll.detach()[(written & real)[:, 1:].flatten()].sum())
    return told / max(1, num_written)


def padded(batch: list[Demonstration]) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, written, real), each [S, T], padded on the right."""
    longest = max(len(demonstration.token_ids) for demonstration in batch)
    token_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    written = torch.zeros(len(batch), longest, dtype=torch.bool)
    real = torch.zeros(len(batch), longest, dtype=torch.bool)
    for i, demonstration in enumerate(batch):
        length = len(demonstration.token_ids)
        token_ids[i, :length] = torch.from_numpy(demonstration.token_ids)
        written[i, :length] = torch.from_numpy(demonstration.written)
        real[i, :length] = True
    return token_ids, written, real


def cache_path(config: Config, demonstrations: Demonstrations) -> Path:
    """Where this warm start is kept: the name is a digest of all that decides the result, some of the
    demonstrations' tokens included, so that a changed environment or tokenizer is another warm start.
    """
    decides = {
        "model": config.model.model_dump(mode="json"),
        "warm_start": config.warm_start.model_dump(mode="json", exclude={"cache", "cache_dir"}),
        "env": config.env.model_dump(mode="json"),
        "stop": config.rollout.stop,
        "seed": config.seed,
        "torch": torch.__version__,
        "demonstrations": [demonstrations[index].token_ids.tolist() for index in range(NUM_FINGERPRINT)],
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:20]
    return cache_dir(config.warm_start) / f"{digest}.safetensors"


def load_cached(model: PreTrainedModel, path: Path) -> bool:
    if not path.is_file():
        return False
    model.load_state_dict(load_file(path), strict=False)
    return True


def store(model: PreTrainedModel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(snapshot(model), partial)
    partial.replace(path)
