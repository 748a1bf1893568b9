"""Methods as data: names, overrides, what is refused, and that every field does something."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from agent_sat.algo.advantage import ADVANTAGES
from agent_sat.algo.aggregate import Aggregation
from agent_sat.algo.correct import CORRECTIONS
from agent_sat.algo.diagnose import MEASURES
from agent_sat.algo.loss import policy_loss
from agent_sat.algo.mask import MASKS
from agent_sat.algo.methods import METHODS, check, resolve
from agent_sat.algo.penalty import KL_ESTIMATORS
from agent_sat.algo.ratio import Terms
from agent_sat.algo.settings import AlgorithmConfig
from agent_sat.algo.trust import TRUST_REGIONS, Surrogate
from agent_sat.errors import ConfigError
from tests.algo.test_loss_invariance import VERSION, example

DOCS = Path(__file__).parents[2] / "docs"


def half(terms: Terms, *, share: float) -> Surrogate:
    """A user's trust region."""
    return Surrogate(values=share * terms.ratio * terms.advantages)


def recent(terms: Terms, *, max_lag: int) -> Tensor:
    """A user's mask, with a parameter of ours."""
    return terms.lag <= max_lag


@pytest.mark.parametrize("name", list(METHODS))
def test_every_preset_resolves_with_and_without_routing_replay(name: str):
    assert not resolve(name).settings.replay_routes
    replayed = resolve(f"{name}+r3")
    assert replayed.settings.replay_routes and replayed.settings.denominator is not None
    assert pickle.loads(pickle.dumps(replayed)) is not None  # it travels to Ray actors


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("sat-grop", {}, r"'sat-grop' is none of .*nearest: 'sat-grpo'"),
        ("grpo", {"eps_hihg": 0.3}, r"algorithm\.eps_hihg is no field.*nearest: 'eps_high'"),
        ("grpo", {"eps_high": -1}, r"algorithm\.eps_high = -1"),
        ("grpo", {"granularity": "word"}, r"algorithm\.granularity = 'word'.*'token', 'turn' or 'sequence'"),
        ("grpo", {"trust_region": "clop"}, r"trust_region 'clop' is none of .*nearest: 'clip'"),
        ("grpo", {"masks": ("kpopp",)}, r"masks 'kpopp' is none of .*nearest: 'kpop'"),
        ("grpo", {"trust_region": "no_such_module:f"}, r"cannot be imported"),
        ("grpo", {"trust_region": "tests.algo.test_methods:half"}, r"needs share: set algorithm\.parameters"),
        ("grpo", {"correction": "tis"}, r"counts the same ratio twice"),
        ("grpo+tis", {"correction_ratio": "policy"}, r"counts the same ratio twice"),
        ("spo", {"reference": "turn"}, r"SAT contracts a clip radius"),
        ("gspo", {"advantage": "turn_return"}, r"averages per-turn advantages away"),
        ("grpo", {"aggregation": "constant"}, r"needs algorithm\.constant"),
        ("sat-grpo", {"anchor": "ema", "scope": "microbatch"}, r"needs scope = step"),
        ("icepop", {"icepop_low": 6.0}, r"icepop_low 6\.0 is not below"),
        ("seqclip", {"seqclip_low": 1.1}, r"seqclip_low 1\.1 is not below"),
        ("dual_clip", {"dual_clip": 1.0}, r"algorithm\.dual_clip = 1\.0"),
    ],
)
def test_wrong_input_is_refused_with_the_reason(name: str, overrides: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(name, overrides)


def fits(**wrong: Any) -> dict[str, Any]:
    run = {
        "top_p": 1.0,
        "num_experts": 8,
        "replay_nucleus": False,
        "keeps_weights": True,
        "asynchronous": True,
    }
    return run | wrong


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("grpo", {"top_p": 0.9}, "nucleus replay"),
        ("sat-grpo+r3", {"num_experts": 0}, "dense"),
        ("grpo+tis", {"keeps_weights": False}, "keeps no published weights"),
    ],
)
def test_method_that_does_not_fit_the_run_is_refused(name: str, wrong: dict[str, Any], message: str):
    check(resolve(name), **fits())
    with pytest.raises(ConfigError, match=message):
        check(resolve(name), **fits(**wrong))


def test_asynchronous_runs_must_name_the_denominator():
    unnamed = resolve("grpo", {"denominator": None})
    check(unnamed, **fits(asynchronous=False))
    with pytest.raises(ConfigError, match=r"set algorithm\.denominator"):
        check(unnamed, **fits())


def test_nucleus_replay_makes_top_p_fit():
    check(resolve("grpo"), **fits(top_p=0.9, replay_nucleus=True))


def test_your_own_functions_need_no_registration():
    overrides = {
        "parameters": {"share": 0.5},
        "masks": ("tests.algo.test_methods:recent",),
        "max_lag": 2,
    }
    method = resolve("tests.algo.test_methods:half", overrides)
    batch, logprobs = example()
    found = policy_loss(method, batch, logprobs=logprobs, entropy=logprobs, version=VERSION)
    known = resolve("grpo", {"trust_region": "none", "masks": ("max_lag",), "max_lag": 2})
    expected = policy_loss(known, batch, logprobs=logprobs, entropy=logprobs, version=VERSION)
    torch.testing.assert_close(found.loss, 0.5 * expected.loss)


# field -> (method, other settings, a value that must change the loss of the example)
EFFECTS: dict[str, tuple[str, dict[str, object], object]] = {
    "granularity": ("grpo", {}, "sequence"),
    "denominator": ("grpo", {}, "recomputed"),
    "trust_region": ("grpo", {}, "spo"),
    "eps_low": ("grpo", {}, 0.1),
    "eps_high": ("grpo", {}, 0.1),
    "dual_clip": ("dual_clip", {}, 1.1),
    "spo_epsilon": ("spo", {}, 0.1),
    "drpo_delta": ("drpo", {}, 0.1),
    "reference": ("grpo", {}, "global"),
    "level": ("sat-grpo", {}, 0.5),
    "exponent": ("sat-grpo", {}, 4.0),
    "min_tokens": ("sat-grpo-turn", {}, 5),
    "max_turn": ("sat-grpo-turn", {"min_tokens": 5}, 1),
    "anchor": ("sat-grpo", {}, "ceiling"),
    "ceiling": ("sat-grpo", {"anchor": "ceiling"}, 0.01),
    "correction": ("grpo+tis", {"tis_cap": 1.01}, "icepop"),
    "correction_ratio": ("tis", {"denominator": "recomputed"}, "implementation"),
    "correction_granularity": ("grpo+tis", {"tis_cap": 1.01}, "sequence"),
    "tis_cap": ("grpo+tis", {}, 1.01),
    "icepop_low": ("icepop", {}, 0.99),
    "icepop_high": ("icepop", {}, 1.05),
    "masks": ("grpo", {"max_lag": 2}, ("max_lag",)),
    "dppo_delta": ("dppo", {}, 0.2),
    "kpop_phi": ("kpop", {}, 0.001),
    "kpop_side": ("kpop", {}, "live"),
    "seqclip_low": ("seqclip", {"seqclip_high": 2.0}, 0.5),
    "seqclip_high": ("seqclip", {"seqclip_low": 0.1}, 2.0),
    "max_lag": ("grpo", {"masks": ("max_lag",)}, 2),
    "kl_estimator": ("grpo", {"kl_coefficient": 1.0}, "k1"),
    "kl_coefficient": ("grpo", {}, 0.1),
    "entropy_coefficient": ("grpo", {}, 0.1),
    "parameters": (
        "grpo",
        {"trust_region": "tests.algo.test_methods:half", "parameters": {"share": 1.0}},
        {"share": 0.5},
    ),
}
ELSEWHERE = {
    "scope": "test_loss_invariance.py: test_published_scope_depends_on_the_cut",
    "ema_decay": "test_reference.py: test_ema_averages_over_steps_and_keeps_what_it_has_not_seen",
    "aggregation": "read where a batch is made",
    "constant": "read where a batch is made",
    "advantage": "read where a group is made",
    "replay_routes": "read by the trainer's forward pass",
}


@pytest.mark.parametrize("field", list(EFFECTS))
def test_field_changes_the_loss(field: str):
    name, others, value = EFFECTS[field]
    batch, logprobs = example()
    entropy = torch.ones_like(logprobs)
    base, changed = (
        policy_loss(resolve(name, o), batch, logprobs=logprobs, entropy=entropy, version=VERSION).loss.item()
        for o in (others, others | {field: value})
    )
    assert base != changed


def test_every_field_has_an_effect_on_record():
    assert set(EFFECTS) | set(ELSEWHERE) == set(AlgorithmConfig.model_fields)


def test_every_field_is_described():
    undescribed = [name for name, field in AlgorithmConfig.model_fields.items() if not field.description]
    assert undescribed == []


def test_what_a_method_needs_is_told():
    needs = {name for name in METHODS if resolve(name).needs_recomputed}
    assert needs == {"grpo+tis", "gspo+tis", "decoupled", "icepop", "kpop", "sat-grpo-implementation"}
    assert resolve("sat-grpo").needs_step_reference
    assert not resolve("sat-grpo", {"scope": "microbatch"}).needs_step_reference
    assert resolve("grpo", {"kl_coefficient": 1e-3}).needs_reference


def test_every_part_of_a_method_has_its_page():
    pages = {path.stem: path.read_text() for path in (DOCS / "methods").glob("*.md")}
    parts = [*TRUST_REGIONS, *MASKS, *CORRECTIONS, *ADVANTAGES, *KL_ESTIMATORS, *get_args(Aggregation)]
    everything = "\n".join(pages.values())
    assert [name for name in parts if f"`{name}`" not in everything and f'"{name}"' not in everything] == []
    told = ("**Formula", "**Gradient", "**When it acts", "**Differences")
    silent = {
        name: missing
        for name, page in pages.items()
        if name not in {"advantages", "penalties"} and (missing := [t for t in told if t not in page])
    }
    assert silent == {}


def test_docs_name_every_preset_and_every_metric():
    pages = (DOCS / "methods.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in pages] == []
    table = (DOCS / "metrics.md").read_text()
    derived = ["window_high", "window_low", "radius_high_mean", "radius_low_mean"]
    assert [name for name in [*MEASURES, *derived] if f"`{name}`" not in table] == []
