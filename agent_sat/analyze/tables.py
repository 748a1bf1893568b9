"""The tables of `agent-sat analyze` in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console

from agent_sat.analyze.measures import MEASURES
from agent_sat.analyze.runs import Run, Window, open_run
from agent_sat.analyze.sums import RunSums, read_sums
from agent_sat.analyze.turns import (
    CONFOUNDERS,
    FEW_EPISODES,
    KL_GROUPS,
    by_kl_group,
    by_lag,
    first_tokens,
    intervals,
    overall,
    quantiles,
    turn_table,
)

MISMATCH = [
    *("episodes", "tokens", "missing", "log_ratio_abs_mean", "log_ratio_abs_p50", "log_ratio_abs_p99"),
    *("log_ratio_abs_max", "k3", "effective_share"),
]
TAILS_AND_REGION = [
    *("tokens", "entropy_mean", "share_pi_below_1e-3", "share_mu_below_1e-3"),
    *("q_mean", "gate_rate", "clipped_share", "changed_share"),
]
FIRST = ["tokens", "log_ratio_abs_mean", "k3", *TAILS_AND_REGION[1:]]
LAG = [
    *("tokens", "log_ratio_abs_mean", "k3", "policy_lag_abs_mean", "policy_lag_variance"),
    *("implementation_abs_mean", "implementation_variance", "clipped_share"),
]
INTERVALS = [
    *(
        "log_ratio_abs_mean",
        "log_ratio_mean",
        "k1",
        "k3",
        "probability_gap_mean",
        "effective_share",
        "entropy_mean",
    ),
    *("share_outside_0.8_1.2", "share_pi_below_1e-3", "share_mu_below_1e-3", "pearson"),
    *("clipped_share", "gate_rate", "changed_share"),
]
SHOWN_INTERVALS = ("log_ratio_abs_mean",)  # in a terminal; the report draws all of INTERVALS
KL_GROUP = ["steps", "tokens", "k3", "probability_gap_mean", "pearson", "pearson_log"]
LEGEND = (
    "d = log pi - log mu of the sampled token, in nats; [low, high]: 95% by bootstrap over episodes;",
    f"*: fewer than {FEW_EPISODES} episodes, read with care; -: nothing recorded.",
)
TITLES = {"log_ratio_abs_p50": "median |d|", "log_ratio_abs_p90": "p90 |d|", "log_ratio_abs_p99": "p99 |d|"}


def print_by_turn(run_dir: str | Path, steps: str = ":", console: Console | None = None) -> None:
    """The short form: mismatch, tails and SAT by turn over a window of steps (`A:B`)."""
    _print(run_dir, steps, console or Console(), full=False)


def print_all(run_dir: str | Path, steps: str = ":", console: Console | None = None) -> None:
    """Everything `agent-sat analyze` says in a terminal: also first tokens, lag, and groups by KL."""
    _print(run_dir, steps, console or Console(), full=True)


def _print(run_dir: str | Path, steps: str, console: Console, *, full: bool) -> None:
    run, window = open_run(run_dir), Window.parse(steps)
    sums = read_sums(run, window)
    if not sums.cube.height:
        console.print(f"{run.name}: no token records in {window}", markup=False)
        return
    table = turn_summary(run, sums, window)
    title = f"{run.name} ({run.method}), {window}:"
    tables = [
        text_table(f"{title} mismatch by tool turn", table, ["turn"], MISMATCH),
        text_table("Low-probability tails and the trust region by turn", table, ["turn"], TAILS_AND_REGION),
    ]
    if full:
        kl_title = "Steps grouped by mean k3: first turn against later turns"
        tables += [
            text_table(
                "First token of a turn against later ones", first_tokens(sums), ["turn", "first"], FIRST
            ),
            text_table("By lag, updates between sampling and use", by_lag(sums), ["lag"], LAG),
            text_table(kl_title, by_kl_group(sums), ["kl_group", "later"], KL_GROUP),
        ]
    for one in tables:
        console.print(one, markup=False, highlight=False, soft_wrap=True)
    for line in (*LEGEND, *CONFOUNDERS):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def turn_summary(run: Run, sums: RunSums, window: Window) -> pl.DataFrame:
    """The by-turn table with exact quantiles and intervals; the last row, turn -1, is all turns."""
    table = turn_table(sums)
    for more in (quantiles(run, window), intervals(sums, INTERVALS)):
        table = table.join(more, on="turn", how="left", maintain_order="left")
    return pl.concat([table, overall(sums)], how="diagonal_relaxed")


def text_table(title: str, frame: pl.DataFrame, keys: Sequence[str], names: Sequence[str]) -> str:
    """A frame of measures in aligned columns, never cut; columns without any value are left out."""
    shown = [
        n for n in names if n in frame.columns and (frame[n].is_not_null() & frame[n].is_not_nan()).any()
    ]
    shown = [n for n in shown if n != "missing" or frame[n].sum()]
    header = [name.replace("_", " ") for name in keys] + [column_title(name) for name in shown]
    rows = []
    for row in frame.iter_rows(named=True):
        few = "*" if (row.get("episodes") or FEW_EPISODES) < FEW_EPISODES else ""
        labels = [_key(name, row[name]) + (few if name == "turn" else "") for name in keys]
        rows.append(labels + [_cell(row, name) for name in shown])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in (header, *rows)
    ]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], ""])


def column_title(name: str) -> str:
    return TITLES.get(name) or (MEASURES[name].title if name in MEASURES else name)


def _key(name: str, value: Any) -> str:
    if name == "turn" and value == -1:
        return "all"
    words = {"first": ("later", "first"), "later": ("turn 0", "turns 1..")}
    if name == "kl_group":
        bounds = ["0", *(f"{bound:g}" for bound in KL_GROUPS), "..."]
        return f"{bounds[value]} to {bounds[value + 1]}"
    return words[name][bool(value)] if name in words else str(value)


def _cell(row: dict[str, Any], name: str) -> str:
    value, low, high = row[name], None, None
    if name in SHOWN_INTERVALS:
        low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    text = figure(value, share=name in MEASURES and MEASURES[name].unit == "share")
    return f"{text} [{figure(low)}, {figure(high)}]" if low is not None and high is not None else text


def figure(value: Any, *, share: bool = False) -> str:
    """A number for a table: whole counts as they are, shares in per cent, the rest in three digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if share:
        return f"{100 * value:.3g}%"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value)}"
    return f"{value:.3g}"
