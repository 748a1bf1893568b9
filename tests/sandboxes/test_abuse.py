"""Every snippet in abuse/ against every backend, several at a time and beside a neighbour."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_sat.sandboxes import Pool
from agent_sat.types import ToolResult
from tests.sandboxes.conftest import BACKENDS, LIMITS, open_pool, run_fairly

ABUSE = sorted((Path(__file__).parent / "abuse").glob("*.py"))
SECRET = "s3cr3t-canary-7f3a"
AT_ONCE = 6
MAX_SECONDS = 8.0  # of a run limited to 0.6 s and half a second of grace, six at once on two cores
CLEANUP_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What a snippet must not reach."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    def fill_in(self, snippet: str) -> str:
        tokens = {
            "CANARY_PID": self.process.pid,
            "PORT": self.port,
            "CANARY_DIR": self.folder,
            "SECRET": SECRET,
        }
        for token, value in tokens.items():
            snippet = snippet.replace("{{" + token + "}}", str(value))
        return snippet

    def unharmed(self) -> bool:
        names = {entry.name for entry in self.folder.iterdir()}
        text = (self.folder / "secret.txt").read_text()
        return self.process.poll() is None and names == {"secret.txt", "socket"} and text == SECRET


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canary]:
    folder = Path("/var/tmp") / f"agent-sat-canary-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "secret.txt").write_text(SECRET)
    secret = os.open(folder / "secret.txt", os.O_RDONLY)
    os.set_inheritable(secret, True)
    process = subprocess.Popen(["sleep", "600"], env={"SECRET": SECRET}, start_new_session=True)
    path, abstract, tcp, udp = (
        *(socket.socket(socket.AF_UNIX) for _ in range(2)),
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    )
    path.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    abstract.bind("\0canary")
    port = tcp.getsockname()[1]
    udp.bind(("127.0.0.1", port))
    threading.Thread(target=answer_datagrams, args=(udp,), daemon=True).start()
    for server in (path, abstract, tcp):
        server.listen()
        threading.Thread(target=answer_connections, args=(server,), daemon=True).start()
    yield Canary(process=process, port=port, folder=folder)
    process.kill()
    process.wait()
    os.close(secret)
    for server in (path, abstract, tcp, udp):
        server.close()
    for name in ("secret.txt", "socket"):
        (folder / name).unlink()
    folder.rmdir()


def answer_connections(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
            connection.sendall(b"canary")
            connection.close()
        except OSError:
            return


def answer_datagrams(server: socket.socket) -> None:
    while True:
        try:
            _, sender = server.recvfrom(100)
            server.sendto(b"canary", sender)
        except OSError:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one snippet."""

    result: ToolResult
    same_episode: ToolResult  # the next turn
    next_episode: ToolResult
    close_seconds: float


def judge(pool: Pool, code: str) -> Verdict:
    with pool.open() as sandbox:
        result = sandbox.run(code)
        same_episode = run_fairly(sandbox, "40 + 2")
        started = time.monotonic()
    close_seconds = time.monotonic() - started
    with pool.open() as sandbox:
        look = "import os\nprint(sorted(os.listdir('.')), 40 + 2, 'result' in globals())"
        next_episode = run_fairly(sandbox, look)
    return Verdict(
        result=result, same_episode=same_episode, next_episode=next_episode, close_seconds=close_seconds
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """All verdicts of one backend, and what was left when all was over."""

    verdicts: dict[str, Verdict]
    neighbour: ToolResult
    processes_before: int
    processes_after: int


@pytest.fixture(scope="module", params=BACKENDS)
def campaign(request: pytest.FixtureRequest, pools: dict[str, Pool], canary: Canary) -> Campaign:
    pool = open_pool(request.param, pools)
    count = count_local if request.param == "local" else count_in_containers
    with pool.open() as neighbour:
        neighbour.run("open('neighbour.txt', 'w').write('mine'); own = [1, 2, 3]")
        before = count()
        codes = {path.stem: canary.fill_in(path.read_text()) for path in ABUSE}
        with ThreadPoolExecutor(AT_ONCE) as threads:
            judged = threads.map(lambda code: judge(pool, code), codes.values())
            verdicts = dict(zip(codes, judged, strict=True))
        end = time.monotonic() + CLEANUP_SECONDS
        while (after := count()) > before and time.monotonic() < end:
            time.sleep(0.1)
        answer = neighbour.run("own, open('neighbour.txt').read()")
    return Campaign(verdicts=verdicts, neighbour=answer, processes_before=before, processes_after=after)


def count_local() -> int:
    """Processes, zombies too, below this one that the fork servers answer for."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, pending = 0, [os.getpid()]
    while pending:
        children = parents.get(pending.pop(), [])
        found += len(children)
        pending += children
    return found


def count_in_containers() -> int:
    """Processes in idle and busy containers beyond the two that each of them always has."""
    from agent_sat.sandboxes.docker import HOST_LABEL, connect

    engine = connect()
    try:
        listed = engine.containers.list(filters={"label": HOST_LABEL})
        return sum(len(container.top()["Processes"]) - 2 for container in listed)
    finally:
        engine.close()


@pytest.mark.parametrize("name", [path.stem for path in ABUSE])
def test_a_snippet_breaks_nothing(campaign: Campaign, name: str) -> None:
    verdict = campaign.verdicts[name]
    result = verdict.result
    shown = result.stdout + result.stderr
    assert not [line for line in shown.splitlines() if line.startswith("BREACH")], shown
    assert SECRET not in shown
    assert result.seconds < MAX_SECONDS and verdict.close_seconds < MAX_SECONDS
    for text in (result.stdout, result.stderr):
        assert len(text) <= LIMITS.output_bytes + 100
    assert verdict.next_episode.stdout == "[] 42 False\n", verdict.next_episode
    assert verdict.same_episode.status != "infra" and verdict.same_episode.seconds < MAX_SECONDS


def test_there_are_at_least_sixty_snippets_and_each_says_what_it_must_not_do() -> None:
    assert len(ABUSE) >= 60
    assert all(path.read_text().startswith("# MUST NOT ") for path in ABUSE)


def test_the_neighbour_never_noticed(campaign: Campaign) -> None:
    assert campaign.neighbour.stdout == "([1, 2, 3], 'mine')\n", campaign.neighbour


def test_no_process_and_no_zombie_is_left(campaign: Campaign) -> None:
    assert campaign.processes_after <= campaign.processes_before


def test_the_canary_is_alive_and_its_files_are_as_they_were(campaign: Campaign, canary: Canary) -> None:
    assert canary.unharmed()


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("18_segfault", {"crashed"}),
        ("21_os_exit", {"exited"}),
        ("13_loop_uninterruptible", {"timeout", "interrupted"}),
        ("14_ignore_signals", {"timeout"}),
        ("10_stdout_flood", {"output_limit", "interrupted", "timeout"}),
        ("61_memory_in_children", {"memory", "timeout", "interrupted"}),
        ("68_abort", {"crashed"}),
        ("78_forged_verdicts", {"error"}),
        ("87_huge_power", {"interrupted", "timeout"}),
    ],
)
def test_the_outcome_is_named_for_what_it_was(campaign: Campaign, name: str, statuses: set[str]) -> None:
    status = campaign.verdicts[name].result.status
    if status == "infra":
        pytest.skip("the machine was too busy to let this snippet run")
    assert status in statuses


@pytest.mark.parametrize("name", ["33_net_tcp", "37_env_secrets", "69_unix_sockets", "95_links_out"])
def test_the_snippets_see_a_breach_where_nothing_confines_them(
    canary: Canary, tmp_path: Path, name: str
) -> None:
    code = canary.fill_in((Path(__file__).parent / "abuse" / f"{name}.py").read_text())
    bare = subprocess.run(
        [sys.executable, "-c", code],
        env={"SECRET": SECRET},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "BREACH" in bare.stdout
