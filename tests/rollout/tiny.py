"""The quickstart's model with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 112


def _common(hidden_size: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.05,
    }


def tiny_moe(seed: int = 0, *, hidden_size: int = 96, moe_intermediate_size: int = 64) -> PreTrainedModel:
    """Qwen3-MoE, 363k parameters by default, float32 on the CPU."""
    config = Qwen3MoeConfig(
        **_common(hidden_size),
        intermediate_size=256,
        moe_intermediate_size=moe_intermediate_size,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    model = _built(Qwen3MoeForCausalLM, config, seed)
    model.set_experts_implementation("grouped_mm")
    return model


def tiny_dense(seed: int = 0) -> PreTrainedModel:
    return _built(Qwen3ForCausalLM, Qwen3Config(**_common(96), intermediate_size=256), seed)


def _built(kind: Any, config: Any, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(config).eval()
    return model
