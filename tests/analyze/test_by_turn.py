import math
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from agent_sat.analyze import runs, turns
from agent_sat.analyze.measures import MEASURES
from agent_sat.analyze.runs import Window, open_run
from agent_sat.analyze.sums import read_sums
from agent_sat.analyze.tables import print_all, print_by_turn
from agent_sat.errors import ConfigError
from tests.analyze.planted import Token, columns, write_run

A, B = math.log(0.4), math.log(1.5)  # d of the two tokens of turn 0
TOKENS = [
    Token(
        mu=0.5, pi=0.2, offset=0, q=0.1, gate=True, clipped=True, changed=True, contraction=0.5, entropy=0.5
    ),
    Token(mu=0.2, pi=0.3, offset=1, q=0.3, recomputed=0.25, advantage=-2.0, lag=3, step=2),
    Token(mu=0.5, pi=0.5, turn=1, member=1, weight=0.5, step=2),
    Token(mu=0.004, pi=0.0005, turn=1, offset=1, member=1, kept=False, step=2),
    Token(mu=0.05, pi=0.09, turn=1, offset=2, member=1, step=2),
    Token(mu=float("nan"), pi=0.5, turn=1, offset=3, member=1, step=2),
]


def close(value: float):
    return pytest.approx(value, rel=2e-6, abs=1e-7)  # the record is float32


def table(tmp_path, tokens=TOKENS) -> dict[int, dict]:
    frame = turns.by_turn(open_run(write_run(tmp_path / "run", tokens)))
    return {row["turn"]: row for row in frame.iter_rows(named=True)}


def test_turn_zero_has_the_values_worked_out_by_hand(tmp_path):
    row = table(tmp_path)[0]
    mean = (A + B) / 2
    assert (row["tokens"], row["missing"], row["episodes"]) == (2, 0, 2)
    assert row["log_ratio_abs_mean"] == close((-A + B) / 2)
    assert row["log_ratio_mean"] == close(mean) and row["k1"] == close(-mean)
    assert row["log_ratio_abs_max"] == close(-A)
    assert row["log_ratio_variance"] == close(((A - mean) ** 2 + (B - mean) ** 2) / 2)
    assert row["k3"] == close((0.4 - 1 - A + 1.5 - 1 - B) / 2)
    assert row["probability_gap_mean"] == close((0.3 + 0.1) / 2)
    assert row["total_variation"] == close((0.6 + 0.5) / 4)
    assert row["share_outside_0.8_1.2"] == 1 and row["share_outside_0.5_2"] == 0.5
    assert row["effective_share"] == close(1.9**2 / (2 * (0.16 + 2.25)))
    assert row["entropy_mean"] == close(0.75)
    assert row["pearson"] == close(-1) and row["pearson_log"] == close(-1)  # two points on a falling line
    assert (row["clipped_share"], row["gate_rate"], row["changed_share"]) == (0.5, 0.5, 0.5)
    assert row["q_mean"] == close(0.2) and row["contraction_mean"] == close(0.75)
    assert row["contraction_min"] == close(0.5)
    assert row["log_ratio_abs_p50"] == close(B) and row["log_ratio_abs_p99"] == close(-A)


def test_d_is_split_where_the_recomputed_policy_is_known(tmp_path):
    """Only the second token has log mu~: lag part log(0.3/0.25), engine part log(0.25/0.2)."""
    row = table(tmp_path)[0]
    assert row["policy_lag_mean"] == close(math.log(1.2))
    assert row["implementation_abs_mean"] == close(math.log(1.25))
    assert row["policy_lag_variance"] == close(0)
    assert table(tmp_path / "other")[1]["policy_lag_mean"] is None


def test_tails_count_tokens_and_the_gradient_they_carry(tmp_path):
    """Masses of turn 1: 0.5 * 1 * (1 - 0.5) = 0.25; masked 0; 1.8 * (1 - 0.09) = 1.638."""
    row = table(tmp_path)[1]
    assert (row["tokens"], row["missing"]) == (3, 1)
    assert row["share_pi_below_1e-2"] == close(1 / 3) and row["share_pi_below_1e-3"] == close(1 / 3)
    assert row["share_pi_below_1e-4"] == 0
    assert row["share_mu_below_1e-2"] == close(1 / 3) and row["share_mu_below_1e-3"] == 0
    assert row["gradient_pi_below_1e-2"] == 0  # the only such token is masked out
    assert row["kept_share"] == close(2 / 3)
    sums = read_sums(open_run(tmp_path / "run")).cube.filter(turn=1)
    assert sums["mass"].sum() == close(0.25 + 1.638)


def test_gradient_mass_of_a_rare_token_is_its_share(tmp_path):
    """Both active, weights 1: 2 * (1 - 0.008) = 1.984 against 1 * 0.5."""
    rows = table(tmp_path, [Token(mu=0.004, pi=0.008), Token(mu=0.5, pi=0.5)])
    assert rows[0]["gradient_pi_below_1e-2"] == close(1.984 / 2.484)
    assert rows[0]["gradient_mu_below_1e-3"] == 0


def test_a_window_takes_its_steps_only(tmp_path):
    run = open_run(write_run(tmp_path / "run", TOKENS))
    first = turns.by_turn(run, Window.parse("1:2"))
    assert first["turn"].to_list() == [0] and first["tokens"].to_list() == [1]
    assert turns.by_turn(run, Window.parse("2"))["tokens"].to_list() == [1, 3]


def test_windows_are_read_as_slices_and_nonsense_is_refused():
    assert Window.parse("3:5") == Window(3, 5) and Window.parse(":") == Window()
    assert 4 in Window.parse("3:5") and 5 not in Window.parse("3:5") and 9 in Window.parse("3:")
    for text in ("5:3", "3:3", "a:b", "-1:4", ""):
        with pytest.raises(ConfigError, match=r"A:B|A up to B-1"):
            Window.parse(text)


def random_tokens(number: int) -> list[Token]:
    random = np.random.default_rng(0)
    made = []
    for index in range(number):
        mu, pi = random.uniform(0.0001, 1, 2)
        made.append(
            Token(
                mu=mu,
                pi=pi,
                step=1 + index // 48,
                group=index // 24,
                member=index // 12 % 2,
                turn=index // 4 % 3,
                offset=index % 4,
                lag=index % 5,
                recomputed=pi,
            )
        )
    return made


def test_values_do_not_depend_on_how_the_records_were_cut(tmp_path, monkeypatch):
    tokens = random_tokens(240)
    whole = open_run(write_run(tmp_path / "whole", tokens))
    cuts = [tokens[:1], tokens[1:77], [], tokens[77:130], tokens[130:]]
    parts = open_run(write_run(tmp_path / "parts", *cuts))
    mixed = [tokens[i] for i in np.random.default_rng(1).permutation(len(tokens))]
    shuffled = open_run(write_run(tmp_path / "shuffled", mixed[:100], mixed[100:]))
    want, want_sums = turns.by_turn(whole), read_sums(whole)
    monkeypatch.setattr(runs, "CHUNK_ROWS", 13)
    for other in (whole, parts, shuffled):
        got, got_sums = turns.by_turn(other), read_sums(other)
        assert got.equals(want) or _near(got, want)
        for table_of in (turns.by_lag, turns.by_step, turns.first_tokens, turns.by_kl_group, turns.overall):
            assert _near(table_of(got_sums), table_of(want_sums))
        bounds = [turns.intervals(s, ["log_ratio_abs_mean", "k3"]) for s in (got_sums, want_sums)]
        assert _near(*bounds)


def _near(left: pl.DataFrame, right: pl.DataFrame) -> bool:
    assert left.columns == right.columns
    return np.allclose(
        left.cast(pl.Float64).to_numpy(), right.cast(pl.Float64).to_numpy(), 1e-9, 1e-12, equal_nan=True
    )


def test_every_measure_agrees_with_numpy_on_random_tokens(tmp_path):
    tokens = random_tokens(240)
    got = table(tmp_path, tokens)[2]
    rows = {k: v[np.array([t.turn == 2 for t in tokens])] for k, v in columns(tokens).items()}
    pi, mu = (np.float32(rows[k]).astype(float) for k in ("logprob", "behavior_logprob"))
    d = pi - mu
    r = np.exp(d)
    want = {
        "log_ratio_variance": d.var(),
        "pearson_log": np.corrcoef(pi, mu)[0, 1],
        "pearson": np.corrcoef(np.exp(pi), np.exp(mu))[0, 1],
        "effective_share": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "k3": (r - 1 - d).mean(),
        "policy_lag_abs_mean": 0.0,
        "implementation_variance": d.var(),
        "parts_covariance": 0.0,
        "log_ratio_abs_p90": np.sort(abs(d))[int(np.ceil(0.9 * len(d))) - 1],
    }
    assert {name: got[name] for name in want} == {name: close(value) for name, value in want.items()}


def test_kl_groups_put_each_step_where_its_mean_k3_belongs(tmp_path):
    """k3 of ratio 1.02 is 0.0002, of 1.1 is 0.0047, of 1.5 is 0.0945, of 2 is 0.307."""
    ratios = {1: 1.02, 2: 1.1, 3: 1.5, 4: 2.0, 5: 1.02}
    tokens = [Token(mu=0.2, pi=0.2 * r, step=s, turn=t) for s, r in ratios.items() for t in (0, 1, 2)]
    sums = read_sums(open_run(write_run(tmp_path / "run", tokens)))
    assert turns.step_groups(sums)["kl_group"].to_list() == [0, 1, 2, 3, 0]
    grouped = turns.by_kl_group(sums)
    assert grouped["kl_group"].to_list() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert grouped["later"].to_list() == [False, True] * 4
    assert grouped["tokens"].to_list() == [2, 4, 1, 2, 1, 2, 1, 2]
    assert grouped["steps"].to_list() == [2, 2, 1, 1, 1, 1, 1, 1]
    assert grouped["probability_gap_mean"][4] == close(0.1)


def test_lag_and_first_tokens_are_told_apart(tmp_path):
    sums = read_sums(open_run(write_run(tmp_path / "run", TOKENS)))
    lag = {row["lag"]: row for row in turns.by_lag(sums).iter_rows(named=True)}
    assert lag[3]["log_ratio_abs_mean"] == close(B) and lag[1]["tokens"] == 4
    first = {(row["turn"], row["first"]): row for row in turns.first_tokens(sums).iter_rows(named=True)}
    assert first[0, True]["log_ratio_mean"] == close(A) and first[1, True]["log_ratio_abs_mean"] == close(0)
    assert first[1, False]["tokens"] == 2


def test_intervals_cover_the_mean_and_close_with_more_episodes(tmp_path):
    random = np.random.default_rng(0)

    def width(number: int) -> float:
        ratios = np.exp(random.normal(0, 0.1, number))
        tokens = [Token(mu=0.5, pi=0.5 * float(r), group=i) for i, r in enumerate(ratios)]
        sums = read_sums(open_run(write_run(tmp_path / str(number), tokens)))
        (row,) = turns.intervals(sums, ["log_ratio_abs_mean"]).iter_rows(named=True)
        (mean,) = turns.turn_table(sums)["log_ratio_abs_mean"]
        assert row["log_ratio_abs_mean_low"] < mean < row["log_ratio_abs_mean_high"]
        # |N(0, 0.1)| has standard deviation 0.0603: the interval is 2 * 1.96 * 0.0603 / sqrt(n) wide
        return (row["log_ratio_abs_mean_high"] - row["log_ratio_abs_mean_low"]) * math.sqrt(number) / 0.2363

    assert width(100) == pytest.approx(1, rel=0.3) and width(900) == pytest.approx(1, rel=0.2)
    assert width(5000) == pytest.approx(1, rel=0.2)  # drawn in blocks


def test_an_interval_over_one_episode_is_that_episode(tmp_path):
    tokens = [Token(mu=0.5, pi=0.4), Token(mu=0.5, pi=0.1)]
    (row,) = turns.intervals(read_sums(open_run(write_run(tmp_path / "r", tokens))), ["k3"]).iter_rows(
        named=True
    )
    assert row["k3_low"] == row["k3_high"]


def test_a_run_without_rows_gives_empty_tables(tmp_path):
    run = open_run(write_run(tmp_path / "run", []))
    assert turns.by_turn(run).height == 0
    assert turns.by_kl_group(read_sums(run)).height == 0
    console = Console(record=True, width=100)
    print_all(run.directory.path, console=console)
    assert "no token records in all steps" in console.export_text()


def test_a_folder_that_is_no_run_is_refused_with_the_next_step(tmp_path):
    with pytest.raises(ConfigError, match="no run directory"):
        open_run(tmp_path / "absent")


def test_the_terminal_table_says_what_the_numbers_are_and_which_are_few(tmp_path):
    path = write_run(tmp_path / "run", TOKENS)
    console = Console(record=True, width=80)
    print_by_turn(path, "1:3", console)
    text = console.export_text()
    assert "planted (sat-grpo), steps 1 to 2: mismatch by tool turn" in text
    for wanted in ("mean |d|", "0.661 [0.405, 0.916]", "SAT changed", "fewer than 30 episodes", "0*", "all"):
        assert wanted in text
    assert "survived" in text and "nats" in text


def test_every_measure_has_a_title_and_a_meaning():
    assert all(m.title and len(m.meaning) > 8 for m in MEASURES.values())
    assert len({m.title for m in MEASURES.values()}) == len(MEASURES)


def test_the_analysis_never_imports_torch_or_ray(tmp_path):
    path = write_run(tmp_path / "run", TOKENS)
    code = f"""
import sys
from agent_sat.analyze import tables
tables.print_all({str(path)!r})
loaded = [name for name in ("torch", "ray", "transformers", "wandb") if name in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
