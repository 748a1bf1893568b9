"""The pool over a backend that runs: one that answers from a script."""

from __future__ import annotations

import threading
import time

import pytest

from agent_sat.errors import SandboxError, WorkerError
from agent_sat.sandboxes.inside.limits import Outcome
from agent_sat.sandboxes.ledger import BREAKER_FAILURES, Ledger, percentile
from agent_sat.sandboxes.pool import Pool
from agent_sat.types import SandboxLimits


class ScriptedSlot:
    def __init__(self, backend: ScriptedBackend) -> None:
        self.backend = backend
        backend.num_living += 1

    def run(self, code: str, timeout_seconds: float) -> Outcome:
        return Outcome(status=code, seconds=0.5, stderr="why" if code == "infra" else "")

    def calm(self) -> None:
        self.backend.num_calmed += 1

    def close(self) -> None:
        self.backend.num_living -= 1


class ScriptedBackend:
    """A snippet is the status that it ends with."""

    tier = "scripted"

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.num_living = self.num_calmed = self.num_opened = 0
        self.closed = False

    def open(self, ledger: Ledger) -> ScriptedSlot:
        if self.broken:
            raise SandboxError("no more processes")
        self.num_opened += 1
        return ScriptedSlot(self)

    def close(self) -> None:
        self.closed = True


LIMITS = SandboxLimits(timeout_seconds=1.0, episode_seconds=1000.0)


def test_a_lost_state_is_replaced_and_a_kept_one_is_not() -> None:
    backend = ScriptedBackend()
    with Pool(backend, LIMITS) as pool, pool.open() as sandbox:
        for status in ("ok", "error", "interrupted", "output_limit"):
            assert sandbox.run(status).status == status
        assert backend.num_opened == 1
        for status in ("timeout", "memory", "crashed", "exited", "infra"):
            sandbox.run(status)
        sandbox.run("ok")
        assert backend.num_opened == 6 and backend.num_living == 1
    assert backend.num_living == 0 and backend.closed


def test_no_more_than_so_many_are_open_and_the_next_waits_its_turn() -> None:
    backend = ScriptedBackend()
    with Pool(backend, LIMITS, max_open=1, queue_seconds=5.0) as pool:
        first = pool.open()
        threading.Timer(0.1, first.close).start()
        started = time.monotonic()
        pool.open().close()
        assert 0.05 < time.monotonic() - started < 2
        assert pool.metrics()["sandbox/wait_seconds_p99"] > 0.05


def test_a_queue_that_does_not_move_is_an_error_in_time() -> None:
    with (
        Pool(ScriptedBackend(), LIMITS, max_open=1, queue_seconds=0.05) as pool,
        pool.open(),
        pytest.raises(SandboxError, match=r"within 0\.05 s"),
    ):
        pool.open()


def test_closing_twice_gives_one_place_back() -> None:
    with Pool(ScriptedBackend(), LIMITS, max_open=1, queue_seconds=0.05) as pool:
        sandbox = pool.open()
        sandbox.close()
        sandbox.close()
        with pool.open(), pytest.raises(SandboxError):
            pool.open()


def test_warm_slots_are_ready_before_they_are_asked_for() -> None:
    backend = ScriptedBackend()
    with Pool(backend, LIMITS, num_warm=3) as pool:
        wait_for(lambda: backend.num_opened == 3)
        pool.open().close()
        wait_for(lambda: backend.num_opened == 4)
    assert backend.num_living == 0


def test_idle_sandboxes_are_looked_after() -> None:
    backend = ScriptedBackend()
    with Pool(backend, LIMITS) as pool, pool.open():
        wait_for(lambda: backend.num_calmed > 0)


def wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_counts_by_outcome_and_percentiles_are_told() -> None:
    with Pool(ScriptedBackend(), LIMITS) as pool, pool.open() as sandbox:
        for status in ("ok", "ok", "error"):
            sandbox.run(status)
        told = pool.metrics()
    assert (told["sandbox/runs"], told["sandbox/ok"], told["sandbox/error"]) == (3, 2, 1)
    assert (told["sandbox/opened"], told["sandbox/open"], told["sandbox/restarts"]) == (1, 1, 0)
    assert told["sandbox/run_seconds_p50"] == 0.5


def test_the_breaker_ends_the_run_with_the_cause_once_too_much_fails() -> None:
    with Pool(ScriptedBackend(), LIMITS) as pool, pool.open() as sandbox:
        for _ in range(BREAKER_FAILURES - 1):
            assert sandbox.run("infra").status == "infra"
            assert sandbox.run("error").status == "error"
        with pytest.raises(WorkerError, match=r"40 of the latest .* last one: why"):
            sandbox.run("infra")
        with pytest.raises(WorkerError):
            pool.open()


def test_the_models_own_failures_never_trip_the_breaker() -> None:
    with Pool(ScriptedBackend(), LIMITS) as pool, pool.open() as sandbox:
        for _ in range(5 * BREAKER_FAILURES):
            sandbox.run("crashed")
        assert sandbox.run("ok").status == "ok"


def test_a_backend_that_cannot_open_is_told_and_then_ends_the_run() -> None:
    with Pool(ScriptedBackend(broken=True), LIMITS) as pool:
        for _ in range(BREAKER_FAILURES - 1):
            with pytest.raises(SandboxError, match="no more processes"):
                pool.open()
        with pytest.raises(WorkerError, match="no more processes"):
            pool.open()


@pytest.mark.parametrize(("level", "value"), [(0.5, 2.0), (0.75, 3.0), (0.76, 4.0), (0.99, 4.0), (0.0, 1.0)])
def test_a_percentile_is_one_of_the_values(level: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], level) == value
