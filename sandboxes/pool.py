"""Gives out sandboxes over any backend, bounded in number, counted, and watched while they are idle."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol, Self, cast

from agent_sat.errors import SandboxError
from agent_sat.sandboxes.inside.limits import Outcome
from agent_sat.sandboxes.ledger import Ledger
from agent_sat.types import STATE_LOST, Metrics, SandboxLimits, ToolResult, ToolStatus

CARETAKER_SECONDS = 1.0
CLOSE_SECONDS = 30.0


class Slot(Protocol):
    """A backend's interpreter with fresh state, good until a status in STATE_LOST."""

    def run(self, code: str, timeout_seconds: float) -> Outcome: ...

    def calm(self) -> None:
        """Called now and then between runs: stop what is still burning CPU."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Where slots come from."""

    @property
    def tier(self) -> str:
        """The confinement that its slots really have."""
        ...

    def open(self, ledger: Ledger) -> Slot:
        """Safe to call from many threads. Raises SandboxError."""
        ...

    def close(self) -> None: ...


class Pool:
    """Sandboxes of one backend, for many threads.

    At most `max_open` are open at once: `open` waits up to `queue_seconds` for a free one. `num_warm` slots
    are kept ready ahead of need. Raises WorkerError, which ends a run, once too many of the
    latest openings and runs failed.
    """

    def __init__(
        self,
        backend: Backend,
        limits: SandboxLimits,
        *,
        max_open: int = 512,
        queue_seconds: float = 120.0,
        num_warm: int = 0,
    ) -> None:
        self.limits = limits
        self.tier = backend.tier
        self.ledger = Ledger()
        self._backend = backend
        self._queue_seconds, self._num_warm = queue_seconds, num_warm
        self._places = threading.BoundedSemaphore(max_open)
        self._warm: deque[Slot] = deque()
        self._open: set[PooledSandbox] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._caretaker = threading.Thread(target=self._take_care, name="sandbox-caretaker", daemon=True)
        self._caretaker.start()

    def open(self) -> PooledSandbox:
        """A sandbox with fresh state. Raises SandboxError when none can be set up."""
        self.ledger.check()
        started = time.monotonic()
        if not self._places.acquire(timeout=self._queue_seconds):
            raise SandboxError(f"no sandbox became free within {self._queue_seconds:g} s")
        waited = time.monotonic() - started
        try:
            sandbox = PooledSandbox(self, self.take_slot())
        except BaseException:
            self._places.release()
            raise
        self.ledger.opened(wait_seconds=waited, open_seconds=time.monotonic() - started - waited)
        with self._lock:
            self._open.add(sandbox)
        return sandbox

    def take_slot(self) -> Slot:
        """A warm slot or a new one; for PooledSandbox."""
        if self._closing.is_set():
            raise SandboxError("the sandbox pool is closed")
        try:
            return self._warm.popleft()
        except IndexError:
            pass
        try:
            return self._backend.open(self.ledger)
        except SandboxError as error:
            self.ledger.failed_to_open(str(error))
            self.ledger.check()
            raise

    def give_back(self, sandbox: PooledSandbox) -> None:
        with self._lock:
            if sandbox not in self._open:
                return
            self._open.remove(sandbox)
        self._places.release()

    def metrics(self) -> Metrics:
        """Counts since the start, and percentiles of the latest waits, openings and runs."""
        return {"sandbox/open": float(len(self._open))} | self.ledger.metrics()

    def close(self) -> None:
        """End every sandbox and the backend; nothing of them is left afterwards."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._caretaker.join(CLOSE_SECONDS)
        while self._warm:
            self._warm.popleft().close()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take_care(self) -> None:
        while not self._closing.wait(CARETAKER_SECONDS if len(self._warm) >= self._num_warm else 0.0):
            if len(self._warm) < self._num_warm:
                try:
                    self._warm.append(self._backend.open(self.ledger))
                except SandboxError as error:
                    self.ledger.failed_to_open(str(error))
                    self._closing.wait(CARETAKER_SECONDS)
                continue
            with self._lock:
                idle = list(self._open)
            for sandbox in idle:
                sandbox.calm()


class PooledSandbox:
    """One episode's interpreter, for one thread at a time; after a lost state the next run starts afresh."""

    def __init__(self, pool: Pool, slot: Slot) -> None:
        self._pool = pool
        self._slot: Slot | None = slot
        self._left_seconds = pool.limits.episode_seconds
        self._closed = False
        self._busy = threading.Lock()  # the caretaker keeps off while a run goes on

    def run(self, code: str, *, timeout_seconds: float | None = None) -> ToolResult:
        """What `code` did; its state stays for the next run unless the status is in STATE_LOST.

        Raises SandboxError on a closed sandbox and WorkerError when the pool's breaker has tripped.
        """
        if self._closed:
            raise SandboxError("the sandbox is closed")
        limits = self._pool.limits
        timeout = limits.timeout_seconds if timeout_seconds is None else timeout_seconds
        with self._busy:
            outcome = self._run(code, min(timeout, self._left_seconds))
        self._left_seconds = max(0.0, self._left_seconds - outcome.seconds)
        status = cast(ToolStatus, outcome.status)
        self._pool.ledger.ran(status, outcome.seconds, outcome.stderr)
        if status == "infra":
            self._pool.ledger.check()
        return ToolResult(
            status=status,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            seconds=outcome.seconds,
            truncated=outcome.truncated,
        )

    def calm(self) -> None:
        if self._busy.acquire(blocking=False):
            try:
                if self._slot is not None and not self._closed:
                    self._slot.calm()
            finally:
                self._busy.release()

    def close(self) -> None:
        with self._busy:
            self._closed = True
            self._end()
        self._pool.give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # gymnasium copies the arguments of `make` into its records, and a process has no copy

    def _run(self, code: str, timeout_seconds: float) -> Outcome:
        if timeout_seconds <= 0:
            return Outcome(status="timeout", stderr="this episode has used up its time in the sandbox\n")
        if self._slot is None:
            try:
                self._slot = self._pool.take_slot()
            except SandboxError as error:
                return Outcome(status="infra", stderr=str(error))
        outcome = self._slot.run(code, timeout_seconds)
        if outcome.status in STATE_LOST:
            self._end()
        return outcome

    def _end(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            slot.close()
