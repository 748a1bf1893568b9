"""Bad input: one clear error with exit code 2, before any process starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent_sat import cli

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """(exit code, stderr) of a command that is refused."""
    monkeypatch.setattr(sys, "argv", ["agent-sat", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.learing_rate=1"], ("train.learing_rate", "did you mean 'learning_rate'")),
        (["method=sat_grpo"], ("sat_grpo", "'sat-grpo'")),
        (["rollout.max_length=4096"], ("4096", "max_position_embeddings 512")),
        (["env.id=agent_sat/Lookpu-v0"], ("agent_sat/Lookpu-v0", "Did you mean: `Lookup`")),
        (["env.kwargs={max_truns = 3}"], ("max_truns",)),
        (["model.config.num_attention_heads=5", "model.config.num_key_value_heads=2"], ("model.config",)),
        (["rollout.stop=['</pyhton>']"], ("rollout.stop", "</pyhton>")),
        (["model.path=nowhere"], ("'nowhere'", "not a folder")),
        (["rollout.temperature=0"], ("rollout.temperature", "greater than 0")),
    ],
)
def test_bad_setting_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    overrides: list[str],
    words: tuple[str, ...],
):
    code, error = told(monkeypatch, capsys, "train", QUICKSTART, f"run_dir={tmp_path / 'run'}", *overrides)
    assert code == 2
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert not (tmp_path / "run").exists()


def test_folder_that_is_no_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, error = told(monkeypatch, capsys, "eval", str(tmp_path))
    assert code == 2 and "no run directory" in error


def test_neither_config_nor_resume_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code, error = told(monkeypatch, capsys, "train")
    assert code == 2 and "--resume RUNDIR" in error


def test_cluster_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, error = told(
        monkeypatch, capsys, "train", QUICKSTART, f"run_dir={tmp_path / 'run'}", "cluster.address=127.0.0.1:1"
    )
    assert code == 2 and "no Ray cluster answers there" in error


def test_help_names_every_command_and_teaches_by_example():
    shown = subprocess.run(
        [sys.executable, "-m", "agent_sat.cli", "train", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "configs/quickstart.toml" in shown and "--resume" in shown


def test_print_shows_the_resolved_config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["agent-sat", "train", QUICKSTART, "steps=7", "--print"])
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().out
    assert "steps = 7" in shown and "[rollout]" in shown
