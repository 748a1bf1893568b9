"""Starts a fork server on this machine: a fresh interpreter in the place that a tier asks for."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from agent_sat.errors import SandboxError
from agent_sat.sandboxes.inside import client, episode
from agent_sat.sandboxes.inside.limits import UID, Confinement, Limits

Tier = Literal["jail", "confined", "process"]
SHARED_TASKS = 32  # episodes' worth of processes, for all together where the kernel counts them by user
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
HIDDEN = ("/tmp", "/work", "/dev", "/proc")  # an episode mounts its own there
PYTHON_FLAGS = ("-I", "-B", "-S")
BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from inside import zygote; zygote.launch()"
START_SECONDS, CLOSE_SECONDS = 60.0, 10.0


class Zygote:
    """A running fork server. Raises SandboxError when it cannot be started as `tier` asks for."""

    def __init__(self, limits: Limits, tier: Tier, preload: Sequence[str], warm_up: str) -> None:
        self.num_forked = self.num_living = 0
        self._limits = limits
        config = configuration(limits, tier, preload, warm_up)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        outside = [str(interpreter()), *PYTHON_FLAGS, "-c", BOOTSTRAP, str(Path(__file__).parent)]
        with theirs:
            self._process = subprocess.Popen(
                [*outside, "start", str(theirs.fileno()), json.dumps(config)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=episode.ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        try:
            client.answer(self._control)
        except client.SetupFailed as error:
            self.close()
            raise SandboxError(str(error)) from error

    def fork(self, work: str) -> client.Episode:
        """A new episode; one thread at a time. Raises client.SetupFailed."""
        forked = client.fork(self._control, work, self._limits)
        self.num_forked += 1
        self.num_living += 1
        return forked

    def close(self) -> None:
        """End the fork server and with it every episode."""
        self._control.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def configuration(limits: Limits, tier: Tier, preload: Sequence[str], warm_up: str) -> dict[str, object]:
    """What the fork server is told, as JSON."""
    jailed = tier == "jail"
    layout = Layout.of_this_interpreter(jailed=jailed)
    shared_tasks = count_tasks() + SHARED_TASKS * limits.num_processes
    confinement = Confinement(
        namespaces=jailed,
        filters=tier != "process",
        root=os.geteuid() == 0,
        gvisor=False,
        max_tasks=limits.num_processes if jailed else shared_tasks,
        readable=layout.readable,
        writable=("/tmp", "/dev/shm") if jailed else (),
    )
    return {
        "python": layout.python,
        "flags": [*PYTHON_FLAGS, "-c", BOOTSTRAP, layout.inside],
        "binds": layout.binds,
        "environment": episode.ENVIRONMENT,
        "packages": layout.packages,
        "preload": list(preload),
        "warm_up": warm_up,
        "limits": asdict(limits),
        "confinement": asdict(confinement),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things lie for the fork server."""

    python: str
    inside: str  # the folder that holds the package `inside`
    packages: list[str]
    binds: list[tuple[str, str]]
    readable: tuple[str, ...]

    @staticmethod
    def of_this_interpreter(*, jailed: bool) -> Layout:
        python, here, prefix = interpreter(), Path(__file__).parent, Path(sys.base_prefix).resolve()
        found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        packages = sorted(path for path in found if os.path.isdir(path))
        if not jailed:
            readable = (*SYSTEM, str(prefix), *packages, str(here / "inside"))
            return Layout(
                python=str(python), inside=str(here), packages=packages, binds=[], readable=readable
            )
        binds = [(path, path) for path in (*SYSTEM, *episode.DEVICES) if os.path.lexists(path)]
        home = prefix
        if not prefix.is_relative_to("/usr"):
            home = Path("/opt/python") if any(map(prefix.is_relative_to, HIDDEN)) else prefix
            binds.append((str(prefix), str(home)))
        binds.append((str(here / "inside"), "/opt/agent_sat/inside"))
        targets = [f"/opt/packages/{number}" for number in range(len(packages))]
        binds += zip(packages, targets, strict=True)
        inner = home / python.relative_to(prefix) if python.is_relative_to(prefix) else python
        return Layout(
            python=str(inner), inside="/opt/agent_sat", packages=targets, binds=binds, readable=("/",)
        )


def interpreter() -> Path:
    """The interpreter itself, also where a virtual environment points to it."""
    return Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()


def count_tasks() -> int:
    """Threads of the user id that episodes without namespaces run under."""
    uid = UID if os.geteuid() == 0 else os.geteuid()
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"{entry.path}/task"))
    return count
