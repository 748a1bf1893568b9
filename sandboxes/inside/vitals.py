"""What the kernel counts of an episode's processes: memory, CPU time, and time spent waiting for a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
MAX_PROCESSES = 4096  # a tree is read no further than this
STARVED_SHARE, IDLE_SHARE = 0.5, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """Sums over a process and all below it."""

    private_bytes: int  # resident, without what is shared with files
    cpu_seconds: float  # with children that were waited for
    waiting_seconds: float  # of the first process alone: ready to run, but without a CPU
    pids: tuple[int, ...]


NOTHING = Vitals(private_bytes=0, cpu_seconds=0.0, waiting_seconds=0.0, pids=())


def read(pid: int) -> Vitals:
    """Vitals of the tree under `pid`; processes that end meanwhile count as nothing."""
    private_bytes, cpu_seconds, pids = 0, 0.0, []
    pending = [pid]
    while pending and len(pids) < MAX_PROCESSES:
        current = pending.pop()
        folder = f"/proc/{current}"
        try:
            resident, shared = (int(word) for word in _read(f"{folder}/statm").split()[1:3])
            ticks = _read(f"{folder}/stat").rpartition(")")[2].split()[11:15]  # utime stime cutime cstime
            for thread in os.listdir(f"{folder}/task"):
                pending += [int(child) for child in _read(f"{folder}/task/{thread}/children").split()]
        except (OSError, ValueError):
            continue
        private_bytes += (resident - shared) * PAGE_BYTES
        cpu_seconds += sum(map(int, ticks)) / TICKS_PER_SECOND
        pids.append(current)
    return Vitals(
        private_bytes=private_bytes,
        cpu_seconds=cpu_seconds,
        waiting_seconds=waiting_seconds(pid),
        pids=tuple(pids),
    )


def waiting_seconds(pid: int) -> float:
    try:
        return int(_read(f"/proc/{pid}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0  # the kernel does not count it, or the process is gone


def starved(seconds: float, cpu_seconds: float, waited_seconds: float) -> bool:
    """Whether a run of `seconds` that did not end in time was kept from running.

    It was ready to run for most of the time and got little CPU. A snippet that sleeps does not wait for a
    CPU, and one that keeps every CPU busy with children of its own has used them.
    """
    return waited_seconds > STARVED_SHARE * seconds and cpu_seconds < IDLE_SHARE * seconds


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
