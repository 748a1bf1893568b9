"""Process 1 of a container: keeps one episode at a time, is asked over stdin and answers over stdout.

The container gives the outer walls; the episode puts Landlock, seccomp and its limits on itself as it does in
the local backend, so that it cannot reach this process, the fork server, or the episode that comes after it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from . import client, linux, wire, zygote
from .limits import Confinement, Limits

WORK = "/work"
WIPED = (WORK, "/tmp", "/dev/shm")
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/opt", "/etc")


class Slot:
    """The present episode and the way to a fresh one."""

    def __init__(self, control: socket.socket, server: int, limits: Limits) -> None:
        self._control, self._server, self._limits = control, server, limits
        self._episode: client.Episode | None = None

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        self._episode = client.fork(self._control, WORK, self._limits)
        self._episode.await_ready()
        return {}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._episode is None:
            raise client.SetupFailed("no episode is open")
        return asdict(self._episode.run(request["code"], request["timeout_seconds"]))

    def calm(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._episode is not None:
            self._episode.calm()
        return {}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        """End the episode. Raises SetupFailed where something of it would be left for the next."""
        if self._episode is not None:
            self._episode.close()
            self._episode = None
        self._end_strays()
        for folder in WIPED:
            wipe(folder)
        return {}

    def _end_strays(self) -> None:
        for _ in range(50):
            strays = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {
                os.getpid(),
                self._server,
            }
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
        raise client.SetupFailed("processes of an episode outlived it")


def wipe(folder: str) -> None:
    """Empty `folder`. Raises SetupFailed where something stays."""
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError) as error:
        raise client.SetupFailed(f"{folder} could not be emptied: {error}") from error


def main(config: dict[str, Any]) -> None:
    """Answer one request after the other until stdin ends, which ends the container."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # an episode has this process's user id: no ptrace, no /proc/1/mem
    limits = Limits(**config["limits"])
    control, server = start_server(config, limits, keep_out=(requests, answers))
    slot = Slot(control, server, limits)
    operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "open": slot.open,
        "run": slot.run,
        "calm": slot.calm,
        "close": slot.close,
    }
    try:
        client.answer(control)
        wire.write_frame(answers, json.dumps({"ready": True}).encode())
        while True:
            request = json.loads(wire.read_frame(requests))
            try:
                told = operations[request["operation"]](request)
            except client.SetupFailed as error:
                told = {"error": str(error)}
            wire.write_frame(answers, json.dumps(told).encode())
    except client.SetupFailed as error:
        wire.write_frame(answers, json.dumps({"error": str(error)}).encode())
    except (EOFError, BrokenPipeError):
        return


def start_server(
    config: dict[str, Any], limits: Limits, keep_out: tuple[int, ...]
) -> tuple[socket.socket, int]:
    """Fork the fork server off this process; its own memory is what an episode starts from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for name in config["preload"]:
        importlib.import_module(name)
    exec(config["warm_up"], {"__name__": "warm_up"})
    own_paths = [path for path in (sys.base_prefix, *sys.path) if path]
    confinement = Confinement(
        namespaces=False,
        filters=not config["gvisor"],
        gvisor=config["gvisor"],
        root=os.geteuid() == 0,
        max_tasks=config["max_tasks"],
        readable=(*SYSTEM, *own_paths),
        writable=("/tmp", "/dev/shm"),
    )
    server = os.fork()
    if server:
        theirs.close()
        return ours, server
    try:
        for descriptor in keep_out:
            os.close(descriptor)
        ours.close()
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        zygote.serve(theirs, limits, confinement)
    except BaseException:
        traceback.print_exc()  # the host shows the last line when it finds the container ended
    finally:
        os._exit(0)


def launch() -> None:
    main(json.loads(sys.argv[-1]))
