"""The report of one run: a single HTML page that opens from disk, for any choice of steps and turns."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from agent_sat.algo.methods import METHODS
from agent_sat.analyze.episodes import Entry, EpisodeIndex, Query
from agent_sat.analyze.measures import MEASURES
from agent_sat.analyze.page import page
from agent_sat.analyze.points import (
    BINS_PER_DECADE,
    LOWEST,
    NUM_BINS,
    POINT,
    add_histograms,
    histogram,
    sample,
)
from agent_sat.analyze.runs import Run, Window, open_run
from agent_sat.analyze.stability import COLLAPSE_RULE, SPIKE_RULE, stability
from agent_sat.analyze.sums import COLUMNS, RunSums, add, prepare, read_sums
from agent_sat.analyze.tables import print_all, print_by_turn, turn_summary
from agent_sat.analyze.turns import CONFOUNDERS, FEW_EPISODES, KL_GROUPS, step_groups

MAX_BINS = 120  # bins of steps on the page
MAX_TURNS = 16  # turns from the last of these on share one line
POINTS_PER_KL_GROUP = 500  # of the first turn, and as many of later turns
POINTS_PER_FATE = 700  # tokens of each fate (changed, gated, clipped, untouched)
EPISODES_SHOWN, EPISODE_BYTES = 48, 4_000_000
SCALARS = ("reward/", "staleness/", "train/", "rollout/", "tool/", "time/", "loss/", "eval/", "sat/")


def write_report(run_dir: str | Path, out: str | Path, steps: str = ":") -> Path:
    """Write the report of a window of steps and give its path."""
    run, window = open_run(run_dir), Window.parse(steps)
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        page(f"{run.name}: by tool turn", "report.js", report_data(run, window)), encoding="utf-8"
    )
    return target


def report_data(run: Run, window: Window) -> dict[str, Any]:
    """Everything the page shows, as plain lists."""
    sums = read_sums(run, window)
    steps = sums.cube["step"].unique().sort().to_list()
    bins = step_bins(steps)
    return {
        "run": _about(run, window),
        "measures": {name: asdict(measure) for name, measure in MEASURES.items()},
        "bins": sorted(set(bins.values())),
        "bin_of": [[step, bins[step]] for step in steps],
        "max_turns": MAX_TURNS,
        "sums": _columns(add(_binned(sums.cube, bins), ["bin", "turn", "first"])),
        "lag_sums": _columns(add(_binned(sums.cube, bins), ["bin", "turn", "lag"])),
        "histogram": {"low": LOWEST, "per_decade": BINS_PER_DECADE, "bins": NUM_BINS},
        "table": _columns(turn_summary(run, sums, window)) if steps else {},
        "kl_bounds": list(KL_GROUPS),
        "few": FEW_EPISODES,
        "notes": list(CONFOUNDERS),
        "rules": {"collapse": COLLAPSE_RULE, "spike": SPIKE_RULE},
        "stability": asdict(stability(run, window)),
        "metrics": _metrics(run, window),
        "evaluations": run.evaluations,
        **_episode_views(run, window),
        **_token_views(run, window, sums, bins),
    }


def _about(run: Run, window: Window) -> dict[str, Any]:
    region = {**METHODS.get(run.method.removesuffix("+r3"), {}), **run.config.get("algorithm", {})}
    path = run.directory.config
    return {
        "name": run.name,
        "method": run.method,
        "seed": run.seed,
        "state": run.manifest.get("state", "?"),
        "window": str(window),
        "exponent": region.get("exponent", 2.0),
        "eps_low": region.get("eps_low", 0.2),
        "eps_high": region.get("eps_high", 0.2),
        "config": path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "",
        "sessions": run.manifest.get("sessions", []),
    }


def step_bins(steps: list[int]) -> dict[int, int]:
    """First step of each step's bin: single steps, or equal widths so that at most MAX_BINS are needed."""
    if not steps:
        return {}
    width = max(1, -(-(steps[-1] - steps[0] + 1) // MAX_BINS))
    return {step: steps[0] + (step - steps[0]) // width * width for step in steps}


def _binned(frame: pl.DataFrame, bins: dict[int, int]) -> pl.DataFrame:
    """Rows with their bin in place of the step, and late turns joined."""
    step, turn = pl.col("step"), pl.col("turn").clip(upper_bound=MAX_TURNS - 1)
    mapped = step.replace_strict(bins, return_dtype=pl.Int64) if bins else step.cast(pl.Int64)
    return frame.with_columns(bin=mapped, turn=turn).drop("step")


def _columns(frame: pl.DataFrame) -> dict[str, list[Any]]:
    return frame.to_dict(as_series=False)


def _token_views(run: Run, window: Window, sums: RunSums, bins: dict[int, int]) -> dict[str, Any]:
    """Histogram and samples of tokens: a second pass, because KL groups are known after the first."""
    groups = step_groups(sums).select("step", "kl_group")
    histograms, scatter, fates = [], [], []
    for chunk in run.token_chunks(window, COLUMNS):
        prepared = prepare(chunk).join(groups, on="step", how="left")
        prepared = prepared.with_columns(later=pl.col("turn") > 0, fate=_fate())
        histograms.append(histogram(prepared))
        scatter.append(sample(prepared, ["kl_group", "later"], POINTS_PER_KL_GROUP))
        fates.append(sample(prepared, ["fate"], POINTS_PER_FATE))
    if not histograms:
        return {"tail": {}, "scatter": {}, "fates": {}}
    return {
        "tail": _tail(add_histograms(histograms), bins),
        "scatter": _points(scatter, ["kl_group", "later"], POINTS_PER_KL_GROUP, bins),
        "fates": _points(fates, ["fate"], POINTS_PER_FATE, bins),
    }


def _fate() -> pl.Expr:
    """What the trust region did to a token, the strongest first."""
    named = pl.when(pl.col("changed")).then(pl.lit("changed")).when(pl.col("clipped")).then(pl.lit("clipped"))
    return named.when(pl.col("gate")).then(pl.lit("gated")).otherwise(pl.lit("untouched"))


def _tail(counts: pl.DataFrame, bins: dict[int, int]) -> dict[str, list[Any]]:
    """Histogram of |d| by bin of steps and turn; `size` is the bin of log10 |d|."""
    moved = _binned(counts.rename({"bin": "size"}), bins)
    return _columns(
        moved.group_by("bin", "turn", "size").agg(pl.col("count").sum()).sort("bin", "turn", "size")
    )


def _points(
    parts: list[pl.DataFrame], by: list[str], number: int, bins: dict[int, int]
) -> dict[str, list[Any]]:
    chosen = sample(pl.concat(parts), by, number)
    keys = [name for name in by if name not in POINT]
    wanted = ["bin", "turn", *keys, "d", "p", "m", "ratio", "advantage", "q", "contraction"]
    return _columns(_binned(chosen, bins).select(wanted))


def _metrics(run: Run, window: Window) -> dict[str, list[Any]]:
    """The step metrics that the page draws, one list a name; by-turn numbers come from the tokens instead."""
    rows = [row for row in run.metrics if int(row["step"]) in window]
    names = sorted({name for row in rows for name in row if name.startswith(SCALARS)})
    numbers = {n: [v if isinstance(v := row.get(n), int | float) else None for row in rows] for n in names}
    return {"step": [int(row["step"]) for row in rows], **numbers}


def _episode_views(run: Run, window: Window) -> dict[str, Any]:
    """Reward by number of turns over all episodes of the window, and a choice of whole ones."""
    index = EpisodeIndex(run)
    entries, _ = index.search(Query(window=window), limit=10_000_000)
    rewards = pl.DataFrame(
        {"num_turns": [e.num_turns for e in entries], "reward": [float(e.reward) for e in entries]},
        schema={"num_turns": pl.Int64, "reward": pl.Float64},
    )
    by_length = (
        rewards.group_by("num_turns").agg(pl.col("reward").mean(), episodes=pl.len()).sort("num_turns")
    )
    shown, size = [], 0
    for entry in _choice(entries):
        if shown and size + entry.length > EPISODE_BYTES:
            continue
        size += entry.length
        shown.append(entry.public() | {"episode": index.open(entry)})
    shown.sort(key=lambda e: (e["step"], e["group"], e["member"]))
    return {"reward_by_turns": _columns(by_length), "episodes": shown}


def _choice(entries: list[Entry]) -> list[Entry]:
    """Episodes worth a look: largest mismatch, most changed by SAT, some of each ending, some in between."""
    quarter = EPISODES_SHOWN // 4
    chosen = sorted(entries, key=lambda e: -(e.max_abs or 0.0))[:quarter]
    chosen += sorted(entries, key=lambda e: -e.changed)[:quarter]
    for ending in sorted({e.ending for e in entries}):
        chosen += [e for e in entries if e.ending == ending][:4]
    chosen += entries[:: max(1, len(entries) // quarter)]
    unique = {(e.step, e.group, e.member): e for e in chosen}
    return list(unique.values())[:EPISODES_SHOWN]


__all__ = ["print_all", "print_by_turn", "report_data", "write_report"]
