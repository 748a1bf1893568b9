"""Turns a fresh fork of the zygote into the confined interpreter of one episode."""

from __future__ import annotations

import os
import resource
import signal

from . import landlock, linux, repl, seccomp
from .limits import MAX_FILES, MAX_INODES, MAX_SIGNALS, MIB, SHM_INODES, SHM_MIB, UID, Confinement, Limits

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def become(
    descriptors: list[int], work: str, limits: Limits, confinement: Confinement, filter_program: bytes
) -> None:
    """Confine this process and serve on `descriptors` (channel, stdout, stderr) with `work` as its folder."""
    os.setsid()
    # A fork server in a container is not dumpable; with that, /proc/self would belong to root.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    # Orphans stay below this process, where their memory and CPU are counted.
    linux.become_subreaper()
    if confinement.namespaces:
        own_mounts(work, limits, confinement)
        own_ids(limits, confinement)
    elif confinement.root:
        take_ids()
        os.scandir(os.path.dirname(os.__file__)).close()  # raises where this id may not read the interpreter
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    own_descriptors(descriptors)
    os.umask(0o077)
    os.chdir(work)
    set_limits(limits, confinement)
    linux.prctl(linux.PR_SET_NAME, b"python")
    if confinement.filters:
        readable = [*confinement.readable, "/proc" if confinement.namespaces else "/proc/self"]
        landlock.restrict(landlock.abi(), readable, [work, *confinement.writable], DEVICES)
        seccomp.install(filter_program)
    linux.drop_capabilities()
    temporary = "/tmp" if confinement.namespaces else work
    os.environ.clear()
    os.environ.update(ENVIRONMENT, HOME=work, TMPDIR=temporary)
    repl.serve()


def own_mounts(work: str, limits: Limits, confinement: Confinement) -> None:
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    owner = f",uid={UID},gid={UID}" if confinement.root else ""
    disk = f"size={limits.disk_mib}m,nr_inodes={MAX_INODES},mode=700{owner}"
    linux.mount("tmpfs", work, "tmpfs", flags, disk)
    linux.mount("tmpfs", "/tmp", "tmpfs", flags, disk)
    linux.mount(
        "tmpfs", "/dev/shm", "tmpfs", flags, f"size={SHM_MIB}m,nr_inodes={SHM_INODES},mode=700{owner}"
    )
    linux.mount("proc", "/proc", "proc", flags | linux.MS_NOEXEC)


def own_ids(limits: Limits, confinement: Confinement) -> None:
    """A user namespace that owns none of the mounts, and in which the process limit is this episode's own."""
    if confinement.root:
        take_ids()
    outside = UID if confinement.root else 0
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.num_processes, limits.num_processes))
    linux.unshare(linux.CLONE_NEWUSER)
    linux.map_ids("self", [(UID, outside)], groups=False)


def take_ids() -> None:
    linux.drop_bounding_set()
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root and the id maps cannot be written


def own_descriptors(descriptors: list[int]) -> None:
    """Null, stdout, stderr, channel at 0 to 3 and nothing else."""
    channel, stdout, stderr = descriptors
    null = os.open("/dev/null", os.O_RDWR)
    kept = [os.dup(descriptor) for descriptor in (null, stdout, stderr, channel)]
    if min(kept) <= repl.CHANNEL:
        raise OSError("descriptors 0 to 3 of the fork server are not all in use")
    for target, descriptor in enumerate(kept):
        os.dup2(descriptor, target)
    os.closerange(repl.CHANNEL + 1, max(kept) + 1)


def set_limits(limits: Limits, confinement: Confinement) -> None:
    with open("/proc/self/statm", "rb") as statm:
        own_pages = int(statm.read().split()[0])
    hard = {
        resource.RLIMIT_AS: own_pages * resource.getpagesize() + limits.memory_mib * MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: limits.file_mib * MIB,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_NPROC: confinement.max_tasks or resource.RLIM_INFINITY,
        resource.RLIMIT_SIGPENDING: MAX_SIGNALS,
    }
    for kind, value in hard.items():
        _, ceiling = resource.getrlimit(kind)
        finite = [bound for bound in (value, ceiling) if bound != resource.RLIM_INFINITY]
        allowed = min(finite, default=resource.RLIM_INFINITY)
        try:
            resource.setrlimit(kind, (allowed, allowed))
        except (OSError, ValueError):
            if not confinement.gvisor:  # which holds some of these fixed
                raise


def call_filter(confinement: Confinement) -> bytes:
    """The seccomp program for episodes of this fork server, made once; empty without filters."""
    if not confinement.filters:
        return b""
    return seccomp.program(
        os.uname().machine,
        process_namespace=confinement.namespaces,
        signal_scope=landlock.abi() >= landlock.ABI_SCOPE,
    )
