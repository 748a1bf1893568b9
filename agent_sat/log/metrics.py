"""Where a step's metrics go: the run's own JSON lines first, wandb as a copy, and no sink can stop a run."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent_sat.errors import AgentSatError, SinkError, boundary
from agent_sat.protocols import MetricSink
from agent_sat.types import Metrics

logger = logging.getLogger(__name__)
WandbMode = Literal["disabled", "offline", "online"]
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """The record: one JSON object a line, on disk when `log` returns; NaN and infinities are strings."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        line = {"step": step, "unix_time": round(time.time(), 3)}
        line |= {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> float | int | str:
    """A value that strict JSON can hold; a metric that is no number at all is kept as its text."""
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file with NaN and infinities as floats again; a torn last line is left out."""
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines) - 1:
                break
            raise
        rows.append({k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbRun:
    """How a run appears in wandb."""

    project: str
    name: str
    id: str  # the run's id in the manifest, so that a resumed run goes on in the same place
    folder: Path
    mode: WandbMode = "disabled"
    config: dict[str, Any] | None = None


class WandbSink:
    """A copy in wandb, started at the first step; `offline` writes under the run directory only."""

    def __init__(self, settings: WandbRun) -> None:
        self._settings = settings
        self._run: Any = None

    def log(self, step: int, metrics: Metrics) -> None:
        if self._settings.mode == "disabled":
            return
        if self._run is None:
            self._run = _start_wandb(self._settings)
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _start_wandb(settings: WandbRun) -> Any:
    if settings.mode == "offline":
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # its crash reporter looks up a host at import
    import wandb

    run = wandb.init(
        project=settings.project,
        name=settings.name,
        id=settings.id,
        dir=str(settings.folder),
        mode=settings.mode,
        config=settings.config,
        resume="allow" if settings.mode == "online" else None,  # offline runs are joined when synced
        settings=wandb.Settings(console="off", silent=True, init_timeout=60, x_disable_stats=True),
    )
    run.define_metric("*", step_metric="step")  # wandb's own step may not go back, ours does after a resume
    return run


class Fanout:
    """Logs to every sink; one that fails is told of once, counted in `failures`, and tried again."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)
        self._told: set[str] = set()
        self.failures: dict[str, int] = {}

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            try:
                with boundary(SinkError, f"{type(sink).__name__} at step {step}"):
                    sink.log(step, metrics)
            except AgentSatError as error:
                self._count(sink, error)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                with boundary(SinkError, f"{type(sink).__name__} at close"):
                    sink.close()
            except AgentSatError as error:
                self._count(sink, error)

    def _count(self, sink: MetricSink, error: AgentSatError) -> None:
        name = type(sink).__name__
        self.failures[name] = self.failures.get(name, 0) + 1
        if name not in self._told:
            self._told.add(name)
            logger.warning("metrics go on without %s: %s (told once, counted from now on)", name, error)
