"""Small real runs through the command line, each in a process group of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SMALL = (
    "steps=3",
    "warm_start.steps=3",
    "warm_start.batch_size=8",
    "warm_start.cache=false",
    "warm_start.threads=1",
    "rollout.tasks_per_step=3",
    "rollout.group_size=4",
    "rollout.max_response_tokens=60",
    "eval.num_tasks=3",
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agent_sat.cli", *arguments]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def train(run_dir: Path, *overrides: str, local: bool = False) -> str:
    """Run to the end; returns what it printed."""
    running = start_train(run_dir, *overrides, local=local)
    printed, _ = running.communicate(timeout=110)
    assert running.returncode == 0, printed
    return printed


def start_train(run_dir: Path, *overrides: str, local: bool = False) -> subprocess.Popen[str]:
    flags = ["--local"] if local else []
    return start("train", "configs/quickstart.toml", f"run_dir={run_dir}", *SMALL, *overrides, *flags)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for(running: subprocess.Popen[str], path: Path, seconds: float = 90) -> None:
    """Until `path` exists, while the run is alive."""
    limit = time.monotonic() + seconds
    while not path.exists():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < limit, f"no {path.name} after {seconds} s"
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found, todo = set(), {pid}
    while todo:
        parent = todo.pop()
        children = {child for child, its in parents.items() if its == parent} - found
        found |= children
        todo |= children
    return found


def alive(pids: set[int]) -> set[int]:
    """Those still running; zombies waiting for a foreign parent do not count."""
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found.add(pid)
    return found


def all_gone(pids: set[int], seconds: float = 20) -> bool:
    limit = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < limit:
        time.sleep(0.1)
    return not alive(pids)


def actor_pids(below: int, name: str) -> list[int]:
    """Processes below `below` whose command line holds `name`."""
    return [
        pid
        for pid in descendants(below)
        if name in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    ]


def interrupt(running: subprocess.Popen[str]) -> None:
    os.kill(running.pid, signal.SIGINT)
