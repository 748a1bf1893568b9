"""The parts that run inside, each by itself."""

import os
import signal
import struct
import subprocess
import sys
import time

import pytest

from agent_sat.sandboxes.inside import client, landlock, seccomp, vitals, wire
from agent_sat.sandboxes.inside.limits import Limits
from agent_sat.sandboxes.inside.output import Output, head_and_tail
from agent_sat.types import STATE_LOST

LIMITS = Limits(memory_mib=64, num_processes=4, file_mib=1, disk_mib=1, cpu_seconds=1, output_bytes=10)
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


def verdict(program: bytes, *, number: int, audit: int = X86, first: int = 0, second: int = 0) -> int:
    """What a filter says of one call: the five instructions that it uses, carried out as the kernel would."""
    data = struct.pack("<IIQ6Q", number, audit, 0, first, second, 0, 0, 0, 0)
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        operation, yes, no, value = code[at]
        at += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
            continue
        hit = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
            operation
        ]
        at += yes if hit else no


@pytest.fixture
def x86() -> bytes:
    return seccomp.program("x86_64", process_namespace=True, signal_scope=True)


def test_the_filter_allows_what_python_needs_and_denies_the_rest(x86: bytes) -> None:
    read, write, mmap, fork, execve, kill = 0, 1, 9, 57, 59, 62
    assert {verdict(x86, number=n) for n in (read, write, mmap, fork, execve, kill)} == {ALLOW}
    socket, ptrace, mount, memfd_create = 41, 101, 165, 319
    assert {verdict(x86, number=n) for n in (socket, ptrace, mount, memfd_create)} == {EPERM}


def test_the_filter_looks_at_arguments(x86: bytes) -> None:
    clone, ioctl, prlimit = 56, 16, 302
    assert verdict(x86, number=clone, first=0x00010F00) == ALLOW  # a thread
    assert verdict(x86, number=clone, first=0x10000011) == EPERM  # CLONE_NEWUSER
    assert verdict(x86, number=435) == ENOSYS  # clone3
    assert verdict(x86, number=ioctl, second=0x5413) == ALLOW  # the size of a window
    assert verdict(x86, number=ioctl, second=0x5412) == EPERM  # typing into a terminal
    assert verdict(x86, number=ioctl, second=0x541C) == EPERM
    assert verdict(x86, number=prlimit, first=0) == ALLOW
    assert verdict(x86, number=prlimit, first=77) == EPERM


def test_calls_of_another_architecture_do_not_slip_through(x86: bytes) -> None:
    assert verdict(x86, number=0, audit=0x40000003) == KILL  # int 0x80
    assert verdict(x86, number=0x40000000) == ENOSYS  # x32
    arm = seccomp.program("aarch64", process_namespace=True, signal_scope=True)
    assert verdict(arm, number=198, audit=ARM) == EPERM  # socket
    assert verdict(arm, number=63, audit=ARM) == ALLOW  # read
    assert verdict(arm, number=220, audit=ARM, first=0x10000011) == EPERM  # clone
    assert verdict(arm, number=198) == KILL
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64", process_namespace=True, signal_scope=True)


def test_without_a_process_namespace_groups_and_if_need_be_signals_are_closed() -> None:
    setsid, kill = 112, 62
    scoped = seccomp.program("x86_64", process_namespace=False, signal_scope=True)
    assert (verdict(scoped, number=setsid), verdict(scoped, number=kill)) == (EPERM, ALLOW)
    unscoped = seccomp.program("x86_64", process_namespace=False, signal_scope=False)
    assert (verdict(unscoped, number=setsid), verdict(unscoped, number=kill)) == (EPERM, EPERM)


def test_the_table_of_this_machine_agrees_with_its_kernel_headers() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the header is that of x86-64")
    try:
        with open("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", encoding="ascii") as file:
            words = [line.split() for line in file if line.startswith("#define __NR_")]
    except FileNotFoundError:
        pytest.skip("no kernel headers here")
    known = {name.removeprefix("__NR_"): int(number) for _, name, number in words}
    tables = seccomp.DENIED | seccomp.GROUP_CALLS | seccomp.SIGNAL_CALLS | seccomp.OWN_ONLY
    assert {name: x86 for name, (x86, _) in tables.items() if name in known and known[name] != x86} == {}


def test_landlock_handles_what_its_version_knows() -> None:
    assert landlock.handled_rights(1) == 0x1FFF
    assert landlock.handled_rights(3) == 0x7FFF
    assert landlock.handled_rights(7) == 0xFFFF


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    buffer, out = bytearray(), []
    for byte in wire.frame(b"one") + wire.frame(b"") + wire.frame(b"three"):
        buffer.append(byte)
        while (body := wire.take_frame(buffer)) is not None:
            out.append(body)
    assert out == [b"one", b"", b"three"] and not buffer


def test_a_frame_that_is_too_long_is_refused_before_it_is_there() -> None:
    with pytest.raises(ValueError, match="4294967295 bytes"):
        wire.take_frame(bytearray(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    ("head", "tail", "shown"),
    [
        (b"ab", b"yz", "ab\n... 5 bytes cut ...\nyz"),
        ("aé".encode()[:-1], b"yz", "a\n... 6 bytes cut ...\nyz"),
        (b"ab", "éz".encode()[1:], "ab\n... 6 bytes cut ...\nz"),
        ("a\N{GRINNING FACE}".encode()[:-1], "\N{GRINNING FACE}z".encode()[3:], "a\n... 9 bytes cut ...\nz"),
        ("aé".encode(), b"yz", "aé\n... 5 bytes cut ...\nyz"),
        (b"a\xff", b"\xffz", "a\ufffd\n... 5 bytes cut ...\n\ufffdz"),
    ],
)
def test_a_cut_falls_between_characters(head: bytes, tail: bytes, shown: str) -> None:
    assert head_and_tail(head, tail, 5) == shown


def memory_file(*parts: bytes) -> int:
    descriptor = os.memfd_create("test")
    for part in parts:
        os.write(descriptor, part)
    return descriptor


def test_output_is_taken_once_and_only_what_is_new() -> None:
    descriptor = memory_file(b"first")
    out = Output(descriptor, LIMITS)
    assert out.take().text == "first"
    assert out.take().text == ""
    os.write(descriptor, b"second")
    assert out.take().text == "second"
    os.write(descriptor, b"0123456789abc")
    cut = out.take()
    assert (cut.text, cut.cut, cut.full) == ("01234\n... 3 bytes cut ...\n89abc", True, False)


def test_output_that_reached_the_limit_says_so_and_is_emptied() -> None:
    descriptor = memory_file(b"x" * (1 << 20))
    assert Output(descriptor, LIMITS).take().full
    assert os.fstat(descriptor).st_size == 0


def test_a_file_that_was_cut_short_by_the_snippet_is_no_trouble() -> None:
    descriptor = memory_file(b"first")
    out = Output(descriptor, LIMITS)
    out.take()
    os.ftruncate(descriptor, 0)
    assert out.take().text == ""


@pytest.mark.parametrize(
    ("wait_status", "status"),
    [
        (0 << 8, "exited"),
        (3 << 8, "exited"),
        (signal.SIGSEGV, "crashed"),
        (signal.SIGXCPU, "timeout"),
        (signal.SIGKILL, "memory"),
    ],
)
def test_the_kernel_tells_how_a_process_ended(wait_status: int, status: str) -> None:
    assert client.judge_end(wait_status) == status


@pytest.mark.parametrize(
    ("cpu", "waited", "starved"),
    [
        (0.1, 4.0, True),  # ready to run, and hardly ever let
        (0.0, 0.0, False),  # asleep
        (4.9, 0.1, False),  # busy
        (9.0, 4.0, False),  # its own children had the CPUs
        (1.2, 2.6, True),
        (1.3, 2.6, False),
    ],
)
def test_a_run_was_starved_if_it_waited_for_a_cpu_that_nobody_of_it_had(
    cpu: float, waited: float, starved: bool
) -> None:
    assert vitals.starved(5.0, cpu, waited) is starved


def test_vitals_count_a_tree_of_processes() -> None:
    code = "import os, time; held = b'x' * (30 << 20); os.fork(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        end = time.monotonic() + 10
        while len((seen := vitals.read(process.pid)).pids) < 2:
            assert time.monotonic() < end
        for pid in reversed(seen.pids):
            os.kill(pid, signal.SIGKILL)
    assert seen.pids[0] == process.pid and len(seen.pids) == 2
    assert seen.private_bytes > 30 << 20
    assert vitals.read(process.pid) == vitals.NOTHING


def test_both_sides_know_the_same_statuses_for_a_lost_state() -> None:
    assert set(client.STATE_LOST) == STATE_LOST
