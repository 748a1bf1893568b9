"""The other policies of a step, without gradient: mu~ at the versions that sampled, and the frozen reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_sat.train.model import token_logprobs
from agent_sat.train.weights import num_bytes
from agent_sat.types import Batch


class PastPolicies:
    """Host copies of published weights, as long as an untrained token may need them, and one model to run them."""

    def __init__(self, model: PreTrainedModel, *, chunk: int, replay: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.chunk = chunk
        self.replay = replay
        self.kept: dict[int, dict[str, Tensor]] = {}

    def keep(self, version: int, weights: dict[str, Tensor], *, oldest: int) -> None:
        """Hold `weights` and forget versions before the newest one that is not after `oldest`: a token sampled
        at version `oldest` or later was sampled at that one or a later one.
        """
        self.kept[version] = weights
        first = max((kept for kept in self.kept if kept <= oldest), default=0)
        self.kept = {kept: weights for kept, weights in self.kept.items() if kept >= first}

    @property
    def num_mib(self) -> float:
        return sum(map(num_bytes, self.kept.values())) / 2**20

    @torch.no_grad()
    def recompute(self, batch: Batch, *, live_version: int) -> Tensor:
        """[N] float32 log mu~: each trained token by the weights of its own version. NaN at `live_version`,
        where it is the live policy's log pi, and for versions no longer kept.
        """
        found = torch.full((len(batch),), torch.nan, device=batch.token_ids.device)
        for version in batch.versions[batch.mask].unique().tolist():
            if version == live_version or version not in self.kept:
                continue
            self.model.load_state_dict(self.kept[version])
            there = batch.mask & (batch.versions == version)
            past = token_logprobs(
                self.model, replace(batch, mask=there), chunk=self.chunk, replay=self.replay
            )
            found = torch.where(there, past.logprobs, found)
        return found


class ReferencePolicy:
    """The model as reinforcement learning found it, kept in the run's folder so that a resumed run finds it again."""

    def __init__(self, model: PreTrainedModel, folder: Path | None, *, chunk: int) -> None:
        if folder is not None and folder.is_dir():
            self.model = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True)
        else:
            self.model = copy.deepcopy(model)
            if folder is not None:
                model.save_pretrained(folder)
        self.model.requires_grad_(False)
        self.chunk = chunk

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """[N] float32, with its own routing."""
        return token_logprobs(self.model, batch, chunk=self.chunk).logprobs
