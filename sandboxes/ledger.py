"""What a pool counts, and the breaker that ends a run whose sandboxes keep failing."""

from __future__ import annotations

import threading
from collections import Counter, deque

from agent_sat.errors import WorkerError
from agent_sat.types import Metrics, ToolStatus

NUM_TIMES = 2048  # the latest ones make the percentiles
BREAKER_WINDOW = 200  # the latest openings and runs
BREAKER_FAILURES = 40  # so many failures of our own among them end the run


class Ledger:
    """Counts since the start of the pool; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._num_opened = self._num_restarts = 0
        self._times: dict[str, deque[float]] = {
            name: deque(maxlen=NUM_TIMES) for name in ("wait", "open", "run")
        }
        self._failures: deque[str] = deque(maxlen=BREAKER_WINDOW)  # the reason, or "" where all went well

    def opened(self, *, wait_seconds: float, open_seconds: float) -> None:
        with self._lock:
            self._num_opened += 1
            self._times["wait"].append(wait_seconds)
            self._times["open"].append(open_seconds)
            self._failures.append("")

    def ran(self, status: ToolStatus, seconds: float, reason: str) -> None:
        with self._lock:
            self._outcomes[status] += 1
            self._times["run"].append(seconds)
            self._failures.append(reason or "no reason given" if status == "infra" else "")

    def failed_to_open(self, reason: str) -> None:
        with self._lock:
            self._failures.append(reason or "no reason given")

    def restarted(self) -> None:
        with self._lock:
            self._num_restarts += 1

    def check(self) -> None:
        """Raise the WorkerError that ends the run once too many of the latest openings and runs failed."""
        with self._lock:
            reasons = [reason for reason in self._failures if reason]
            num_seen = len(self._failures)
        if len(reasons) >= BREAKER_FAILURES:
            raise WorkerError(
                f"the sandboxes keep failing: {len(reasons)} of the latest {num_seen} openings and runs "
                f"failed for reasons of the sandbox itself, not of the model; the last one: {reasons[-1]}"
            )

    def metrics(self) -> Metrics:
        with self._lock:
            counted = {f"sandbox/{status}": float(count) for status, count in sorted(self._outcomes.items())}
            times = {name: sorted(values) for name, values in self._times.items() if values}
            totals = {
                "sandbox/opened": float(self._num_opened),
                "sandbox/runs": float(sum(self._outcomes.values())),
                "sandbox/restarts": float(self._num_restarts),
            }
        for name, values in times.items():
            totals[f"sandbox/{name}_seconds_p50"] = percentile(values, 0.50)
            totals[f"sandbox/{name}_seconds_p99"] = percentile(values, 0.99)
        return totals | counted


def percentile(ordered: list[float], level: float) -> float:
    """The smallest value that at least a share `level` of the ordered values do not exceed."""
    rank = -int(-level * len(ordered) // 1)
    return ordered[min(max(rank, 1), len(ordered)) - 1]
