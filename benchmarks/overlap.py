"""What asynchrony saves: wall time of the training steps with rollout and training overlapped, against the
same work one after the other (bound 0), in pairs from the same warm start.

    python benchmarks/overlap.py --pairs 3 --steps 20
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--cache", type=Path, help="where the warm start is kept; default: made for this call"
    )
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            cache = options.cache or Path(folder) / "cache"
            run = {bound: Path(folder) / f"bound{bound}-{pair}" for bound in (0, 1)}
            seconds = {bound: training_seconds(run[bound], bound, options.steps, cache) for bound in (0, 1)}
            ratios.append(seconds[1] / seconds[0])
            print(
                f"synchronous {seconds[0]:.1f} s, asynchronous {seconds[1]:.1f} s, ratio {ratios[-1]:.2f}",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def training_seconds(run_dir: Path, bound: int, steps: int, cache: Path) -> float:
    """Wall seconds of the steps after the first, which has nothing to overlap with."""
    arguments = [
        f"run_dir={run_dir}",
        f"steps={steps}",
        f"staleness.bound={bound}",
        f"warm_start.cache_dir={cache}",
        "eval.enabled=false",
    ]
    command = [sys.executable, "-m", "agent_sat.cli", "train", "configs/quickstart.toml", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sum(line["time/step_seconds"] for line in metrics[1:])


if __name__ == "__main__":
    main()
