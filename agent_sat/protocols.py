"""The seams: what can be replaced, each with as few methods as its user needs."""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

from agent_sat.types import (
    Completion,
    GroupSummary,
    IntArray,
    Metrics,
    Position,
    SamplingParams,
    StepReport,
    Task,
    ToolResult,
    WarmStep,
)


class RolloutEngine(Protocol):
    """Samples turns. The in-process engine and SGLang return the same record."""

    async def generate(self, prompt_ids: IntArray, params: SamplingParams, session: str) -> Completion:
        """Sample one turn after `prompt_ids` [P]; turns of one `session` share their KV cache.

        Raises EngineError when the prompt does not fit the context or the engine is closed.
        """
        ...

    async def release(self, session: str) -> None:
        """Forget a session's cache; unknown sessions are ignored."""
        ...

    async def load_weights(self, version: int, weights: Any) -> None:
        """Serve `weights` (what Learner.publish gave) from the next token on and stamp `version` on it."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class Sandbox(Protocol):
    """One episode's interpreter: state is kept across runs and gone after close.

    Synchronous, because gymnasium's `Env.step` is; episodes call `step` in a thread, so nothing blocks.
    """

    def run(self, code: str, *, timeout_seconds: float | None = None) -> ToolResult: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class SandboxPool(Protocol):
    """Gives out fresh sandboxes; closing it leaves no process behind."""

    def open(self) -> Sandbox:
        """A sandbox with fresh state. Raises SandboxError when none can be set up."""
        ...

    def metrics(self) -> Metrics:
        """`sandbox/...`: counts since the start, and percentiles of the latest waits and runs."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Demonstrator(Protocol):
    """What an environment adds to be warm-started: demonstrations of its own tasks."""

    def demonstrate(
        self, seed: int, options: dict[str, Any], slips: dict[str, float]
    ) -> list[tuple[str, str]]:
        """One demonstrated episode as (role, text), role one of user, assistant, tool, in order."""
        ...


class Rollouts(Protocol):
    """Runs groups of episodes; the payload is opaque to the loop (at scale: an object-store reference)."""

    async def run_group(
        self, number: int, task: Task, *, size: int, greedy: bool = False
    ) -> tuple[GroupSummary, Any]:
        """Play `size` siblings of `task`. Raises EngineError or WorkerError when the system fails."""
        ...

    async def metrics(self) -> Metrics:
        """What the tools did so far: see SandboxPool.metrics."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """Turns groups into new weights."""

    async def warm_start(self, num_steps: int) -> WarmStep | None:
        """Up to `num_steps` more supervised steps: the last one done, or None once the warm start is over."""
        ...

    async def step(self, step: int, payloads: list[Any]) -> StepReport: ...

    async def publish(self) -> tuple[int, Any]:
        """(version, weights for RolloutEngine.load_weights)."""
        ...

    async def save(self, path: str, position: Position) -> None:
        """Write a checkpoint folder that `load` and transformers' from_pretrained read."""
        ...

    async def load(self, path: str) -> Position: ...

    async def close(self) -> None: ...


class MetricSink(Protocol):
    """Where a step's metrics go; a sink that fails never stops the run."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...
