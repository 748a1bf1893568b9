"""What a sandboxed episode and turn cost, beside a fresh `python -c` and a bare fork server in the same run.

`python benchmarks/sandbox.py [--repeats 5] [--episodes 100] [--backends python fork local docker] [--soak N]`
The Docker backend needs an engine with the image: `.ci/docker-engine PYTHON benchmarks/sandbox.py` has both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_sat.sandboxes import Pool, local_pool
from agent_sat.sandboxes.inside import wire
from agent_sat.sandboxes.ledger import percentile
from agent_sat.types import SandboxLimits

SEED = 0
PRELOAD = ("fractions", "math", "random", "numpy", "sympy")
WARM_UP = "import sympy; x = sympy.Symbol('x'); sympy.solve(x*x - 2, x); sympy.integrate(x, x)"
LIMITS = SandboxLimits(timeout_seconds=20.0, episode_seconds=1e6)
MIXED = (
    "print(sum(range(100)))",
    "from fractions import Fraction\nFraction(1, 3) + Fraction(1, 6)",
    "[n for n in range(2, 400) if all(n % d for d in range(2, int(n ** 0.5) + 1))][-1]",
    "import sympy\nx = sympy.Symbol('x')\nsympy.solve(x**2 - 5*x + 6, x)",
    "import numpy as np\nnp.linalg.solve(np.array([[2.0, 1], [1, 3]]), np.array([1.0, 2]))",
    "undefined_name + 1",
)
TURNS_OF_AN_EPISODE = 10
TURN = "print(4821*377+51)"
# Forks and executes, with no confinement and no limits: what the sandbox is measured against.
BARE_SERVER = """
import contextlib, gc, importlib, io, os, signal, socket, struct, sys
for name in sys.argv[2].split(","): importlib.import_module(name)
exec(sys.argv[3], {})
gc.collect(); gc.freeze(); signal.signal(signal.SIGCHLD, signal.SIG_IGN)
control = socket.socket(fileno=int(sys.argv[1])); control.send(b"ready")
def read(d, n):
    parts = b""
    while len(parts) < n:
        part = os.read(d, n - len(parts))
        if not part: os._exit(0)
        parts += part
    return parts
while True:
    message, descriptors, _, _ = socket.recv_fds(control, 10, 1)
    if not message: sys.exit()
    d = descriptors[0]
    if os.fork(): os.close(d); continue
    control.close(); names = {}
    while True:
        code = read(d, struct.unpack(">I", read(d, 4))[0]); out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try: exec(code, names)
            except Exception as error: print(error)
        text = out.getvalue().encode(); os.write(d, struct.pack(">I", len(text)) + text)
"""


class Session(Protocol):
    """An episode of any of the ways that are compared."""

    def run(self, code: str) -> object: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    name: str
    open: Callable[[], Session]
    cpu_is_below: bool  # all its processes are descendants of this one
    num_open: int = 64  # episodes at once in the mixed set


class FreshPython:
    def run(self, code: str) -> object:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    def close(self) -> None: ...


class BareServer:
    """Host's end of BARE_SERVER."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [sys.executable, "-c", BARE_SERVER, str(theirs.fileno()), ",".join(PRELOAD), WARM_UP]
        self._process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        theirs.close()
        assert self._control.recv(10) == b"ready"

    def open(self) -> BareSession:
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [b"new"], [theirs.fileno()])
        theirs.close()
        session = BareSession(ours)
        session.run("")
        return session

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class BareSession:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def run(self, code: str) -> object:
        self._channel.sendall(wire.frame(code.encode()))
        return wire.read_frame(self._channel.fileno())

    def close(self) -> None:
        self._channel.close()


@contextmanager
def ways(names: list[str]) -> Iterator[list[Way]]:
    with ExitStack() as stack:
        found = []
        for name in names:
            if name == "python":
                found.append(Way(name="python -c", open=FreshPython, cpu_is_below=True))
            elif name == "fork":
                server = BareServer()
                stack.callback(server.close)
                found.append(Way(name="bare fork server", open=server.open, cpu_is_below=True))
            else:
                pool = stack.enter_context(open_pool(name))
                local = name == "local"
                described = f"{name} ({pool.tier})"
                num_open = 64 if local else 8  # a container holds tens of MiB
                found.append(Way(name=described, open=pool.open, cpu_is_below=local, num_open=num_open))
        yield found


def open_pool(name: str) -> Pool:
    if name == "local":
        return local_pool(LIMITS, tier="process", preload=PRELOAD, warm_up=WARM_UP)
    from agent_sat.sandboxes.docker import docker_pool

    return docker_pool(LIMITS, preload=PRELOAD, warm_up=WARM_UP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One repeat of one way; times in milliseconds."""

    open_p50: float
    open_p99: float
    open_cpu: float
    turn_p50: float
    turn_p99: float
    turn_cpu: float
    fresh_mib: float
    used_mib: float
    mixed_per_second: float


def measure(way: Way, num_episodes: int, rng: random.Random) -> Measured:
    fresh = way.name == "python -c"
    opens, turns = [], []
    cpu = tree_cpu_seconds()
    for _ in range(num_episodes):
        started = time.perf_counter()
        session = way.open()
        opens.append(time.perf_counter() - started)
        session.close()
    open_cpu = (tree_cpu_seconds() - cpu) / num_episodes
    session = way.open()
    num_turns = num_episodes if fresh else 20 * num_episodes
    session.run(TURN)
    cpu = tree_cpu_seconds()
    for _ in range(num_turns):
        started = time.perf_counter()
        session.run(TURN)
        turns.append(time.perf_counter() - started)
    turn_cpu = (tree_cpu_seconds() - cpu) / num_turns
    session.close()
    fresh_mib, used_mib = (0.0, 0.0) if fresh or not way.cpu_is_below else memory(way)
    return Measured(
        open_p50=1e3 * percentile(sorted(opens), 0.5),
        open_p99=1e3 * percentile(sorted(opens), 0.99),
        open_cpu=1e3 * open_cpu if way.cpu_is_below else float("nan"),
        turn_p50=1e3 * percentile(sorted(turns), 0.5),
        turn_p99=1e3 * percentile(sorted(turns), 0.99),
        turn_cpu=1e3 * turn_cpu if way.cpu_is_below else float("nan"),
        fresh_mib=fresh_mib,
        used_mib=used_mib,
        mixed_per_second=float("nan") if fresh else mixed(way, rng),
    )


def mixed(way: Way, rng: random.Random) -> float:
    """Snippets a second with `way.num_open` episodes at once, each opened, run for some turns and closed."""
    plans = [[rng.choice(MIXED) for _ in range(TURNS_OF_AN_EPISODE)] for _ in range(2 * way.num_open)]

    def episode(codes: list[str]) -> None:
        session = way.open()
        for code in codes:
            session.run(code)
        session.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(way.num_open) as threads:
        list(threads.map(episode, plans))
    return len(plans) * TURNS_OF_AN_EPISODE / (time.perf_counter() - started)


def memory(way: Way) -> tuple[float, float]:
    """Proportional memory that an open episode adds, fresh and after each mixed snippet, in MiB."""
    count = 16
    sessions = [way.open() for _ in range(count)]
    before = tree_pss_mib()
    more = [way.open() for _ in range(count)]
    fresh = (tree_pss_mib() - before) / count
    for session in more:
        for code in MIXED:
            session.run(code)
    used = (tree_pss_mib() - before) / count
    for session in sessions + more:
        session.close()
    return fresh, used


def tree() -> list[int]:
    """This process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found


def tree_cpu_seconds() -> float:
    """CPU of this process and all below it, those that were waited for included."""
    ticks = 0
    for pid in tree():
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_pss_mib() -> float:
    kib = 0
    for pid in tree():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


def soak(backend: str, num_episodes: int, rng: random.Random) -> dict[str, float]:
    """Many short episodes; what grew meanwhile, and the slowest turns."""

    def episode(codes: list[str]) -> list[float]:
        took = []
        with pool.open() as sandbox:
            for code in codes:
                took.append(sandbox.run(code).seconds)
        return took

    with open_pool(backend) as pool, ThreadPoolExecutor(8) as threads:
        plans = ([rng.choice(MIXED) for _ in range(3)] for _ in range(num_episodes))
        list(threads.map(episode, [list(MIXED)] * 64))  # settle
        before = (len(tree()), len(os.listdir("/proc/self/fd")), tree_pss_mib())
        seconds = sorted(took for taken in threads.map(episode, plans) for took in taken)
        after = (len(tree()), len(os.listdir("/proc/self/fd")), tree_pss_mib())
        outcomes = {name: value for name, value in pool.metrics().items() if "seconds" not in name}
    return {
        "episodes": num_episodes,
        "processes_grown": after[0] - before[0],
        "descriptors_grown": after[1] - before[1],
        "mib_grown": round(after[2] - before[2], 2),
        "turn_ms_p50": round(1e3 * percentile(seconds, 0.5), 3),
        "turn_ms_p99": round(1e3 * percentile(seconds, 0.99), 3),
        "turn_ms_p99.9": round(1e3 * percentile(seconds, 0.999), 3),
    } | outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--backends", nargs="*", default=["python", "fork", "local"])
    parser.add_argument(
        "--soak", type=int, default=0, help="episodes of a soak of the last backend, and nothing else"
    )
    arguments = parser.parse_args()
    rng = random.Random(SEED)
    print(
        f"seed {SEED}, {os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
    if arguments.soak:
        print(json.dumps(soak(arguments.backends[-1], arguments.soak, rng)))
        return
    with ways(arguments.backends) as compared:
        for way in compared:
            repeats = [measure(way, arguments.episodes, rng) for _ in range(arguments.repeats)]
            print(f"\n{way.name}: median of {arguments.repeats} (lowest to highest)")
            for field in Measured.__slots__:
                values = [getattr(repeat, field) for repeat in repeats]
                print(
                    f"  {field:18} {statistics.median(values):9.3f}  ({min(values):.3f} to {max(values):.3f})"
                )


if __name__ == "__main__":
    main()
