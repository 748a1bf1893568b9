import json
import math
from dataclasses import replace

import pytest

from agent_sat.analyze.compare import compare_runs
from agent_sat.analyze.compare_report import compare
from agent_sat.analyze.statistics import estimate, paired, student_quantile
from agent_sat.errors import ConfigError
from tests.analyze.planted_runs import Plan, write


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [(0.975, 1, 12.7062047), (0.975, 2, 4.30265273), (0.975, 4, 2.77644511), (0.9995, 9, 4.78091259)],
)
def test_student_quantiles_are_those_of_the_tables(probability, degrees, value):
    assert student_quantile(probability, degrees) == pytest.approx(value, rel=1e-6)


def test_an_interval_over_three_values_is_the_students():
    """1, 2, 3: mean 2, standard error 1 / sqrt(3), t(2) = 4.3027."""
    found = estimate([1.0, 3.0, math.nan, 2.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.high - 2.0 == pytest.approx(4.30265273 / math.sqrt(3)) and found.low == pytest.approx(
        4 - found.high
    )


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert math.isnan(estimate([5.0]).low) and estimate([5.0]).mean == 5.0
    assert math.isnan(estimate([]).mean) and estimate([]).count == 0


def test_pairing_takes_away_what_seeds_share():
    """Differences 0.1, 0.1, 0.13 of values that spread over 1: separable only in pairs."""
    candidate, baseline = {0: 0.1, 1: 0.6, 2: 1.13, 9: 5.0}, {0: 0.0, 1: 0.5, 2: 1.0, 7: -5.0}
    found = paired(candidate, baseline)
    assert found.pairs == 3 and found.separable
    assert found.estimate.mean == pytest.approx(0.11)
    assert found.estimate.high - 0.11 == pytest.approx(4.30265273 * math.sqrt(0.0003) / math.sqrt(3))
    assert not paired(candidate, baseline, comparisons=40).separable  # jointly for 40 it is no longer


def test_two_pairs_are_never_separable():
    assert not paired({0: 1.0, 1: 1.001}, {0: 0.0, 1: 0.0}).separable


METHODS = {
    "grpo": {"reward_end": 0.6},
    "sat-grpo": {"reward_end": 0.6},
    "sat-grpo-turn": {"reward_end": 0.75, "factor": 1.5},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Planted at lag 8: the second method equals the first, the third is 0.15 better; at lag 1 all equal."""
    folder = tmp_path_factory.mktemp("grid")
    paths = []
    for method, planted in METHODS.items():
        for seed in range(4):
            name = f"{method}-{seed}"
            at_one = Plan(name=name, method=method, seed=seed, lag=1, steps=10, groups=2, reward_end=0.6)
            paths.append(write(folder / f"8-{name}", replace(at_one, lag=8, **planted)))
            paths.append(write(folder / f"1-{name}", at_one))
    return paths


@pytest.fixture(scope="module")
def found(runs):
    return compare_runs(runs)


def test_the_verdicts_say_what_was_planted_and_no_more(found):
    separable = {(c.method, c.setting, c.outcome) for c in found.contrasts if c.difference.separable}
    better = [
        ("sat-grpo-turn", "staleness.bound=8", o)
        for o in ("last", "best", "success", "log_ratio_abs_mean", "k3")
    ]
    assert separable == set(better)
    verdicts = {(c.method, c.setting, c.outcome): c.verdict for c in found.contrasts}
    told = verdicts["sat-grpo-turn", "staleness.bound=8", "last"]
    assert told.startswith("sat-grpo-turn against grpo (staleness.bound=8): last reward higher: +0.1")
    assert "over 4 paired seeds" in told
    assert " lower: -" in verdicts["sat-grpo-turn", "staleness.bound=8", "k3"]
    assert "last reward not separable: " in verdicts["sat-grpo", "staleness.bound=8", "last"]
    assert found.warnings == ()


def test_cells_hold_their_seeds_in_the_order_given(found):
    cells = found.cells
    assert [(c.method, c.setting) for c in cells[:2]] == [
        ("grpo", "staleness.bound=8"),
        ("grpo", "staleness.bound=1"),
    ]
    assert len(cells) == 6 and all([r.seed for r in c.runs] == [0, 1, 2, 3] for c in cells)
    assert sum(c.collapses for c in cells) == 0


def test_collapses_are_counted_and_too_few_seeds_are_said(tmp_path):
    paths = [
        write(
            tmp_path / f"{method}{seed}", Plan(method=method, seed=seed, steps=30, groups=1, collapse_at=at)
        )
        for method, at in (("grpo", 20), ("gspo", None))
        for seed in ((0, 1) if method == "grpo" else (1, 2))
    ]
    found = compare_runs(paths)
    assert [cell.collapses for cell in found.cells] == [2, 0]
    assert found.contrasts[0].verdict.endswith("not separable: 1 paired seeds are too few, 3 are needed")
    assert len(found.warnings) == 2 and "lacks seeds [2]" in found.warnings[0]


def test_an_override_of_a_method_is_a_method_of_its_own(tmp_path):
    paths = []
    for name, text in (("a", ""), ("b", "eps_low = 0.05\n")):
        path = write(tmp_path / name, Plan(steps=6, groups=1))
        config = path / "config.toml"
        config.write_text(config.read_text().replace("eps_low = 0.2\n", text or "eps_low = 0.2\n"))
        paths.append(path)
    assert [c.method for c in compare_runs(paths).cells] == [
        "sat-grpo-turn eps_low=0.2",
        "sat-grpo-turn eps_low=0.05",
    ]


def test_the_same_seed_twice_and_a_single_run_are_refused(runs):
    with pytest.raises(ConfigError, match=r"seed 0 is there twice"):
        compare_runs([runs[0], runs[0]])
    with pytest.raises(ConfigError, match="two or more"):
        compare_runs(runs[:1])


def test_three_files_say_the_same(runs, tmp_path):
    compare([path for path in runs if path.name.startswith("8-")], tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        f"comparison.{x}" for x in ("html", "json", "md")
    ]
    data = json.loads((tmp_path / "out/comparison.json").read_text())
    markdown = (tmp_path / "out/comparison.md").read_text()
    assert all(contrast["verdict"] in markdown for contrast in data["contrasts"])
    assert "| grpo |  | 4 |" in markdown and "0 of 4" in markdown
    assert data["cells"][0]["curve"][0][0] == 1 and data["cells"][0]["curve"][0][4] == 4
