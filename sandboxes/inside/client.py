"""The keeping ends of a fork server and of one episode; what the other side says is only believed in form.

The host uses this for the local backend, and the slot program in a container uses it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any

from . import vitals, wire
from .limits import GRACE_SECONDS, MIB, Limits, Outcome
from .output import Output

ANSWER_BYTES = 65536
OPEN_SECONDS = 20.0
CLOSE_SECONDS = 10.0
FIRST_LOOK_SECONDS, LOOK_SECONDS = 0.03, 0.05  # at the memory of a run that is not over yet
IDLE_CPU_SECONDS = 0.1  # between two looks at an episode that has nothing to run
MAX_STALE_FRAMES = 64
CLAIMS = ("ok", "error", "interrupted", "memory")  # what the inside may say of a run
STATE_LOST = ("timeout", "memory", "crashed", "exited", "infra")


class SetupFailed(Exception):
    """The fork server or an episode could not be set up; the message says what refused."""


class Lost(Exception):
    """The other end is gone or speaks nonsense."""


def answer(control: socket.socket) -> tuple[dict[str, Any], int]:
    """The fork server's next message and the descriptor that came with it, or -1. Raises SetupFailed."""
    try:
        message, descriptors, _, _ = socket.recv_fds(control, ANSWER_BYTES, 1)
    except OSError as error:
        raise SetupFailed(f"the fork server does not answer: {error}") from error
    told = json.loads(message) if message else {"error": "the fork server ended"}
    if "error" in told:
        raise SetupFailed(told["error"])
    return told, descriptors[0] if descriptors else -1


def fork(control: socket.socket, work: str, limits: Limits) -> Episode:
    """A new episode in `work`; call its `await_ready`. One thread at a time. Raises SetupFailed."""
    ours, theirs = socket.socketpair()
    streams = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("stdout", "stderr")]
    for descriptor in streams:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    end, their_end = os.pipe2(os.O_CLOEXEC)
    try:
        request = json.dumps({"work": work}).encode()
        socket.send_fds(control, [request], [theirs.fileno(), *streams, their_end])
        told, pidfd = answer(control)
    except (SetupFailed, OSError) as error:
        ours.close()
        for descriptor in (*streams, end):
            os.close(descriptor)
        raise SetupFailed(f"no new episode: {error}") from error
    finally:
        theirs.close()
        os.close(their_end)
    pid = pid_of(pidfd) if pidfd >= 0 else told["pid"]
    return Episode(limits, channel=ours, streams=(streams[0], streams[1]), end=end, pidfd=pidfd, pid=pid)


class Episode:
    """One confined interpreter, for one thread at a time."""

    def __init__(
        self,
        limits: Limits,
        *,
        channel: socket.socket,
        streams: tuple[int, int],
        end: int,
        pidfd: int,  # -1 where the kernel has none
        pid: int,  # as seen from here
    ) -> None:
        self.pid = pid
        self._limits = limits
        self._channel = channel
        self._outputs = tuple(Output(stream, limits) for stream in streams)
        self._end = end
        self._pidfd = pidfd
        self._buffer = bytearray()
        channel.setblocking(False)
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(end, select.POLLIN)
        self._first = (0.0, vitals.NOTHING)  # the first look at this run; the run's start until there is one
        self._next_look = 0.0
        self._frozen: tuple[int, ...] = ()
        self._idle_cpu: float | None = None  # as of the last look between two runs
        self._closed = False

    def await_ready(self) -> None:
        """Raises SetupFailed, after a close, when a protection could not be put on."""
        self._next_look = float("inf")
        try:
            told = self._receive(time.monotonic() + OPEN_SECONDS)
            failure = "" if told == wire.READY else told.decode("utf-8", "replace")
        except (Lost, TimeoutError) as error:
            failure = repr(error)
        if failure:
            self.close()
            raise SetupFailed(f"a new episode could not be confined: {failure}")

    def run(self, code: str, timeout_seconds: float) -> Outcome:
        """Execute one snippet. After a status in STATE_LOST this episode is dead and waits for its close."""
        started = time.monotonic()
        signal_all(self._frozen, signal.SIGCONT)
        self._frozen, self._idle_cpu = (), None
        self._first, self._next_look = (started, vitals.NOTHING), started + FIRST_LOOK_SECONDS
        status = self._execute(code.encode("utf-8", "replace"), started + timeout_seconds)
        if status in STATE_LOST:
            self._kill()
        stdout, stderr = (out.take() for out in self._outputs)
        if status in ("ok", "error") and (stdout.full or stderr.full):
            status = "output_limit"
        return Outcome(
            status=status,
            stdout=stdout.text,
            stderr=stderr.text,
            seconds=time.monotonic() - started,
            truncated=stdout.cut or stderr.cut,
        )

    def calm(self) -> None:
        """Between runs: freeze all processes until the next run if they have used CPU since the last call."""
        if self._frozen:
            return
        seen = vitals.read(self.pid)
        if seen.private_bytes > self._limits.memory_mib * MIB:
            self._kill()
        elif self._idle_cpu is not None and seen.cpu_seconds - self._idle_cpu > IDLE_CPU_SECONDS:
            self._frozen = seen.pids
            signal_all(self._frozen, signal.SIGSTOP)
        self._idle_cpu = seen.cpu_seconds

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
            elif not self._ended_within(0.0):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Kill it and all it started, wait until the kernel says so, let go of every descriptor."""
        if self._closed:
            return
        self._closed = True
        self._kill()
        self._channel.close()
        for descriptor in (self._pidfd, self._end, *(out.descriptor for out in self._outputs)):
            if descriptor >= 0:
                os.close(descriptor)

    def _execute(self, code: bytes, deadline: float) -> str:
        if len(code) > wire.CODE_BYTES:
            os.write(self._outputs[1].descriptor, b"the code is longer than 1 MiB\n")
            return "error"
        nonce = os.urandom(wire.NONCE_BYTES)
        try:
            self._send(wire.frame(nonce + code), deadline)
            try:
                return self._reply(nonce, deadline)
            except TimeoutError:
                self.signal(signal.SIGINT)
                self._reply(nonce, deadline + GRACE_SECONDS)
                return "interrupted"
        except TimeoutError:
            return "infra" if self._was_starved() else "timeout"
        except MemoryError:
            return "memory"
        except (Lost, OSError):
            return self._how_it_ended(deadline)

    def _send(self, request: bytes, deadline: float) -> None:
        left = memoryview(request)
        while left:
            try:
                left = left[self._channel.send(left) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._channel, select.POLLOUT)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                    raise TimeoutError from None

    def _reply(self, nonce: bytes, deadline: float) -> str:
        """The answer to this request; frames of another one, late or forged, are dropped."""
        for _ in range(MAX_STALE_FRAMES):
            body = self._receive(deadline)
            if body.startswith(nonce):
                status = body[len(nonce) :].decode("ascii", "replace")
                return status if status in CLAIMS else "error"
        raise Lost("too many frames that answer nothing")

    def _receive(self, deadline: float) -> bytes:
        """The next frame. Raises Lost, TimeoutError at the deadline, MemoryError if a look finds too much."""
        late = False
        while True:
            try:
                body = wire.take_frame(self._buffer)
            except ValueError as error:
                raise Lost(str(error)) from error
            if body is not None:
                return body
            now = time.monotonic()
            if late:
                raise TimeoutError
            if now >= self._next_look:
                self._look()
            late = now >= deadline  # what is there by now still counts, but not one byte after the other
            ready = dict(self._poller.poll(max(0.0, min(deadline, self._next_look) - now) * 1e3))
            if self._channel.fileno() in ready:
                part = self._channel.recv(wire.REPLY_BYTES)
                if not part:
                    raise Lost("the channel is closed")
                self._buffer += part
            elif ready:
                raise Lost("the process ended")

    def _look(self) -> None:
        now, seen = time.monotonic(), vitals.read(self.pid)
        if self._first[1] is vitals.NOTHING:
            self._first = (now, seen)
        self._next_look = now + LOOK_SECONDS
        if seen.private_bytes > self._limits.memory_mib * MIB:
            raise MemoryError

    def _was_starved(self) -> bool:
        since, first = self._first
        last = vitals.read(self.pid)
        return vitals.starved(
            time.monotonic() - since,
            last.cpu_seconds - first.cpu_seconds,
            last.waiting_seconds - first.waiting_seconds,
        )

    def _how_it_ended(self, deadline: float) -> str:
        """What the kernel says of a process that is gone; one that only closed its channel gets its time."""
        if not self._ended_within(max(0.0, deadline - time.monotonic())):
            return "timeout"
        told = os.read(self._end, 4)
        if len(told) < 4:
            return "infra"  # nobody was left to tell: the fork server itself is gone
        return judge_end(*struct.unpack("i", told))

    def _ended_within(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        return bool(poller.poll(seconds * 1e3))

    def _kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._ended_within(CLOSE_SECONDS)


def signal_all(pids: tuple[int, ...], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def pid_of(pidfd: int) -> int:
    """The process id of a pidfd in the namespace of the reader."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def judge_end(wait_status: int) -> str:
    """The outcome of a run in which the interpreter went away."""
    if os.WIFEXITED(wait_status):
        return "exited"
    number = os.WTERMSIG(wait_status)
    if number == signal.SIGXCPU:
        return "timeout"
    # Only the kernel can kill process 1 of a namespace, and it does so for memory.
    return "memory" if number == signal.SIGKILL else "crashed"
