import json
import re

import pytest

from agent_sat.analyze.page import inert, page
from agent_sat.analyze.report import report_data, step_bins, write_report
from agent_sat.analyze.runs import Window, open_run
from tests.analyze.planted import Token, write_run
from tests.analyze.planted_runs import HOSTILE, Plan, write


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    plan = Plan(steps=12, groups=4, members=8, factor=2.0, base=0.02)
    return open_run(write(tmp_path_factory.mktemp("runs") / "run", plan))


def test_the_report_of_a_planted_run_says_what_was_planted(planted):
    """Mismatch doubles from turn to turn; mean |N(0, s)| is 0.798 s; three quarters of d are policy lag."""
    table = report_data(planted, Window())["table"]
    mean = dict(zip(table["turn"], table["log_ratio_abs_mean"], strict=True))
    assert mean[0] == pytest.approx(0.02 * 0.798, rel=0.05)
    assert [mean[k + 1] / mean[k] for k in (0, 1, 2)] == pytest.approx([2, 2, 2], rel=0.08)
    row = table["turn"].index(1)
    assert table["policy_lag_abs_mean"][row] == pytest.approx(0.75 * mean[1], rel=1e-3)
    assert table["gate_rate"][row] == pytest.approx(0.1336, abs=0.02)  # P(|N| > 1.5)
    low, high = table["log_ratio_abs_mean_low"][row], table["log_ratio_abs_mean_high"][row]
    assert low < mean[1] < high < 1.1 * low


def test_stability_and_rewards_of_the_planted_run(planted):
    data = report_data(planted, Window())
    assert data["stability"]["spikes"] == (9,) and not data["stability"]["collapsed"]
    assert data["reward_by_turns"]["num_turns"] == [1, 2, 3, 4]
    assert data["reward_by_turns"]["reward"] == [1.0, 0.0, 1.0, 0.0]
    assert data["metrics"]["step"] == list(range(1, 13)) and "reward/level=2" in data["metrics"]


def test_the_sums_of_the_page_add_up_to_the_tokens_of_the_window(planted):
    data = report_data(planted, Window(3, 6))
    rows = 3 * 4 * 8 * 2.5 * 10  # steps, groups, members, turns on average, tokens
    assert (
        sum(data["sums"]["tokens"]) == sum(data["lag_sums"]["tokens"]) == sum(data["tail"]["count"]) == rows
    )
    assert data["bins"] == [3, 4, 5] and set(data["scatter"]["bin"]) == {3, 4, 5}


def test_long_runs_are_binned_and_late_turns_joined(tmp_path):
    assert step_bins([7, 8, 246]) == {7: 7, 8: 7, 246: 245}
    assert len(set(step_bins(list(range(1000))).values())) <= 120
    tokens = [Token(mu=0.5, pi=0.4, turn=turn) for turn in (0, 14, 15, 40)]
    data = report_data(open_run(write_run(tmp_path / "run", tokens)), Window())
    assert data["sums"]["turn"] == [0, 14, 15] and data["sums"]["tokens"] == [1, 1, 2]


def test_episodes_of_a_report_hold_the_extremes_and_each_ending(planted):
    shown = report_data(planted, Window())["episodes"]
    assert len({(e["step"], e["group"], e["member"]) for e in shown}) == len(shown) <= 48
    assert {e["ending"] for e in shown} == {"answered", "turn_limit"}
    assert max(e["max_abs"] for e in shown) == pytest.approx(
        max(report_data(planted, Window())["table"]["log_ratio_abs_max"]), rel=1e-5
    )


def test_an_empty_run_still_has_a_report(tmp_path):
    path = write_run(tmp_path / "run", [])
    target = write_report(path, tmp_path / "out" / "report.html")
    assert "<!doctype html>" in target.read_text()


def test_no_text_can_leave_the_data_of_a_page():
    text = inert({"text": HOSTILE, "nan": float("nan"), "list": (1, 0.1 + 0.2)})
    assert "<" not in text and ">" not in text and "&" not in text
    assert json.loads(text) == {"text": HOSTILE, "nan": None, "list": [1, 0.3]}


def test_a_page_names_no_other_place_and_runs_only_its_own_script():
    text = page('<img src=x> "quoted"', "report.js", {"x": "</script><script>1</script>"})
    assert text.count("<script") == 2 and "<img" not in text
    assert set(re.findall(r"https?://[\w./-]+", text)) == {"http://www.w3.org/2000/svg"}
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert (
        policy
        and "default-src 'none'; script-src 'sha256-" in policy[1]
        and "connect-src 'none'" in policy[1]
    )
