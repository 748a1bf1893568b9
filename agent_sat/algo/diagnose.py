"""Mismatch and trust-region metrics by turn and by lag: sums that add over micro-batches, then means.

The words and formulas are those of `agent_sat.analyze`, which computes the same from a run's token record.
Everything is detached and counts trained tokens only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agent_sat.algo.loss import LossOutput
from agent_sat.algo.methods import Method
from agent_sat.algo.ratio import MAX_LOG_RATIO
from agent_sat.algo.settings import AlgorithmConfig
from agent_sat.types import Batch, Metrics

Rule = Literal["sum", "mean", "variance", "covariance", "effective_share", "max", "min"]

LOW_PROBABILITY = math.log(1e-3)
MAX_LAG_SHOWN = 16  # lags from this one on share one row of the table by lag


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric: a rule over sums. Logged as `area/name` over all turns and as `turn/<k>/name`."""

    area: str
    rule: Rule
    parts: tuple[str, ...]
    scale: float = 1.0


def _mean(area: str, part: str, count: str = "tokens", scale: float = 1.0) -> Measure:
    return Measure(area, "mean", (part, count), scale)


MEASURES: dict[str, Measure] = {
    "tokens": Measure("loss", "sum", ("tokens",)),
    "missing": Measure("loss", "sum", ("missing",)),
    "log_ratio_abs_mean": _mean("mismatch", "d_abs"),
    "log_ratio_abs_max": Measure("mismatch", "max", ("d_abs_max",)),
    "k1": _mean("mismatch", "d", scale=-1.0),
    "k3": _mean("mismatch", "k3"),
    "share_outside_0.8_1.2": _mean("mismatch", "outside"),
    "effective_share": Measure("mismatch", "effective_share", ("r", "r_square", "tokens")),
    "share_pi_below_1e-3": _mean("mismatch", "pi_low"),
    "share_mu_below_1e-3": _mean("mismatch", "mu_low"),
    "entropy_mean": _mean("mismatch", "entropy"),
    "lag_mean": _mean("staleness", "lag"),
    "lag_max": Measure("staleness", "max", ("lag_max",)),
    "clipped_share": _mean("loss", "clipped"),
    "kept_share": _mean("loss", "kept"),
    "correction_mean": _mean("loss", "correction"),
    "kl_mean": _mean("loss", "kl"),
    "q": _mean("sat", "q"),
    "gate_rate": _mean("sat", "gate"),
    "changed_share": _mean("sat", "changed"),
    "fell_back_share": _mean("sat", "fell_back"),
    "c_high_mean": _mean("sat", "c_high"),
    "c_low_mean": _mean("sat", "c_low"),
    "c_high_min": Measure("sat", "min", ("c_high_min",)),
    "c_low_min": Measure("sat", "min", ("c_low_min",)),
    "policy_lag_mean": _mean("split", "policy_lag", "split"),
    "policy_lag_variance": Measure("split", "variance", ("policy_lag", "policy_lag_square", "split")),
    "implementation_mean": _mean("split", "implementation", "split"),
    "implementation_variance": Measure(
        "split", "variance", ("implementation", "implementation_square", "split")
    ),
    "parts_covariance": Measure("split", "covariance", ("product", "policy_lag", "implementation", "split")),
}
BY_LAG = frozenset({"tokens", "log_ratio_abs_mean", "clipped_share", "changed_share"})  # and area "split"

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over one or many micro-batches of one method, on the host; `+` adds two.

    Ranks reduce `sums` by sum and `largest` by max.
    """

    sums: dict[str, Array]  # name -> [turns, lags] float64
    largest: dict[str, Array]  # name -> [turns, lags] float64, -inf where nothing was seen; minima negated

    def __add__(self, other: Tally) -> Tally:
        assert self.sums.keys() == other.sums.keys(), "tallies of different methods"
        return Tally(
            sums={name: value + other.sums[name] for name, value in self.sums.items()},
            largest={name: np.maximum(value, other.largest[name]) for name, value in self.largest.items()},
        )


def host(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Tokens of one turn stand together: values are reduced over such runs first, then by key."""

    starts: Array  # [runs] first token of each run
    keys: Array  # [runs]
    num_keys: int

    def sum(self, values: Array) -> Array:
        wide = values if values.dtype.kind == "f" else values.astype(np.float32)
        by_run = np.add.reduceat(wide, self.starts) if len(self.starts) else np.zeros(0)
        return np.bincount(self.keys, weights=by_run, minlength=self.num_keys)

    def max(self, values: Array) -> Array:
        table = np.full(self.num_keys, -np.inf)
        if len(self.starts):
            np.maximum.at(table, self.keys, np.maximum.reduceat(values, self.starts))
        return table


def runs_of(keys: Array, num_keys: int) -> Runs:
    starts = np.flatnonzero(np.concatenate([[len(keys) > 0], keys[1:] != keys[:-1]]))
    return Runs(starts=starts, keys=keys[starts], num_keys=num_keys)


def tally(method: Method, batch: Batch, output: LossOutput, *, logprobs: Tensor, entropy: Tensor) -> Tally:
    """The sums of one micro-batch; `logprobs` and `entropy` are those the loss was given.

    What is not trained goes to two shelves of its own and never meets what is: sampled tokens without a
    log-probability, and context.
    """
    shape = (method.settings.max_turn + 1, MAX_LAG_SHOWN + 1)
    shelf = shape[0] * shape[1]
    turn, active = host(batch.turn), host(output.tokens.active)
    key = turn.clip(0, shape[0] - 1) * shape[1] + host(output.tokens.lag).clip(0, MAX_LAG_SHOWN)
    runs = runs_of(np.where(active, key, np.where(turn >= 0, key + shelf, 2 * shelf)), 2 * shelf + 1)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not trained may hold anything
        features = _features(batch, output)
        features |= {"pi_low": host(logprobs) < LOW_PROBABILITY, "entropy": host(entropy)}
        sums = {name: runs.sum(value) for name, value in features.items()}
        largest = {name: runs.max(value) for name, value in _extremes(output).items()}
    missing = sums["tokens"][shelf : 2 * shelf].reshape(shape)
    return Tally(
        sums={name: value[:shelf].reshape(shape) for name, value in sums.items()} | {"missing": missing},
        largest={name: value[:shelf].reshape(shape) for name, value in largest.items()},
    )


def _features(batch: Batch, output: LossOutput) -> dict[str, Array]:
    """Per token ([N]), what is summed."""
    tokens, behavior = output.tokens, host(batch.behavior_logprobs)
    d = host(tokens.log_ratio)
    r = np.exp(np.minimum(d, MAX_LOG_RATIO))
    optional = {
        "kept": tokens.keep,
        "correction": tokens.correction,
        "kl": tokens.kl,
        "gate": tokens.gate,
        "changed": tokens.changed,
    }
    features = {
        "tokens": np.ones_like(d),
        "d": d,
        "d_abs": np.abs(d),
        "k3": r - 1 - d,
        "r": r,
        "r_square": r * r,
        "outside": np.abs(r - 1) > 0.2,
        "mu_low": behavior < LOW_PROBABILITY,
        "lag": host(tokens.lag),
        "clipped": host(tokens.clipped),
        **{name: host(value) for name, value in optional.items() if value is not None},
    }
    if tokens.q is not None and tokens.reference is not None:
        fell_back, strata = tokens.reference.fell_back, tokens.strata
        features["q"] = host(tokens.q)
        features["fell_back"] = np.zeros(len(d)) if strata is None else strata.spread(fell_back)
        features |= _sides(output)
    if batch.recomputed_logprobs is not None:
        features |= _split(d, host(batch.recomputed_logprobs) - behavior)
    return features


def _split(d: Array, implementation: Array) -> dict[str, Array]:
    """d = policy_lag + implementation where log mu~ is known."""
    known = np.isfinite(implementation)
    implementation = np.where(known, implementation, 0)
    policy_lag = np.where(known, d - implementation, 0)
    return {
        "split": known,
        "policy_lag": policy_lag,
        "policy_lag_square": policy_lag**2,
        "implementation": implementation,
        "implementation_square": implementation**2,
        "product": policy_lag * implementation,
    }


def _extremes(output: LossOutput) -> dict[str, Array]:
    tokens = output.tokens
    extremes = {"d_abs_max": np.abs(host(tokens.log_ratio)), "lag_max": host(tokens.lag)}
    if tokens.contraction is not None:
        extremes |= {f"{name}_min": -value for name, value in _sides(output).items()}
    return extremes


def _sides(output: LossOutput) -> dict[str, Array]:
    """SAT's factor on either radius: c on the side of g, 1 on the other."""
    assert output.tokens.contraction is not None
    c, g = host(output.tokens.contraction), host(output.tokens.objective_log_ratio)
    return {"c_high": np.where(g > 0, c, 1), "c_low": np.where(g < 0, c, 1)}


def finish(total: Tally, settings: AlgorithmConfig) -> Metrics:
    """Named means: `area/name`, `turn/<k>/name` for turns and `lag/<n>/name` for lags that have tokens."""
    metrics = {f"{_area(name)}/{name}": value for name, value in _values(total, settings).items()}
    tokens = total.sums["tokens"]
    for k in np.flatnonzero(tokens.sum(1)):
        part = _values(_select(total, np.s_[k : k + 1, :]), settings)
        metrics |= {f"turn/{k}/{name}": value for name, value in part.items()}
    for n in np.flatnonzero(tokens.sum(0)):
        part = _values(_select(total, np.s_[:, n : n + 1]), settings)
        shown = [name for name in part if name in BY_LAG or _area(name) == "split"]
        metrics |= {f"lag/{n}/{name}": part[name] for name in shown}
    return metrics


def _area(name: str) -> str:
    return MEASURES[name].area if name in MEASURES else "sat"


def _select(total: Tally, part: tuple[slice, slice]) -> Tally:
    return Tally(
        sums={name: value[part] for name, value in total.sums.items()},
        largest={name: value[part] for name, value in total.largest.items()},
    )


def _values(total: Tally, settings: AlgorithmConfig) -> Metrics:
    """Every measure whose sums are there, and what follows from q and the contractions."""
    cut = {name: float(value.sum()) for name, value in total.sums.items()}
    cut |= {name: float(value.max()) for name, value in total.largest.items()}
    values: Metrics = {}
    for name, measure in MEASURES.items():
        if all(part in cut for part in measure.parts):
            value = _apply(measure.rule, [cut[part] for part in measure.parts])
            if math.isfinite(value):
                values[name] = value * measure.scale
    if "q" in values:
        values["window_high"] = max(0.0, math.log1p(settings.eps_high) - values["q"])
        if settings.eps_low < 1:
            values["window_low"] = max(0.0, -math.log1p(-settings.eps_low) - values["q"])
        values["radius_high_mean"] = settings.eps_high * values["c_high_mean"]
        values["radius_low_mean"] = settings.eps_low * values["c_low_mean"]
    return values


def _apply(rule: Rule, parts: list[float]) -> float:
    """One number from its sums; NaN where there is nothing to divide by."""
    first, count = parts[0], parts[-1]
    if rule in {"sum", "max", "min"}:
        return -first if rule == "min" else first
    if count == 0:
        return math.nan
    match rule:
        case "mean":
            return first / count
        case "variance":
            return max(0.0, (parts[1] - first**2 / count) / count)
        case "covariance":
            return (first - parts[1] * parts[2] / count) / count
        case _:  # effective_share
            return first**2 / (parts[1] * count) if parts[1] > 0 else math.nan
