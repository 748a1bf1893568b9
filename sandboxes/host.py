"""The host's ends of a fork server and of one episode; what the other side says is only believed in form."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from agent_sat.errors import SandboxError
from agent_sat.sandboxes import output
from agent_sat.sandboxes.inside import episode, wire, zygote
from agent_sat.types import SandboxLimits, ToolResult, ToolStatus

Tier = Literal["jail", "process"]

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PYTHON_FLAGS = ("-I", "-B", "-S")
BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from inside import zygote; zygote.launch()"
START_SECONDS = 60.0
OPEN_SECONDS = 20.0
CLOSE_SECONDS = 10.0
GRACE_SECONDS = 0.5  # between the interrupt, which keeps state, and the kill, which does not
CPU_TIMEOUTS = 20  # CPU seconds of an episode, in timeouts of one run
MAX_STALE_FRAMES = 64
KEPT_OUTPUT_BYTES = 1 << 16  # a longer output file is emptied after the run
REPORTED: tuple[ToolStatus, ...] = ("ok", "error", "interrupted", "memory")  # what the inside may claim


class Zygote:
    """A running fork server. Raises SandboxError when it cannot be started as `tier` asks for."""

    def __init__(self, limits: SandboxLimits, tier: Tier, preload: Sequence[str], warm_up: str) -> None:
        self.limits = limits
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        root = os.geteuid() == 0
        namespaces = tier == "jail"
        layout = Layout.of_this_interpreter(jailed=namespaces)
        config = {
            "namespaces": namespaces,
            "root": root,
            "binds": layout.binds,
            "python": layout.python,
            "flags": [*PYTHON_FLAGS, "-c", BOOTSTRAP, layout.inside],
            "environment": episode.ENVIRONMENT,
            "packages": layout.packages,
            "preload": list(preload),
            "warm_up": warm_up,
            "limits": {
                "memory_mib": limits.memory_mib,
                "num_processes": limits.num_processes,
                "file_mib": limits.file_mib,
                "disk_mib": 4 * limits.file_mib,
                "cpu_seconds": max(1, round(CPU_TIMEOUTS * limits.timeout_seconds)),
            },
        }
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
            self._answer()
        except SandboxError:
            self.close()
            raise

    def fork(self, work: str) -> Episode:
        """A new episode in the folder `work`; call its `await_ready`. Not safe for two threads at once."""
        ours, theirs = socket.socketpair()
        stdout, stderr = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("stdout", "stderr"))
        for descriptor in (stdout, stderr):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        end, their_end = os.pipe2(os.O_CLOEXEC)
        try:
            sent = [theirs.fileno(), stdout, stderr, their_end]
            socket.send_fds(self._control, [json.dumps({"work": work}).encode()], sent)
            pidfd = self._answer()
        except (SandboxError, OSError) as error:
            ours.close()
            for descriptor in (stdout, stderr, end):
                os.close(descriptor)
            raise SandboxError(f"no new episode: {error}") from error
        finally:
            theirs.close()
            os.close(their_end)
        return Episode(self.limits, channel=ours, stdout=stdout, stderr=stderr, end=end, pidfd=pidfd)

    def close(self) -> None:
        """End the fork server and with it every episode."""
        self._control.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> int:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, zygote.REQUEST_BYTES, 1)
        except OSError as error:
            raise SandboxError(f"the fork server does not answer: {error}") from error
        told = json.loads(message) if message else {"error": "the fork server ended"}
        if "error" in told:
            raise SandboxError(told["error"])
        return descriptors[0] if descriptors else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things lie for the fork server."""

    python: str
    inside: str  # the folder that holds the package `inside`
    packages: list[str]
    binds: list[tuple[str, str]]

    @staticmethod
    def of_this_interpreter(*, jailed: bool) -> Layout:
        python, here = interpreter(), Path(__file__).parent
        packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        if not jailed:
            return Layout(python=str(python), inside=str(here), packages=packages, binds=[])
        prefix = Path(sys.base_prefix).resolve()
        binds = [(path, path) for path in (*SYSTEM, *DEVICES) if os.path.lexists(path)]
        home = prefix
        if not prefix.is_relative_to("/usr"):
            hidden = any(prefix.is_relative_to(folder) for folder in ("/tmp", "/work", "/dev", "/proc"))
            home = Path("/opt/python") if hidden else prefix
            binds.append((str(prefix), str(home)))
        binds.append((str(here / "inside"), "/opt/agent_sat/inside"))
        targets = [f"/opt/packages/{number}" for number in range(len(packages))]
        binds += zip(packages, targets, strict=True)
        inner = home / python.relative_to(prefix) if python.is_relative_to(prefix) else python
        return Layout(python=str(inner), inside="/opt/agent_sat", packages=targets, binds=binds)


def interpreter() -> Path:
    """The interpreter itself, also where a virtual environment points to it."""
    return Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()


class Lost(Exception):
    """The other end is gone or speaks nonsense."""


class Episode:
    """One confined interpreter. Used by one thread at a time."""

    def __init__(
        self, limits: SandboxLimits, *, channel: socket.socket, stdout: int, stderr: int, end: int, pidfd: int
    ) -> None:
        self._limits = limits
        self._channel = channel
        self._outputs = (Output(stdout, limits), Output(stderr, limits))
        self._end = end
        self._pidfd = pidfd
        self._buffer = bytearray()
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(end, select.POLLIN)
        self._closed = False

    def await_ready(self) -> None:
        try:
            told = self._receive(time.monotonic() + OPEN_SECONDS)
        except (Lost, TimeoutError, ValueError) as error:
            self.close()
            raise SandboxError(f"a new episode did not get ready: {error!r}") from error
        if "ready" not in told:
            self.close()
            raise SandboxError(f"a new episode could not be confined: {told.get('error')}")

    def run(self, code: str, timeout_seconds: float) -> ToolResult:
        """Execute one snippet; afterwards `close` this episode if the status says that its state is lost."""
        started = time.monotonic()
        status = self._execute(code.encode("utf-8", "replace"), started + timeout_seconds)
        if status in ("timeout", "memory"):
            self._kill()
        stdout, stderr = (out.take() for out in self._outputs)
        full = any(out.full for out in (stdout, stderr))
        if full and status in ("ok", "error"):
            status = "output_limit"
        return ToolResult(
            status=status,
            stdout=stdout.text,
            stderr=stderr.text,
            seconds=time.monotonic() - started,
            truncated=stdout.cut or stderr.cut,
        )

    def close(self) -> None:
        """Kill it and all it started, wait until the kernel says so, let go of every descriptor."""
        if self._closed:
            return
        self._closed = True
        self._kill()
        self._channel.close()
        for descriptor in (self._pidfd, self._end, *(out.descriptor for out in self._outputs)):
            os.close(descriptor)

    def _execute(self, code: bytes, deadline: float) -> ToolStatus:
        if len(code) > wire.CODE_BYTES:
            return "error"
        nonce = os.urandom(wire.NONCE_BYTES // 2).hex()
        try:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            self._channel.sendall(wire.frame(nonce.encode() + code))
            try:
                return self._reply(nonce, deadline)
            except TimeoutError:
                signal.pidfd_send_signal(self._pidfd, signal.SIGINT)
                self._reply(nonce, deadline + GRACE_SECONDS)
                return "interrupted"
        except TimeoutError:
            return "timeout"
        except (Lost, OSError):
            return self._how_it_ended(deadline)

    def _reply(self, nonce: str, deadline: float) -> ToolStatus:
        """The answer to this request; frames of another one, late or forged, are dropped."""
        for _ in range(MAX_STALE_FRAMES):
            told = self._receive(deadline)
            if told.get("nonce") == nonce:
                status = told.get("status")
                return cast(ToolStatus, status) if status in REPORTED else "error"
        raise Lost("too many frames that answer nothing")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while True:
            try:
                body = wire.take_frame(self._buffer)
                told = None if body is None else json.loads(body)
            except (ValueError, RecursionError) as error:
                raise Lost(str(error)) from error
            if body is not None:
                return told if isinstance(told, dict) else {}
            ready = dict(self._poller.poll(max(0.0, deadline - time.monotonic()) * 1e3))
            if self._channel.fileno() in ready:
                part = self._channel.recv(wire.REPLY_BYTES)
                if not part:
                    raise Lost("the channel is closed")
                self._buffer += part
            elif ready:
                raise Lost("the process ended")
            else:
                raise TimeoutError

    def _how_it_ended(self, deadline: float) -> ToolStatus:
        """What the kernel says of a process that is gone; one that only closed its channel gets its time."""
        ended = select.poll()
        ended.register(self._end, select.POLLIN)
        if not ended.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            return "timeout"
        told = os.read(self._end, 4)
        if len(told) < 4:
            return "infra"  # nobody was left to tell: the fork server itself is gone
        return judge_end(*struct.unpack("i", told))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ended = select.poll()
        ended.register(self._end, select.POLLIN)
        ended.poll(CLOSE_SECONDS * 1e3)


def judge_end(wait_status: int) -> ToolStatus:
    """The outcome of a run in which the interpreter went away."""
    if os.WIFEXITED(wait_status):
        return "exited"
    number = os.WTERMSIG(wait_status)
    if number == signal.SIGXCPU:
        return "timeout"
    # Only the kernel can kill process 1 of a namespace, and it does so for memory.
    return "memory" if number == signal.SIGKILL else "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    text: str
    cut: bool
    full: bool  # the file reached its size limit


class Output:
    """A file in memory that an episode appends to and that outlives it."""

    def __init__(self, descriptor: int, limits: SandboxLimits) -> None:
        self.descriptor = descriptor
        self._position = 0
        self._shown_bytes = limits.output_bytes
        self._max_bytes = limits.file_mib * episode.MIB

    def take(self) -> Shown:
        """What was written since the last call, head and tail where it is too long."""
        size = os.fstat(self.descriptor).st_size
        length = max(0, size - self._position)
        if not length:
            self._position = size
            return Shown(text="", cut=False, full=False)
        half = self._shown_bytes // 2
        if length <= self._shown_bytes:
            text = os.pread(self.descriptor, length, self._position).decode("utf-8", "replace")
        else:
            head = os.pread(self.descriptor, half, self._position)
            tail = os.pread(self.descriptor, half, size - half)
            text = output.head_and_tail(head, tail, length - 2 * half)
        if size > KEPT_OUTPUT_BYTES:
            os.ftruncate(self.descriptor, 0)
            self._position = 0
        else:
            self._position = size
        return Shown(text=text, cut=length > self._shown_bytes, full=size >= self._max_bytes)
