"""Thin proxies around actors: the plain objects live in processes of their own and never hear of Ray."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from agent_sat.errors import AgentSatError, WorkerError
from agent_sat.types import (
    Completion,
    GroupSummary,
    IntArray,
    Metrics,
    Position,
    SamplingParams,
    StepReport,
    Task,
    WarmStep,
)


class Host:
    """What runs in an actor: an object built there, called by the names of its methods."""

    def __init__(self) -> None:
        self.subject: Any = None

    async def build(self, make: Callable[..., Any], *args: Any) -> None:
        """Not in the constructor: what that raises, Ray tells as the actor's death."""
        self.subject = make(*args)

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Lists of object references among `args` are fetched here, so they never pass through the driver."""
        result = getattr(self.subject, method)(*[await fetched(arg) for arg in args], **keywords)
        return await result if inspect.isawaitable(result) else result


async def fetched(arg: Any) -> Any:
    if isinstance(arg, list) and arg and isinstance(arg[0], ObjectRef):
        return list(await asyncio.gather(*arg))
    return arg


async def answer(reply: Awaitable[Any], who: str) -> Any:
    """Wait for an actor's reply. Our own errors come back as they were raised; anything else, a death included,
    is a WorkerError with its cause.
    """
    try:
        return await reply
    except RayTaskError as error:
        if isinstance(error.cause, AgentSatError):
            raise error.cause from None
        raise WorkerError(f"{who}: {error.cause!r}\n{error}") from error
    except RayActorError as error:
        raise WorkerError(f"{who} died: {error}") from error
    except RayError as error:
        raise WorkerError(f"{who}: {error}") from error


class RemoteEngine:
    """A RolloutEngine in another process."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    async def generate(self, prompt_ids: IntArray, params: SamplingParams, session: str) -> Completion:
        return await self._call("generate", prompt_ids, params, session)

    async def release(self, session: str) -> None:
        self.handle.call.remote("release", session)  # nobody waits for it

    async def load_weights(self, version: int, weights: Any) -> None:
        await self._call("load_weights", version, weights)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def close(self) -> None:
        await self._call("close")

    async def _call(self, method: str, *args: Any) -> Any:
        return await answer(self.handle.call.remote(method, *args), "the engine")


class RemoteRollouts:
    """Workers in other processes; a group goes to the one with the fewest groups."""

    def __init__(self, handles: Sequence[ActorHandle]) -> None:
        self.handles = list(handles)
        self.num_groups = [0] * len(self.handles)

    async def run_group(
        self, number: int, task: Task, *, size: int, greedy: bool = False
    ) -> tuple[GroupSummary, ObjectRef]:
        """The payload is a reference: the group's arrays stay in the object store."""
        worker = min(range(len(self.handles)), key=self.num_groups.__getitem__)
        self.num_groups[worker] += 1
        call: Any = self.handles[worker].call.options(num_returns=2)
        summary, group = call.remote("run_group", number, task, size=size, greedy=greedy)
        try:
            return await answer(summary, f"worker {worker}"), group
        except asyncio.CancelledError:
            ray.cancel(summary)
            raise
        finally:
            self.num_groups[worker] -= 1

    async def metrics(self) -> Metrics:
        """Counts add up over workers; of percentiles the worst one is told."""
        replies = [answer(handle.call.remote("metrics"), "a worker") for handle in self.handles]
        merged: Metrics = {}
        for one in await asyncio.gather(*replies):
            for name, value in one.items():
                merge = max if name.endswith(("_p50", "_p99")) else sum
                merged[name] = merge((merged[name], value)) if name in merged else value
        return merged

    async def close(self) -> None:
        replies = [answer(handle.call.remote("close"), "a worker") for handle in self.handles]
        await asyncio.gather(*replies)


class RemoteLearner:
    """A learner in another process; groups and weights go there and back as references."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    async def warm_start(self, num_steps: int) -> WarmStep | None:
        return await self._call("warm_start", num_steps)

    async def step(self, step: int, payloads: list[ObjectRef]) -> StepReport:
        return await self._call("step", step, payloads)

    async def publish(self) -> tuple[int, ObjectRef]:
        call: Any = self.handle.call.options(num_returns=2)
        version, weights = call.remote("publish")
        return await answer(version, "the learner"), weights

    async def save(self, path: str, position: Position) -> None:
        await self._call("save", path, position)

    async def load(self, path: str) -> Position:
        return await self._call("load", path)

    async def close(self) -> None:
        pass

    async def _call(self, method: str, *args: Any) -> Any:
        return await answer(self.handle.call.remote(method, *args), "the learner")
