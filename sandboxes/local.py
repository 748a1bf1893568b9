"""Sandboxes on this machine: episodes forked from a warm interpreter into namespaces."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from typing import Self

from agent_sat.errors import SandboxError
from agent_sat.sandboxes.host import Episode, Tier, Zygote
from agent_sat.sandboxes.inside import episode
from agent_sat.types import STATE_LOST, SandboxLimits, ToolResult

TIERS: tuple[Tier, ...] = ("jail", "process")  # the strongest first
JAIL_WORK = "/work"
STDLIB = (
    "collections",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "hashlib",
    "itertools",
    "json",
    "math",
    "random",
    "re",
)


class LocalPool:
    """Opens sandboxes by fork from one warm interpreter; safe to use from many threads.

    `tier` is the weakest confinement accepted: "jail" (namespaces and a read-only root) or "process" (limits
    and an own process group only). The strongest that works here is used; the attribute `tier` tells which.
    `preload` names modules imported before any fork, `warm_up` is trusted code run there once.
    Raises SandboxError when `tier` cannot be had, with the reason of each one tried.
    """

    def __init__(
        self,
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008  it is frozen
        *,
        tier: Tier = "jail",
        preload: Sequence[str] = STDLIB,
        warm_up: str = "",
    ) -> None:
        self.limits = limits
        self.tier: Tier
        self._preload, self._warm_up = tuple(preload), warm_up
        self._lock = threading.Lock()
        self._closed = False
        self._folder = tempfile.mkdtemp(prefix="agent-sat-sandbox-")
        os.chmod(self._folder, 0o711)
        self._num_opened = 0
        try:
            self.tier, self._zygote = self._start(tier)
        except SandboxError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def open(self) -> LocalSandbox:
        """A sandbox with fresh state. Raises SandboxError when none can be set up."""
        return LocalSandbox(self)

    def fork(self) -> tuple[Episode, str]:
        """A fresh episode and its folder on this side, empty with namespaces; for LocalSandbox."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox pool is closed")
            folder = self._make_folder() if self.tier == "process" else ""
            try:
                forked = self._zygote.fork(folder or JAIL_WORK)
            except SandboxError:
                self._zygote.close()  # whatever ailed it ends here, its episodes too
                self._zygote = Zygote(self.limits, self.tier, self._preload, self._warm_up)
                forked = self._zygote.fork(folder or JAIL_WORK)
        forked.await_ready()
        return forked, folder

    def close(self) -> None:
        """End every sandbox of this pool and its fork server."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._zygote.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, least: Tier) -> tuple[Tier, Zygote]:
        """The strongest tier, found by confining a first episode in it."""
        reasons: list[str] = []
        accepted = TIERS[: TIERS.index(least) + 1]
        for tier in accepted:
            try:
                zygote = Zygote(self.limits, tier, self._preload, self._warm_up)
            except SandboxError as error:
                reasons.append(f"{tier}: {error}")
                continue
            try:
                first = zygote.fork(self._make_folder() if tier == "process" else JAIL_WORK)
                first.await_ready()
                first.close()
                return tier, zygote
            except SandboxError as error:
                zygote.close()
                reasons.append(f"{tier}: {error}")
        weaker = TIERS[len(accepted) :]
        advice = (
            f"; where that is enough, ask for a weaker tier by name: {', '.join(weaker)}" if weaker else ""
        )
        raise SandboxError(f"sandbox tier {least!r} cannot be had here ({'; '.join(reasons)}){advice}")

    def _make_folder(self) -> str:
        self._num_opened += 1
        folder = os.path.join(self._folder, str(self._num_opened))
        os.mkdir(folder, 0o700)
        if os.geteuid() == 0:
            os.chown(folder, episode.UID, episode.UID)
        return folder


class LocalSandbox:
    """One episode's interpreter, for one thread at a time; after a lost state the next run starts afresh."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        self._closed = False
        self._episode: Episode | None = None
        self._episode, self._folder = pool.fork()

    def run(self, code: str, *, timeout_seconds: float | None = None) -> ToolResult:
        """What `code` did; its state stays for the next run unless the status is in STATE_LOST."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if self._episode is None:
            try:
                self._episode, self._folder = self._pool.fork()
            except SandboxError as error:
                return ToolResult(status="infra", stderr=str(error))
        timeout = self._pool.limits.timeout_seconds if timeout_seconds is None else timeout_seconds
        result = self._episode.run(code, timeout)
        if result.status in STATE_LOST:
            self._end()
        return result

    def close(self) -> None:
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # gymnasium copies the arguments of `make` into its records, and a process has no copy

    def _end(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
