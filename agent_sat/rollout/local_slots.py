"""The in-process engine's books: what each slot holds, feeds next, and has sampled in its turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_sat.rollout.local_cache import Index, Rows
from agent_sat.types import (
    Completion,
    FloatArray,
    IntArray,
    Nucleus,
    Routes,
    SamplingParams,
    StopReason,
    route_dtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """What a model's routers choose for one token."""

    layers: int
    top_k: int
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A step's input, and the slots that sample from its output."""

    rows: Rows
    token_ids: Index  # [N]
    samples: Index  # [R] slots whose last known token is fed
    sample_rows: Index  # [R] that token's row


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The sampling parameters of R rows."""

    temperature: FloatArray
    top_p: FloatArray
    top_k: Index
    seeds: NDArray[np.uint64]
    counters: NDArray[np.uint64]  # tokens sampled before in the turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What R rows sampled."""

    token_ids: Index
    logprobs: FloatArray
    nucleus: Nucleus | None  # over R rows, where any truncates


class Slots:
    """Arrays by slot, from which a turn's record is cut when it ends: no loop over slots in a step."""

    def __init__(self, *, num_slots: int, max_length: int, routes: RouteShape | None) -> None:
        grid = (num_slots, max_length)
        self._max_length = max_length
        self._token_ids = np.zeros(grid, np.int64)
        self._logprobs = np.full(grid, np.nan, np.float32)
        self._versions = np.full(grid, -1, np.int32)
        self._experts: Any = None  # RouteArray [slots, max_length, layers, top_k]
        if routes is not None:
            self._experts = np.zeros((*grid, routes.layers, routes.top_k), route_dtype(routes.num_experts))
        self._nucleus: list[list[Nucleus]] = [[] for _ in range(num_slots)]
        self._started = np.zeros(num_slots)
        self._running = np.zeros(num_slots, bool)
        self._known = np.zeros(num_slots, np.int64)  # tokens: prompt and sampled
        self._fed = np.zeros(num_slots, np.int64)  # of them the first have keys and values
        self._returned = np.zeros(num_slots, np.int64)  # of them the first have had their routes handed out
        self._prompt = np.zeros(num_slots, np.int64)
        self._limit = np.zeros(num_slots, np.int64)
        self._seed = np.zeros(num_slots, np.uint64)
        self._temperature = np.ones(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.full(num_slots, -1, np.int64)
        self._truncates = np.zeros(num_slots, bool)
        self._stops = np.full((num_slots, 1), -1, np.int64)  # widened to the largest stop set seen

    def begin(self, slot: int, prompt: IntArray, params: SamplingParams) -> None:
        """Start a turn; the slot's cache is cut back to what it shares with the prompt."""
        length = len(prompt)
        shared = min(length, int(self._known[slot]))
        differing = np.flatnonzero(self._token_ids[slot, :shared] != prompt[:shared])
        shared = int(differing[0]) if len(differing) else shared
        self._fed[slot] = min(
            shared, self._fed[slot], length - 1
        )  # the last token is fed again for its logits
        self._returned[slot] = min(self._returned[slot], self._fed[slot])
        self._token_ids[slot, :length] = prompt
        self._known[slot] = self._prompt[slot] = length
        self._limit[slot] = min(length + params.max_tokens, self._max_length)
        self._seed[slot] = params.seed % 2**64
        self._temperature[slot], self._top_p[slot] = params.temperature, params.top_p
        self._top_k[slot], self._truncates[slot] = params.top_k, params.truncates
        if (missing := len(params.stop_token_ids) - self._stops.shape[1]) > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._nucleus[slot] = []
        self._started[slot] = time.perf_counter()
        self._running[slot] = True

    def clear(self, slot: int) -> None:
        """Forget all the slot holds."""
        self._running[slot] = False
        self._known[slot] = self._fed[slot] = self._returned[slot] = 0

    def feed(self, max_prefill_tokens: int) -> Feed:
        """What the running slots feed next; those far behind share `max_prefill_tokens`."""
        slots = np.flatnonzero(self._running)
        behind = self._known[slots] - self._fed[slots]
        share = max(1, max_prefill_tokens // max(1, int((behind > 1).sum())))
        rows = Rows.pack(slots, self._fed[slots], np.minimum(behind, share))
        last = np.cumsum(rows.counts) - 1
        complete = rows.positions[last] + 1 == self._known[rows.slots]
        return Feed(
            rows=rows,
            token_ids=self._token_ids[rows.row_slots, rows.positions],
            samples=rows.slots[complete],
            sample_rows=last[complete],
        )

    def settings(self, slots: Index) -> Settings:
        return Settings(
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            top_k=self._top_k[slots],
            seeds=self._seed[slots],
            counters=(self._known[slots] - self._prompt[slots]).astype(np.uint64),
        )

    def fed(self, rows: Rows, experts: NDArray[np.int64] | None) -> None:
        """Note that the rows have keys and values, and which experts [N, layers, top_k] they went to."""
        self._fed[rows.slots] += rows.counts
        if self._experts is not None and experts is not None:
            self._experts[rows.row_slots, rows.positions] = experts

    def sampled(self, slots: Index, drawn: Drawn, version: int) -> list[int]:
        """Note one sampled token a slot; gives the slots whose turn is over."""
        places = (slots, self._known[slots])
        self._token_ids[places] = drawn.token_ids
        self._logprobs[places] = drawn.logprobs
        self._versions[places] = version
        self._known[slots] += 1
        if drawn.nucleus is not None:
            for row in np.flatnonzero(self._truncates[slots]):
                self._nucleus[slots[row]].append(drawn.nucleus.cut(int(row), int(row) + 1))
        stopped = (drawn.token_ids[:, None] == self._stops[slots]).any(axis=1)
        return slots[stopped | (self._known[slots] >= self._limit[slots])].tolist()

    def end(self, slot: int) -> Completion:
        """The record of a turn that is over; what the slot holds stays for the next one."""
        self._running[slot] = False
        sampled = slice(int(self._prompt[slot]), int(self._known[slot]))
        token_ids = self._token_ids[slot, sampled].astype(np.int32)
        stop_reason: StopReason = "stop" if token_ids[-1] in self._stops[slot] else "length"
        return Completion(
            token_ids=token_ids,
            behavior_logprobs=self._logprobs[slot, sampled].copy(),
            versions=self._versions[slot, sampled].copy(),
            stop_reason=stop_reason,
            routes=self._routes(slot),
            nucleus=Nucleus.join(self._nucleus[slot]) if self._truncates[slot] else None,
            seconds=time.perf_counter() - self._started[slot],
        )

    def _routes(self, slot: int) -> Routes | None:
        """The rows not handed out before; the pass over the last sampled token comes with the next turn."""
        if self._experts is None:
            return None
        start, stop = int(self._returned[slot]), int(self._fed[slot])
        self._returned[slot] = stop
        return Routes(start=start, experts=self._experts[slot, start:stop].copy())
