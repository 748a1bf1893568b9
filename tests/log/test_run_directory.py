import json

import pytest

from agent_sat.errors import ConfigError
from agent_sat.log.run import RunDirectory, replacing, write_json


def test_create_makes_a_directory_that_open_finds(tmp_path):
    run = RunDirectory.create(tmp_path / "new" / "run")
    run.config.write_text("steps = 1\n")
    assert RunDirectory.open(run.path) == run
    assert run.tokens_of(12) == tmp_path / "new/run/tokens/step_000012.parquet"
    assert run.episodes_of(12).name == "step_000012.jsonl" and run.episodes_of(12).parent.is_dir()


def test_create_refuses_a_run_that_is_there_and_names_the_next_step(tmp_path):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(
        ConfigError, match=r"is not empty: continue it with `agent-sat train --resume .*choose a"
    ):
        RunDirectory.create(tmp_path)


def test_create_takes_the_place_of_a_run_that_ended_before_its_first_step(tmp_path):
    RunDirectory.create(tmp_path / "run").config.write_text("steps = 1\n")
    assert RunDirectory.create(tmp_path / "run").config.exists()


def test_create_refuses_a_folder_of_other_things_without_speaking_of_resume(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(tmp_path)
    assert "is not empty" in str(caught.value) and "resume" not in str(caught.value)


def test_create_takes_an_empty_folder_and_refuses_a_file(tmp_path):
    RunDirectory.create(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        RunDirectory.create(tmp_path / "file")


def test_open_names_the_runs_beside_a_missing_one(tmp_path):
    other = RunDirectory.create(tmp_path / "first")
    other.config.write_text("")
    with pytest.raises(ConfigError, match=r"no run directory.*runs beside it: .*first"):
        RunDirectory.open(tmp_path / "frist")


def test_the_manifest_keeps_one_id_and_every_session(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    first = run.begin(seed=3)
    run.end("interrupted", cause="Ctrl-C")
    second = run.begin(seed=3, from_step=4, accelerators=["H200"])
    run.end("finished")
    manifest = run.read_manifest()
    assert first == second == manifest["run_id"]
    assert manifest["state"] == "finished" and manifest["seed"] == 3
    one, two = manifest["sessions"]
    assert (one["state"], one["cause"], one["from_step"]) == ("interrupted", "Ctrl-C", 0)
    assert (two["state"], two["from_step"], two["hardware"]["accelerators"]) == ("finished", 4, ["H200"])
    assert two["versions"]["polars"] and two["versions"]["python"].startswith("3.")


def test_forget_after_leaves_each_step_up_to_it_and_no_torn_line(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) for step in (1, 2, 3)]
    run.metrics.write_text("\n".join(lines) + '\n{"step": 4, "rew')
    run.evaluations.write_text('{"step": 0}\n{"step": 3}\n')
    for step in (1, 2, 3):
        run.tokens_of(step).write_text("")
        run.episodes_of(step).write_text("")
    (run.tokens / ".step_000004.parquet.77.tmp").write_text("half")
    run.forget_after(2)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2]
    assert run.evaluations.read_text() == '{"step": 0}\n'
    assert sorted(p.name for p in run.tokens.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    assert sorted(p.name for p in run.episodes.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
