"""Seccomp: which system calls a process and all it starts may make.

A list of what is denied, because snippets may use all of Python and numpy; it holds what reaches past an
episode (other processes, namespaces, the network, kernel objects) or past the memory limits.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import linux

# Name -> number on x86-64 and on aarch64; None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the network: no socket of any family (AF_VSOCK knows no namespace); socketpair stays
    "socket": (41, 198),
    # memory that no limit of a process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "mlock": (149, 228),
    "mlock2": (325, 284),
    "mlockall": (151, 230),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "vmsplice": (278, 75),
    # large kernel surfaces
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "landlock_create_ruleset": (444, 444),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
}
# Without a process namespace one kill of the group must reach all that an episode started.
GROUP_CALLS = {"setsid": (112, 157), "setpgid": (109, 154)}
# Without a process namespace and without Landlock's scope for signals these would reach the trainer itself.
SIGNAL_CALLS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
# Calls whose first argument, a process, must be 0: the caller itself.
OWN_ONLY = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}

CLONE_NEW_ANY = 0x7E020000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
CLONE3 = 435
X32_BIT = 0x40000000
EPERM, ENOSYS = 1, 38

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST, AT_SECOND = 0, 4, 16, 24  # of struct seccomp_data
PR_SET_SECCOMP, MODE_FILTER = 22, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    audit: int
    column: int  # of the tables above
    clone: int
    ioctl: int


ARCHITECTURES = {
    "x86_64": Architecture(audit=0xC000003E, column=0, clone=56, ioctl=16),
    "aarch64": Architecture(audit=0xC00000B7, column=1, clone=220, ioctl=29),
}


def program(machine: str, *, process_namespace: bool, signal_scope: bool) -> bytes:
    """The filter for one architecture, as an array of struct sock_filter.

    Raises OSError for an architecture that has no table.
    """
    try:
        architecture = ARCHITECTURES[machine]
    except KeyError:
        raise OSError(ENOSYS, f"no table of system calls for {machine!r}") from None
    tables: list[Mapping[str, tuple[int | None, int | None]]] = [DENIED]
    if not process_namespace:
        tables.append(GROUP_CALLS)
        if not signal_scope:
            tables.append(SIGNAL_CALLS)
    denied = numbers((pair for table in tables for pair in table.values()), architecture)
    code = [
        step(LOAD, AT_ARCHITECTURE),
        step(JUMP_EQUAL, architecture.audit, yes=1),
        step(RETURN, KILL_PROCESS),  # the calls of another architecture, such as int 0x80
        step(LOAD, AT_NUMBER),
        step(JUMP_AT_LEAST, X32_BIT, no=1),
        step(RETURN, ERRNO | ENOSYS),
        step(JUMP_EQUAL, CLONE3, no=1),  # its flags are behind a pointer; libc falls back to clone
        step(RETURN, ERRNO | ENOSYS),
    ]
    for number in denied:
        code += [step(JUMP_EQUAL, number, no=1), step(RETURN, ERRNO | EPERM)]
    code += argument_check(architecture.clone, AT_FIRST, [step(JUMP_ANY_BIT, CLONE_NEW_ANY, no=1)])
    code += argument_check(
        architecture.ioctl,
        AT_SECOND,
        [step(JUMP_EQUAL, TIOCSTI, yes=1), step(JUMP_EQUAL, TIOCLINUX, no=1)],
    )
    for number in numbers(OWN_ONLY.values(), architecture):
        code += argument_check(number, AT_FIRST, [step(JUMP_EQUAL, 0, yes=1)])
    return b"".join([*code, step(RETURN, ALLOW)])


def argument_check(number: int, at: int, tests: list[bytes]) -> list[bytes]:
    """For call `number`: load the low word of an argument; the call is denied where `tests` fall through."""
    body = [step(LOAD, at), *tests, step(RETURN, ERRNO | EPERM), step(RETURN, ALLOW)]
    return [step(JUMP_EQUAL, number, no=len(body)), *body]


def numbers(pairs: Iterable[tuple[int | None, int | None]], architecture: Architecture) -> list[int]:
    return sorted(number for pair in pairs if (number := pair[architecture.column]) is not None)


def step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def install(filter_program: bytes) -> None:
    """Put the filter on this thread for good; no_new_privs must be set."""
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    count = len(filter_program) // len(step(0, 0))
    linux.prctl(PR_SET_SECCOMP, MODE_FILTER, struct.pack("HxxxxxxQ", count, ctypes.addressof(buffer)))
