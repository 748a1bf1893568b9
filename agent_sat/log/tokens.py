"""What a step leaves of its samples: one parquet row per sampled token, one JSON line per episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from agent_sat.log.run import replacing
from agent_sat.types import Group, IntArray, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the token record; `default` None means that every writer must give it."""

    dtype: type[np.generic]
    default: float | bool | None
    meaning: str


NAN = float("nan")
TOKEN_COLUMNS: dict[str, Column] = {
    "step": Column(np.int32, None, "optimizer step that trained the token"),
    "group": Column(np.int32, None, "number of the group in the run"),
    "member": Column(np.int16, None, "member of the group"),
    "turn": Column(np.int16, None, "assistant turn of the episode, from 0"),
    "position": Column(np.int32, None, "index of the token in its sample, context included"),
    "offset": Column(np.int32, -1, "sampled tokens of the same turn before this one"),
    "token_id": Column(np.int32, None, "the sampled token"),
    "version": Column(np.int32, None, "weights version that sampled it"),
    "lag": Column(np.int32, None, "trainer version at use minus `version`"),
    "behavior_logprob": Column(np.float32, None, "log mu, of the engine; NaN where it gave none"),
    "recomputed_logprob": Column(
        np.float32, NAN, "log mu~, of the trainer at `version`; NaN where not computed"
    ),
    "logprob": Column(np.float32, None, "log pi, of the trainer at use, before the update"),
    "entropy": Column(np.float32, NAN, "entropy of pi at this position, nats"),
    "advantage": Column(np.float32, None, "advantage of the token"),
    "weight": Column(np.float32, 1.0, "aggregation weight of the token in the loss"),
    "ratio": Column(np.float32, NAN, "r of the objective, at its granularity"),
    "q": Column(np.float32, NAN, "SAT's reference quantile of |g| for the token's stratum; NaN without SAT"),
    "contraction": Column(np.float32, 1.0, "SAT's c on the side of g; 1 where the radius is untouched"),
    "correction": Column(np.float32, 1.0, "importance correction c_i (tis, icepop); 1 without one"),
    "gate": Column(np.bool_, False, "SAT contracted the radius: |g| > q"),
    "clipped": Column(np.bool_, False, "the trust region left the token no gradient, SAT's cut included"),
    "changed": Column(np.bool_, False, "SAT took the gradient that the base method would have given"),
    "kept": Column(np.bool_, True, "the masks (dppo, kpop, seqclip, max_lag) kept the token"),
    "reward": Column(np.float32, NAN, "outcome reward of the episode"),
}
"""The token record, read by `agent_sat.analyze`; d = logprob - behavior_logprob everywhere."""


def write_tokens(path: Path, columns: Mapping[str, ArrayLike]) -> None:
    """Write one row per sampled token; a scalar column counts for all rows, absent ones take their default.

    Rows of one turn stand together and in order, as a sample holds them: where `offset` is not given it is
    counted along such runs. Raises ValueError for an unknown, missing or misshapen column.
    """
    frame = token_frame(columns)
    with replacing(path) as temporary:
        frame.write_parquet(temporary, compression="zstd", compression_level=1, statistics=True)


def token_frame(columns: Mapping[str, ArrayLike]) -> pl.DataFrame:
    """The columns as a frame of TOKEN_COLUMNS' names, order and types, without copying where they fit."""
    if unknown := sorted(set(columns) - set(TOKEN_COLUMNS)):
        raise ValueError(f"token record: unknown columns {unknown}; known are {list(TOKEN_COLUMNS)}")
    required = [name for name, column in TOKEN_COLUMNS.items() if column.default is None]
    if missing := [name for name in required if name not in columns]:
        raise ValueError(f"token record: missing columns {missing}")
    given = {name: np.asarray(value) for name, value in columns.items()}
    lengths = {name: len(array) for name, array in given.items() if array.ndim == 1}
    if len(set(lengths.values())) != 1 or any(array.ndim > 1 for array in given.values()):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in given.items())
        raise ValueError(f"token record: columns must be scalars or of one length: {shapes}")
    num_rows = next(iter(lengths.values()))
    arrays = {name: _column(name, given, num_rows) for name in TOKEN_COLUMNS}
    if "offset" not in given:
        arrays["offset"] = _offsets(arrays)
    return pl.DataFrame(arrays)


def _column(name: str, given: Mapping[str, NDArray[Any]], num_rows: int) -> NDArray[Any]:
    column = TOKEN_COLUMNS[name]
    array = given.get(name, np.asarray(column.default))
    if issubclass(column.dtype, np.integer) and array.size and array.dtype.kind not in "iub":
        raise ValueError(f"token record: {name} holds {array.dtype}, not integers")
    if issubclass(column.dtype, np.integer) and array.size:
        limits = np.iinfo(column.dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"token record: {name} does not fit {np.dtype(column.dtype)}: {array.max()}")
    return np.ascontiguousarray(np.broadcast_to(array.astype(column.dtype, copy=False), num_rows))


def _offsets(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int32]:
    """Index of each row within its run of equal (step, group, member, turn)."""
    num_rows = len(arrays["turn"])
    starts = np.zeros(num_rows, bool)
    starts[:1] = True
    for name in ("step", "group", "member", "turn"):
        starts[1:] |= arrays[name][1:] != arrays[name][:-1]
    index = np.arange(num_rows)
    return (index - np.maximum.accumulate(np.where(starts, index, 0))).astype(np.int32)


class TokenText:
    """The text of single tokens, such that the pieces of a turn join to its text.

    `decode` is called once for each new token id. Tokens that hold part of a character give "", the last of
    them gives the character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: IntArray) -> list[str]:
        pieces, open_ids = [], []
        for token in token_ids.tolist():
            piece = self._one(token)
            if not open_ids and "\ufffd" not in piece:
                pieces.append(piece)
                continue
            open_ids.append(token)
            joined = self._decode(open_ids)
            if joined.endswith("\ufffd") and len(open_ids) < 8:
                pieces.append("")
            else:
                pieces.append(joined)
                open_ids = []
        if open_ids:
            pieces[-1] = self._decode(open_ids)
        return pieces

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]


def write_episodes(path: Path, groups: Sequence[Group], *, step: int, text: TokenText | None = None) -> None:
    """Write one JSON line per member of each group; `text` adds the text of every token."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for group in groups:
            for member, advantages in zip(group.members, group.advantages, strict=True):
                record = _episode(step, group, member, advantages.tolist(), text)
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")


def _episode(
    step: int, group: Group, member: Trajectory, advantages: list[float], text: TokenText | None
) -> dict[str, Any]:
    return {
        "step": step,
        "group": group.number,
        "member": member.member,
        "task": member.task.id,
        "seed": member.task.seed,
        "options": member.task.options,
        "temperature": group.temperature,
        "reward": member.reward,
        "ending": str(member.ending),
        "failure": clean(member.failure),
        "seconds": member.seconds,
        "num_turns": len(member.turns),
        "num_tokens": member.num_sampled,
        "advantages": advantages,
        "prompt": clean(member.prompt),
        "turns": [_turn(turn, text) for turn in member.turns],
    }


def _turn(turn: Turn, text: TokenText | None) -> dict[str, Any]:
    completion = turn.completion
    versions = completion.versions
    record: dict[str, Any] = {
        "text": clean(turn.text),
        "observation": clean(turn.observation),
        "tool": None,
        "reward": turn.reward,
        "num_tokens": len(completion.token_ids),
        "stop_reason": completion.stop_reason,
        "version_min": int(versions.min()) if len(versions) else -1,
        "version_max": int(versions.max()) if len(versions) else -1,
        "model_seconds": completion.seconds,
        "env_seconds": turn.env_seconds,
    }
    if turn.tool is not None:
        result = turn.tool.result
        record["tool"] = {
            "code": clean(turn.tool.code),
            "status": result.status,
            "stdout": clean(result.stdout),
            "stderr": clean(result.stderr),
            "seconds": result.seconds,
            "truncated": result.truncated,
        }
    if text is not None:
        record["pieces"] = [clean(piece) for piece in text(completion.token_ids)]
    return record


def clean(text: str) -> str:
    """The text as valid Unicode: a model or a tool may print lone surrogates, which no file can hold."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
