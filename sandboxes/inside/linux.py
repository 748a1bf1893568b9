"""The Linux calls that Python does not wrap; each raises an OSError that names it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
# noatime, nodiratime and relatime, as statvfs tells them: a user namespace has to repeat them in a remount.
ATIME_FLAGS = {1024: 1 << 10, 2048: 1 << 11, 4096: 1 << 21}

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
NUM_CAPABILITY_BITS = 64


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def call(name: str, *arguments: object) -> int:
    """Call a libc function that answers -1 and errno on failure."""
    result = getattr(_libc(), name)(*arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    result = _libc().syscall(ctypes.c_long(number), *arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def size_t(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def prctl(option: int, argument: object = 0, extra: object = 0) -> int:
    return call("prctl", option, argument, extra, 0, 0)


def unshare(flags: int) -> None:
    call("unshare", flags)


def setns(descriptor: int, flags: int) -> None:
    call("setns", descriptor, flags)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    try:
        call("mount", *encoded, ctypes.c_ulong(flags), data.encode())
    except OSError as error:
        raise OSError(error.errno, f"mount {target}: {error.strerror}") from error


def bind_read_only(source: str, target: str) -> None:
    """Show `source` at `target`, read-only, without device files or set-uid programs."""
    mount(source, target, None, MS_BIND | MS_REC)
    told = os.statvfs(target).f_flag
    kept = told & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for shown, flag in ATIME_FLAGS.items():
        kept |= flag if told & shown else 0
    mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def pivot_into(root: str, old: str) -> None:
    """Make `root` the root folder and let go of everything that was above it; `old` is a folder in it."""
    os.chdir(root)
    call("pivot_root", b".", os.fsencode(old))
    os.chdir("/")
    call("umount2", os.fsencode("/" + old), MNT_DETACH)
    os.rmdir("/" + old)


def write_text(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def map_ids(pid: int | str, ids: list[tuple[int, int]], *, groups: bool) -> None:
    """Write (inside, outside) ids of a new user namespace; without `groups`, setgroups stays denied."""
    if not groups:
        write_text(f"/proc/{pid}/setgroups", "deny")
    lines = "".join(f"{inside} {outside} 1\n" for inside, outside in ids)
    write_text(f"/proc/{pid}/uid_map", lines)
    write_text(f"/proc/{pid}/gid_map", lines)


def become_subreaper() -> None:
    """Orphans below this process become its children; an old gVisor has that for process 1 alone."""
    with contextlib.suppress(OSError):
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def drop_bounding_set() -> None:
    """No capability through any later exec; where this is not allowed, no_new_privs has to do."""
    libc = _libc()
    for capability in range(NUM_CAPABILITY_BITS):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_capabilities() -> None:
    """No capability now, and none to be had through any later exec."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_bounding_set()
    call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
