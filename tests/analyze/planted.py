"""Hand-made run directories: probabilities are given, the library's own writers write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_sat.log.tokens import write_tokens


@dataclass(frozen=True, kw_only=True)
class Token:
    """One sampled token; probabilities instead of their logs, because people can divide those."""

    mu: float
    pi: float
    step: int = 1
    group: int = 0
    member: int = 0
    turn: int = 0
    lag: int = 1
    offset: int = 0
    recomputed: float | None = None
    entropy: float = 1.0
    advantage: float = 1.0
    weight: float = 1.0
    q: float = float("nan")
    contraction: float = 1.0
    gate: bool = False
    clipped: bool = False
    changed: bool = False
    kept: bool = True


def columns(tokens: Sequence[Token]) -> dict[str, np.ndarray]:
    def of(name: str) -> np.ndarray:
        return np.array([getattr(token, name) for token in tokens])

    recomputed = np.array([np.nan if t.recomputed is None else t.recomputed for t in tokens], float)
    same = (
        "step group member turn lag offset entropy advantage weight q contraction gate clipped changed kept"
    )
    return {name: of(name) for name in same.split()} | {
        "position": np.arange(len(tokens)),
        "token_id": np.zeros(len(tokens), np.int32),
        "version": of("step") - of("lag"),
        "behavior_logprob": np.log(of("mu")),
        "logprob": np.log(of("pi")),
        "recomputed_logprob": np.log(recomputed),
        "ratio": of("pi") / of("mu"),
    }


def write_run(path: Path, *files: Sequence[Token], config: str = "", metrics: Sequence[dict] = ()) -> Path:
    """A run directory whose token record is cut into the given files."""
    (path / "tokens").mkdir(parents=True)
    (path / "episodes").mkdir()
    (path / "config.toml").write_text(config or 'name = "planted"\nmethod = "sat-grpo"\nseed = 0\n')
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for number, tokens in enumerate(files):
        write_tokens(path / f"tokens/step_{number:06d}.parquet", columns(tokens))
    return path
