from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_sat.data.samples import samples_of
from agent_sat.errors import TrainingDiverged
from agent_sat.log.run import RunDirectory
from agent_sat.train.learner import PolicyLearner
from agent_sat.types import Group, Position, Routes, Trajectory, Turn
from tests.train.fixtures import config, groups


def gradients(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None}


def stepped(micro_batch_tokens: int, **changes) -> tuple[PolicyLearner, dict, dict[str, torch.Tensor]]:
    learner = PolicyLearner(config(train={"micro_batch_tokens": micro_batch_tokens}, **changes))
    found: dict[str, torch.Tensor] = {}
    learner.optimizer.step = lambda: found.update(gradients(learner))  # type: ignore[method-assign]
    report = learner.step(1, groups(3))
    return learner, report.metrics, found


@pytest.mark.parametrize("method", ["grpo", "gspo", "sat-grpo", "sat-grpo-turn", "sat-gspo", "dapo"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 90])
def test_loss_and_gradient_do_not_depend_on_the_cut(method: str, micro_batch_tokens: int):
    _, whole, whole_gradient = stepped(100_000, method=method)
    _, cut, cut_gradient = stepped(micro_batch_tokens, method=method)
    assert whole["train/micro_batches"] == 1 < cut["train/micro_batches"]
    assert cut["loss/policy"] == pytest.approx(whole["loss/policy"], abs=1e-6)
    for name, gradient in whole_gradient.items():
        torch.testing.assert_close(cut_gradient[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def routed(group: Group, *, missing: bool) -> Group:
    """The group with random routes of two layers and two of four experts, or with none recorded."""
    random = np.random.default_rng(group.number)

    def turns(member: Trajectory) -> Iterator[Turn]:
        held = 0
        for turn in member.turns:
            length = len(turn.prompt_ids) + len(turn.completion.token_ids)
            every = np.tile(np.arange(4), (length - 1 - held, 2, 1))
            rows = random.permuted(every, axis=-1)[..., :2]
            rows = np.full_like(rows, 255) if missing else rows
            routes = Routes(start=held, experts=rows.astype(np.uint8))
            held = length - 1
            yield replace(turn, completion=replace(turn.completion, routes=routes))

    members = tuple(replace(member, turns=tuple(turns(member))) for member in group.members)
    return replace(group, members=members)


def test_coverage_and_difference_of_replayed_routes_are_logged():
    recorded = [routed(group, missing=False) for group in groups()]
    samples = [sample for group in recorded for sample in samples_of(group)]
    num_tokens = sum(len(sample) for sample in samples)
    rows = {}
    for tokens in (100_000, 1):  # whole, and a sample at a time
        learner = PolicyLearner(config(method="sat-grpo+r3", train={"micro_batch_tokens": tokens}))
        rows[tokens] = learner.step(1, recorded).metrics
    # the pass over the last token of each sample never happened
    expected = (num_tokens - len(samples)) / num_tokens
    for metrics in rows.values():
        assert metrics["replay/route_coverage"] == pytest.approx(expected)
        # four experts, two of them at random: five of six sets are another one
        assert metrics["replay/routes_differing"] == pytest.approx(5 / 6, abs=0.1)
    live = PolicyLearner(config(method="sat-grpo"))
    assert "replay/route_coverage" not in live.step(1, recorded).metrics
    nothing = PolicyLearner(config(method="sat-grpo+r3")).step(1, [routed(g, missing=True) for g in groups()])
    assert nothing.metrics["replay/route_coverage"] == 0


def test_published_form_of_sat_depends_on_the_cut():
    # a level of 0.5 over few tokens: q of a part is not q of the whole
    algorithm = {"scope": "microbatch", "level": 0.5, "min_tokens": 1}
    _, whole, _ = stepped(100_000, method="sat-grpo", algorithm=algorithm)
    _, cut, _ = stepped(1, method="sat-grpo", algorithm=algorithm)
    assert cut["loss/policy"] != pytest.approx(whole["loss/policy"], abs=1e-6)


def test_step_moves_the_weights_and_the_version():
    learner = PolicyLearner(config())
    _, before = learner.publish()
    report = learner.step(1, groups())
    version, after = learner.publish()
    assert (report.version, version, report.skipped) == (1, 1, "")
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_published_weights_are_safe_from_the_next_step():
    learner = PolicyLearner(config())
    _, published = learner.publish()
    kept = {name: weight.clone() for name, weight in published.items()}
    learner.step(1, groups())
    assert all(torch.equal(published[name], kept[name]) for name in kept)


def test_non_finite_gradient_skips_the_step_and_names_the_tensor():
    learner = PolicyLearner(config(train={"max_skipped_steps": 2}))
    embedding = learner.model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        embedding[20] = torch.inf
    before = {name: weight.clone() for name, weight in learner.model.state_dict().items()}
    report = learner.step(1, groups())
    assert "non-finite" in report.skipped and report.version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in learner.model.state_dict().items())
    with pytest.raises(TrainingDiverged, match=r"2 steps in a row .*gradients of model\."):
        learner.step(2, groups())


def test_update_between_skips_starts_the_count_again():
    learner = PolicyLearner(config(train={"max_skipped_steps": 2}))
    learner.guard.skipped("a test")
    learner.step(1, groups())
    learner.guard.skipped("a test")


def test_step_without_a_trained_token_is_skipped_and_says_so():
    learner = PolicyLearner(config())
    report = learner.step(1, groups(1, turns=0))
    assert report.skipped == "no token to train on"
    assert report.version == 0


def test_warm_up_raises_the_learning_rate_linearly():
    learner = PolicyLearner(config(train={"warmup_steps": 4, "learning_rate": 1.0}))
    rates = [learner.step(step, groups()).metrics["train/learning_rate"] for step in range(1, 6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_checkpoint_brings_back_weights_optimizer_and_position(tmp_path: Path):
    learner = PolicyLearner(config())
    learner.step(1, groups())
    position = Position(step=1, version=1, next_group=2)
    learner.save(str(tmp_path / "step_000001"), position)
    expected = learner.step(2, groups(seed=1))
    fresh = PolicyLearner(config(seed=9))
    assert fresh.load(str(tmp_path / "step_000001")) == position
    again = fresh.step(2, groups(seed=1))
    assert again.version == expected.version == 2
    assert again.metrics["loss/policy"] == expected.metrics["loss/policy"]
    weights, others = learner.model.state_dict(), fresh.model.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_averaged_reference_of_sat_survives_a_resume(tmp_path: Path):
    averaged = {"method": "sat-grpo", "algorithm": {"anchor": "ema"}}
    learner = PolicyLearner(config(**averaged))
    learner.step(1, groups())
    learner.save(str(tmp_path / "step_000001"), Position(step=1, version=1, next_group=2))
    fresh = PolicyLearner(config(**averaged))
    fresh.load(str(tmp_path / "step_000001"))
    one, other = learner.sat_reference, fresh.sat_reference
    assert one is not None and other is not None
    assert one.q.tolist() == other.q.tolist()
    expected = learner.step(2, groups(seed=1)).metrics
    assert fresh.step(2, groups(seed=1)).metrics["sat/q"] == expected["sat/q"]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    learner = PolicyLearner(config(train={"keep_checkpoints": 2}))
    for step in (1, 2, 3):
        learner.save(str(tmp_path / f"step_{step:06d}"), Position(step=step, version=step, next_group=step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_lag_one_tokens_are_recomputed_by_the_weights_that_sampled_them():
    learner = PolicyLearner(config(log={"mismatch_causes": True}))
    learner.publish()
    learner.step(1, groups())
    learner.publish()
    batch = learner.make_batch([sample for group in groups(seed=1) for sample in samples_of(group)])
    assert batch is not None and learner.past is not None
    recomputed = learner.past.recompute(batch, live_version=learner.version)
    learner.model.load_state_dict(learner.past.kept[0])
    expected = learner._logprobs(batch).logprobs
    torch.testing.assert_close(recomputed, expected.detach(), equal_nan=True)


def test_kept_versions_are_bounded_by_the_staleness_bound():
    learner = PolicyLearner(config(log={"mismatch_causes": True}, staleness={"bound": 2}))
    for step in range(1, 7):
        learner.publish()
        learner.step(step, groups(version=step - 1))
    assert learner.past is not None
    assert sorted(learner.past.kept) == [3, 4, 5]


def test_reference_model_stays_what_training_found(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    learner = PolicyLearner(config(method="grpo", algorithm={"kl_coefficient": 0.1}), run)
    learner.step(1, groups())
    assert learner.frozen is not None
    first = {name: weight.clone() for name, weight in learner.frozen.model.state_dict().items()}
    learner.step(2, groups(seed=1))
    resumed = PolicyLearner(config(method="grpo", algorithm={"kl_coefficient": 0.1}, seed=5), run)
    resumed.step(1, groups())
    assert resumed.frozen is not None
    found = resumed.frozen.model.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in first.items())


def test_records_hold_a_row_for_each_sampled_token(tmp_path: Path):
    import polars as pl

    run = RunDirectory.create(tmp_path / "run")
    learner = PolicyLearner(config(train={"micro_batch_tokens": 40}), run)
    made = groups(2)
    learner.step(1, made)
    table = pl.read_parquet(run.tokens_of(1))
    assert table.height == sum(member.num_sampled for group in made for member in group.members)
    assert set(table["turn"].unique()) == {0, 1}
    first = made[0].members[0].turns[0].completion
    mine = table.filter((pl.col("group") == 0) & (pl.col("member") == 0) & (pl.col("turn") == 0))
    assert mine["token_id"].to_list() == first.token_ids.tolist()
    assert mine["behavior_logprob"].to_list() == first.behavior_logprobs.tolist()
    assert mine["position"].to_list() == list(range(4, 4 + len(first.token_ids)))
    assert table["logprob"].is_finite().all()
    assert run.episodes_of(1).read_text().count("\n") == 6
