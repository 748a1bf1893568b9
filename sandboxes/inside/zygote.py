"""The fork server: a fresh interpreter that imports once and forks one episode a request.

`start` prepares the place (namespaces and a read-only root where asked), `main` serves in it. Stopping is
always the end of a descriptor or of the process above, never a message that could be lost.
"""

from __future__ import annotations

import ast  # noqa: F401  imported before any fork, as are the modules below that only an episode uses
import contextlib
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import traceback
from typing import Any, NoReturn

from . import episode, linux, repl, wire
from .limits import UID, Confinement, Limits

REQUEST_BYTES = 65536
NUM_DESCRIPTORS = 4  # channel, stdout, stderr, and a pipe that tells how the episode ended
SETUP_FAILED = 99
NEW_ROOT = "/tmp"
FOLDERS = ("/proc", "/work", "/tmp", "/dev/shm", "/old")


def start(control: int, config: dict[str, Any]) -> None:
    """First stage, outside: build the place, then become the zygote in it with a fresh exec."""
    try:
        confinement = Confinement(**config["confinement"])
        if confinement.namespaces:
            enter_namespaces(confinement.root)
            build_root([tuple(pair) for pair in config["binds"]])
            linux.call("sethostname", b"sandbox", 7)
        arguments = [config["python"], *config["flags"], "main", str(control), json.dumps(config)]
        os.execve(config["python"], arguments, config["environment"])
    except OSError as error:
        socket.socket(fileno=control).send(json.dumps({"error": str(error)}).encode())
        os._exit(1)


def enter_namespaces(root: bool) -> None:
    """Return as process 1 of new namespaces; the process that came in stays outside as its watcher."""
    host = os.pidfd_open(os.getppid())
    unshared, mapped = os.pipe(), os.pipe()
    own_pid = os.getpid()
    if not os.fork():  # maps several ids only from outside the namespace
        if os.read(unshared[0], 1):
            ids = [(0, 0), (UID, UID)] if root else [(0, os.getuid())]
            linux.map_ids(own_pid, ids, groups=root)
            os.write(mapped[1], b"1")
        os._exit(0)
    linux.unshare(linux.ALL_NAMESPACES)
    os.write(unshared[1], b"1")
    os.close(mapped[1])
    if not os.read(mapped[0], 1):
        raise OSError("the ids of the user namespace could not be mapped")
    for descriptor in (*unshared, mapped[0]):
        os.close(descriptor)
    init = os.fork()
    if init:
        watch(host, os.pidfd_open(init))
    os.close(host)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(host: int, init: int) -> None:
    """Wait until the host or process 1 is gone, then go too: the kernel kills all inside for that."""
    os.closerange(0, min(host, init))
    poller = select.poll()
    poller.register(host, select.POLLIN)
    poller.register(init, select.POLLIN)
    poller.poll()
    os._exit(0)


def build_root(binds: list[tuple[str, str]]) -> None:
    """Pivot into a read-only root that shows `binds` (source, target) and little else."""
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    # Sources are held open, because the mount of the new root may hide their paths.
    shown = [(os.open(source, os.O_PATH | os.O_NOFOLLOW), target) for source, target in binds]
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", NEW_ROOT, "tmpfs", flags, "size=4m,mode=755")
    for descriptor, target in shown:
        show(descriptor, NEW_ROOT + target)
        os.close(descriptor)
    for folder in FOLDERS:
        os.makedirs(NEW_ROOT + folder, exist_ok=True)
    linux.mount("proc", NEW_ROOT + "/proc", "proc", flags | linux.MS_NOEXEC)
    linux.pivot_into(NEW_ROOT, "old")
    linux.mount(None, "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | flags)


def show(descriptor: int, target: str) -> None:
    """Show what `descriptor` refers to at `target`: folders and files read-only, a link as a link."""
    source = f"/proc/self/fd/{descriptor}"
    mode = os.fstat(descriptor).st_mode
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink("", dir_fd=descriptor), target)
        return
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    if stat.S_ISCHR(mode):
        linux.mount(source, target, None, linux.MS_BIND)
    else:
        linux.bind_read_only(source, target)


def main(control: int, config: dict[str, Any]) -> None:
    """Second stage: import, then serve."""
    channel = socket.socket(fileno=control)
    try:
        sys.path += config["packages"]
        for name in config["preload"]:
            importlib.import_module(name)
        exec(config["warm_up"], {"__name__": "warm_up"})
    except Exception as error:
        channel.send(json.dumps({"error": f"preload: {error!r}"}).encode()[:REQUEST_BYTES])
        return
    serve(channel, Limits(**config["limits"]), Confinement(**config["confinement"]))


def serve(channel: socket.socket, limits: Limits, confinement: Confinement) -> None:
    """Say ready, and fork an episode a request until the other side closes `channel`."""
    linux.become_subreaper()
    server = Server(channel, limits, confinement)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()
    channel.send(b'{"ready": true}')
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(wake, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == wake:
                os.read(wake, 4096)
                server.reap()
            elif not server.answer():
                server.end_all()
                return


class Server:
    """The living children, and what each of them puts on itself."""

    def __init__(self, channel: socket.socket, limits: Limits, confinement: Confinement) -> None:
        self._channel, self._limits, self._confinement = channel, limits, confinement
        self._filter = episode.call_filter(confinement)
        self._own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if confinement.namespaces else -1
        self._ends: dict[int, int] = {}  # child pid -> the pipe that tells how it ended

    def answer(self) -> bool:
        """Answer one request with a pidfd of a new episode; False when the host is gone."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, REQUEST_BYTES, NUM_DESCRIPTORS)
        if not message:
            return False
        *streams, end = descriptors
        try:
            pid = self._fork(streams, json.loads(message)["work"])
            pidfds = open_pidfds(pid)
        except OSError as error:
            self._channel.send(json.dumps({"error": str(error)}).encode())
            os.close(end)
        else:
            self._ends[pid] = end
            socket.send_fds(self._channel, [json.dumps({"pid": pid}).encode()], pidfds)
            streams += pidfds
        for descriptor in streams:
            os.close(descriptor)
        return True

    def reap(self) -> None:
        """Tell the host of every child that ended: its wait status, then the end of the pipe."""
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None:
                return
            pid = child.si_pid
            if not self._confinement.namespaces and pid in self._ends:
                with contextlib.suppress(
                    ProcessLookupError
                ):  # a zombie still: nobody else can have its number
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            end = self._ends.pop(pid, None)
            if end is not None:
                with contextlib.suppress(OSError):  # the host let go of it
                    os.write(end, struct.pack("i", status))
                os.close(end)

    def end_all(self) -> None:
        """Kill the groups of all living episodes; with namespaces the end of process 1 does more."""
        for pid in self._ends:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _fork(self, streams: list[int], work: str) -> int:
        if not self._confinement.namespaces:
            return os.fork() or self._run_episode(streams, work)
        linux.unshare(linux.CLONE_NEWPID)  # the next child is process 1 of its own namespace
        try:
            return os.fork() or self._run_episode(streams, work)
        finally:
            linux.setns(self._own_namespace, linux.CLONE_NEWPID)

    def _run_episode(self, streams: list[int], work: str) -> NoReturn:
        """The child's whole life; whatever fails in it is told on the channel and ends it."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            episode.become(streams, work, self._limits, self._confinement, self._filter)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{error} ({where.name})".encode()
            for descriptor in (streams[0], repl.CHANNEL):  # before or after it was moved there
                with contextlib.suppress(OSError):
                    wire.write_frame(descriptor, message)
        finally:
            os._exit(SETUP_FAILED)


def open_pidfds(pid: int) -> list[int]:
    """A pidfd, or none where the kernel is an old gVisor: there the number itself has to do."""
    try:
        return [os.pidfd_open(pid)]
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return []


def launch() -> None:
    stage, control, config = sys.argv[-3:]
    {"start": start, "main": main}[stage](int(control), json.loads(config))
