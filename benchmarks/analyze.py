"""Time and peak memory of `agent-sat analyze` on a made-up run of 10 million token rows.

    python benchmarks/analyze.py            # tables and the whole report
    python benchmarks/analyze.py --rows 1   # millions of rows

Goal: under 20 s and 2 GiB on 2 cores for the tables; the report is timed beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SEED, STEPS, TURNS, TOKENS = 0, 40, 5, 20


def write_run(path: Path, millions: float) -> None:
    """Steps of equal size; every episode has all turns, the worst case for the number of cells."""
    from agent_sat.log.tokens import write_tokens

    random = np.random.default_rng(SEED)
    (path / "tokens").mkdir(parents=True)
    (path / "config.toml").write_text('name = "benchmark"\n')
    episodes = int(millions * 1e6 / STEPS / TURNS / TOKENS)
    size = episodes * TURNS * TOKENS
    episode = np.repeat(np.arange(episodes), TURNS * TOKENS)
    turn = np.tile(np.repeat(np.arange(TURNS), TOKENS), episodes)
    for step in range(1, STEPS + 1):
        mu, d = -random.exponential(0.5, size), random.normal(0, 0.02 * (turn + 1))
        columns = {
            "step": step,
            "group": episode // 8 + step * episodes,
            "member": episode % 8,
            "turn": turn,
            "position": np.tile(np.arange(TURNS * TOKENS), episodes),
            "token_id": random.integers(0, 100, size),
            "version": step - 1,
            "lag": 1 + episode % 3,
            "behavior_logprob": mu,
            "recomputed_logprob": mu + d / 2,
            "logprob": mu + d,
            "entropy": random.random(size),
            "advantage": random.normal(size=size),
            "ratio": np.exp(d),
            "q": 0.03,
            "gate": np.abs(d) > 0.03,
        }
        write_tokens(path / f"tokens/step_{step:06d}.parquet", columns)


def measure(path: str, what: str) -> None:
    """One task in this process: wall and CPU seconds and the process's own peak of resident memory."""
    from agent_sat.analyze.report import print_all, write_report

    wall, cpu = time.perf_counter(), time.process_time()
    if what == "tables":
        with contextlib.redirect_stdout(io.StringIO()):
            print_all(path)
    else:
        write_report(path, Path(path) / "report.html")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.perf_counter() - wall} {time.process_time() - cpu} {peak}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=10.0, help="millions of token rows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("RUN", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    cores = len(os.sched_getaffinity(0))
    print(f"seed {SEED}, {options.rows:g} million rows, {cores} cores, {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / "run", options.rows)
        for what in ("tables", "report"):
            command = [sys.executable, __file__, "--measure", f"{folder}/run", what]
            runs = [
                [
                    float(x)
                    for x in subprocess.run(
                        command, capture_output=True, text=True, check=True
                    ).stdout.split()
                ]
                for _ in range(options.repeats + 1)
            ][1:]  # the first one warms the file cache
            wall, cpu, peak = ([run[i] for run in runs] for i in range(3))
            print(
                f"{what:7s} wall {statistics.median(wall):.1f} s (from {min(wall):.1f} to {max(wall):.1f}), "
                f"CPU {statistics.median(cpu):.1f} s, peak memory {max(peak):.2f} GiB"
            )


if __name__ == "__main__":
    main()
