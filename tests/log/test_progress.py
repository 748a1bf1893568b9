import io
import math

from rich.console import Console

from agent_sat.log.progress import Progress, short

METRICS = {
    "reward/mean": 0.45,
    "reward/level=10": 0.0,
    "reward/level=2": 0.5,
    "reward/levels": 9.0,
    "rollout/tokens_per_second": 12345.6,
    "train/tokens_per_second": 980.0,
    "staleness/lag_mean": 1.25,
    "staleness/lag_max": 3,
    "turn/0/log_ratio_abs_mean": 0.00231,
    "turn/10/log_ratio_abs_mean": 0.2,
    "turn/2/log_ratio_abs_mean": 0.1,
    "time/step_seconds": 2.0,
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def plain(total_steps=50, **options):
    file = io.StringIO()
    return Progress(total_steps, console=Console(file=file, width=80), **options), file


def test_without_a_terminal_each_step_is_one_line_with_everything_in_it():
    progress, file = plain(stratum="level")
    with progress:
        progress.phase("training")
        progress.step(12, METRICS)
    assert file.getvalue().splitlines() == [
        "[0:00] training",
        "step 12/50 | reward 0.45 | rollout tok/s 12346 | train tok/s 980 | lag mean 1.25 | lag max 3 | "
        "s/step 2 | level 2:0.5 10:0 | |d| by turn 0:0.00231 2:0.1 10:0.2 | left 1:16",
    ]


def test_a_terminal_shows_phase_progress_reward_lag_mismatch_and_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=110, record=True)
    with Progress(50, stratum="level", console=console) as progress:
        progress.phase("training")
        progress.step(12, METRICS)
    shown = console.export_text()
    wanted = [
        "training",
        "1:16 left",
        "step",
        "12/50",
        "0.45",
        "12346",
        "980",
        "1.25",
        "level 2",
        "turn 10",
        "0.00231",
    ]
    assert [text for text in wanted if text not in shown] == []


def test_plain_phases_are_told_in_time_and_not_at_every_advance():
    clock = Clock()
    progress, file = plain(clock=clock)
    progress.phase("warm start", total=400)
    for _ in range(400):
        clock.now += 0.1
        progress.advance(1, loss=0.5)
    lines = file.getvalue().splitlines()
    assert lines[0] == "[0:00] warm start" and lines[-1] == "  warm start 400/400  loss 0.5"
    assert 4 <= len(lines) <= 6  # 40 seconds, a line every 10


def test_time_left_is_judged_by_the_median_of_recent_steps():
    progress, _ = plain(total_steps=10)
    for step, seconds in enumerate([3.0, 100.0, 3.0], start=1):
        progress.step(step, {"time/step_seconds": seconds})
    assert progress.line().endswith("left 0:21")


def test_odd_metrics_show_as_a_dash_and_never_raise():
    odd = {
        "reward/mean": None,
        "time/step_seconds": "soon",
        "staleness/lag_mean": math.nan,
        "staleness/lag_max": math.inf,
        "turn/x/log_ratio_abs_mean": [1],
        "rollout/tokens_per_second": object(),
    }
    console = Console(file=io.StringIO(), force_terminal=True, width=110, record=True)
    for progress in (plain()[0], Progress(0, stratum="level", console=console)):
        with progress:
            progress.step(1, odd)  # pyright: ignore[reportArgumentType]
            progress.advance(5, loss=math.nan)
    assert "inf" in console.export_text()


def test_text_of_a_model_in_a_note_is_no_markup():
    progress, file = plain()
    progress.note("[red]x[/red] [/oops]")
    assert file.getvalue() == "[red]x[/red] [/oops]\n"


def test_short_numbers_keep_their_size_readable():
    values = [0, 3.0, 0.123456, 0.00001234, 123456.7, 999.6, -2.5, math.nan, None, "warm", True]
    wanted = ["0", "3", "0.123", "1.2e-05", "1.2e+05", "1000", "-2.5", "-", "-", "warm", "1"]
    assert [short(v) for v in values] == wanted
