from pathlib import Path

import pytest

from agent_sat.config import Config, apply_override, load, parse, to_toml, toml_value
from agent_sat.errors import ConfigError

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
MINIMAL = {"name": "x", "steps": 3}


def overridden(*overrides: str) -> Config:
    return load(QUICKSTART, list(overrides))


def test_misspelt_key_names_the_nearest_valid_one():
    with pytest.raises(ConfigError, match=r"'train\.learing_rate'; did you mean 'learning_rate'"):
        parse(MINIMAL | {"train": {"learing_rate": 1e-6}})


def test_float_in_exponent_form_is_a_float():
    assert overridden("train.learning_rate=1e-6").train.learning_rate == 1e-06


def test_command_line_false_beats_a_true_in_the_file():
    assert overridden("log.tokens=false").log.tokens is False


@pytest.mark.parametrize("text", ["on", "12:30:00", "true", "123"])
def test_text_field_keeps_what_was_typed(text: str):
    assert overridden(f"name={text}").name == text


def test_bare_word_needs_no_quotes():
    assert overridden("method=sat-grpo", "run_dir=runs/x").method == "sat-grpo"


def test_sizes_need_not_divide_one_another():
    # 10 prompts x 4 samples on 3 workers: groups go to the least busy worker, so there is no remainder
    config = parse(MINIMAL | {"rollout": {"tasks_per_step": 10, "group_size": 4, "num_workers": 3}})
    assert config.max_sessions == 40


def test_group_that_does_not_fit_the_engine_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"max_sessions 4 .*group_size 8; set engine\.max_sessions=8"):
        overridden("engine.max_sessions=4")


def test_bound_below_the_broadcast_interval_is_refused():
    with pytest.raises(ConfigError, match=r"staleness\.bound=7 or more"):
        overridden("staleness.broadcast_interval=8")


def test_unknown_method_names_the_nearest():
    with pytest.raises(ConfigError, match="'sat-grpo'"):
        overridden("method=sat_grpo")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["method=grpo", "algorithm.correction=tis"], "counts the same ratio twice"),
        (
            ["method=sat-grpo+r3", "model.architecture=Qwen3ForCausalLM", "model.config={hidden_size=96}"],
            "dense",
        ),
        (["method=gspo", "algorithm.advantage=turn_return"], "averages per-turn advantages away"),
        (["method=dual_clip", "algorithm.dual_clip=1"], r"algorithm\.dual_clip = 1"),
    ],
)
def test_combination_that_is_wrong_is_refused_by_the_config_with_the_reason(
    overrides: list[str], reason: str
):
    with pytest.raises(ConfigError, match=reason):
        overridden(*overrides)


def test_temperature_zero_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        overridden("rollout.temperature=0")


def test_value_of_the_wrong_type_is_named():
    with pytest.raises(ConfigError, match=r"train\.threads = 'many'"):
        overridden("train.threads=many")


def test_missing_file_names_the_nearest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(QUICKSTART.parents[1])
    with pytest.raises(ConfigError, match=r"did you mean 'configs/quickstart\.toml'"):
        load("configs/quickstrat.toml")


def test_override_without_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        apply_override({}, "steps")


def test_override_into_a_value_is_refused():
    with pytest.raises(ConfigError, match="'steps' is a value"):
        apply_override({"steps": 3}, "steps.more=1")


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("[1, 2]", [1, 2]), ("a-b", "a-b"), ("12:30:00", "12:30:00"), ("true", True)],
)
def test_override_values_are_toml_or_words(text: str, value: object):
    assert toml_value(text) == value


@pytest.mark.parametrize("method", ["sat-grpo-turn", "gspo", "decoupled", "sat-grpo+r3"])
def test_resolved_config_reads_back_to_the_same_run(tmp_path: Path, method: str):
    words = 'env.kwargs={max_turns = 3, note = "a \\"quoted\\" word"}'
    config = overridden(words, f"method={method}", "algorithm.eps_high=0.3")
    (tmp_path / "config.toml").write_text(to_toml(config))
    again = load(tmp_path / "config.toml")
    assert again.resolve_method().settings == config.resolve_method().settings
    assert again.model_dump(exclude={"algorithm"}) == config.model_dump(exclude={"algorithm"})


def test_every_field_has_a_docstring():
    def missing(model, path: str) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found += missing(field.annotation, f"{path}{name}.")
            elif not field.description:
                found.append(f"{path}{name}")
        return found

    assert missing(Config, "") == []
