"""Mismatch by tool turn, by lag and by KL group: the tables behind `agent-sat analyze`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from agent_sat.analyze.measures import MEASURES, finish, value
from agent_sat.analyze.runs import Run, Window
from agent_sat.analyze.sums import RESAMPLED, RunSums, add, read_sums

FEW_EPISODES = 30  # below it a table says so: an interval over so few episodes is itself uncertain
MAX_DRAWN = 2000
QUANTILES = (0.5, 0.9, 0.99)
KL_GROUPS = (1e-3, 2e-2, 1e-1)  # upper bounds on the mean k3 of a step; a last group is open
CONFOUNDERS = (
    "Later turns exist only in episodes that survived to them: turns differ in their tasks too.",
    "The first token of a turn is a decision (call the tool, answer, stop): it is shown apart.",
)


def by_turn(run: Run, window: Window | None = None) -> pl.DataFrame:
    """Every measure per turn (rows in order of turn) with counts of episodes and exact quantiles of |d|."""
    return turn_table(read_sums(run, window)).join(
        quantiles(run, window), on="turn", how="left", maintain_order="left"
    )


def turn_table(sums: RunSums) -> pl.DataFrame:
    """Measures per turn, with the number of episodes that had a token there."""
    counted = sums.episodes.group_by("turn").agg(episodes=pl.len())
    table = finish(add(sums.cube, ["turn"]))
    return table.join(counted, on="turn", how="left", maintain_order="left")


def overall(sums: RunSums) -> pl.DataFrame:
    """The same measures over all turns: one row with turn -1."""
    row = finish(add(sums.cube, []))
    episodes = sums.episodes.select("step", "group", "member").n_unique() if sums.episodes.height else 0
    turn = pl.lit(-1, sums.cube.schema["turn"])
    return row.select(turn.alias("turn"), pl.all(), pl.lit(episodes).cast(pl.UInt32).alias("episodes"))


def by_lag(sums: RunSums) -> pl.DataFrame:
    return finish(add(sums.cube, ["lag"]))


def first_tokens(sums: RunSums) -> pl.DataFrame:
    """First and later tokens of each turn apart; turns from 1 on start right after a tool result."""
    return finish(add(sums.cube, ["turn", "first"]))


def by_step(sums: RunSums) -> pl.DataFrame:
    return finish(add(sums.cube, ["step", "turn"]))


def step_groups(sums: RunSums) -> pl.DataFrame:
    """Steps with their mean k3 over all turns and the number of the KL group it falls in, from 0."""
    steps = finish(add(sums.cube, ["step"]), ["k3"]).filter(pl.col("k3").is_not_null())
    number = pl.sum_horizontal([(pl.col("k3") > bound).cast(pl.Int32) for bound in KL_GROUPS])
    return steps.with_columns(kl_group=number)


def by_kl_group(sums: RunSums) -> pl.DataFrame:
    """Steps grouped by mean k3; within each group the first turn against all later ones."""
    grouped = sums.cube.join(step_groups(sums).select("step", "kl_group"), on="step")
    with_part = grouped.with_columns(later=pl.col("turn") > 0)
    table = finish(add(with_part, ["kl_group", "later"]))
    steps = step_groups(sums).group_by("kl_group").agg(steps=pl.len())
    return table.join(steps, on="kl_group", how="left", maintain_order="left")


def quantiles(run: Run, window: Window | None = None) -> pl.DataFrame:
    """Exact quantiles of |d| per turn: the smallest value that at least the given share does not exceed."""
    d = (pl.col("logprob").cast(pl.Float64) - pl.col("behavior_logprob").cast(pl.Float64)).abs()
    columns = ["turn", "logprob", "behavior_logprob"]
    chunks = run.token_chunks(window or Window(), columns)
    parts = [c.select("turn", size=d).filter(pl.col("size").is_finite()) for c in chunks]
    schema = {"turn": pl.Int16, "size": pl.Float64}
    tokens = pl.concat(parts) if parts else pl.DataFrame(schema=schema)
    rows = []
    for (turn,), frame in tokens.group_by("turn", maintain_order=True):
        sizes = np.sort(frame["size"].to_numpy())
        ranks = [int(np.ceil(level * len(sizes) - 1e-9)) - 1 for level in QUANTILES]
        rows.append(
            {"turn": turn, **{quantile_name(q): sizes[r] for q, r in zip(QUANTILES, ranks, strict=True)}}
        )
    names = {quantile_name(level): pl.Float64 for level in QUANTILES}
    return pl.DataFrame(rows, schema={"turn": tokens.schema["turn"], **names}).sort("turn")


def quantile_name(level: float) -> str:
    return f"log_ratio_abs_p{level * 100:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """How intervals are made: episodes are drawn with replacement."""

    replicas: int = 200
    level: float = 0.95
    seed: int = 0


def intervals(sums: RunSums, names: list[str], bootstrap: Bootstrap | None = None) -> pl.DataFrame:
    """Percentile intervals per turn, columns `<name>_low` and `<name>_high`, by drawing episodes again.

    Raises KeyError for a measure whose sums are not kept by episode (RESAMPLED).
    """
    how = bootstrap or Bootstrap()
    for name in names:
        if lost := set(MEASURES[name].parts) - set(RESAMPLED):
            raise KeyError(f"no interval for {name}: {sorted(lost)} are not kept by episode")
    parts = [part for part in RESAMPLED if any(part in MEASURES[name].parts for name in names)]
    rows = []
    for (turn,), frame in sums.episodes.sort("turn").group_by("turn", maintain_order=True):
        ordered = frame.sort("step", "group", "member").select(parts).to_numpy()
        replicas = _resample(ordered, how, np.random.default_rng([how.seed, int(str(turn))]))
        drawn = pl.DataFrame(replicas, schema=parts).select(value(MEASURES[n]).alias(n) for n in names)
        tail = (1 - how.level) / 2
        row: dict[str, object] = {"turn": turn}
        for name in names:
            row[f"{name}_low"] = drawn[name].quantile(tail, "linear")
            row[f"{name}_high"] = drawn[name].quantile(1 - tail, "linear")
        rows.append(row)
    bounds = {f"{name}_{end}": pl.Float64 for name in names for end in ("low", "high")}
    return pl.DataFrame(rows, schema={"turn": sums.episodes.schema["turn"], **bounds}).sort("turn")


def _resample(
    episodes: NDArray[np.float64], how: Bootstrap, random: np.random.Generator
) -> NDArray[np.float64]:
    """Sums [replicas, parts] of as many episodes as there are, drawn with replacement.

    Of more than MAX_DRAWN episodes, random blocks are drawn in their place: sums of independent episodes
    spread as the episodes do, and the cost no longer grows with the run.
    """
    if len(episodes) > MAX_DRAWN:
        starts = np.arange(MAX_DRAWN) * len(episodes) // MAX_DRAWN
        episodes = np.add.reduceat(random.permutation(episodes), starts)
    number = len(episodes)
    draws = (random.integers(number, size=number) for _ in range(how.replicas))
    return np.stack([np.bincount(drawn, minlength=number) @ episodes for drawn in draws])
