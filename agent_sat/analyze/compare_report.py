"""A comparison as Markdown, JSON and an HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent_sat.analyze.compare import (
    OUTCOMES,
    Cell,
    Comparison,
    compare_runs,
    learning_curve,
    mismatch_by_turn,
)
from agent_sat.analyze.page import page, rounded
from agent_sat.analyze.stability import COLLAPSE_RULE
from agent_sat.analyze.statistics import LEAST_PAIRS, Estimate, estimate
from agent_sat.log.run import write_text

METHOD_NOTE = (
    "Rewards are trailing means over 5 steps. [low, high]: 95% Student interval over seeds. Differences are "
    "paired by seed and their intervals hold jointly for all methods of one outcome (Bonferroni); a "
    f"difference counts as separable only if its interval leaves out 0, with at least {LEAST_PAIRS} pairs."
)


def compare(directories: Sequence[str | Path], out: str | Path) -> Comparison:
    """Compare finished runs and write comparison.md, .json and .html into the folder `out`."""
    comparison = compare_runs(directories)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    data = comparison_data(comparison)
    write_text(folder / "comparison.md", markdown(comparison))
    write_text(folder / "comparison.json", json.dumps(rounded(data), indent=1, allow_nan=False) + "\n")
    write_text(folder / "comparison.html", page("comparison of runs", "compare.js", data))
    return comparison


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    return {
        "outcomes": OUTCOMES,
        "note": METHOD_NOTE,
        "collapse_rule": COLLAPSE_RULE,
        "warnings": list(comparison.warnings),
        "cells": [_cell(cell) for cell in comparison.cells],
        "contrasts": [
            asdict(contrast) | {"verdict": contrast.verdict, "separable": contrast.difference.separable}
            for contrast in comparison.contrasts
        ],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "method": cell.method,
        "setting": cell.setting,
        "seeds": [run.seed for run in cell.runs],
        "collapses": cell.collapses,
        "outcomes": {name: asdict(estimate(list(cell.of(name).values()))) for name in OUTCOMES},
        "curve": [[step, e.mean, e.low, e.high, e.count] for step, e in learning_curve(cell)],
        "turns": {
            name: [[turn, e.mean, e.low, e.high, e.count] for turn, e in mismatch_by_turn(cell, name)]
            for name in ("log_ratio_abs_mean", "k3", "changed_share")
        },
        "runs": [
            {"path": run.path, "seed": run.seed, "state": run.state, "outcomes": run.outcomes}
            | {"collapse_step": run.stability.collapse_step, "spikes": len(run.stability.spikes)}
            for run in cell.runs
        ],
    }


def markdown(comparison: Comparison) -> str:
    """The comparison as a page of Markdown: verdicts first, then the tables behind them."""
    lines = ["# Comparison", ""]
    lines += [f"> {warning}" for warning in comparison.warnings] + [""] * bool(comparison.warnings)
    lines += [
        f"- {contrast.verdict}"
        for contrast in comparison.contrasts
        if _has_values(comparison, contrast.outcome)
    ]
    shown = [name for name in OUTCOMES if _has_values(comparison, name)]
    head = ["method", "setting", "seeds", *(OUTCOMES[name] for name in shown), "collapsed"]
    lines += ["", *_table(head, [_row(cell, shown) for cell in comparison.cells]), ""]
    lines += ["## Mean |d| by tool turn (nats)", ""]
    turns = sorted({t for cell in comparison.cells for run in cell.runs for t in run.turns})
    rows = []
    for cell in comparison.cells:
        found = dict(mismatch_by_turn(cell, "log_ratio_abs_mean"))
        rows.append(
            [cell.method, cell.setting, *(estimate_text(found[t]) if t in found else "-" for t in turns)]
        )
    lines += [*_table(["method", "setting", *(f"turn {turn}" for turn in turns)], rows), ""]
    return "\n".join([*lines, METHOD_NOTE, "", COLLAPSE_RULE, ""])


def _has_values(comparison: Comparison, outcome: str) -> bool:
    return any(math.isfinite(value) for cell in comparison.cells for value in cell.of(outcome).values())


def _row(cell: Cell, outcomes: Sequence[str]) -> list[str]:
    values = [estimate_text(estimate(list(cell.of(name).values()))) for name in outcomes]
    return [cell.method, cell.setting, str(len(cell.runs)), *values, f"{cell.collapses} of {len(cell.runs)}"]


def estimate_text(value: Estimate) -> str:
    if not value.count:
        return "-"
    if not math.isfinite(value.low):
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} [{value.low:.3g}, {value.high:.3g}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]
