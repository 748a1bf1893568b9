"""Runs a grid of methods, lags and seeds from identical warm starts, and goes on with what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from agent_sat.config import load
from agent_sat.errors import ConfigError, WorkerError
from agent_sat.log.run import RunDirectory

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """One run of the grid."""

    method: str
    lag: int
    seed: int
    overrides: tuple[str, ...]  # common to all runs

    @property
    def name(self) -> str:
        return f"{self.method}-lag{self.lag}-seed{self.seed}".replace(":", "_").replace("/", "_")

    @property
    def settings(self) -> list[str]:
        """`lag` is the broadcast interval and the bound at once: the regime of a fixed cadence."""
        return [
            *self.overrides,
            f"name={self.name}",
            f"method={self.method}",
            f"seed={self.seed}",
            f"staleness.bound={self.lag}",
            f"staleness.broadcast_interval={max(1, self.lag)}",
        ]


def make_grid(
    config: Path,
    *,
    methods: Sequence[str],
    lags: Sequence[int],
    seeds: Sequence[int],
    overrides: Sequence[str],
) -> list[GridRun]:
    """Every combination, seeds outermost, so that all methods of one seed follow the warm start they share.

    Raises ConfigError if any of them is not a valid config, before anything runs.
    """
    grid = [
        GridRun(method=method, lag=lag, seed=seed, overrides=tuple(overrides))
        for seed, lag, method in product(seeds, lags, methods)
    ]
    for run in grid:
        load(config, run.settings)
    return grid


def run_grid(config: Path, grid: Sequence[GridRun], folder: Path, *, jobs: int, say: Say) -> list[Path]:
    """Run what is not finished, `jobs` at once; returns every run's directory in the order of the grid.

    Raises WorkerError once all others are done if some run failed; calling again goes on with those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = [run for run in grid if not finished(folder / run.name)]
    say(f"{len(grid)} runs, {len(grid) - len(todo)} finished before, {jobs} at once; logs in {folder}/*.log")
    started, failed = time.monotonic(), []
    with ThreadPoolExecutor(jobs) as pool, ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # Ctrl-C starts no further run
        running = {pool.submit(run_one, config, run, folder): run for run in todo}
        for done, future in enumerate(as_completed(running), 1):
            run, code = running[future], future.result()
            if code != 0:
                failed.append(run.name)
            seconds = time.monotonic() - started
            left = seconds / done * (len(todo) - done)
            state = "finished" if code == 0 else f"FAILED (exit {code})"
            say(
                f"[{done}/{len(todo)}] {run.name} {state}; {seconds / 60:.1f} min so far, {left / 60:.1f} min left"
            )
    if failed:
        raise WorkerError(f"{len(failed)} runs failed: {', '.join(failed)}; see their logs in {folder}")
    return [folder / run.name for run in grid]


def run_one(config: Path, run: GridRun, folder: Path) -> int:
    """Start, or go on with, one run in a process of its own; returns its exit code."""
    directory = folder / run.name
    command = [sys.executable, "-m", "agent_sat.cli", "train", "--local"]
    if any((directory / "checkpoints").glob("step_*")):
        command += ["--resume", str(directory)]
    else:
        if (directory / "config.toml").exists():
            shutil.rmtree(directory)  # ended before its first checkpoint
        command += [str(config), *run.settings, f"run_dir={directory}"]
    return launch(command, folder / f"{run.name}.log")


def launch(command: list[str], log: Path) -> int:
    with log.open("a") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def default_jobs() -> int:
    """A run keeps about two cores busy: engine and learner."""
    return max(1, (os.cpu_count() or 1) // 2)


def finished(directory: Path) -> bool:
    return RunDirectory(directory).read_manifest().get("state") == "finished"


def split(text: str, what: str) -> Iterator[str]:
    """The items of a comma-separated option. Raises ConfigError if there is none."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigError(f"--{what} {text!r} names nothing")
    yield from items


def numbers(text: str, what: str) -> list[int]:
    try:
        return [int(item) for item in split(text, what)]
    except ValueError as error:
        raise ConfigError(f"--{what} {text!r}: give whole numbers, e.g. 0,1,2") from error
