"""The token record as sums that can be added: every mean, share and correlation is made of them later.

One pass over the tokens gives a row of sums per cell; tables by turn, by lag or by step and resampled
episodes all add up the same rows, so they cannot disagree and do not depend on the cut into files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from agent_sat.analyze.runs import Run, Window

CELL = ("step", "group", "member", "turn", "lag", "first")
CUBE = ("step", "turn", "lag", "first")
EPISODE = ("step", "group", "member", "turn")
TAILS = ("1e-2", "1e-3", "1e-4")
COLUMNS = [
    *("step", "group", "member", "turn", "lag", "offset"),
    *("behavior_logprob", "recomputed_logprob", "logprob", "entropy", "advantage", "weight"),
    *("ratio", "q", "contraction", "correction", "gate", "clipped", "changed", "kept"),
]
RESAMPLED = [
    *("tokens", "d", "d_abs", "d_square", "k3", "r", "r_square", "p_gap", "entropy", "entropy_count"),
    *("outside_narrow", "pi_below_1e-3", "mu_below_1e-3", "clipped", "gate", "changed"),
    *("prob_x", "prob_y", "prob_xx", "prob_yy", "prob_xy"),
]
"""Sums kept by episode, for intervals."""
MAXIMA = ("log_ratio_abs_max",)
MINIMA = ("contraction_min",)


def terms() -> dict[str, pl.Expr]:
    """What each token adds to each sum, in float64; NaN and null add nothing."""
    pi, mu = pl.col("logprob"), pl.col("behavior_logprob")
    d, r, p, m = (pl.col(name) for name in ("d", "r", "p", "m"))
    lag_part, engine_part, split = pl.col("lag_part"), pl.col("engine_part"), pl.col("lag_part").is_not_null()
    mass = pl.col("mass")
    return {
        "tokens": d.is_not_null(),
        "d": d,
        "d_abs": d.abs(),
        "d_square": d * d,
        "k3": r - 1 - d,
        "r": r,
        "r_square": r * r,
        "r_gap": (r - 1).abs(),
        "p_gap": (p - m).abs(),
        "outside_narrow": (r < 0.8) | (r > 1.2),
        "outside_wide": (r < 0.5) | (r > 2.0),
        **{f"pi_below_{tail}": p < float(tail) for tail in TAILS},
        **{f"mu_below_{tail}": m < float(tail) for tail in TAILS},
        "mass": mass,
        **{f"mass_pi_below_{tail}": pl.when(p < float(tail)).then(mass) for tail in TAILS},
        **{f"mass_mu_below_{tail}": pl.when(m < float(tail)).then(mass) for tail in TAILS},
        **_moments("log", pi, mu),
        **_moments("prob", p, m),
        "entropy": pl.col("entropy"),
        "entropy_count": pl.col("entropy").is_not_null(),
        "clipped": pl.col("clipped"),
        "gate": pl.col("gate"),
        "changed": pl.col("changed"),
        "kept": pl.col("kept"),
        "contraction": pl.col("contraction"),
        "q": pl.col("q"),
        "q_count": pl.col("q").is_not_null(),
        "split_count": split,
        "policy_lag": lag_part,
        "policy_lag_abs": lag_part.abs(),
        "policy_lag_square": lag_part * lag_part,
        "implementation": engine_part,
        "implementation_abs": engine_part.abs(),
        "implementation_square": engine_part * engine_part,
        "split_product": lag_part * engine_part,
    }


def _moments(name: str, x: pl.Expr, y: pl.Expr) -> dict[str, pl.Expr]:
    """The five sums of a Pearson correlation."""
    return {f"{name}_x": x, f"{name}_y": y, f"{name}_xx": x * x, f"{name}_yy": y * y, f"{name}_xy": x * y}


def prepare(rows: pl.DataFrame) -> pl.DataFrame:
    """Token rows in float64 with d, ratio and probabilities beside them; a missing value is null.

    `mass` is |weight c A r (1 - pi)|, the loss gradient on the token's own logit; 0 where clipped or masked.
    """
    numbers = ("behavior_logprob", "recomputed_logprob", "logprob", "entropy", "advantage", "weight")
    numbers += ("ratio", "q", "contraction", "correction")
    finite = [_finite(name) for name in numbers]
    active = pl.col("kept") & ~pl.col("clipped")
    size = (
        pl.col("weight") * pl.col("correction") * pl.col("advantage") * pl.col("ratio").fill_null(pl.col("r"))
    )
    recomputed = pl.col("recomputed_logprob")
    return (
        rows.lazy()
        .with_columns(finite)
        .with_columns(
            first=pl.col("offset") == 0,
            d=pl.col("logprob") - pl.col("behavior_logprob"),
            p=pl.col("logprob").exp(),
            m=pl.col("behavior_logprob").exp(),
            lag_part=pl.col("logprob") - recomputed,
            engine_part=pl.col("behavior_logprob").mul(-1) + recomputed,
        )
        .with_columns(r=pl.col("d").clip(-700.0, 700.0).exp())
        .with_columns(mass=pl.when(active).then((size * (1 - pl.col("p"))).abs()).otherwise(0.0))
        .collect()
    )


def _finite(name: str) -> pl.Expr:
    value = pl.col(name).cast(pl.Float64)
    return pl.when(value.is_finite()).then(value).alias(name)


def cells(rows: pl.DataFrame) -> pl.DataFrame:
    """Sums of token rows per CELL; rows without both logprobs count as missing and enter nothing else."""
    prepared = prepare(rows)
    known = prepared.filter(pl.col("d").is_not_null())
    sums = [expression.cast(pl.Float64).sum().alias(name) for name, expression in terms().items()]
    extremes = [
        pl.col("d").abs().max().alias("log_ratio_abs_max"),
        pl.col("contraction").min().alias("contraction_min"),
    ]
    counted = (
        known.lazy()
        .group_by(CELL)
        .agg(*sums, *extremes, missing=pl.col("d").is_null().sum().cast(pl.Float64))
        .collect()
    )
    lost = prepared.lazy().filter(pl.col("d").is_null()).group_by(CELL).agg(missing=pl.len().cast(pl.Float64))
    return pl.concat([counted, lost.collect()], how="diagonal")


def add(sums: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Rows of sums added up per `by`, in its order; by nothing gives one row."""
    rest = [name for name in sums.columns if name not in (*CELL, *by)]
    added = [
        pl.col(name).max() if name in MAXIMA else pl.col(name).min() if name in MINIMA else pl.col(name).sum()
        for name in rest
    ]
    if not by:
        return sums.select(added)
    return sums.lazy().group_by(list(by)).agg(added).sort(list(by)).collect()


@dataclass(frozen=True, slots=True)
class RunSums:
    """All that the tables need of a run's tokens."""

    cube: pl.DataFrame  # every sum per CUBE
    episodes: pl.DataFrame  # the RESAMPLED sums per EPISODE

    def window(self, window: Window) -> RunSums:
        return RunSums(self.cube.filter(window.filter()), self.episodes.filter(window.filter()))


def read_sums(run: Run, window: Window | None = None) -> RunSums:
    """One pass over the tokens of a run; memory grows with its episodes, not with its tokens."""
    cubes, episodes = [_no_cells()], [_no_cells().select(*EPISODE, *RESAMPLED)]
    for chunk in run.token_chunks(window or Window(), COLUMNS):
        counted = cells(chunk)
        cubes.append(add(counted, CUBE))
        episodes.append(add(counted.select(*EPISODE, *RESAMPLED), EPISODE))
    return RunSums(add(_join(cubes, CUBE), CUBE), add(_join(episodes, EPISODE), EPISODE))


def _join(parts: list[pl.DataFrame], by: Sequence[str]) -> pl.DataFrame:
    columns = parts[-1].columns
    assert set(by) <= set(columns)
    return pl.concat([part.select(columns) for part in parts], how="vertical_relaxed")


def _no_cells() -> pl.DataFrame:
    return cells(pl.DataFrame(schema=_empty_schema()))


def _empty_schema() -> dict[str, pl.DataType]:
    flags = {"gate", "clipped", "changed", "kept"}
    whole = {"step", "group", "member", "turn", "lag", "offset"}
    return {n: pl.Boolean() if n in flags else pl.Int32() if n in whole else pl.Float32() for n in COLUMNS}
