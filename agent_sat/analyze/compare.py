"""Finished runs side by side: tables with intervals, paired differences, and a verdict that can say no."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sat.analyze.measures import finish
from agent_sat.analyze.runs import Run, open_run
from agent_sat.analyze.stability import Stability, series, stability
from agent_sat.analyze.statistics import LEAST_PAIRS, Difference, Estimate, estimate, paired
from agent_sat.analyze.sums import add, read_sums
from agent_sat.errors import ConfigError

OUTCOMES = {
    "last": "last reward",
    "best": "best reward",
    "success": "success at the last evaluation",
    "log_ratio_abs_mean": "mean |d| (nats)",
    "k3": "mean k3 (nats)",
}
IDENTITY = ("name", "run_dir", "seed", "cluster", "log", "eval")  # no part of what is compared
METHOD_KEYS = (
    "method",
    "algorithm",
)  # what is compared; all else that varies is the setting it is compared in


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a comparison needs of one run."""

    path: str
    method: str
    seed: int
    state: str
    settings: dict[str, Any]  # flat config without IDENTITY
    stability: Stability
    outcomes: dict[str, float]  # by OUTCOMES; NaN where there is none
    rewards: dict[int, float]  # by step
    turns: dict[int, dict[str, float]]  # by turn: tokens, mean |d|, k3, share changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The seeds of one method in one setting."""

    method: str
    setting: str
    runs: tuple[RunSummary, ...]

    @property
    def collapses(self) -> int:
        return sum(run.stability.collapsed for run in self.runs)

    def of(self, outcome: str) -> dict[int, float]:
        return {run.seed: run.outcomes[outcome] for run in self.runs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """One method against the baseline of its setting, in one outcome."""

    setting: str
    method: str
    baseline: str
    outcome: str
    difference: Difference

    @property
    def verdict(self) -> str:
        where = f" ({self.setting})" if self.setting else ""
        subject = f"{self.method} against {self.baseline}{where}: {OUTCOMES[self.outcome]}"
        found, pairs = self.difference.estimate, self.difference.pairs
        if pairs < LEAST_PAIRS:
            return f"{subject} not separable: {pairs} paired seeds are too few, {LEAST_PAIRS} are needed"
        size = f"{found.mean:+.3g} [{found.low:+.3g}, {found.high:+.3g}] over {pairs} paired seeds"
        if not self.difference.separable:
            return f"{subject} not separable: {size}"
        return f"{subject} {'higher' if found.mean > 0 else 'lower'}: {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Cells in the order their first runs were given, and contrasts with the first method of each setting."""

    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...]
    warnings: tuple[str, ...]


def compare_runs(directories: Sequence[str | Path]) -> Comparison:
    """Compare finished runs; the method given first in each setting is the baseline of that setting.

    Raises ConfigError for fewer than two runs and for two runs of one cell with the same seed.
    """
    if len(directories) < 2:
        raise ConfigError(f"{len(directories)} run is nothing to compare: give two or more run directories")
    runs = [summarise(open_run(path)) for path in directories]
    cells = make_cells(runs)
    return Comparison(cells=cells, contrasts=make_contrasts(cells), warnings=make_warnings(cells))


def summarise(run: Run) -> RunSummary:
    sums = read_sums(run)
    names = ["tokens", "log_ratio_abs_mean", "k3", "changed_share"]
    overall = finish(add(sums.cube, []), names).row(0, named=True) if sums.cube.height else {}
    turns = finish(add(sums.cube, ["turn"]), names).iter_rows(named=True)
    history = stability(run)
    steps, rewards = series(run.metrics, "reward/mean")
    return RunSummary(
        path=str(run.directory.path),
        method=run.method,
        seed=run.seed,
        state=str(run.manifest.get("state", "?")),
        settings={k: v for k, v in flat(run.config).items() if _area(k) not in IDENTITY},
        stability=history,
        outcomes={
            "last": history.last,
            "best": history.best,
            "success": _success(run),
            "log_ratio_abs_mean": overall.get("log_ratio_abs_mean", math.nan),
            "k3": overall.get("k3", math.nan),
        },
        rewards=dict(zip(steps.tolist(), rewards.tolist(), strict=True)),
        turns={row["turn"]: {name: row[name] for name in names} for row in turns},
    )


def _success(run: Run) -> float:
    """Success over all strata at the last evaluation: sampled where there is such, else greedy."""
    scores = run.evaluations[-1].get("scores", []) if run.evaluations else []
    overall = {str(s["kind"]): s for s in scores if s["stratum"] == "all" and s["total"]}
    chosen = overall.get("sampled") or overall.get("greedy")
    return chosen["successes"] / chosen["total"] if chosen else math.nan


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def varying(runs: Sequence[RunSummary]) -> list[str]:
    """Settings that are not the same in all of the runs."""
    keys = {key for run in runs for key in run.settings}
    return sorted(key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1)


def _area(key: str) -> str:
    return key.split(".", maxsplit=1)[0]


def make_cells(runs: Sequence[RunSummary]) -> tuple[Cell, ...]:
    """Runs grouped by everything that varies among them but the seed."""
    varied = varying(runs)
    same_method = {
        method: [run for run in runs if run.method == method] for method in {r.method for r in runs}
    }
    overrides = {
        method: [k for k in varying(same) if _area(k) == "algorithm"] for method, same in same_method.items()
    }
    grouped: dict[tuple[str, str], list[RunSummary]] = {}
    for run in runs:
        parts = [f"{key.split('.')[-1]}={run.settings.get(key)}" for key in overrides[run.method]]
        method = " ".join([run.method, *parts])
        others = [key for key in varied if _area(key) not in METHOD_KEYS]
        setting = ", ".join(f"{k}={run.settings.get(k)}" for k in others)
        grouped.setdefault((method, setting), []).append(run)
    for (method, setting), members in grouped.items():
        seeds = [run.seed for run in members]
        if twice := {seed for seed in seeds if seeds.count(seed) > 1}:
            paths = ", ".join(run.path for run in members if run.seed in twice)
            raise ConfigError(
                f"{method} {setting}: seed {min(twice)} is there twice ({paths}); leave one out"
            )
    return tuple(Cell(method=m, setting=s, runs=tuple(members)) for (m, s), members in grouped.items())


def make_contrasts(cells: Sequence[Cell]) -> tuple[Contrast, ...]:
    """Every outcome of every cell against the first cell of its setting, at a joint level per outcome."""
    first = {cell.setting: cell for cell in reversed(cells)}
    others = [cell for cell in cells if cell is not first[cell.setting]]
    return tuple(
        Contrast(
            setting=cell.setting,
            method=cell.method,
            baseline=first[cell.setting].method,
            outcome=outcome,
            difference=paired(cell.of(outcome), first[cell.setting].of(outcome), comparisons=len(others)),
        )
        for outcome in OUTCOMES
        for cell in others
    )


def make_warnings(cells: Sequence[Cell]) -> tuple[str, ...]:
    """What a reader must know before trusting the table."""
    told = [f"{r.path} is {r.state}, not finished" for c in cells for r in c.runs if r.state != "finished"]
    lengths = {run.stability.num_steps for cell in cells for run in cell.runs}
    if len(lengths) > 1:
        told.append(f"runs differ in length: {min(lengths)} to {max(lengths)} steps")
    for cell in cells:
        wanted = {run.seed for other in cells if other.setting == cell.setting for run in other.runs}
        if lost := wanted - {run.seed for run in cell.runs}:
            told.append(
                f"{cell.method} {cell.setting} lacks seeds {sorted(lost)}: they are left out of its pairs"
            )
    return tuple(told)


def learning_curve(cell: Cell) -> list[tuple[int, Estimate]]:
    """Mean reward over seeds at each step, with a Student interval."""
    steps = sorted({step for run in cell.runs for step in run.rewards})
    return [(s, estimate([run.rewards[s] for run in cell.runs if s in run.rewards])) for s in steps]


def mismatch_by_turn(cell: Cell, name: str) -> list[tuple[int, Estimate]]:
    """A measure by turn over seeds, with a Student interval."""
    turns = sorted({turn for run in cell.runs for turn in run.turns})
    values = {
        t: [v for r in cell.runs if t in r.turns and (v := r.turns[t][name]) is not None] for t in turns
    }
    return [(turn, estimate(values[turn])) for turn in turns]
