"""The in-process engine: many episodes decode together in one thread, each on its own KV cache.

A turn's way: `generate` checks the request and posts it to the decode thread; the thread gives its session
a slot (or lets it wait for one), keeps what the slot's cache shares with the prompt, and feeds the rest
together with everybody else's next token; when the turn ends its record is cut from the slot's arrays and
the caller's future is resolved. Weights, pauses and releases are posted, too, and take effect between two
steps: at a token boundary.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_sat.errors import AgentSatError, EngineError, boundary
from agent_sat.rollout.local_model import SlotModel
from agent_sat.rollout.local_slots import Slots
from agent_sat.types import Completion, IntArray, SamplingParams

_Outcome = tuple[asyncio.Future[Any], object]  # a future and its result, or its EngineError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Request:
    """One awaited turn."""

    session: str
    prompt_ids: IntArray
    params: SamplingParams
    future: asyncio.Future[Completion]


class LocalEngine:
    """A RolloutEngine over a transformers model in this process.

    The engine owns `model`: its attention is replaced and its weights are overwritten by `load_weights`, so
    neither the model nor its config object may be shared with a trainer. What a request samples does not
    depend on the other open episodes, up to the rounding of differently shaped matrix products.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: int = 0,
        max_sessions: int,
        max_length: int,
        record_routes: bool = True,
        max_prefill_tokens: int = 4096,
    ) -> None:
        """`max_length` counts a session's prompt and sampled tokens; one step feeds at most about
        `max_prefill_tokens` of prompts and tool output."""
        self._model = SlotModel(
            model, num_slots=max_sessions, max_length=max_length, record_routes=record_routes
        )
        self._max_length = max_length
        self._max_prefill_tokens = max_prefill_tokens
        self._wake = threading.Condition()  # guards the next four
        self._inbox: deque[Callable[[], None]] = deque()
        self._awaited: set[asyncio.Future[Any]] = set()
        self._closing = False
        self._ended: EngineError | None = None
        # the decode thread's own
        self._version = version
        self._paused = False
        self._slots = Slots(num_slots=max_sessions, max_length=max_length, routes=self._model.route_shape)
        self._sessions: dict[str, int] = {}
        self._free = list(range(max_sessions))  # a heap: low slots first, so that those in use adjoin
        self._waiting: dict[str, _Request] = {}  # by session, first come first served
        self._running: dict[int, _Request] = {}  # by slot
        self._outcomes: list[_Outcome] = []
        self._thread = threading.Thread(target=self._serve, name="agent-sat-decode", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: IntArray, params: SamplingParams, session: str) -> Completion:
        """Sample one turn; what the session's cache shares with `prompt_ids` is not computed again.

        Sessions beyond `max_sessions` wait until one is released, first come first served. Cancelling gives
        the session up. Raises EngineError for a request that cannot be served and when the engine has ended.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        self._check(prompt, params)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(session=session, prompt_ids=prompt, params=params, future=future)
        self._post(lambda: self._admit(request), future)
        try:
            return await future
        except asyncio.CancelledError:
            self._tell(lambda: self._forget(session))
            raise

    async def release(self, session: str) -> None:
        """Free the session's slot; a turn of it that still runs fails."""
        self._tell(lambda: self._forget(session))

    async def load_weights(self, version: int, weights: dict[str, Tensor]) -> None:
        """Raises EngineError, and the old weights serve on, unless names and shapes are the model's."""

        def load() -> None:
            self._model.load(weights)
            self._version = version

        await self._between_steps(load)

    async def pause(self) -> None:
        """No token is sampled after this returns; caches are kept and requests are taken up."""
        await self._between_steps(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._between_steps(lambda: self._set_paused(False))

    async def close(self) -> None:
        """End the decode thread after the step it is in; what is outstanding fails with EngineError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # the callers' side

    def _check(self, prompt: IntArray, params: SamplingParams) -> None:
        longest = self._max_length - 1
        if not 0 < len(prompt) <= longest:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens; max_length {self._max_length} takes 1 to {longest}"
            )
        if (
            prompt.view(np.uint32).max() >= self._model.vocab_size
        ):  # as unsigned, a negative id is a large one
            raise EngineError(f"the prompt has a token id outside 0..{self._model.vocab_size - 1}")
        if params.temperature < 0 or not 0 < params.top_p <= 1 or params.max_tokens < 1:
            raise EngineError(f"needs temperature >= 0, 0 < top_p <= 1 and max_tokens >= 1: {params}")

    async def _between_steps(self, action: Callable[[], None]) -> None:
        """Have the decode thread do `action`; what EngineError it raises is the caller's alone."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def act() -> None:
            try:
                action()
            except EngineError as error:
                self._outcomes.append((future, error))
            else:
                self._outcomes.append((future, None))

        self._post(act, future)
        await future

    def _post(self, action: Callable[[], None], future: asyncio.Future[Any]) -> None:
        with self._wake:
            if self._ended is not None:
                raise EngineError(str(self._ended)) from self._ended
            self._awaited.add(future)
            self._inbox.append(action)
            self._wake.notify()

    def _tell(self, action: Callable[[], None]) -> None:
        """Post what nobody waits for."""
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    # the decode thread

    @torch.inference_mode()
    def _serve(self) -> None:
        end = EngineError("the engine is closed")
        try:
            with boundary(EngineError, "the engine's decode thread died"):
                while self._wait():
                    if self._running and not self._paused:
                        self._step()
                    self._deliver()
        except AgentSatError as error:
            end = EngineError(str(error))
            end.__cause__ = error.__cause__ or error
        with self._wake:
            self._ended = end
            left = list(self._awaited)
        self._outcomes += [(future, end) for future in left]  # after what was settled before the end
        self._deliver()

    def _wait(self) -> bool:
        """Sleep until there is work and do what was posted; False when the engine closes."""
        with self._wake:
            while not (self._closing or self._inbox or (self._running and not self._paused)):
                self._wake.wait()
            actions, self._inbox = self._inbox, deque()
            if self._closing:
                return False
        for action in actions:
            action()
        return True

    def _step(self) -> None:
        """Feed every running slot and sample where a slot has nothing left to feed."""
        feed = self._slots.feed(self._max_prefill_tokens)
        logits, experts = self._model.forward(feed)
        self._slots.fed(feed.rows, experts)
        if logits is None:
            return
        drawn = self._model.sample(logits, self._slots.settings(feed.samples))
        for slot in self._slots.sampled(feed.samples, drawn, self._version):
            self._outcomes.append((self._running.pop(slot).future, self._slots.end(slot)))

    def _admit(self, request: _Request) -> None:
        slot = self._sessions.get(request.session)
        if request.session in self._waiting or slot in self._running:
            error = EngineError(f"session {request.session!r} already has a turn in progress")
            self._outcomes.append((request.future, error))
        elif slot is not None:
            self._begin(slot, request)
        else:
            self._waiting[request.session] = request
            self._fill()

    def _fill(self) -> None:
        """Give free slots to those who wait."""
        while self._free and self._waiting:
            session = next(iter(self._waiting))
            slot = self._sessions[session] = heapq.heappop(self._free)
            self._begin(slot, self._waiting.pop(session))

    def _begin(self, slot: int, request: _Request) -> None:
        self._slots.begin(slot, request.prompt_ids, request.params)
        self._running[slot] = request

    def _forget(self, session: str) -> None:
        request = self._waiting.pop(session, None)
        if (slot := self._sessions.pop(session, None)) is not None:
            request = self._running.pop(slot, None)
            self._slots.clear(slot)
            heapq.heappush(self._free, slot)
        if request is not None:
            error = EngineError(f"session {session!r} was released during its turn")
            self._outcomes.append((request.future, error))
        self._fill()

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _deliver(self) -> None:
        """Resolve futures, with one wake-up of each event loop that waits."""
        outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return
        with self._wake:
            self._awaited.difference_update(future for future, _ in outcomes)
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        for outcome in outcomes:
            by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)
        for loop, theirs in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, theirs)


def _settle(outcomes: list[_Outcome]) -> None:
    for future, outcome in outcomes:
        if future.done():  # cancelled
            continue
        if isinstance(outcome, EngineError):
            error = EngineError(str(outcome))  # each waiter gets its own, with its own traceback
            error.__cause__ = outcome.__cause__
            future.set_exception(error)
        else:
            future.set_result(outcome)
