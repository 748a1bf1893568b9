"""What the learner leaves of a step: one row per sampled token, one line per episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_sat.algo.loss import LossOutput
from agent_sat.config import LogConfig
from agent_sat.log.run import RunDirectory
from agent_sat.log.tokens import TokenText, write_episodes, write_tokens
from agent_sat.train.replay import RouteOverlap
from agent_sat.types import Batch, Group, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one micro-batch's forward pass left, detached, in the order of its batch."""

    batch: Batch
    logprobs: Tensor  # [N] float32, NaN where not trained
    entropy: Tensor  # [N] float32, NaN where not trained
    output: LossOutput
    routes: RouteOverlap | None  # where routes were replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecorder:
    """Writes a run's token and episode records, as far as its config asks for them."""

    run: RunDirectory
    config: LogConfig
    text: TokenText

    def record(
        self,
        step: int,
        groups: Sequence[Group],
        samples: Sequence[Sample],
        passes: Sequence[Pass],
        version: int,
    ) -> None:
        """`samples` are those of `passes` in order, `version` the trainer's when the step used them."""
        if self.config.tokens:
            columns = token_columns(groups, samples, passes, version)
            write_tokens(self.run.tokens_of(step), {"step": step} | columns)
        if self.config.episodes:
            write_episodes(self.run.episodes_of(step), groups, step=step, text=self.text)


def token_columns(
    groups: Sequence[Group], samples: Sequence[Sample], passes: Sequence[Pass], version: int
) -> dict[str, NDArray[Any]]:
    """The columns of `log.tokens.TOKEN_COLUMNS` for every sampled token, in the order of the samples."""
    rewards = {(group.number, member.member): member.reward for group in groups for member in group.members}
    lengths = [len(sample) for sample in samples]
    sampled = np.concatenate([sample.turn >= 0 for sample in samples])

    def of_sample(values: list[Any]) -> NDArray[Any]:
        return np.repeat(np.asarray(values), lengths)[sampled]

    def of_token(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(sample, name) for sample in samples])[sampled]

    def joined(found: list[Tensor | None]) -> NDArray[Any] | None:
        """The sampled tokens of every pass's [N] tensor (a scalar counts for all); None where a pass has none."""
        parts = [
            value.expand(len(one.batch))
            for one, value in zip(passes, found, strict=True)
            if value is not None
        ]
        return torch.cat(parts).cpu().numpy()[sampled] if len(parts) == len(passes) else None

    def of_batch(name: str) -> NDArray[Any] | None:
        return joined([getattr(one.batch, name) for one in passes])

    def of_loss(name: str) -> NDArray[Any] | None:
        return joined([getattr(one.output.tokens, name) for one in passes])

    columns = {
        "group": of_sample([sample.group for sample in samples]),
        "member": of_sample([sample.member for sample in samples]),
        "reward": of_sample([rewards[sample.group, sample.member] for sample in samples]),
        "position": np.concatenate([np.arange(length) for length in lengths])[sampled],
        "turn": of_token("turn"),
        "token_id": of_token("token_ids"),
        "version": of_token("versions"),
        "lag": version - of_token("versions"),
        "behavior_logprob": of_token("behavior_logprobs"),
        "advantage": of_batch("advantages"),
        "weight": of_batch("weights"),
        "recomputed_logprob": of_batch("recomputed_logprobs"),
        "logprob": joined([one.logprobs for one in passes]),
        "entropy": joined([one.entropy for one in passes]),
        "kept": of_loss("keep"),
        **{
            name: of_loss(name)
            for name in ("ratio", "q", "contraction", "correction", "gate", "clipped", "changed")
        },
    }
    return {name: values for name, values in columns.items() if values is not None}
