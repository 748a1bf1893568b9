"""What the tables and plots show: each measure as a rule over sums, with its unit and its meaning.

The report carries this table to the page, which applies the same rules to the same sums for any choice of
steps and turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import polars as pl

from agent_sat.analyze.sums import TAILS

Rule = Literal["sum", "mean", "variance", "covariance", "pearson", "effective_share", "extreme"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a set of tokens; `parts` are names of sums, in the order its rule takes them."""

    title: str
    rule: Rule
    parts: tuple[str, ...]
    meaning: str
    unit: str = ""
    scale: float = 1.0


def _tail(policy: Literal["pi", "mu"], tail: str) -> dict[str, Measure]:
    below = f"{policy}_below_{tail}"
    return {
        f"share_{below}": Measure(
            f"{policy}<{tail}",
            "mean",
            (below, "tokens"),
            f"share of tokens with {policy} below {tail}",
            "share",
        ),
        f"gradient_{below}": Measure(
            f"grad {policy}<{tail}",
            "mean",
            (f"mass_{below}", "mass"),
            f"share of the gradient mass on tokens with {policy} below {tail}; the mass of a token is "
            "|weight c A r (1 - pi)|, 0 where clipped or masked",
            "share",
        ),
    }


MEASURES: dict[str, Measure] = {
    "tokens": Measure("tokens", "sum", ("tokens",), "sampled tokens with both log-probabilities"),
    "missing": Measure(
        "missing", "sum", ("missing",), "tokens without a finite log mu or log pi; counted nowhere"
    ),
    "log_ratio_abs_mean": Measure(
        "mean |d|",
        "mean",
        ("d_abs", "tokens"),
        "mean of |d|, d = log pi - log mu of the sampled token",
        "nats",
    ),
    "log_ratio_abs_max": Measure("max |d|", "extreme", ("log_ratio_abs_max",), "largest |d|", "nats"),
    "log_ratio_mean": Measure("mean d", "mean", ("d", "tokens"), "signed mean of d", "nats"),
    "log_ratio_variance": Measure(
        "var d", "variance", ("d", "d_square", "tokens"), "variance of d (divided by n)", "nats^2"
    ),
    "k1": Measure(
        "k1", "mean", ("d", "tokens"), "mean of -d: unbiased estimate of KL(mu | pi)", "nats", -1.0
    ),
    "k3": Measure(
        "k3",
        "mean",
        ("k3", "tokens"),
        "mean of exp(d) - 1 - d: estimate of KL(mu | pi), never below 0",
        "nats",
    ),
    "policy_lag_mean": Measure(
        "lag part",
        "mean",
        ("policy_lag", "split_count"),
        "mean of log pi - log mu~: what the updates since sampling did",
        "nats",
    ),
    "policy_lag_abs_mean": Measure(
        "|lag part|", "mean", ("policy_lag_abs", "split_count"), "mean of |log pi - log mu~|", "nats"
    ),
    "policy_lag_variance": Measure(
        "var lag part",
        "variance",
        ("policy_lag", "policy_lag_square", "split_count"),
        "variance of log pi - log mu~",
        "nats^2",
    ),
    "implementation_mean": Measure(
        "engine part",
        "mean",
        ("implementation", "split_count"),
        "mean of log mu~ - log mu: trainer against engine at the same weights",
        "nats",
    ),
    "implementation_abs_mean": Measure(
        "|engine part|", "mean", ("implementation_abs", "split_count"), "mean of |log mu~ - log mu|", "nats"
    ),
    "implementation_variance": Measure(
        "var engine part",
        "variance",
        ("implementation", "implementation_square", "split_count"),
        "variance of log mu~ - log mu",
        "nats^2",
    ),
    "parts_covariance": Measure(
        "cov parts",
        "covariance",
        ("split_product", "policy_lag", "implementation", "split_count"),
        "covariance of the two parts of d",
        "nats^2",
    ),
    "probability_gap_mean": Measure(
        "|pi-mu|", "mean", ("p_gap", "tokens"), "mean of |pi - mu| of the sampled token", "probability"
    ),
    "total_variation": Measure(
        "TV",
        "mean",
        ("r_gap", "tokens"),
        "half the mean of |exp(d) - 1|: estimate of the total variation of mu and pi",
        "probability",
        0.5,
    ),
    "share_outside_0.8_1.2": Measure(
        "r out .8-1.2",
        "mean",
        ("outside_narrow", "tokens"),
        "share of tokens with exp(d) outside [0.8, 1.2]",
        "share",
    ),
    "share_outside_0.5_2": Measure(
        "r out .5-2",
        "mean",
        ("outside_wide", "tokens"),
        "share of tokens with exp(d) outside [0.5, 2]",
        "share",
    ),
    "effective_share": Measure(
        "ESS",
        "effective_share",
        ("r", "r_square", "tokens"),
        "effective sample size (sum r)^2 / (n sum r^2) of r = exp(d)",
        "share",
    ),
    "entropy_mean": Measure("entropy", "mean", ("entropy", "entropy_count"), "mean entropy of pi", "nats"),
    **{name: m for policy in ("pi", "mu") for tail in TAILS for name, m in _tail(policy, tail).items()},
    "pearson_log": Measure(
        "corr log",
        "pearson",
        ("log_x", "log_y", "log_xx", "log_yy", "log_xy", "tokens"),
        "Pearson correlation of log pi with log mu",
    ),
    "pearson": Measure(
        "corr",
        "pearson",
        ("prob_x", "prob_y", "prob_xx", "prob_yy", "prob_xy", "tokens"),
        "Pearson correlation of pi with mu",
    ),
    "clipped_share": Measure(
        "clipped",
        "mean",
        ("clipped", "tokens"),
        "share of tokens left without gradient by the trust region",
        "share",
    ),
    "gate_rate": Measure(
        "gate", "mean", ("gate", "tokens"), "share of tokens whose radius SAT contracted: |g| > q", "share"
    ),
    "changed_share": Measure(
        "SAT changed", "mean", ("changed", "tokens"), "share of tokens whose gradient SAT took away", "share"
    ),
    "kept_share": Measure("kept", "mean", ("kept", "tokens"), "share of tokens kept by the masks", "share"),
    "q_mean": Measure("q", "mean", ("q", "q_count"), "mean over tokens of SAT's reference quantile", "nats"),
    "contraction_mean": Measure(
        "c mean", "mean", ("contraction", "tokens"), "mean of SAT's contraction c on the side of g"
    ),
    "contraction_min": Measure("c min", "extreme", ("contraction_min",), "smallest contraction"),
}


def finish(sums: pl.DataFrame, names: list[str] | None = None) -> pl.DataFrame:
    """The measures of each row of sums beside its keys; null where there is nothing to divide by.

    Only measures whose sums are all there are given.
    """
    wanted = {
        n: m
        for n, m in MEASURES.items()
        if (names is None or n in names) and set(m.parts) <= set(sums.columns)
    }
    parts = {part for measure in MEASURES.values() for part in measure.parts}
    keys = [name for name in sums.columns if name not in parts]
    return sums.select(*keys, *(value(measure).alias(name) for name, measure in wanted.items()))


def value(measure: Measure) -> pl.Expr:
    """The rule of a measure over its sums."""
    parts = [pl.col(part) for part in measure.parts]
    match measure.rule:
        case "sum" | "extreme":
            result = parts[0]
        case "mean":
            result = _over(parts[0], parts[1])
        case "variance":
            total, square, count = parts
            result = _over(square - total * total / count, count).clip(0.0)
        case "covariance":
            product, x, y, count = parts
            result = _over(product - x * y / count, count)
        case "effective_share":
            total, square, count = parts
            result = _over(total * total, square * count)
        case "pearson":
            x, y, xx, yy, xy, count = parts
            spread = (xx - x * x / count) * (yy - y * y / count)
            result = _over(xy - x * y / count, pl.when(spread > 0).then(spread).otherwise(0.0).sqrt())
    return result * measure.scale if measure.scale != 1.0 else result


def _over(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)
