"""Generated tokens per CPU-second: the in-process engine against transformers' generate on the same episodes.

The work is multi-turn tool use as in the quickstart, made from a seed and fixed: a prompt of about 20 tokens,
3 or 4 turns of 15 to 25 sampled tokens, 8 to 12 tokens of tool output between them. The engine keeps its
cache across turns and records log-probabilities and routes; `generate` starts each turn from the whole
context, left-padded, a batch of as many episodes as are open, and gives log-probabilities. Tokens of a
batch that an episode did not ask for are not counted. CPU time is that of the whole process.

    python benchmarks/rollout.py            # 16, 64 and 128 open episodes, median of 5
    python benchmarks/rollout.py --short    # 16 and 64, median of 3, fewer episodes
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from agent_sat.rollout.local import LocalEngine
from agent_sat.rollout.sampling import seed_for
from agent_sat.types import IntArray, SamplingParams

VOCAB = 112
MAX_LENGTH = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A prompt, and turns of (tokens to sample, the tool's output)."""

    number: int
    prompt: IntArray
    turns: tuple[tuple[int, IntArray], ...]

    @property
    def num_sampled(self) -> int:
        return sum(length for length, _ in self.turns)


def episodes(num: int, seed: int) -> list[Episode]:
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> IntArray:
        return rng.integers(2, VOCAB, rng.integers(low, high + 1)).astype(np.int32)

    def turns() -> tuple[tuple[int, IntArray], ...]:
        return tuple((int(rng.integers(15, 26)), tokens(8, 12)) for _ in range(rng.integers(3, 5)))

    return [Episode(number=number, prompt=tokens(16, 24), turns=turns()) for number in range(num)]


def quickstart_model(seed: int) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    }
    config = Qwen3MoeConfig(**sizes, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation("grouped_mm")
    return model


async def play(engine: LocalEngine, work: list[Episode], num_open: int) -> None:
    """All episodes, `num_open` at a time."""
    left = iter(work)

    async def worker() -> None:
        for episode in left:
            context, session = episode.prompt, str(episode.number)
            for turn, (length, output) in enumerate(episode.turns):
                params = SamplingParams(max_tokens=length, seed=seed_for(episode.number, turn))
                completion = await engine.generate(context, params, session)
                assert len(completion.token_ids) == length
                context = np.concatenate([context, completion.token_ids, output])
            await engine.release(session)

    await asyncio.gather(*(worker() for _ in range(num_open)))


def by_engine(model: PreTrainedModel, work: list[Episode], num_open: int) -> None:
    async def run() -> None:
        engine = LocalEngine(model, max_sessions=num_open, max_length=MAX_LENGTH)
        await play(engine, work, num_open)
        await engine.close()

    asyncio.run(run())


@torch.inference_mode()
def by_generate(model: PreTrainedModel, work: list[Episode], num_open: int) -> None:
    for start in range(0, len(work), num_open):
        batch = work[start : start + num_open]
        contexts = [episode.prompt for episode in batch]
        for turn in range(max(len(episode.turns) for episode in batch)):
            going = [i for i, episode in enumerate(batch) if turn < len(episode.turns)]
            lengths = [batch[i].turns[turn][0] for i in going]
            sampled = generate_turn(model, [contexts[i] for i in going], lengths)
            for i, new in zip(going, sampled, strict=True):
                contexts[i] = np.concatenate([contexts[i], new, batch[i].turns[turn][1]])


def generate_turn(model: PreTrainedModel, contexts: list[IntArray], lengths: list[int]) -> list[IntArray]:
    """What `generate` samples after each context, cut to its length; logprobs are made and dropped."""
    longest = max(len(context) for context in contexts)
    pads = [longest - len(context) for context in contexts]
    ids = np.stack([np.pad(context, (pad, 0)) for context, pad in zip(contexts, pads, strict=True)])
    mask = np.arange(longest) >= np.array(pads)[:, None]
    output = model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=torch.from_numpy(ids).long(),
        attention_mask=torch.from_numpy(mask).long(),
        max_new_tokens=max(lengths),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = output.sequences[:, longest:]
    logprobs = torch.log_softmax(torch.stack(output.logits, dim=1), dim=-1)
    logprobs.gather(-1, new[..., None])
    return [row[:length] for row, length in zip(new.int().numpy(), lengths, strict=True)]


def rate(run: Callable[[], None], num_tokens: int) -> float:
    """Tokens per CPU-second."""
    started = time.process_time()
    run()
    return num_tokens / (time.process_time() - started)


def compare(num_open: int, *, scale: int, repeats: int, seed: int) -> None:
    """Print both rates over `scale` x `num_open` episodes, run by turns so that both see the same machine."""
    work = episodes(scale * num_open, seed)
    num_tokens = sum(episode.num_sampled for episode in work)
    served, plain = quickstart_model(seed), quickstart_model(seed)
    engine: list[float] = []
    generate: list[float] = []
    for _ in range(1 + repeats):  # the first of each is a warm-up
        engine.append(rate(lambda: by_engine(served, work, num_open), num_tokens))
        generate.append(rate(lambda: by_generate(plain, work, num_open), num_tokens))
    ratio = statistics.median(e / g for e, g in zip(engine[1:], generate[1:], strict=True))
    print(
        f"{num_open:4d} open, {num_tokens} tokens: engine {shown(engine[1:])}, "
        f"generate {shown(generate[1:])}, ratio {ratio:.2f}",
        flush=True,
    )


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):8,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--open", type=int, nargs="+", help="open episodes, instead of 16 64 128")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    repeats, scale = (3, 2) if options.short else (5, 4)
    print(
        f"seed {options.seed}, {platform.machine()} {platform.processor()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread, median of {repeats} (least to most), tokens per CPU-second"
    )
    for num_open in options.open or ([16, 64] if options.short else [16, 64, 128]):
        compare(num_open, scale=scale, repeats=repeats, seed=options.seed)


if __name__ == "__main__":
    main()
