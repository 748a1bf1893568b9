"""How much of |log pi - log mu| routing replay (R3) takes away, for unchanged weights, by cause.

A small mixture-of-experts model with random weights plays multi-turn episodes in the in-process engine; the
trainer's forward (float32, same weights) gives log pi with live and with replayed routes. Engines: float32
(must agree to 1e-4 either way), bfloat16 weights and arithmetic, and float32 with noise of 2 % on what its
routers see. Coverage is the share of (token, layer) rows that were recorded (the pass over an episode's last
token never happens); differing is the share of them whose set of experts is not the trainer's live top-k.

    python benchmarks/replay.py             # seeds 0, 1, 2; 64 episodes each
    python benchmarks/replay.py --episodes 16
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_sat.data.batch import make_batch
from agent_sat.data.samples import cut
from agent_sat.rollout.local import LocalEngine
from agent_sat.rollout.routers import find_routers
from agent_sat.rollout.sampling import seed_for
from agent_sat.train.model import token_logprobs
from agent_sat.train.replay import replay_routes, route_overlap
from agent_sat.types import Batch, Ending, SamplingParams, Task, Trajectory, Turn

VOCAB, MAX_LENGTH, TURNS = 112, 160, 3
EXACT = 1e-4  # the bound on |d| with a float32 engine


def random_model(seed: int) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.12,  # sharper than training starts from: experts and tokens differ
    }
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**sizes, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def exact(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    return model


def half(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    return model.bfloat16()


def noisy(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)

    def disturb(_router: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noise = torch.randn(inputs[0].shape, generator=generator)
        return (inputs[0] * (1 + 0.02 * noise), *inputs[1:])

    for router in find_routers(model):
        router.register_forward_pre_hook(disturb)
    return model


ENGINES: dict[str, Callable[[PreTrainedModel, int], PreTrainedModel]] = {
    "float32": exact,
    "bfloat16": half,
    "router noise": noisy,
}


async def play(engine: LocalEngine, number: int, seed: int) -> Trajectory:
    """An episode of a fixed number of turns, random ids where a tool would have answered."""
    rng = np.random.default_rng([seed, number])
    context = rng.integers(2, VOCAB, 20).astype(np.int32)
    turns: list[Turn] = []
    for k in range(TURNS):
        params = SamplingParams(max_tokens=20, seed=seed_for(seed, number, k))
        completion = await engine.generate(context, params, str(number))
        turns.append(Turn(prompt_ids=context, completion=completion, text=""))
        context = np.concatenate([context, completion.token_ids, rng.integers(2, VOCAB, 10).astype(np.int32)])
    await engine.release(str(number))
    task = Task(id=str(number), seed=number)
    return Trajectory(
        group=0, member=number, task=task, turns=tuple(turns), reward=0.0, ending=Ending.ANSWERED
    )


def sampled(model: PreTrainedModel, num_episodes: int, seed: int) -> Batch:
    """The batch of what an engine over `model` samples."""

    async def run() -> list[Trajectory]:
        engine = LocalEngine(model, max_sessions=32, max_length=MAX_LENGTH)
        found = await asyncio.gather(*(play(engine, number, seed) for number in range(num_episodes)))
        await engine.close()
        return found

    trajectories = asyncio.run(run())
    samples = [s for t in trajectories for s in cut(t, np.zeros(TURNS, np.float32), temperature=1.0)]
    return make_batch(
        samples, aggregation="token_mean", constant=None, step_advantage=None, device=torch.device("cpu")
    )


@torch.no_grad()
def differences(model: PreTrainedModel, batch: Batch, *, replay: bool) -> Tensor:
    """|log pi - log mu| of the sampled tokens."""
    logprobs = token_logprobs(model, batch, chunk=4096, replay=replay).logprobs
    return (logprobs - batch.behavior_logprobs)[batch.mask].abs()


@torch.no_grad()
def overlap(model: PreTrainedModel, batch: Batch) -> tuple[float, float]:
    """(coverage, share of recorded rows that differ), the trainer routing live, sample by sample."""
    assert batch.experts is not None
    counts = []
    for sample in batch.seq.unique():
        rows = batch.seq == sample
        experts = batch.experts[rows]
        unrouted = torch.full_like(experts, -1)  # nothing replayed: all layers see live inputs
        with replay_routes(model, unrouted) as replay:
            model(input_ids=batch.token_ids[rows][None], use_cache=False)
        live = torch.stack([replay.live[layer] for layer in range(experts.shape[1])], dim=1)
        counts.append(route_overlap(experts, live))
    rows, recorded = sum(c.num_rows for c in counts), sum(c.num_recorded for c in counts)
    return recorded / rows, sum(c.num_differing for c in counts) / recorded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, {options.episodes} episodes of {TURNS} turns")
    print(f"{'engine':>13} seed tokens coverage differing | mean |d| live, R3 | max |d| live, R3")
    for name, made in ENGINES.items():
        for seed in options.seeds:
            trainer = random_model(seed)
            batch = sampled(made(copy.deepcopy(trainer), seed), options.episodes, seed)
            coverage, differing = overlap(trainer, batch)
            live, replayed = (differences(trainer, batch, replay=replay) for replay in (False, True))
            print(
                f"{name:>13} {seed:4d} {len(live):6d} {coverage:8.3f} {differing:9.4f} | "
                f"{live.mean():.2e}, {replayed.mean():.2e} | {live.max():.2e}, {replayed.max():.2e}",
                flush=True,
            )
            if name == "float32" and max(live.max(), replayed.max()) >= EXACT:
                raise SystemExit(f"a float32 engine must agree to {EXACT}")


if __name__ == "__main__":
    main()
