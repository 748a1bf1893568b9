"""Every preset against a reference written apart, and what must not change its loss or gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from agent_sat.algo.loss import LossOutput, policy_loss
from agent_sat.algo.methods import METHODS, Method, resolve
from agent_sat.algo.reference import fit, observe
from agent_sat.types import Batch
from tests.algo.batches import make_batch
from tests.algo.slow_loss import slow_loss

VERSION = 9
LENGTHS = (7, 12, 5, 16, 9, 11)  # tokens of each sample
PRESETS = list(METHODS)


def example(spread: float = 0.3, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """Six samples of three turns with some context between them, and the trainer's log-probabilities."""
    generator = torch.Generator().manual_seed(7)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

    n = sum(LENGTHS)
    seq = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    mask = torch.rand(n, generator=generator) > 0.25
    # log-probabilities stay below -0.1, so that pi, mu and mu~ are probabilities
    behavior = -0.1 - 2 * torch.rand(n, generator=generator, dtype=torch.float64)
    recomputed = (behavior + noise(0.1)).clamp_max(-0.05)
    logprobs = (behavior + noise(spread)).clamp_max(-0.02)
    batch = make_batch(
        behavior,
        advantages=torch.tensor([1.0, -0.7, 0.4, -1.3, 0.9, -0.2])[seq],
        mask=mask,
        seq=seq,
        turn=position // 5,
        recomputed=recomputed,
        reference=(behavior + noise(0.2)).clamp_max(-0.02),
        versions=(VERSION - position // 3).tolist(),
        dtype=dtype,
    )
    return batch, logprobs.to(dtype)


def small(name: str, **overrides: object) -> Method:
    """The preset with thresholds that bind on a batch of 60 tokens."""
    binding: dict[str, object] = {"min_tokens": 4, "kl_coefficient": 0.1, "level": 0.8}
    if name == "seqclip":
        binding |= {"seqclip_low": 0.95, "seqclip_high": 1.2}
    return resolve(name, binding | overrides)


def evaluate(method: Method, batch: Batch, logprobs: Tensor) -> tuple[LossOutput, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    output = policy_loss(
        method, batch, logprobs=leaf, entropy=torch.full_like(leaf, torch.nan), version=VERSION
    )
    output.loss.backward()
    assert leaf.grad is not None
    return output, leaf.grad


@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_the_reference_written_apart(name: str):
    batch, logprobs = example()
    method = small(name)
    output, gradient = evaluate(method, batch, logprobs)
    leaf = logprobs.clone().requires_grad_()
    expected = slow_loss(method.settings, batch, leaf, version=VERSION)
    expected.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "overrides",
    [
        {"masks": ("max_lag",), "max_lag": 2},
        {"correction": "tis", "correction_granularity": "sequence", "denominator": "recomputed"},
        {"correction": "icepop", "correction_granularity": "turn", "denominator": "recomputed"},
        {"masks": ("kpop", "dppo_kl"), "kpop_side": "live", "kpop_phi": 0.02, "dppo_delta": 0.01},
        {"reference": "turn", "trust_region": "cispo", "max_turn": 1, "exponent": 3.0},
        {"reference": "global", "trust_region": "dual_clip", "dual_clip": 1.2},
        {"reference": "global", "trust_region": "up", "granularity": "turn"},
        {"kl_estimator": "k1"},
        {"kl_estimator": "k2"},
    ],
    ids=str,
)
def test_combination_equals_the_reference_written_apart(overrides: dict[str, object]):
    batch, logprobs = example()
    method = small("grpo", **overrides)
    output, gradient = evaluate(method, batch, logprobs)
    leaf = logprobs.clone().requires_grad_()
    expected = slow_loss(method.settings, batch, leaf, version=VERSION)
    expected.backward()
    torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_cut_into_micro_batches_changes_nothing(name: str):
    batch, logprobs = example()
    method = small(name)
    whole, gradient = evaluate(method, batch, logprobs)
    bounds = [0, 7, 24, 40, 60]
    parts = [(slice(a, b), batch.cut(a, b)) for a, b in pairwise(bounds)]
    reference = None
    if method.needs_step_reference:
        reference = fit(method.settings, [observe(method, part, logprobs[at]) for at, part in parts])
    leaf = logprobs.clone().requires_grad_()
    losses = [
        policy_loss(
            method,
            part,
            logprobs=leaf[at],
            entropy=torch.zeros(len(part)),
            version=VERSION,
            reference=reference,
        ).loss
        for at, part in parts
    ]
    total = torch.stack(losses).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), whole.loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)


def test_published_scope_depends_on_the_cut():
    # so the test above can fail: with one q per micro-batch the sum is another
    batch, logprobs = example()
    method = small("sat-grpo", scope="microbatch")
    whole, _ = evaluate(method, batch, logprobs)
    parts = [(slice(0, 24), batch.cut(0, 24)), (slice(24, 60), batch.cut(24, 60))]
    total = sum(evaluate(method, part, logprobs[at])[0].loss.item() for at, part in parts)
    assert abs(total - whole.loss.item()) > 1e-4


@pytest.mark.parametrize("name", PRESETS)
def test_order_of_samples_changes_nothing(name: str):
    batch, logprobs = example()
    method = small(name)
    whole, gradient = evaluate(method, batch, logprobs)
    order = torch.cat([(batch.seq == k).nonzero()[:, 0] for k in (3, 0, 5, 2, 4, 1)])
    moved = {
        field: value[order]
        for field in Batch.__dataclass_fields__
        if isinstance(value := getattr(batch, field), Tensor)
    }
    ids = torch.unique_consecutive(moved["seq"], return_inverse=True)[1]
    output, permuted = evaluate(method, replace(batch, **moved | {"seq": ids}), logprobs[order])
    torch.testing.assert_close(output.loss, whole.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(permuted, gradient[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_not_trained_may_hold_anything(name: str, garbage: float):
    batch, logprobs = example()
    method = small(name, entropy_coefficient=0.01)
    hidden = ~batch.mask

    def spoil(values: Tensor | None) -> Tensor:
        assert values is not None
        return values.masked_fill(hidden, garbage)

    entropy = torch.linspace(0, 1, len(batch), dtype=torch.float64)
    leaf, spoiled_leaf = (x.clone().requires_grad_() for x in (logprobs, spoil(logprobs)))
    policy_loss(method, batch, logprobs=leaf, entropy=entropy, version=VERSION).loss.backward()
    spoiled = replace(
        batch,
        advantages=spoil(batch.advantages),
        behavior_logprobs=spoil(batch.behavior_logprobs),
        recomputed_logprobs=spoil(batch.recomputed_logprobs),
        reference_logprobs=spoil(batch.reference_logprobs),
        turn=batch.turn.masked_fill(hidden, -1),
    )
    output = policy_loss(method, spoiled, logprobs=spoiled_leaf, entropy=spoil(entropy), version=VERSION)
    output.loss.backward()
    assert leaf.grad is not None and spoiled_leaf.grad is not None
    assert torch.equal(spoiled_leaf.grad, leaf.grad)
    assert torch.equal(spoiled_leaf.grad[hidden], torch.zeros(int(hidden.sum()), dtype=torch.float64))


@pytest.mark.parametrize("name", PRESETS)
def test_padding_changes_nothing(name: str):
    batch, logprobs = example()
    method = small(name)
    whole, gradient = evaluate(method, batch, logprobs)
    rows = torch.cat([torch.cat([(batch.seq == k).nonzero()[:, 0], torch.tensor([0, 0])]) for k in range(6)])
    is_padding = torch.cat([torch.tensor([False] * length + [True, True]) for length in LENGTHS])
    padded = {
        field: value[rows]
        for field in Batch.__dataclass_fields__
        if isinstance(value := getattr(batch, field), Tensor)
    }
    padded["seq"] = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS) + 2)
    padded["mask"] = padded["mask"] & ~is_padding
    padded["weights"] = padded["weights"].masked_fill(is_padding, 0)
    output, wide = evaluate(
        method, replace(batch, **padded), logprobs[rows].masked_fill(is_padding, torch.nan)
    )
    torch.testing.assert_close(output.loss, whole.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wide[~is_padding], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_every_method_is_the_policy_gradient(name: str):
    # pi = mu = mu~: all ratios are 1, nothing is cut, and the gradient is -weight A
    batch, _ = example()
    batch = replace(batch, recomputed_logprobs=batch.behavior_logprobs)
    output, gradient = evaluate(resolve(name), batch, batch.behavior_logprobs)
    assert torch.equal(
        output.tokens.ratio[batch.mask], torch.ones(int(batch.mask.sum()), dtype=torch.float64)
    )
    assert not output.tokens.clipped.any()
    torch.testing.assert_close(gradient, -batch.weights * batch.advantages, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("base", ["grpo", "gspo", "gspo-turn", "dual_clip", "up", "cispo", "dppo"])
def test_sat_that_gates_nothing_is_bit_identical_to_its_base(base: str):
    batch, logprobs = example(spread=0.1, dtype=torch.float32)
    plain, gradient = evaluate(resolve(base), batch, logprobs)
    idle, idle_gradient = evaluate(resolve(base, {"reference": "global", "level": 1.0}), batch, logprobs)
    assert idle.tokens.gate is not None and not idle.tokens.gate.any()
    assert torch.equal(idle.loss, plain.loss) and torch.equal(idle_gradient, gradient)
    active, active_gradient = evaluate(resolve(base, {"reference": "global", "level": 0.5}), batch, logprobs)
    # and it does something where it gates: so the equality above is no accident
    assert active.tokens.gate is not None and active.tokens.gate.any()
    assert active.tokens.changed is not None
    assert torch.equal(active_gradient, gradient) == (not active.tokens.changed.any())
    assert active.tokens.changed.any() or base.startswith(("gspo", "dppo"))


def test_a_token_without_recomputed_logprob_is_left_out_where_the_method_needs_it():
    batch, logprobs = example()
    assert batch.recomputed_logprobs is not None
    first = int(batch.mask.nonzero()[0])
    holed = batch.recomputed_logprobs.clone()
    holed[first] = torch.nan
    _, without = evaluate(resolve("icepop"), replace(batch, recomputed_logprobs=holed), logprobs)
    _, full = evaluate(resolve("icepop"), batch, logprobs)
    assert without[first] == 0 and full[first] != 0
    full[first] = 0
    assert torch.equal(without, full)
    _, unneeded = evaluate(resolve("grpo"), replace(batch, recomputed_logprobs=holed), logprobs)
    assert unneeded[first] != 0


def test_needed_logprobs_that_are_missing_are_named():
    batch, logprobs = example()
    with pytest.raises(ValueError, match="recomputed_logprobs"):
        evaluate(resolve("icepop"), replace(batch, recomputed_logprobs=None), logprobs)
    with pytest.raises(ValueError, match="reference_logprobs"):
        evaluate(resolve("grpo", {"kl_coefficient": 0.1}), replace(batch, reference_logprobs=None), logprobs)


def test_entropy_bonus_reaches_the_entropy():
    batch, logprobs = example()
    entropy = torch.ones(len(batch), dtype=torch.float64, requires_grad=True)
    method = resolve("grpo", {"entropy_coefficient": 0.5})
    policy_loss(method, batch, logprobs=logprobs, entropy=entropy, version=VERSION).loss.backward()
    torch.testing.assert_close(entropy.grad, -0.5 * batch.weights)
