"""What the commands do: a run from its config to its last table, and an evaluation of a finished one."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agent_sat.cluster.in_process import Parts, in_process
from agent_sat.config import Config, load, to_toml
from agent_sat.data.tasks import TaskStream
from agent_sat.data.tokenizer import load_tokenizer
from agent_sat.errors import ConfigError
from agent_sat.evaluate import Score, as_metrics, as_record, evaluate
from agent_sat.log.metrics import Fanout, JsonlSink, WandbRun, WandbSink
from agent_sat.log.progress import Progress
from agent_sat.log.run import RunDirectory, write_text
from agent_sat.loop import Loop, LoopSettings, unless
from agent_sat.rollout.chat import chat_of
from agent_sat.rollout.environment import make_environment
from agent_sat.train.checkpoint import newest
from agent_sat.train.model import transformer_config
from agent_sat.train.warm_start import Demonstrations
from agent_sat.types import Metrics, Position

START = Position(step=0, version=0, next_group=0)
WARM_STEPS_A_CALL = 5
INTERRUPTED = 130  # exit code of a run stopped by Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training run ended."""

    run: RunDirectory
    position: Position
    interrupted: bool


def preflight(config: Config) -> None:
    """Find what cannot work before any process starts. Raises ConfigError."""
    environment = make_environment(config.env.id, config.env.kwargs, None)
    environment.close()
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    chat = chat_of(tokenizer, config.rollout.stop)
    if config.warm_start.steps:
        demonstrations = Demonstrations(config, tokenizer, chat)
        for index in range(max(map(len, config.env.choices.values()), default=1)):
            demonstrations[index]  # every choice once: a wrong one or an unknown slip is told now
    model_config = transformer_config(config.model, tokenizer)
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is not None and config.rollout.max_length > longest:
        raise ConfigError(
            f"rollout.max_length {config.rollout.max_length} is more than the model's "
            f"max_position_embeddings {longest}; lower the one or raise the other"
        )
    try:
        with torch.device("meta"), torch.no_grad():
            # shapes without memory; grouped products take bfloat16 alone on the meta device
            shapes = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
            shapes(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except (ValueError, RuntimeError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"model.config: the sizes do not make a model: {error}") from error


async def train(config: Config, *, local: bool, resume: RunDirectory | None = None) -> Outcome:
    """Train from the start, or go on from the newest checkpoint of `resume`."""
    preflight(config)
    checkpoint = newest(resume.checkpoints) if resume else None
    run = resume or RunDirectory.create(config.directory)
    write_text(run.config, to_toml(config))
    from_step = json.loads((checkpoint / "position.json").read_text())["step"] if checkpoint else 0
    run.forget_after(from_step)
    run_id = run.begin(seed=config.seed, from_step=from_step)
    state, cause = "failed", ""
    try:
        with Progress(config.steps, stratum=config.env.stratum) as progress:
            async with launched(config, run, local=local) as parts:
                training = Training(config, run, parts, progress, copies(config, run, run_id))
                outcome = await training.run_from(checkpoint)
        state = "interrupted" if outcome.interrupted else "finished"
        return outcome
    except BaseException as error:
        state, cause = (
            ("interrupted", "") if isinstance(error, asyncio.CancelledError) else ("failed", str(error))
        )
        raise
    finally:
        run.end(state, cause=cause)


def launched(config: Config, run: RunDirectory | None, *, local: bool) -> AbstractAsyncContextManager[Parts]:
    """The parts of a run, in this process or on Ray, which is only imported if it is used."""
    if local:
        return in_process(config, run)
    from agent_sat.cluster.launch import on_ray

    return on_ray(config, run)


def copies(config: Config, run: RunDirectory, run_id: str) -> Fanout:
    """Where metrics go beside the run directory."""
    wandb = WandbRun(
        project=config.log.wandb_project,
        name=config.name,
        id=run_id,
        folder=run.path,
        mode=config.log.wandb,
        config=config.model_dump(mode="json"),
    )
    return Fanout([WandbSink(wandb)] if config.log.wandb != "disabled" else [])


class Training:
    """The phases of one training run over parts that are up."""

    def __init__(
        self, config: Config, run: RunDirectory, parts: Parts, progress: Progress, copies: Fanout
    ) -> None:
        self.config = config
        self.run = run
        self.parts = parts
        self.progress = progress
        self.copies = copies
        self.sinks = Fanout([JsonlSink(run.metrics), copies])

    async def run_from(self, checkpoint: Path | None) -> Outcome:
        async with stop_on_signal() as stop:
            if checkpoint is None:
                if not await self.warm_start(stop):
                    self.sinks.close()
                    return Outcome(run=self.run, position=START, interrupted=True)
                position = START
            else:
                self.progress.phase(f"loading {checkpoint.name}")
                position = await self.parts.learner.load(str(checkpoint))
            loop = self.loop(position, stop)
            if position.step == 0 and self.config.eval.enabled and not stop.is_set():
                await loop.publish()
                await unless(stop, self.evaluate(position.step))
            self.progress.phase("training")
            position = await loop.run()
            if not self.run.checkpoint_of(position.step).exists():
                await self.save(position)
            if self.config.eval.enabled and not stop.is_set():
                await loop.publish()
                await unless(stop, self.evaluate(position.step))
            self.sinks.close()
            return Outcome(run=self.run, position=position, interrupted=stop.is_set())

    async def warm_start(self, stop: asyncio.Event) -> bool:
        """Whether it came to its end; half a warm start is not kept."""
        self.progress.phase("warm start", total=self.config.warm_start.steps)
        done = 0
        while not stop.is_set() and (last := await self.parts.learner.warm_start(WARM_STEPS_A_CALL)):
            self.progress.advance(last.step - done, loss=last.loss)
            done = last.step
        return not stop.is_set()

    def loop(self, position: Position, stop: asyncio.Event) -> Loop:
        config = self.config
        return Loop(
            settings=LoopSettings(
                steps=config.steps,
                groups_per_step=config.rollout.tasks_per_step,
                group_size=config.rollout.group_size,
                bound=config.staleness.bound,
                broadcast_interval=config.staleness.broadcast_interval,
                concurrency=config.concurrency,
                stratum=config.env.stratum,
                group_timeout_seconds=config.rollout.group_timeout_seconds,
                step_timeout_seconds=config.train.step_timeout_seconds,
            ),
            engine=self.parts.engine,
            rollouts=self.parts.rollouts,
            learner=self.parts.learner,
            tasks=TaskStream(seed=config.seed, stream="train", choices=config.env.choices),
            position=position,
            step_done=self.step_done,
            stop=stop,
        )

    async def step_done(self, metrics: Metrics, position: Position) -> None:
        self.sinks.log(position.step, metrics)
        self.progress.step(position.step, metrics)
        if position.step % self.config.train.checkpoint_interval == 0:
            await self.save(position)
        interval = self.config.eval.interval
        if interval and position.step % interval == 0 and position.step < self.config.steps:
            await self.evaluate(position.step)

    async def save(self, position: Position) -> None:
        await self.parts.learner.save(str(self.run.checkpoint_of(position.step)), position)

    async def evaluate(self, step: int) -> list[Score]:
        self.progress.phase("evaluating", total=2 * self.config.eval.num_tasks)
        scores = await evaluate(
            self.parts.rollouts,
            self.config,
            num_samples=self.config.eval.samples,
            advance=self.progress.advance,
        )
        with self.run.evaluations.open("a") as file:
            file.write(json.dumps(as_record(step, scores)) + "\n")
        self.copies.log(step, as_metrics(scores, self.config.env.stratum))
        return scores


@asynccontextmanager
async def stop_on_signal() -> AsyncIterator[asyncio.Event]:
    """An event that the first Ctrl-C sets, so that the step under way ends and is saved; the second cancels."""
    stop = asyncio.Event()
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None

    def interrupted() -> None:
        if stop.is_set():
            running.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def evaluate_run(
    run: RunDirectory, *, num_tasks: int | None, num_samples: int
) -> tuple[int, list[Score]]:
    """Evaluate a run's newest checkpoint in this process: (its step, scores)."""
    config = load(run.config, [f"eval.num_tasks={num_tasks}"] if num_tasks else [])
    checkpoint = newest(run.checkpoints)
    with Progress(config.steps, stratum=config.env.stratum) as progress:
        async with launched(config, None, local=True) as parts:
            position = await parts.learner.load(str(checkpoint))
            await parts.engine.load_weights(*await parts.learner.publish())
            progress.phase("evaluating", total=2 * config.eval.num_tasks)
            scores = await evaluate(parts.rollouts, config, num_samples=num_samples, advance=progress.advance)
    return position.step, scores
