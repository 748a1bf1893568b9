"""What one episode is held to, and how it is confined: plain records that travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
UID = 65532  # the id a snippet sees; also its real one where the pool runs as root
MAX_FILES, MAX_INODES, MAX_SIGNALS = 128, 4096, 256
SHM_MIB, SHM_INODES = 8, 64
GRACE_SECONDS = 0.5  # between the interrupt, which keeps state, and the kill, which does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Hard limits of one episode."""

    memory_mib: int  # of all its processes
    num_processes: int
    file_mib: int  # of one file, and of what one stream may hold
    disk_mib: int  # of /work, and again of /tmp
    cpu_seconds: int  # of each process
    output_bytes: int  # shown of each stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """Which protections an episode puts on itself; each one that fails ends it before any snippet."""

    namespaces: bool  # the fork server is process 1 of its own namespaces
    filters: bool  # Landlock and seccomp
    gvisor: bool  # the kernel below is gVisor's, which has no Landlock and fewer limits
    root: bool  # the fork server has user id 0, and an episode takes UID
    max_tasks: int  # of the user id an episode runs under; 0 where something else bounds them
    readable: tuple[str, ...]  # what Landlock lets an episode read and execute, beside its own folders
    writable: tuple[str, ...]  # folders beside its work folder that it may write


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is told of one run; `status` is one of agent_sat.types.ToolStatus."""

    status: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    truncated: bool = False
