"""What a page can show of single tokens: histograms of |d|, and samples that no cut into files changes."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

BINS_PER_DECADE = 8
LOWEST, HIGHEST = -5, 1  # decades of |d|; the outermost bins are open
NUM_BINS = BINS_PER_DECADE * (HIGHEST - LOWEST)
POINT = ["step", "group", "member", "turn", "lag", "offset", "d", "p", "m", "ratio", "advantage"]
POINT += ["q", "contraction", "gate", "clipped", "changed"]
ORDER = "order"  # the pseudo-random key that decides who is in a sample


def histogram(prepared: pl.DataFrame) -> pl.DataFrame:
    """Tokens per (step, turn, bin of log10 |d|)."""
    decade = (pl.col("d").abs().clip(1e-300).log10() - LOWEST) * BINS_PER_DECADE
    number = decade.floor().clip(0, NUM_BINS - 1).cast(pl.Int16)
    known = prepared.lazy().filter(pl.col("d").is_not_null())
    return known.group_by("step", "turn", bin=number).agg(count=pl.len()).collect()


def add_histograms(parts: list[pl.DataFrame]) -> pl.DataFrame:
    keys = ["step", "turn", "bin"]
    return pl.concat(parts).group_by(keys).agg(pl.col("count").sum()).sort(keys)


def sample(prepared: pl.DataFrame, by: list[str], number: int) -> pl.DataFrame:
    """At most `number` tokens of each `by`: those whose identity hashes lowest, in any order of reading."""
    known = prepared.filter(pl.col("d").is_not_null())
    if ORDER not in known.columns:
        known = known.with_columns(pl.Series(ORDER, identity_hash(known), dtype=pl.UInt64))
    columns = [*POINT, *(name for name in by if name not in POINT), ORDER]
    return known.select(columns).sort(ORDER).group_by(by, maintain_order=True).head(number).sort(ORDER)


def identity_hash(rows: pl.DataFrame) -> NDArray[np.uint64]:
    """A well mixed 64-bit number of (step, group, member, turn, offset): splitmix64, chained."""
    mixed = np.zeros(rows.height, np.uint64)
    for name in ("step", "group", "member", "turn", "offset"):
        mixed = mixed + rows[name].cast(pl.Int64).to_numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
