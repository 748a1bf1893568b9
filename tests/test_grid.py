from pathlib import Path

import pytest

from agent_sat import grid
from agent_sat.errors import ConfigError, WorkerError
from agent_sat.log.run import RunDirectory, write_text

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"


def make(methods=("grpo", "sat-grpo"), lags=(1, 8), seeds=(0, 1), overrides=()) -> list[grid.GridRun]:
    return grid.make_grid(QUICKSTART, methods=methods, lags=lags, seeds=seeds, overrides=overrides)


class FakeTrain:
    """Stands in for the training process: finishes a run's manifest, or exits 1 for the names given."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing = failing
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], log: Path) -> int:
        self.commands.append(command)
        run_dir = next((a.removeprefix("run_dir=") for a in command if a.startswith("run_dir=")), command[-1])
        if Path(run_dir).name in self.failing:
            return 1
        run = RunDirectory(Path(run_dir))
        if not run.config.exists():
            RunDirectory.create(run_dir)
            write_text(run.config, "")
        run.begin(seed=0)
        run.end("finished")
        return 0


def run(
    folder: Path, fake: FakeTrain, monkeypatch: pytest.MonkeyPatch, said: list[str] | None = None
) -> list[Path]:
    monkeypatch.setattr(grid, "launch", fake)
    return grid.run_grid(QUICKSTART, make(), folder, jobs=2, say=(said if said is not None else []).append)


def test_grid_is_every_combination_with_all_methods_of_a_seed_together():
    names = [run.name for run in make()]
    assert len(names) == 8
    assert names[:2] == ["grpo-lag1-seed0", "sat-grpo-lag1-seed0"]
    assert names[-1] == "sat-grpo-lag8-seed1"


def test_lag_is_the_broadcast_interval_and_the_bound():
    settings = make()[-1].settings
    assert "staleness.bound=8" in settings and "staleness.broadcast_interval=8" in settings


def test_wrong_cell_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="'sat-grpo'"):
        make(methods=("grpo", "sat_grpo"))


def test_every_run_is_started_once_and_finished_ones_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = FakeTrain(), FakeTrain()
    directories = run(tmp_path, first, monkeypatch)
    assert len(first.commands) == len(directories) == 8
    assert run(tmp_path, second, monkeypatch) == directories
    assert second.commands == []


def test_failed_run_is_named_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failing = "sat-grpo-lag8-seed0"
    with pytest.raises(WorkerError, match=f"1 runs failed: {failing}"):
        run(tmp_path, FakeTrain((failing,)), monkeypatch)
    again = FakeTrain()
    run(tmp_path, again, monkeypatch)
    assert len(again.commands) == 1


def test_run_with_a_checkpoint_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = RunDirectory.create(tmp_path / "grpo-lag1-seed0")
    write_text(started.config, "")
    (started.checkpoints / "step_000001").mkdir()
    fake = FakeTrain()
    run(tmp_path, fake, monkeypatch)
    (resumed,) = (command for command in fake.commands if "--resume" in command)
    assert resumed[-1] == str(started.path)


def test_progress_says_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    run(tmp_path, FakeTrain(), monkeypatch, said)
    assert said[0].startswith("8 runs, 0 finished before, 2 at once")
    assert "[8/8]" in said[-1] and "min left" in said[-1]


@pytest.mark.parametrize("text", ["", " , "])
def test_empty_list_is_refused(text: str):
    with pytest.raises(ConfigError, match="--seeds"):
        grid.numbers(text, "seeds")


def test_word_among_numbers_is_refused():
    with pytest.raises(ConfigError, match="whole numbers"):
        grid.numbers("0,one", "seeds")
