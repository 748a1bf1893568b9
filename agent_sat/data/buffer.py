"""The staleness buffer: bounds the lag by what may start, hands out groups in the order they were started.

A plain asyncio object that knows neither Ray nor torch. The rule: a group may start only if the step that
will use it, counted in the order of start, is at most `bound` updates ahead of the weights the engine
serves. Every token of the group is then sampled at those weights or newer ones, so its lag at use is at
most `bound`; nothing has to be thrown away, however slow a group is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from agent_sat.errors import AgentSatError, WorkerError
from agent_sat.types import GroupSummary

MAX_INVALID_IN_A_ROW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished group: its summary here, its arrays behind `payload`, wherever they are."""

    summary: GroupSummary
    payload: Any
    version_at_finish: int  # of the trainer; what passes until use is the in-queue part of the lag


class StalenessBuffer:
    """Groups in flight and finished, in the order of their start."""

    def __init__(self, *, bound: int, groups_per_step: int, next_number: int = 0, version: int = 0) -> None:
        self.bound = bound
        self.groups_per_step = groups_per_step
        self.next_number = self._first_started = next_number
        self.next_version = version  # the trainer's version when the next groups are used
        self.num_invalid = 0  # groups without a valid member, replaced by later ones
        self.num_too_old = 0  # groups dropped at use; stays 0 by the rule above
        self._pending: dict[int, Finished | AgentSatError | None] = {}
        self._num_invalid_in_a_row = 0
        self._changed = asyncio.Event()

    @property
    def num_started(self) -> int:
        """Groups started here that were or will be used."""
        return self.next_number - self._first_started - self.num_invalid - self.num_too_old

    @property
    def num_in_flight(self) -> int:
        return sum(entry is None for entry in self._pending.values())

    @property
    def first_number(self) -> int:
        """The oldest group not yet used: where a resumed run starts again."""
        return min(self._pending, default=self.next_number)

    def may_start(self, published_version: int) -> bool:
        """Whether a group started now, at `published_version` or newer, is used within the bound."""
        version_at_use = self.next_version + len(self._pending) // self.groups_per_step
        return version_at_use - published_version <= self.bound

    def start(self) -> int:
        """Number the next group."""
        number = self.next_number
        self.next_number += 1
        self._pending[number] = None
        return number

    def finish(self, number: int, summary: GroupSummary, payload: Any) -> None:
        """Accept a finished group; one without a valid member is counted and leaves its place to a later one."""
        if summary.valid_rewards:
            self._num_invalid_in_a_row = 0
            self._pending[number] = Finished(
                summary=summary, payload=payload, version_at_finish=self.next_version
            )
        else:
            del self._pending[number]
            self.num_invalid += 1
            self._num_invalid_in_a_row += 1
            if self._num_invalid_in_a_row >= MAX_INVALID_IN_A_ROW:
                self._pending[number] = WorkerError(
                    f"{self._num_invalid_in_a_row} groups in a row had no valid episode; the last cause: "
                    f"{summary.failures[-1] if summary.failures else 'aborted'}"
                )
        self._changed.set()

    def fail(self, number: int, error: AgentSatError) -> None:
        """A group that raised: whoever takes next is told at once."""
        self._pending[number] = error
        self._changed.set()

    async def take(self, *, version: int) -> list[Finished]:
        """Wait for the next step's groups, in the order of their start, to be used at trainer `version`.

        Raises the error of a failed group as a WorkerError that names it.
        """
        self.next_version = version
        while (groups := self._ready(version)) is None:
            self._changed.clear()
            await self._changed.wait()
        self.next_version = version + 1
        return groups

    def _ready(self, version: int) -> list[Finished] | None:
        for number, entry in self._pending.items():
            if isinstance(entry, AgentSatError):
                raise WorkerError(f"group {number}: {entry}") from entry
        for number, entry in list(self._pending.items()):
            if isinstance(entry, Finished) and 0 <= entry.summary.oldest_version < version - self.bound:
                del self._pending[number]
                self.num_too_old += 1
        first = list(self._pending.items())[: self.groups_per_step]
        groups = [entry for _, entry in first if isinstance(entry, Finished)]
        if len(groups) < self.groups_per_step:
            return None
        for number, _ in first:
            del self._pending[number]
        return groups
