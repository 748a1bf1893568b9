"""The quickstart, measured: wall time, memory of all its processes, success before and after, by seed.

python benchmarks/quickstart.py                 # seeds 0, 1, 2, cold (no cached warm start)
python benchmarks/quickstart.py --seeds 0 method=sat-grpo
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print("seed | wall s | peak MiB | greedy before, after % | sampled before, after %")
    for seed in options.seeds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(Path(folder) / "run", int(seed), options.overrides), flush=True)


def measure(run_dir: Path, seed: int, overrides: list[str]) -> str:
    started = time.monotonic()
    arguments = [f"run_dir={run_dir}", f"seed={seed}", "warm_start.cache=false", *overrides]
    command = [sys.executable, "-m", "agent_sat.cli", "train", "configs/quickstart.toml", *arguments]
    with (run_dir.parent / "printed").open("w") as printed:
        running = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT)
        peak = 0.0
        while running.poll() is None:
            peak = max(peak, resident_mib(running.pid))
            time.sleep(5)
    if running.returncode != 0:
        raise SystemExit((run_dir.parent / "printed").read_text())
    wall = time.monotonic() - started
    before, *_, after = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    rates = [f"{rate(before, kind):.1f}, {rate(after, kind):.1f}" for kind in ("greedy", "sampled")]
    return f"{seed:4} | {wall:6.0f} | {peak:8.0f} | {rates[0]:>22} | {rates[1]}"


def rate(record: dict, kind: str) -> float:
    (score,) = (s for s in record["scores"] if s["kind"] == kind and s["stratum"] == "all")
    return 100 * score["successes"] / score["total"]


def resident_mib(pid: int) -> float:
    """Proportional set size of a process and all below it: shared pages count once."""
    total = 0
    for member in family(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def family(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = set(), [pid]
    while todo:
        member = todo.pop()
        found.add(member)
        todo += children.get(member, [])
    return found


if __name__ == "__main__":
    main()
