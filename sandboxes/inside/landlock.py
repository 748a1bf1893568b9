"""Landlock: what files a process and all it starts may touch, and whom it may signal."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from . import linux

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
VERSION_FLAG, PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
FIRST_RIGHTS, REFER = (1 << 13) - 1, 1 << 13
NET_TCP = 0b11  # bind and connect, without any rule that allows a port
SCOPE_ABSTRACT_SOCKET, SCOPE_SIGNAL = 0b01, 0b10
ABI_TRUNCATE, ABI_REFER, ABI_NET, ABI_IOCTL, ABI_SCOPE = 3, 2, 4, 5, 6


def abi() -> int:
    """The version the kernel offers, 0 for none."""
    try:
        return linux.syscall("landlock_create_ruleset", CREATE_RULESET, None, linux.size_t(0), VERSION_FLAG)
    except OSError:
        return 0


def handled_rights(version: int) -> int:
    rights = FIRST_RIGHTS
    for since, right in ((ABI_REFER, REFER), (ABI_TRUNCATE, TRUNCATE), (ABI_IOCTL, IOCTL_DEV)):
        rights |= right if version >= since else 0
    return rights


def restrict(version: int, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Deny everything but reading below `readable`, changing below `writable`, and using `devices`.

    Paths that do not exist are left out. Raises OSError where the kernel has no Landlock.
    """
    rights = handled_rights(version)
    net = NET_TCP if version >= ABI_NET else 0
    scope = SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL if version >= ABI_SCOPE else 0
    size = 24 if version >= ABI_SCOPE else 16 if version >= ABI_NET else 8
    attributes = struct.pack("QQQ", rights, net, scope)[:size]
    ruleset = linux.syscall("landlock_create_ruleset", CREATE_RULESET, attributes, linux.size_t(size), 0)
    read = EXECUTE | READ_FILE | READ_DIR
    write = rights & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)
    wanted = [(path, read) for path in readable] + [(path, write) for path in writable]
    wanted += [(path, WRITE_FILE | READ_FILE | TRUNCATE) for path in devices]
    for path, allowed in wanted:
        try:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        possible = rights if stat.S_ISDIR(os.fstat(beneath).st_mode) else rights & FILE_RIGHTS
        rule = struct.pack("=Qi", allowed & possible, beneath)
        linux.syscall("landlock_add_rule", ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
        os.close(beneath)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.syscall("landlock_restrict_self", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
