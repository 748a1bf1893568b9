"""The Docker backend: one long-lived container a slot, reset between episodes."""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.types import LogConfig

from agent_sat.errors import SandboxError
from agent_sat.sandboxes.inside import client, wire
from agent_sat.sandboxes.inside.limits import GRACE_SECONDS, MAX_INODES, SHM_MIB, UID, Outcome
from agent_sat.sandboxes.ledger import Ledger
from agent_sat.sandboxes.local import STDLIB, inner_limits
from agent_sat.sandboxes.pool import Pool
from agent_sat.types import SandboxLimits

IMAGE = "agent-sat-python"
PYTHON_LABEL = "agent-sat.python"  # of an image: its interpreter
CODE_LABEL = "agent-sat.inside"  # of an image: the digest of our code in it
RUN_LABEL, HOST_LABEL = "agent-sat.run", "agent-sat.host"  # of a container: its pool, and the host process
BOOTSTRAP = "import sys; sys.path.insert(0, '/opt/agent_sat'); from inside import slot; slot.launch()"
START_SECONDS = 60.0
ANSWER_SECONDS = 20.0  # beyond the time of a run itself: the container's CPU is shared
STREAM_HEADER = struct.Struct(">BxxxL")  # Docker's framing of an attached stream: which one, how many bytes
GVISOR = "runsc"
GVISOR_THREADS = 1024  # its own kernel is a process with many of them
STDOUT_STREAM, MAX_ERROR_BYTES = 1, 4096
OVERHEAD_MIB = 128  # the slot, the fork server and what they preloaded
NUM_OVERHEAD_PROCESSES = 2
MAX_ANSWER_BYTES = 8 << 20


def docker_pool(
    limits: SandboxLimits = SandboxLimits(),  # noqa: B008  it is frozen
    *,
    image: str = IMAGE,
    runtime: str | None = None,
    preload: Sequence[str] = STDLIB,
    warm_up: str = "",
    max_open: int = 64,
    num_warm: int = 0,
) -> Pool:
    """A pool of sandboxes in containers of `image`; `runtime` may name another one, such as "runsc" (gVisor).

    The engine is the one that Docker's own environment variables name. Containers that a dead run left behind
    are removed first. Raises SandboxError when the engine or the image cannot be used.
    """
    backend = DockerBackend(limits, image=image, runtime=runtime, preload=preload, warm_up=warm_up)
    return Pool(backend, limits, max_open=max_open, num_warm=num_warm)


def connect() -> docker.DockerClient:
    """The engine that DOCKER_HOST names, or the one of this machine. Raises SandboxError."""
    try:
        return docker.DockerClient.from_env(timeout=int(START_SECONDS))
    except docker.errors.DockerException as error:
        raise SandboxError(f"the Docker engine cannot be used: {error}") from error


def this_process() -> str:
    """What no other process of any time is labelled with: host, pid and when it started."""
    return f"{socket.gethostname()}:{os.getpid()}:{started_at(str(os.getpid()))}"


def started_at(pid: str) -> str:
    """When a process started, in ticks since the machine did; "" for one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def code_digest() -> str:
    """A digest of the code that runs inside: an image built from other code is refused."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "inside").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class DockerBackend:
    """Containers of this process, idle ones kept for the next episode."""

    def __init__(
        self,
        limits: SandboxLimits,
        *,
        image: str,
        runtime: str | None,
        preload: Sequence[str],
        warm_up: str,
    ) -> None:
        self.tier = "docker" if runtime is None else f"docker ({runtime})"
        self._limits, self._image, self._runtime = inner_limits(limits), image, runtime
        self._config = {"preload": list(preload), "warm_up": warm_up, "limits": asdict(self._limits)}
        # gVisor has no Landlock: there its own kernel stands between an episode and the host's.
        self._config["gvisor"] = runtime == GVISOR
        self._config["max_tasks"] = limits.num_processes + NUM_OVERHEAD_PROCESSES if runtime == GVISOR else 0
        self._run = uuid.uuid4().hex
        self._idle: list[Container] = []
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._docker = connect()
            self._python = self._check_image()
            self._remove_leftovers()
        except (docker.errors.DockerException, OSError) as error:
            raise SandboxError(f"the Docker engine cannot be used: {error}") from error
        first = self.open(Ledger())
        first.close()

    def open(self, ledger: Ledger) -> DockerSlot:
        while True:
            with self._lock:
                container = self._idle.pop() if self._idle else None
            fresh = container is None
            container = container or self._start()
            try:
                container.ask({"operation": "open"}, ANSWER_SECONDS)
                return DockerSlot(self, container)
            except SandboxError:
                container.remove()
                if fresh:
                    raise
                ledger.restarted()

    def give_back(self, container: Container) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(container)
                return
        container.remove()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for container in idle:
            container.remove()
        try:
            self._remove({RUN_LABEL: self._run})
        finally:
            self._docker.close()

    def _check_image(self) -> str:
        """The interpreter's path in the image."""
        try:
            labels = self._docker.images.get(self._image).labels
        except docker.errors.ImageNotFound:
            raise SandboxError(
                f"the engine has no image {self._image!r}: build it with "
                "`python -m agent_sat.sandboxes.images.build`"
            ) from None
        if labels.get(CODE_LABEL) != code_digest():
            raise SandboxError(
                f"the image {self._image!r} holds code of another version: build it again with "
                "`python -m agent_sat.sandboxes.images.build`"
            )
        return labels[PYTHON_LABEL]

    def _remove_leftovers(self) -> None:
        """Containers of processes of this host that are no more."""
        for container in self._docker.containers.list(all=True, filters={"label": HOST_LABEL}):
            host, pid, started = container.labels.get(HOST_LABEL, "::").rsplit(":", 2)
            if host == socket.gethostname() and started != started_at(pid):
                self._discard(container)

    def _remove(self, label: dict[str, str]) -> None:
        filters: dict[str, str | list[str] | bool] = {
            "label": [f"{name}={value}" for name, value in label.items()]
        }
        for container in self._docker.containers.list(all=True, filters=filters):
            self._discard(container)

    def _discard(self, container: Any) -> None:
        try:
            container.remove(force=True)
        except docker.errors.APIError as error:
            if error.status_code not in (404, 409):  # gone, or on its way
                raise

    def _start(self) -> Container:
        api = self._docker.api
        try:
            created = api.create_container(
                self._image,
                [self._python, "-I", "-B", "-c", BOOTSTRAP, json.dumps(self._config)],
                stdin_open=True,
                user=f"{UID}:{UID}",
                working_dir="/work",
                labels={RUN_LABEL: self._run, HOST_LABEL: this_process()},
                environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"},
                host_config=self._walls(),
            )
            stream = api.attach_socket(created["Id"], {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            api.start(created["Id"])
        except (docker.errors.DockerException, OSError) as error:
            raise SandboxError(f"no new container: {error}") from error
        container = Container(self._docker, created["Id"], stream)
        try:
            container.receive(START_SECONDS)
        except SandboxError:
            container.remove()
            raise
        return container

    def _walls(self) -> dict[str, Any]:
        """What the engine is asked to hold a container to."""
        limits, gvisor = self._limits, self._runtime == GVISOR
        disk = f"rw,nosuid,nodev,size={limits.disk_mib}m,nr_inodes={MAX_INODES},mode=700,uid={UID},gid={UID}"
        num_processes = limits.num_processes + NUM_OVERHEAD_PROCESSES
        memory = (limits.memory_mib + OVERHEAD_MIB) << 20
        return self._docker.api.create_host_config(
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=num_processes + (GVISOR_THREADS if gvisor else 0),
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=1_000_000_000,
            tmpfs={"/work": disk, "/tmp": disk},
            ipc_mode="private",
            shm_size=f"{SHM_MIB}m",
            log_config=LogConfig(type="none"),
            runtime=self._runtime,
            auto_remove=True,
        )


class Container:
    """A running container and the stream to its slot program; one thread at a time."""

    def __init__(self, engine: docker.DockerClient, identity: str, stream: Any) -> None:
        self._engine, self._identity, self._stream = engine, identity, stream
        self._socket: socket.socket = getattr(stream, "_sock", stream)
        self._raw, self._buffer, self._errors = bytearray(), bytearray(), bytearray()

    def ask(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """The slot's answer. Raises SandboxError when it fails or does not come in time."""
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.sendall(wire.frame(json.dumps(request).encode()))
        except OSError as error:
            raise SandboxError(f"the container's stream failed: {error}") from error
        return self.receive(timeout_seconds)

    def receive(self, timeout_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        try:
            while (body := wire.take_frame(self._buffer, MAX_ANSWER_BYTES)) is None:
                self._read(deadline)
            told = json.loads(body)
        except (OSError, ValueError) as error:
            raise SandboxError(f"the container's stream failed: {error}") from error
        if "error" in told:
            raise SandboxError(f"{told['error']} {self._last_error()}".rstrip())
        return told

    def remove(self) -> None:
        self._stream.close()
        try:
            self._engine.api.remove_container(self._identity, force=True)
        except docker.errors.APIError as error:
            if error.status_code not in (404, 409):  # gone, or on its way
                raise SandboxError(f"a container could not be removed: {error}") from error

    def _last_error(self) -> str:
        """The last line that came on stderr, in brackets."""
        line = self._errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"({line})" if line else ""

    def _read(self, deadline: float) -> None:
        """Move what came on stdout to the buffer of frames. Raises OSError at the deadline or the end."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError("no answer in time")
        part = self._socket.recv(wire.REPLY_BYTES)
        if not part:
            raise ConnectionResetError(f"the container ended {self._last_error()}".rstrip())
        self._raw += part
        while len(self._raw) >= STREAM_HEADER.size:
            stream, length = STREAM_HEADER.unpack_from(self._raw)
            end = STREAM_HEADER.size + length
            if len(self._raw) < end:
                return
            into = self._buffer if stream == STDOUT_STREAM else self._errors
            into += self._raw[STREAM_HEADER.size : end]
            del self._errors[:-MAX_ERROR_BYTES]
            del self._raw[:end]


class DockerSlot:
    """One episode in a container."""

    def __init__(self, backend: DockerBackend, container: Container) -> None:
        self._backend, self._container = backend, container
        self._failed = False

    def run(self, code: str, timeout_seconds: float) -> Outcome:
        request = {"operation": "run", "code": code, "timeout_seconds": timeout_seconds}
        try:
            told = self._container.ask(request, timeout_seconds + GRACE_SECONDS + ANSWER_SECONDS)
            return Outcome(**told)
        except (SandboxError, TypeError) as error:
            self._failed = True
            return Outcome(status="infra", stderr=str(error))

    def calm(self) -> None:
        try:
            self._container.ask({"operation": "calm"}, ANSWER_SECONDS)
        except SandboxError:
            self._failed = True  # the next run will say so

    def close(self) -> None:
        """Reset the container for the next episode, or remove it where that fails."""
        try:
            if self._failed:
                raise SandboxError("the container failed")
            self._container.ask({"operation": "close"}, client.CLOSE_SECONDS + ANSWER_SECONDS)
        except SandboxError:
            self._container.remove()
        else:
            self._backend.give_back(self._container)
