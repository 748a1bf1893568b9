"""What SAT costs on top of a plain clip: forward and backward of the policy loss, one thread, CPU time.

All in one run, interleaved, so that a busy machine slows every row alike: a bare memory copy, an eager PPO
clip in ten lines of torch, our own clip, SAT with one q, SAT with a q for each of 32 turns, and the metrics
(`tally`). Goals: SAT at most 1.3 times, per turn at most 1.6 times our own clip, median of the ratio of
neighbouring runs.

    python benchmarks/loss.py                  # 1e5 and 1e6 tokens, median of 15
    python benchmarks/loss.py --repeats 31
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from agent_sat.algo.aggregate import token_weights
from agent_sat.algo.diagnose import tally
from agent_sat.algo.loss import LossOutput, policy_loss
from agent_sat.algo.methods import Method, resolve
from agent_sat.types import Batch

NUM_TURNS = 32
TURN_TOKENS = 50
METHODS = {"clip": "grpo", "sat": "sat-grpo", "sat 32 turns": "sat-grpo-turn"}
GOALS = {"sat": 1.3, "sat 32 turns": 1.6}


def make_batch(num_tokens: int) -> tuple[Batch, Tensor]:
    """Episodes of 32 turns of 50 tokens whose mismatch grows by turn up to twice; nothing masked."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(num_tokens)
    seq = index // (NUM_TURNS * TURN_TOKENS)
    turn = (index // TURN_TOKENS) % NUM_TURNS
    mask = torch.ones(num_tokens, dtype=torch.bool)
    behavior = -torch.rand(num_tokens, generator=generator) * 2
    spread = 0.03 * (1 + turn / NUM_TURNS)
    logprobs = behavior + spread * torch.randn(num_tokens, generator=generator)
    batch = Batch(
        token_ids=index,
        position_ids=index,
        seq=seq,
        turn=turn,
        mask=mask,
        advantages=torch.randn(int(seq[-1]) + 1, generator=generator)[seq],
        behavior_logprobs=behavior,
        versions=torch.zeros_like(index),
        weights=token_weights("token_mean", mask=mask, seq=seq, turn=turn),
        temperature=torch.ones(num_tokens),
    )
    return batch, logprobs


def eager_ppo(batch: Batch, logprobs: Tensor) -> None:
    """The textbook: no masks selected away, no diagnostics, no overflow guard."""
    leaf = logprobs.detach().requires_grad_()
    ratio = torch.exp(leaf - batch.behavior_logprobs)
    unclipped = ratio * batch.advantages
    clipped = torch.clamp(ratio, 0.8, 1.2) * batch.advantages
    loss = -torch.minimum(unclipped, clipped)
    ((loss * batch.mask).sum() / batch.mask.sum()).backward()


def ours(method: Method, batch: Batch, logprobs: Tensor) -> LossOutput:
    leaf = logprobs.detach().requires_grad_()
    output = policy_loss(method, batch, logprobs=leaf, entropy=logprobs, version=1)
    output.loss.backward()
    return output


def measure(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """CPU milliseconds of each piece of work, taken in turns; the first two rounds are warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats + 2):
        for name, call in work.items():
            start = time.process_time()
            call()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: found[2:] for name, found in times.items()}


def report(num_tokens: int, repeats: int) -> None:
    batch, logprobs = make_batch(num_tokens)
    methods = {label: resolve(name) for label, name in METHODS.items()}
    outputs = {label: ours(method, batch, logprobs) for label, method in methods.items()}

    def tallied(label: str) -> Callable[[], object]:
        return lambda: tally(methods[label], batch, outputs[label], logprobs=logprobs, entropy=logprobs)

    work: dict[str, Callable[[], object]] = {
        "memory copy": logprobs.clone,
        "eager PPO": lambda: eager_ppo(batch, logprobs),
        **{label: (lambda m=method: ours(m, batch, logprobs)) for label, method in methods.items()},
        "metrics of clip": tallied("clip"),
        "metrics of sat 32 turns": tallied("sat 32 turns"),
    }
    times = measure(work, repeats)
    print(f"\n{num_tokens:,} tokens, {repeats} runs each: CPU ms")
    print(f"{'':24}{'median':>9}{'min':>9}{'max':>9}{'/ copy':>9}{'/ clip':>9}{'goal':>7}")
    for label, found in times.items():
        ratio = statistics.median(np.divide(found, times["clip"]))
        copies = statistics.median(found) / statistics.median(times["memory copy"])
        goal = GOALS.get(label, "")
        print(
            f"{label:24}{statistics.median(found):9.2f}{min(found):9.2f}{max(found):9.2f}"
            f"{copies:9.0f}{ratio:9.2f}{goal:>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, NumPy {np.__version__}, seed 0"
    )
    for num_tokens in options.tokens:
        report(num_tokens, options.repeats)


if __name__ == "__main__":
    main()
