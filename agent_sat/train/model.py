"""The model: built or loaded through transformers, and the one way from its logits to log-probabilities."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agent_sat.algo.logprobs import take_sets, target_logprobs
from agent_sat.config import ModelConfig
from agent_sat.errors import ConfigError
from agent_sat.train.replay import RouteOverlap, replay_routes
from agent_sat.types import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNDECLARED = frozenset({"head_dim"})  # read by models whose configuration class does not declare it
SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def build_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """A causal language model on the CPU: loaded from `config.path`, else made with random weights from `seed`.

    Raises ConfigError for an unknown architecture, settings its configuration refuses, a vocabulary smaller
    than the tokenizer's, or logits that are scaled outside the language-model head.
    """
    model_config = transformer_config(config, tokenizer)
    if model_config.vocab_size < len(tokenizer):
        raise ConfigError(f"the model has {model_config.vocab_size} tokens, its tokenizer {len(tokenizer)}")
    for name in SCALED_LOGITS:
        if getattr(model_config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"models with {name} are not supported: log-probabilities would leave it out")
    dropout = [
        name
        for name, value in model_config.to_dict().items()
        if name.endswith(("dropout", "pdrop")) and value
    ]
    if dropout:
        raise ConfigError(f"{', '.join(dropout)} must be 0: a policy's log-probabilities must not be random")
    choose_experts(model_config, config.experts_implementation)
    torch.manual_seed(seed)
    if config.path is not None:
        model = AutoModelForCausalLM.from_pretrained(
            config.path, config=model_config, dtype=DTYPES[config.dtype], local_files_only=True
        )
    else:
        model = AutoModelForCausalLM.from_config(model_config, dtype=DTYPES[config.dtype])
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def transformer_config(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The model's own configuration, its vocabulary and special tokens from the tokenizer unless it names them."""
    if config.path is not None:
        return AutoConfig.from_pretrained(config.path, local_files_only=True)
    architecture = getattr(transformers, config.architecture, None)
    if architecture is None or getattr(architecture, "config_class", None) is None:
        raise ConfigError(
            f"model.architecture {config.architecture!r} is not a model of transformers "
            f"{transformers.__version__}; e.g. Qwen3ForCausalLM, Qwen3MoeForCausalLM"
        )
    known: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    plain = architecture.config_class()
    stray = [name for name in config.config if name not in UNDECLARED and not hasattr(plain, name)]
    if stray:
        raise ConfigError(
            f"model.config: {architecture.config_class.__name__} has no {', '.join(stray)}"
            f"; nearest: {difflib.get_close_matches(stray[0], list(plain.to_dict()), n=3)}"
        )
    return architecture.config_class(**(known | config.config))


def choose_experts(model_config: PretrainedConfig, implementation: str) -> None:
    """Mixture-of-experts layers as one grouped product unless told otherwise."""
    if any(hasattr(model_config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        model_config._experts_implementation = "grouped_mm" if implementation == "auto" else implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What a pass over a batch says of its tokens; NaN where one is not trained."""

    logprobs: Tensor  # [N] float32 log pi, with gradient
    entropy: Tensor  # [N] float32, with gradient if asked
    routes: RouteOverlap | None  # how recorded and live experts compare, where they were replayed


def token_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    *,
    chunk: int,
    entropy_gradient: bool = False,
    replay: bool = False,
) -> TokenLogprobs:
    """log pi and entropy of a batch's tokens; `replay` routes every token to its recorded experts (R3).

    The one place of the trainer where logits become log-probabilities: temperature, kept sets and float32 as
    `algo.logprobs` has them. The hidden states that predict trained tokens go through the language-model head
    `chunk` at a time and again in the backward pass, so [tokens, vocabulary] is never held at once.
    """
    hidden, routes = hidden_states(model, batch, replay=replay)
    trained = batch.mask.nonzero()[:, 0]
    head = model.get_output_embeddings()
    assert head is not None, "build_model takes causal language models only"
    pieces = trained.split(chunk)

    def piece_logprobs(piece: Tensor, predicting: Tensor) -> tuple[Tensor, Tensor]:
        ids, offsets = kept_sets(batch, piece)
        found = target_logprobs(
            head(predicting),
            batch.token_ids[piece],
            temperature=batch.temperature[piece],
            nucleus_ids=ids,
            nucleus_offsets=offsets,
            entropy_gradient=entropy_gradient,
        )
        return found.logprobs, found.entropy

    results = [
        piece_logprobs(piece, hidden[piece - 1])
        if len(pieces) == 1 or not torch.is_grad_enabled()
        else checkpoint(piece_logprobs, piece, hidden[piece - 1], use_reentrant=False)
        for piece in pieces
    ]
    missing = torch.full((len(batch),), torch.nan, device=hidden.device)
    logprobs, entropy = (torch.cat(parts) for parts in zip(*results, strict=True))
    return TokenLogprobs(
        logprobs=missing.index_put((trained,), logprobs),
        entropy=missing.index_put((trained,), entropy),
        routes=routes,
    )


def kept_sets(batch: Batch, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if batch.nucleus_ids is None or batch.nucleus_offsets is None:
        return None, None
    return take_sets(batch.nucleus_ids, batch.nucleus_offsets, rows)


def hidden_states(
    model: PreTrainedModel, batch: Batch, *, replay: bool
) -> tuple[Tensor, RouteOverlap | None]:
    """([N, hidden] last hidden states, how replayed routes compare with the live ones). Padding stands on the
    right, where causal attention never looks.
    """
    num_samples, longest = int(batch.seq[-1]) + 1, int(batch.position_ids.max()) + 1
    place = (batch.seq, batch.position_ids)
    padded = batch.token_ids.new_zeros(num_samples, longest)
    padded[place] = batch.token_ids

    def forward() -> Tensor:
        return model.get_decoder()(input_ids=padded, use_cache=False).last_hidden_state[place]

    if not replay or batch.experts is None:
        return forward(), None
    experts = batch.experts.new_full((num_samples, longest, *batch.experts.shape[1:]), -1)
    experts[place] = batch.experts
    with replay_routes(model, experts.flatten(0, 1)) as replayed:
        hidden = forward()
    return hidden, replayed.overlap(batch.seq * longest + batch.position_ids)
