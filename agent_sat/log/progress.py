"""What a run shows while it works: a live panel in a terminal, a line a step anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agent_sat.types import Metrics

METRICS_SHOWN = {
    "reward/mean": "reward",
    "rollout/tokens_per_second": "rollout tok/s",
    "train/tokens_per_second": "train tok/s",
    "staleness/lag_mean": "lag mean",
    "staleness/lag_max": "lag max",
    "time/step_seconds": "s/step",
}
"""Names read by the display; also `reward/<stratum>=<value>` and `turn/<k>/log_ratio_abs_mean`."""
TURN_PREFIX, TURN_SUFFIX = "turn/", "/log_ratio_abs_mean"
MAX_COLUMNS = 10  # strata and turns shown; the files hold all of them
RECENT_STEPS = 10  # the time left is judged by their median
PLAIN_SECONDS = 10.0  # least time between two lines of one phase where there is no terminal


class Progress:
    """The state of the run on the screen; odd or missing metrics show as "-" and never raise."""

    def __init__(
        self,
        total_steps: int,
        *,
        stratum: str | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._stratum = stratum
        self._console = console or Console()
        self._clock = clock
        self._phase, self._phase_total, self._phase_done = "starting", 0, 0
        self._facts: dict[str, Any] = {}
        self._step, self._metrics = 0, Metrics()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._started = self._last_step_at = self._last_line_at = clock()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4)
            live.start()
            self._live = live
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str, total: int | None = None) -> None:
        """Say what the run does now; `total` counts what `advance` will add up to."""
        self._phase, self._phase_total, self._phase_done = name, total or 0, 0
        self._facts = {}
        self._last_line_at = self._clock()
        if name == "training" and not self._seconds:
            self._last_step_at = self._clock()
        if self._live is None:
            self._line(f"[{_duration(self._clock() - self._started)}] {name}")

    def advance(self, n: int = 1, **facts: float | str) -> None:
        """Count `n` more of the phase's total and show facts beside it, e.g. loss=0.3."""
        self._phase_done += n
        self._facts |= facts
        due = self._clock() - self._last_line_at >= PLAIN_SECONDS
        if self._live is None and (due or self._phase_done == self._phase_total):
            self._last_line_at = self._clock()
            self._line(f"  {self._phase_text()}")

    def step(self, step: int, metrics: Metrics) -> None:
        """Show that `step` (counted from 1) is done, with its metrics."""
        now = self._clock()
        seconds = number(metrics.get("time/step_seconds"))
        self._seconds.append(seconds if math.isfinite(seconds) else now - self._last_step_at)
        self._step, self._metrics, self._last_step_at = step, metrics, now
        if self._live is None:
            self._line(self.line())

    def note(self, text: str) -> None:
        """Print a line of its own, above the live panel where there is one."""
        self._line(text)

    def line(self) -> str:
        """The last step in one line."""
        parts = [f"step {self._step}/{self._total_steps}"]
        for name, title in METRICS_SHOWN.items():
            if name in self._metrics:
                parts.append(f"{title} {short(self._metrics[name])}")
        if strata := strata_of(self._metrics, self._stratum):
            parts.append(f"{self._stratum} " + " ".join(f"{k}:{short(v)}" for k, v in strata.items()))
        if turns := turns_of(self._metrics):
            parts.append("|d| by turn " + " ".join(f"{k}:{short(v)}" for k, v in turns.items()))
        parts.append(f"left {self._left()}")
        return " | ".join(parts)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _left(self) -> str:
        """Time left by the median of the recent steps."""
        recent = sorted(self._seconds)
        if not recent:
            return "-"
        return _duration(recent[len(recent) // 2] * max(0, self._total_steps - self._step))

    def _phase_text(self) -> str:
        counted = f" {self._phase_done}/{self._phase_total}" if self._phase_total else ""
        facts = "".join(f"  {name} {short(value)}" for name, value in self._facts.items())
        return f"{self._phase}{counted}{facts}"

    def _panel(self) -> Panel:
        header = Table.grid(expand=True)
        header.add_column(justify="left")
        header.add_column(justify="right")
        header.add_row(
            Text(self._phase_text(), style="bold"),
            Text(f"{_duration(self._clock() - self._started)} gone, {self._left()} left"),
        )
        total, done = max(1, self._total_steps), self._step
        if self._phase_total and self._phase != "training":
            total, done = self._phase_total, self._phase_done
        bar = Table.grid(expand=True)  # a bar alone ends no line
        bar.add_row(ProgressBar(total=total, completed=min(done, total)))
        rows: list[Any] = [header, bar]
        if self._step:
            shown = {title: self._metrics.get(name) for name, title in METRICS_SHOWN.items()}
            rows.append(_table({"step": f"{self._step}/{self._total_steps}", **shown}))
        if strata := strata_of(self._metrics, self._stratum):
            rows.append(_table({f"{self._stratum} {key}": value for key, value in strata.items()}))
        if turns := turns_of(self._metrics):
            rows.append(_table({f"|d| turn {key}": value for key, value in turns.items()}))
        return Panel(Group(*rows), title="agent-sat", title_align="left", width=min(110, self._console.width))


def _table(values: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in values:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row(*(Text(value if isinstance(value, str) else short(value)) for value in values.values()))
    return table


def strata_of(metrics: Metrics, stratum: str | None) -> dict[str, Any]:
    """Mean reward by value of the stratum, in order: metrics named `reward/<stratum>=<value>`."""
    if stratum is None:
        return {}
    prefix = f"reward/{stratum}="
    found = {str(name)[len(prefix) :]: v for name, v in metrics.items() if str(name).startswith(prefix)}
    return dict(sorted(found.items(), key=lambda item: _natural(item[0]))[:MAX_COLUMNS])


def turns_of(metrics: Metrics) -> dict[str, Any]:
    """Mean |d| by turn, in order."""
    found = {
        str(name)[len(TURN_PREFIX) : -len(TURN_SUFFIX)]: value
        for name, value in metrics.items()
        if str(name).startswith(TURN_PREFIX) and str(name).endswith(TURN_SUFFIX)
    }
    return dict(sorted(found.items(), key=lambda item: _natural(item[0]))[:MAX_COLUMNS])


def _natural(text: str) -> tuple[float, str]:
    return (number(text), text) if math.isfinite(number(text)) else (math.inf, text)


def number(value: Any) -> float:
    """The value as a float, NaN where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def short(value: Any) -> str:
    """A number in at most about seven characters; "-" where there is none, text as it is."""
    result = number(value)
    if math.isnan(result):
        return value if isinstance(value, str) and value.lower() != "nan" else "-"
    if math.isinf(result):
        return "inf" if result > 0 else "-inf"
    magnitude = abs(result)
    if result == int(result) and magnitude < 1e6:
        return f"{int(result)}"
    if magnitude >= 1e5 or magnitude < 1e-3:
        return f"{result:.1e}"
    return f"{result:.0f}" if magnitude >= 100 else f"{result:.3g}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
