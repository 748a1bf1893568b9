"""The local backend: episodes forked from a warm interpreter into namespaces, without a daemon."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence

from agent_sat.errors import SandboxError
from agent_sat.sandboxes.inside import client
from agent_sat.sandboxes.inside.limits import UID, Limits, Outcome
from agent_sat.sandboxes.launch import Tier, Zygote
from agent_sat.sandboxes.ledger import Ledger
from agent_sat.sandboxes.pool import Pool
from agent_sat.types import SandboxLimits

TIERS: tuple[Tier, ...] = ("jail", "confined", "process")  # the strongest first
WORK = "/work"  # with namespaces
STDLIB = (
    *("collections", "datetime", "decimal", "fractions", "functools", "hashlib", "itertools", "json", "math"),
    *("random", "re", "statistics", "string"),
)
CPU_TIMEOUTS = 20  # CPU seconds of one process, in timeouts of one run
DISK_FILES = 2  # size of a work folder, in largest files
FORKS_OF_A_ZYGOTE = 10_000  # then a new one takes over


def local_pool(
    limits: SandboxLimits = SandboxLimits(),  # noqa: B008  it is frozen
    *,
    tier: Tier = "jail",
    preload: Sequence[str] = STDLIB,
    warm_up: str = "",
    max_open: int = 512,
    num_warm: int = 0,
) -> Pool:
    """A pool of sandboxes on this machine.

    `tier` is the weakest confinement accepted: "jail" (namespaces, read-only root, Landlock, seccomp),
    "confined" (Landlock and seccomp) or "process" (limits and an own process group only). The strongest that
    works here is used, and told by the pool's `tier`. `preload` names modules imported before any fork,
    `warm_up` is trusted code run there once. Raises SandboxError when `tier` cannot be had, with the reason
    of each one tried.
    """
    backend = LocalBackend(limits, tiers=TIERS[: TIERS.index(tier) + 1], preload=preload, warm_up=warm_up)
    return Pool(backend, limits, max_open=max_open, num_warm=num_warm)


class LocalBackend:
    """Fork servers on this machine: one that forks, and older ones until their last episode is over."""

    def __init__(
        self, limits: SandboxLimits, *, tiers: Sequence[Tier], preload: Sequence[str], warm_up: str
    ) -> None:
        self._limits = inner_limits(limits)
        self._preload, self._warm_up = tuple(preload), warm_up
        self._lock = threading.Lock()
        self.tier: Tier
        self.tier, self._zygote = self._strongest(tiers)
        self._retired: list[Zygote] = []

    def open(self, ledger: Ledger) -> LocalSlot:
        with self._lock:
            folder = make_folder(self.tier)
            if self._zygote.num_forked >= FORKS_OF_A_ZYGOTE:
                self._retire()
            try:
                forked = self._zygote.fork(folder or WORK)
            except client.SetupFailed:
                self._zygote.close()  # whatever ailed it ends here, and its episodes with it
                ledger.restarted()
                self._zygote = self._new_zygote(self.tier)
                forked = self._fork(self._zygote, folder or WORK)
            slot = LocalSlot(self, self._zygote, forked, folder)
        slot.await_ready()
        return slot

    def release(self, zygote: Zygote) -> None:
        """One episode of `zygote` is over; for LocalSlot."""
        with self._lock:
            zygote.num_living -= 1
            if zygote in self._retired and not zygote.num_living:
                self._retired.remove(zygote)
                zygote.close()

    def close(self) -> None:
        with self._lock:
            for zygote in (self._zygote, *self._retired):
                zygote.close()
            self._retired.clear()

    def _retire(self) -> None:
        """Let a new fork server take over; the old one stays for the episodes that it has."""
        if self._zygote.num_living:
            self._retired.append(self._zygote)
        else:
            self._zygote.close()
        self._zygote = self._new_zygote(self.tier)

    def _strongest(self, accepted: Sequence[Tier]) -> tuple[Tier, Zygote]:
        """The first of the tiers that works, found by confining a first episode in it."""
        reasons: list[str] = []
        for tier in accepted:
            try:
                return tier, self._proven(tier)
            except SandboxError as error:
                reasons.append(f"{tier}: {error}")
        weaker = TIERS[TIERS.index(accepted[-1]) + 1 :]
        advice = (
            f"; where that is enough, ask for a weaker tier by name: {', '.join(weaker)}" if weaker else ""
        )
        raise SandboxError(f"sandbox tier {accepted[-1]!r} cannot be had here ({'; '.join(reasons)}){advice}")

    def _proven(self, tier: Tier) -> Zygote:
        zygote = self._new_zygote(tier)
        folder = make_folder(tier)
        try:
            first = zygote.fork(folder or WORK)
            first.await_ready()
            first.close()
        except client.SetupFailed as error:
            zygote.close()
            raise SandboxError(str(error)) from error
        finally:
            remove_folder(folder)
        zygote.num_living -= 1
        return zygote

    def _new_zygote(self, tier: Tier) -> Zygote:
        return Zygote(self._limits, tier, self._preload, self._warm_up)

    def _fork(self, zygote: Zygote, work: str) -> client.Episode:
        try:
            return zygote.fork(work)
        except client.SetupFailed as error:
            raise SandboxError(str(error)) from error


class LocalSlot:
    """One forked episode."""

    def __init__(self, backend: LocalBackend, zygote: Zygote, forked: client.Episode, folder: str) -> None:
        self._backend, self._zygote, self._episode, self._folder = backend, zygote, forked, folder

    def await_ready(self) -> None:
        try:
            self._episode.await_ready()
        except client.SetupFailed as error:
            self.close()
            raise SandboxError(str(error)) from error

    def run(self, code: str, timeout_seconds: float) -> Outcome:
        return self._episode.run(code, timeout_seconds)

    def calm(self) -> None:
        self._episode.calm()

    def close(self) -> None:
        self._episode.close()
        remove_folder(self._folder)
        self._backend.release(self._zygote)


def make_folder(tier: Tier) -> str:
    """A work folder on this side, or "" where an episode mounts its own."""
    if tier == "jail":
        return ""
    folder = tempfile.mkdtemp(prefix="agent-sat-episode-")
    if os.geteuid() == 0:
        os.chown(folder, UID, UID)
    return folder


def remove_folder(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def inner_limits(limits: SandboxLimits) -> Limits:
    return Limits(
        memory_mib=limits.memory_mib,
        num_processes=limits.num_processes,
        file_mib=limits.file_mib,
        disk_mib=DISK_FILES * limits.file_mib,
        cpu_seconds=max(1, round(CPU_TIMEOUTS * limits.timeout_seconds)),
        output_bytes=limits.output_bytes,
    )
