import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_sat.errors import SandboxError
from agent_sat.sandboxes import Pool, PooledSandbox, local_pool
from agent_sat.types import SandboxLimits

LIMITS = SandboxLimits(timeout_seconds=0.5, memory_mib=200, num_processes=16, output_bytes=2000, file_mib=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with local_pool(LIMITS, tier="process") as pool:
        yield pool


@pytest.fixture
def sandbox(pool: Pool) -> Iterator[PooledSandbox]:
    with pool.open() as sandbox:
        yield sandbox


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


def test_state_is_kept_over_the_runs_of_one_sandbox_and_unknown_to_the_next(pool: Pool) -> None:
    with pool.open() as one, pool.open() as other:
        one.run("x = 20\ndef twice(y): return 2 * y")
        assert one.run("print(twice(x) + 2)").stdout == "42\n"
        assert other.run("x").status == "error"


def test_the_last_expression_is_shown_unless_it_is_none(sandbox: PooledSandbox) -> None:
    assert sandbox.run("1\n'a'").stdout == "'a'\n"
    assert sandbox.run("None").stdout == ""
    assert sandbox.run("if True:\n  5").stdout == ""
    assert sandbox.run("").status == "ok"


def test_a_traceback_shows_the_snippets_lines_only(sandbox: PooledSandbox) -> None:
    result = sandbox.run("import json\ndef f():\n    return json.loads('{')\nf()")
    assert result.status == "error"
    assert 'File "<turn 1>", line 4, in <module>\n    f()' in result.stderr
    assert 'File "<turn 1>", line 3, in f' in result.stderr
    assert result.stderr.count("File ") == 2
    assert result.stderr.endswith("(char 1)\n")


def test_the_causes_of_an_error_are_shown_too(sandbox: PooledSandbox) -> None:
    result = sandbox.run("try:\n    1/0\nexcept Exception as e:\n    raise ValueError('two') from e")
    assert "ZeroDivisionError" in result.stderr and result.stderr.endswith("ValueError: two\n")


def test_an_endless_loop_is_interrupted_and_keeps_its_state(sandbox: PooledSandbox) -> None:
    result = sandbox.run("x = 5\nprint('begun')\nwhile True: pass")
    assert (result.status, result.stdout) == ("interrupted", "begun\n")
    assert 0.5 <= result.seconds < 3
    assert sandbox.run("x").stdout == "5\n"


def test_what_ignores_the_interrupt_is_killed_and_the_next_run_is_fresh(sandbox: PooledSandbox) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun')\nwhile True: pass"
    result = sandbox.run(deaf)
    assert (result.status, result.stdout) == ("timeout", "begun\n")
    assert result.seconds < 4
    assert sandbox.run("1 + 1").stdout == "2\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("exit()", "exited"),
        ("import sys; sys.exit('bye')", "exited"),
        ("import os; os._exit(0)", "exited"),
        ("import ctypes; ctypes.string_at(1)", "crashed"),
        ("x = bytearray(400 << 20)", "memory"),
        ("while True: print('a' * 4000)", "output_limit"),
        ("def f(): return f()\nf()", "error"),
        ("raise KeyboardInterrupt", "interrupted"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "error"),
        ("import os; os.closerange(3, 100)", "exited"),
        ("'\\ud800'", "ok"),
        ("print('\\ud800')", "ok"),
        ("x = '\ud800'", "ok"),
    ],
)
def test_every_end_has_its_status(sandbox: PooledSandbox, code: str, status: str) -> None:
    assert sandbox.run(code).status == status
    assert sandbox.run("2 + 2").stdout == "4\n"


def test_long_output_shows_head_and_tail_and_says_so(sandbox: PooledSandbox) -> None:
    result = sandbox.run("print('start' + 'é' * 5000 + 'end')")
    assert result.truncated
    assert result.stdout.startswith("starté") and result.stdout.endswith("éend\n")
    assert len(result.stdout.encode()) < 2100 and "\ufffd" not in result.stdout
    assert "bytes cut" in result.stdout
    assert not sandbox.run("print('short')").truncated


def test_invalid_utf8_is_replaced_and_stderr_is_apart(sandbox: PooledSandbox) -> None:
    result = sandbox.run("import os\nn = os.write(1, b'\\xf0ok')\nn = os.write(2, b'why')")
    assert (result.stdout, result.stderr) == ("\ufffdok", "why")


def test_the_number_of_processes_is_bounded(sandbox: PooledSandbox) -> None:
    code = """
        import os, time
        n = 0
        try:
            for _ in range(100):
                if os.fork() == 0:
                    time.sleep(30)
                n += 1
        except OSError:
            print('stopped')
        print(n)
    """
    result = sandbox.run(textwrap.dedent(code))
    assert result.stdout.startswith("stopped")
    assert int(result.stdout.split()[1]) < 16


def test_a_forged_reply_neither_ends_nor_shifts_a_later_run(sandbox: PooledSandbox) -> None:
    forge = 'import os, struct\nb = b\'{"nonce": "0000000000000000", "status": "ok"}\'\n'
    sandbox.run(forge + "n = os.write(3, (struct.pack('>I', len(b)) + b) * 3)")
    assert sandbox.run("print('mine')").stdout == "mine\n"
    assert sandbox.run("n = os.write(3, b'\\xff' * 100)").status in ("ok", "exited", "timeout")
    assert sandbox.run("print('again')").stdout in ("again\n", "")
    assert sandbox.run("print('at last')").stdout == "at last\n"


def test_a_background_child_does_not_delay_the_answer_and_does_not_survive(pool: Pool) -> None:
    with pool.open() as sandbox:
        shell = "echo done; (sleep 31.07 &); exit 0"
        code = f"import subprocess\nprint(subprocess.run({shell!r}, shell=True).returncode)"
        result = sandbox.run(code)
        assert (result.status, result.stdout) == ("ok", "done\n0\n")
        assert num_processes("31.07") == 1
    assert num_processes("31.07") == 0


def test_many_threads_have_their_own_sandboxes(pool: Pool) -> None:
    def episode(number: int) -> str:
        with pool.open() as sandbox:
            sandbox.run(f"x = {number}")
            return "".join(sandbox.run("x += 1; print(x)").stdout for _ in range(3))

    with ThreadPoolExecutor(32) as threads:
        outputs = list(threads.map(episode, range(32)))
    assert outputs == [f"{n + 1}\n{n + 2}\n{n + 3}\n" for n in range(32)]


def test_no_descriptor_is_left_behind(pool: Pool) -> None:
    def episode() -> None:
        with pool.open() as sandbox:
            sandbox.run("exit()")
            sandbox.run("1")

    episode()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        episode()
    assert len(os.listdir("/proc/self/fd")) == before


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
        from agent_sat.sandboxes import Pool, local_pool
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
