"""The field's and SAT's reference rows: loss and gradient in float64 to 1e-9 and in float32 to 1e-5."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_sat.algo.loss import LossOutput, policy_loss
from agent_sat.algo.methods import Method, resolve
from tests.algo.batches import make_batch

ROWS_FILE = Path(__file__).parent / "data" / "loss_cases.jsonl.gz"
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in gzip.decompress(ROWS_FILE.read_bytes()).splitlines()
]
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}


def overrides(row: dict[str, Any]) -> dict[str, object]:
    """The row's method in our words."""
    params, name = row["params"], row["id"]
    eps = params.get("eps", 0.2)
    common: dict[str, object] = {
        # "sat/" rows divide by mu; "field/" rows by mu~ unless their anchor says otherwise
        "denominator": "recomputed"
        if name.startswith("field/") and params.get("anchor") != "logp_behavior"
        else "behavior",
        "eps_low": params.get("eps_low", params.get("lo", eps)),
        "eps_high": params.get("eps_high", params.get("hi", eps)),
        "aggregation": AGGREGATIONS[
            row.get("aggregation") or params.get("agg") or params.get("mode") or "token-mean"
        ],
        "min_tokens": 1,
        "max_turn": 256,
    }
    if common["aggregation"] == "constant":
        common["constant"] = 24
    return common | SPECIFIC.get(name, BY_METHOD.get(row.get("method", ""), lambda _: {}))(params)


BY_METHOD: dict[str, Any] = {
    "sat": lambda _: {"reference": "global"},
    "sat_turn": lambda _: {"reference": "turn"},
    "sat_gspo": lambda p: {
        "reference": "turn" if "group_ids" in p else "global",
        "granularity": "sequence",
    },
    "drpo": lambda p: {"trust_region": "drpo", "drpo_delta": p["delta"]},
    "spo": lambda p: {"trust_region": "spo", "spo_epsilon": p["eps"]},
    "up": lambda _: {"trust_region": "up"},
}
IMPLEMENTATION = {"correction_ratio": "implementation"}
SPECIFIC: dict[str, Any] = {
    "field/dual_clip": lambda p: {"trust_region": "dual_clip", "dual_clip": p["c"]},
    "field/gspo": lambda _: {"granularity": "sequence"},
    "field/gspo_segment": lambda _: {"granularity": "turn"},
    "field/tis_token": lambda p: {**IMPLEMENTATION, "correction": "tis", "tis_cap": p["cap"]},
    "field/icepop": lambda p: {
        **IMPLEMENTATION,
        "correction": "icepop",
        "icepop_low": p["alpha"],
        "icepop_high": p["beta"],
    },
    "field/dppo_tv": lambda p: {
        "trust_region": "none",
        "masks": ("dppo_tv",),
        "dppo_delta": p["thr_low"],
    },
    "field/dppo_kl": lambda p: {
        "trust_region": "none",
        "masks": ("dppo_kl",),
        "dppo_delta": p["thr_low"],
    },
    "field/cispo": lambda _: {"trust_region": "cispo"},
    "field/kl_k1": lambda _: {"kl_estimator": "k1", "kl_coefficient": 1.0},
    "field/kl_k2": lambda _: {"kl_estimator": "k2", "kl_coefficient": 1.0},
    "field/kl_k3": lambda _: {"kl_estimator": "k3", "kl_coefficient": 1.0},
}


def runs(mask: Tensor) -> Tensor:
    """[B, T] index of the contiguous run of active tokens within each response."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return (starts.long().cumsum(1) - 1).clamp_min(0)


def evaluate(row: dict[str, Any], dtype: torch.dtype) -> tuple[Method, LossOutput, Tensor]:
    def flat(name: str) -> Tensor:
        rows = [[float("nan") if v is None else v for v in line] for line in row["inputs"][name]]
        return torch.tensor(rows, dtype=torch.float64)

    mask = flat("mask") > 0
    shape = mask.shape
    turn = runs(mask) if row["id"] == "field/gspo_segment" else flat("turn").long()
    method = resolve("grpo", overrides(row))
    optional = {k: flat(f"logp_{k}") for k in ("recompute", "ref") if f"logp_{k}" in row["inputs"]}
    # a pure KL row has no policy term
    advantages = torch.zeros(shape) if method.needs_reference else flat("advantages")
    batch = make_batch(
        flat("logp_behavior").flatten(),
        advantages=advantages.flatten(),
        mask=mask.flatten(),
        seq=torch.arange(shape[0])[:, None].expand(shape).flatten(),
        turn=turn.flatten(),
        recomputed=optional["recompute"].flatten() if "recompute" in optional else None,
        reference=optional["ref"].flatten() if "ref" in optional else None,
        aggregation=method.settings.aggregation,
        constant=method.settings.constant,
        dtype=dtype,
    )
    logprobs = flat("logp_train").flatten().to(dtype).requires_grad_()
    output = policy_loss(method, batch, logprobs=logprobs, entropy=torch.zeros_like(logprobs), version=0)
    output.loss.backward()
    assert logprobs.grad is not None
    return method, output, logprobs.grad.view(shape)


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_reference_row_has_its_loss_and_gradient(row: dict[str, Any], dtype: torch.dtype, tolerance: float):
    _, output, gradient = evaluate(row, dtype)
    expected = torch.tensor(row["grad"], dtype=dtype)
    torch.testing.assert_close(output.loss.item(), row["loss"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("row", [r for r in ROWS if r.get("expect")], ids=lambda row: row["id"])
def test_reference_row_has_its_intermediate_values(row: dict[str, Any]):
    _, output, gradient = evaluate(row, torch.float64)
    tokens, shape = output.tokens, gradient.shape
    mask = tokens.active.view(shape)
    found = {
        "c_plus": tokens.c_high,
        "c_minus": tokens.c_low,
        "q": tokens.q,
        "gate": tokens.gate,
        "clipped": tokens.clipped,
    }
    for name, values in row["expect"].items():
        rows = [[float("nan") if v is None else v for v in line] for line in values]
        expected = torch.tensor(rows, dtype=torch.float64)
        value = found[name]
        assert value is not None
        actual = value.double().expand(tokens.active.shape).view(shape)
        torch.testing.assert_close(actual[mask], expected[mask], rtol=1e-9, atol=1e-9, msg=name)


def test_all_reference_rows_are_here():
    assert len(ROWS) == 37
