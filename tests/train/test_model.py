from dataclasses import replace

import pytest
import torch

from agent_sat.config import ModelConfig
from agent_sat.data.batch import make_batch
from agent_sat.data.samples import samples_of
from agent_sat.data.tokenizer import character_tokenizer
from agent_sat.errors import ConfigError
from agent_sat.train.model import build_model, token_logprobs
from tests.train.fixtures import MODEL, VOCABULARY, config, groups

TOKENIZER = character_tokenizer()


def model_of(**changes):
    settings = ModelConfig(architecture="Qwen3MoeForCausalLM", config=MODEL | changes)
    return build_model(settings, TOKENIZER, seed=0)


def batch_of(count: int = 2):
    samples = [sample for group in groups(count) for sample in samples_of(group)]
    return make_batch(
        samples, aggregation="token_mean", constant=None, step_advantage=None, device=torch.device("cpu")
    )


def test_logprobs_are_those_of_a_plain_forward_of_each_sample_alone():
    model, batch = model_of(), batch_of()
    found = token_logprobs(model, batch, chunk=10_000)
    logprobs, entropy = found.logprobs, found.entropy
    for index in range(int(batch.seq[-1]) + 1):
        there = batch.seq == index
        logits = model(input_ids=batch.token_ids[there][None], use_cache=False).logits[0].float()
        plain = logits.log_softmax(-1)
        mask = batch.mask[there]
        expected = plain[:-1].gather(1, batch.token_ids[there][1:, None])[:, 0][mask[1:]]
        torch.testing.assert_close(logprobs[there][mask], expected, atol=1e-5, rtol=1e-5)
        expected_entropy = -(plain.exp() * plain).sum(-1)[:-1][mask[1:]]
        torch.testing.assert_close(entropy[there][mask], expected_entropy, atol=1e-5, rtol=1e-5)


def test_untrained_tokens_have_no_logprob():
    batch = batch_of()
    logprobs = token_logprobs(model_of(), batch, chunk=10_000).logprobs
    assert torch.equal(logprobs.isnan(), ~batch.mask)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_neither_value_nor_gradient(chunk: int):
    batch = batch_of()
    results = []
    for size in (chunk, 10_000):
        model = model_of()
        logprobs = token_logprobs(model, batch, chunk=size).logprobs
        logprobs[batch.mask].sum().backward()
        results.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (one, one_grad), (other, other_grad) = results
    torch.testing.assert_close(one, other, equal_nan=True)
    for name, gradient in one_grad.items():
        torch.testing.assert_close(gradient, other_grad[name], atol=1e-5, rtol=1e-4, msg=name)


def test_temperature_is_applied_before_the_softmax():
    model, batch = model_of(), batch_of(1)
    hot = replace(batch, temperature=torch.full_like(batch.temperature, 100.0))
    found = token_logprobs(model, hot, chunk=10_000)
    logprobs, entropy = found.logprobs, found.entropy
    uniform = torch.tensor(float(VOCABULARY)).log()
    torch.testing.assert_close(entropy[batch.mask].mean(), uniform, atol=1e-2, rtol=1e-2)
    assert logprobs[batch.mask].std() < 0.1


def test_same_seed_builds_the_same_model():
    one, other = model_of().state_dict(), model_of().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_unknown_setting_of_a_model_is_named():
    with pytest.raises(ConfigError, match=r"Qwen3MoeConfig has no num_hidden_layer;.*num_hidden_layers"):
        model_of(num_hidden_layer=3)


def test_vocabulary_smaller_than_the_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="the model has 50 tokens, its tokenizer 107"):
        model_of(vocab_size=50)


def test_unknown_architecture_is_refused_with_examples():
    settings = ModelConfig(architecture="Qwen9ForCausalLM")
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM"):
        build_model(settings, TOKENIZER, seed=0)


def test_config_knows_its_experts():
    assert config().num_experts == 4
