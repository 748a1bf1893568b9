"""Checkpoints: a folder that transformers' from_pretrained reads, with what resuming needs beside it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_sat.algo.reference import Reference
from agent_sat.errors import ConfigError
from agent_sat.types import Position

POSITION = "position.json"
OPTIMIZER = "optimizer.pt"
SAT_REFERENCE = "sat_reference.npz"


def save(
    path: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    sat_reference: Reference | None,
    position: Position,
) -> None:
    """Write the checkpoint beside `path` and move it there, so that a half-written one is never seen."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    torch.save({"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state()}, partial / OPTIMIZER)
    if sat_reference is not None:
        np.savez(partial / SAT_REFERENCE, **asdict(sat_reference))
    (partial / POSITION).write_text(json.dumps(asdict(position)))
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)


def load(path: Path, *, model: PreTrainedModel, optimizer: Optimizer) -> tuple[Position, Reference | None]:
    """Put a checkpoint's weights, optimizer and random state in place; returns where the run stood and SAT's last
    reference. Raises ConfigError if it is not a checkpoint.
    """
    if not (path / POSITION).is_file():
        raise ConfigError(f"{str(path)!r} is not a checkpoint: it has no {POSITION}")
    loaded = type(model).from_pretrained(path, dtype=model.dtype, local_files_only=True)
    model.load_state_dict(loaded.state_dict())
    state = torch.load(path / OPTIMIZER, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    saved = path / SAT_REFERENCE
    reference = Reference(**np.load(saved, allow_pickle=False)) if saved.exists() else None
    return Position(**json.loads((path / POSITION).read_text())), reference


def newest(folder: Path) -> Path:
    """The checkpoint with the highest step in a run's folder. Raises ConfigError if there is none."""
    found = sorted(path for path in folder.glob("step_*") if (path / POSITION).is_file())
    if not found:
        raise ConfigError(
            f"no checkpoint in {str(folder)!r}: the run ended before its first one; start it again"
        )
    return found[-1]


def keep_newest(folder: Path, count: int) -> None:
    for path in sorted(path for path in folder.glob("step_*") if (path / POSITION).is_file())[:-count]:
        shutil.rmtree(path)
