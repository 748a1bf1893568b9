"""The parts of a run, built from its config: the same plain classes with and without Ray."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import torch

from agent_sat.algo.advantage import ADVANTAGES
from agent_sat.config import Config
from agent_sat.data.tokenizer import load_tokenizer
from agent_sat.protocols import RolloutEngine, SandboxPool
from agent_sat.rollout.chat import chat_of
from agent_sat.rollout.environment import make_environment
from agent_sat.rollout.episode import EpisodeRunner, Limits
from agent_sat.rollout.group import GroupRunner
from agent_sat.rollout.local import LocalEngine
from agent_sat.train.model import build_model
from agent_sat.types import Group, GroupSummary, Metrics, SamplingParams, SandboxLimits, Task


def build_engine(config: Config) -> LocalEngine:
    """The in-process engine, with weights of its own until the first `load_weights`."""
    torch.set_num_threads(config.engine.threads)
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    settings = config.model.model_copy(update={"dtype": config.engine.dtype or config.model.dtype})
    model = build_model(settings, tokenizer, seed=config.seed)
    return LocalEngine(
        model,
        max_sessions=config.max_sessions,
        max_length=config.rollout.max_length,
        record_routes=config.engine.record_routes,
    )


def build_sandboxes(config: Config) -> SandboxPool:
    """The configured pool. Its modules are plug-ins, imported only here and only when they are used."""
    settings = config.sandbox
    limits = SandboxLimits(
        timeout_seconds=settings.timeout_seconds,
        memory_mib=settings.memory_mib,
        num_processes=settings.num_processes,
        output_bytes=settings.output_bytes,
        file_mib=settings.file_mib,
        episode_seconds=settings.episode_seconds,
    )
    from agent_sat.sandboxes.local import STDLIB, local_pool

    preload = settings.preload if settings.preload is not None else STDLIB
    if settings.backend == "docker":
        from agent_sat.sandboxes.docker import docker_pool

        return docker_pool(
            limits,
            image=settings.image,
            runtime=settings.runtime,
            preload=preload,
            max_open=config.max_sessions,
        )
    return local_pool(limits, tier=settings.tier, preload=preload, max_open=config.max_sessions)


class SandboxedEnvironment(gymnasium.Wrapper[str, str, str, str]):
    """An environment that closes the sandbox it was given together with itself."""

    def __init__(self, environment: gymnasium.Env[str, str], sandbox: Any) -> None:
        super().__init__(environment)
        self.sandbox = sandbox

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.sandbox.close()


class Worker:
    """Plays groups: environments, sandboxes and the threads in which they block."""

    def __init__(self, config: Config, engine: RolloutEngine) -> None:
        rollout = config.rollout
        tokenizer = load_tokenizer(config.model.tokenizer_name)
        self.sandboxes = build_sandboxes(config)
        self.executor = ThreadPoolExecutor(max_workers=config.max_sessions, thread_name_prefix="environment")
        self.env = config.env
        self.groups = GroupRunner(
            episodes=EpisodeRunner(
                engine=engine,
                chat=chat_of(tokenizer, rollout.stop),
                make_environment=self.make_environment,
                executor=self.executor,
                room=asyncio.Semaphore(config.max_sessions),
                limits=Limits(
                    max_response_tokens=rollout.max_response_tokens,
                    max_length=rollout.max_length,
                    step_timeout_seconds=config.env.step_timeout_seconds,
                ),
            ),
            params=SamplingParams(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
            advantage=ADVANTAGES[config.resolve_method().settings.advantage],
            run_seed=config.seed,
        )

    def make_environment(self) -> gymnasium.Env[str, str]:
        sandbox = self.sandboxes.open()
        try:
            return SandboxedEnvironment(make_environment(self.env.id, self.env.kwargs, sandbox), sandbox)
        except BaseException:
            sandbox.close()
            raise

    async def run_group(  # as protocols.Rollouts
        self, number: int, task: Task, *, size: int, greedy: bool = False
    ) -> tuple[GroupSummary, Group]:
        group = await self.groups.run(number, task, size=size, greedy=greedy)
        return group.summary(), group

    async def metrics(self) -> Metrics:
        return self.sandboxes.metrics()

    async def close(self) -> None:
        """Ends every sandbox; environment steps that still run fail."""
        await asyncio.to_thread(self.sandboxes.close)
        self.executor.shutdown(wait=False, cancel_futures=True)
