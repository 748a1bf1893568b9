import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from agent_sat.errors import SandboxError
from agent_sat.sandboxes import Pool, local_pool, probe
from tests.sandboxes.conftest import LIMITS


def num_processes(marker: str) -> int:
    """Living processes whose command line holds `marker`."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                count += marker in (entry / "cmdline").read_text(errors="replace")
            except OSError:
                continue
    return count


def wait_until(condition: object, seconds: float = 5.0) -> bool:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_background_child_does_not_delay_the_answer_and_does_not_survive(pool: Pool) -> None:
    with pool.open() as sandbox:
        shell = "echo done; (sleep 31.07 &); exit 0"
        code = f"import subprocess\nprint(subprocess.run({shell!r}, shell=True).returncode)"
        result = sandbox.run(code)
        assert (result.status, result.stdout) == ("ok", "done\n0\n")
        assert num_processes("31.07") == 1
    assert num_processes("31.07") == 0


def test_no_descriptor_is_left_behind(pool: Pool) -> None:
    def episode() -> None:
        with pool.open() as sandbox:
            sandbox.run("exit()")
            sandbox.run("1")

    episode()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        episode()
    assert len(os.listdir("/proc/self/fd")) <= before  # other tests' own may be collected meanwhile


def test_a_closed_sandbox_or_pool_refuses() -> None:
    pool = local_pool(LIMITS, tier="process")
    sandbox = pool.open()
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("1")
    pool.close()
    pool.close()
    with pytest.raises(SandboxError, match="closed"):
        pool.open()


def test_a_pool_made_in_a_thread_outlives_the_thread() -> None:
    pools: list[Pool] = []
    maker = threading.Thread(target=lambda: pools.append(local_pool(LIMITS, tier="process")))
    maker.start()
    maker.join()
    with pools[0] as pool, pool.open() as sandbox:
        time.sleep(0.1)
        assert sandbox.run("1").stdout == "1\n"


def fork_servers() -> set[int]:
    """The outermost processes of this process's fork servers."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {int(pid) for pid in children if "zygote" in Path(f"/proc/{pid}/cmdline").read_text()}


def test_the_loss_of_the_fork_server_is_infra_and_then_mended() -> None:
    before = fork_servers()
    with local_pool(LIMITS, tier="process") as pool, pool.open() as sandbox:
        (lost,) = fork_servers() - before
        os.kill(lost, signal.SIGKILL)
        time.sleep(0.2)
        assert sandbox.run("1").status == "infra"
        assert sandbox.run("1").stdout == "1\n"
        assert pool.metrics()["sandbox/restarts"] == 1


def test_nothing_survives_the_sudden_death_of_the_host(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal
        from agent_sat.sandboxes import Pool, local_pool, probe
        sandbox = local_pool(tier="process").open()
        print(sandbox.run("import subprocess; p = subprocess.Popen(['sleep', '33.07'])").status, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.stdout == "ok\n", ended.stderr
    assert wait_until(lambda: num_processes("33.07") == 0)


def test_a_module_that_cannot_be_preloaded_is_told() -> None:
    with pytest.raises(SandboxError, match="no_such_module"):
        local_pool(LIMITS, tier="process", preload=("no_such_module",))


def test_the_bare_name_is_refused() -> None:
    root = str(Path(__file__).parents[2])
    for name in ("sandboxes", "envs"):
        ended = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            env={"PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert f"agent_sat.{name}" in ended.stderr and ended.returncode == 1


def test_a_tier_that_cannot_be_had_is_told_with_the_weaker_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_sat.sandboxes import launch

    def refuse(*arguments: object) -> None:
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr("agent_sat.sandboxes.local.Zygote", refuse)
    with pytest.raises(
        SandboxError, match=r"'jail' cannot be had.*not permitted.*by name: confined, process"
    ):
        local_pool(LIMITS, tier="jail")
    assert launch.interpreter().exists()


def test_a_new_fork_server_takes_over_and_the_old_one_ends_with_its_last_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent_sat.sandboxes.local.FORKS_OF_A_ZYGOTE", 3)
    before = fork_servers()
    with local_pool(LIMITS, tier="process") as pool:
        sandboxes = [pool.open() for _ in range(4)]
        assert len(fork_servers() - before) == 2
        for sandbox in sandboxes:
            assert sandbox.run("1").stdout == "1\n"
            sandbox.close()
        assert len(fork_servers() - before) == 1
    assert fork_servers() == before


def test_the_probe_names_a_tier_that_a_pool_then_really_has() -> None:
    found = probe(LIMITS, docker=False)
    with local_pool(LIMITS, tier="process") as pool:
        assert found.tier == pool.tier
    assert all(finding.works or (finding.reason and finding.advice) for finding in found.findings)


def test_preloaded_numpy_draws_other_numbers_in_every_episode() -> None:
    with (
        local_pool(LIMITS, tier="process", preload=("numpy",)) as pool,
        pool.open() as one,
        pool.open() as other,
    ):
        code = "import numpy as np\nprint(np.random.random(), int(np.arange(4).sum()))"
        first, second = one.run(code).stdout.split(), other.run(code).stdout.split()
        assert first[1] == second[1] == "6" and first[0] != second[0]
