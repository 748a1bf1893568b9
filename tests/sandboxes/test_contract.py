"""What every backend promises."""

import asyncio
import itertools
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_sat.sandboxes import Pool, PooledSandbox
from tests.sandboxes.conftest import run_fairly


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
    assert 0.6 <= result.seconds < 4
    assert sandbox.run("x").stdout == "5\n"


def test_what_ignores_the_interrupt_is_killed_and_the_next_run_is_fresh(sandbox: PooledSandbox) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun')\nwhile True: pass"
    result = run_fairly(sandbox, deaf)
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
        ("x = bytearray(600 << 20)", "memory"),
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
    assert run_fairly(sandbox, code).status == status
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
    assert int(result.stdout.split()[1]) < 24


def test_a_forged_reply_neither_ends_nor_shifts_a_later_run(sandbox: PooledSandbox) -> None:
    forge = "import os, struct\nb = b'0' * 16 + b'infra'\n"
    sandbox.run(forge + "n = os.write(3, (struct.pack('>I', len(b)) + b) * 3)")
    assert sandbox.run("print('mine')").stdout == "mine\n"
    assert sandbox.run("n = os.write(3, b'\\xff' * 100)").status in ("ok", "exited", "timeout")
    assert sandbox.run("print('again')").stdout in ("again\n", "")
    assert sandbox.run("print('at last')").stdout == "at last\n"


def test_a_reply_in_drops_does_not_put_off_the_deadline(sandbox: PooledSandbox) -> None:
    drip = """
        import os, signal, struct, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(3, struct.pack('>I', 60000))
        while True:
            os.write(3, b'x')
            time.sleep(0.005)
    """
    result = run_fairly(sandbox, textwrap.dedent(drip))
    assert result.status == "timeout" and result.seconds < 4


def test_many_threads_have_their_own_sandboxes(pool: Pool) -> None:
    def episode(number: int) -> str:
        with pool.open() as sandbox:
            sandbox.run(f"x = {number}")
            return "".join(sandbox.run("x += 1; print(x)").stdout for _ in range(3))

    with ThreadPoolExecutor(12) as threads:
        outputs = list(threads.map(episode, range(12)))
    assert outputs == [f"{n + 1}\n{n + 2}\n{n + 3}\n" for n in range(12)]


def test_a_hidden_thread_or_child_is_frozen_between_runs_and_goes_on_with_the_next(pool: Pool) -> None:
    code = """
        import os, threading, time
        def burn():
            while True: pass
        threading.Thread(target=burn, daemon=True).start()
        if os.fork() == 0: burn()
    """
    with pool.open() as sandbox:
        sandbox.run(textwrap.dedent(code))
        for _ in range(3):  # as the pool's caretaker does every second
            sandbox.calm()
            time.sleep(0.4)
        before = float(sandbox.run("sum(os.times()[:2])").stdout)
        sandbox.calm()
        time.sleep(0.4)
        sandbox.calm()
        time.sleep(1.0)
        after = float(sandbox.run("sum(os.times()[:2])").stdout)
        assert after - before < 0.9  # 1.4 s have gone by, and the thread had the first 0.4 of them
        assert sandbox.run("1 + 1").stdout == "2\n"


def test_memory_is_counted_over_all_processes_of_an_episode(sandbox: PooledSandbox) -> None:
    code = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                b = bytearray(120 << 20)
                time.sleep(20)
        time.sleep(20)
    """
    assert run_fairly(sandbox, textwrap.dedent(code), 5.0).status == "memory"


def test_a_snippet_that_sleeps_too_long_is_to_blame_itself(sandbox: PooledSandbox) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(9)"
    assert run_fairly(sandbox, code).status == "timeout"


def test_an_episode_has_a_folder_of_its_own_that_is_empty_for_the_next(pool: Pool) -> None:
    with pool.open() as one, pool.open() as other:
        assert one.run("open('mine', 'w').write('x'); import os; os.listdir('.')").stdout.endswith(
            "['mine']\n"
        )
        assert other.run("import os; os.listdir('.')").stdout == "[]\n"
    with pool.open() as later:
        assert later.run("import os; os.listdir('.') + os.listdir(os.environ['TMPDIR'])").stdout == "[]\n"


def test_an_episode_runs_as_nobody_without_network_or_privileges(sandbox: PooledSandbox) -> None:
    result = sandbox.run("import os, socket\nprint(os.getuid())\nsocket.socket()")
    assert result.stdout == "65532\n" and result.stderr.endswith("Operation not permitted\n")
    told = sandbox.run(
        "[x for x in open('/proc/self/status') if x[:4] in ('CapE', 'CapB', 'NoNe', 'Secc')]"
    ).stdout
    assert "CapEff:\\t0000000000000000" in told and "CapBnd:\\t0000000000000000" in told
    assert "NoNewPrivs:\\t1" in told and "Seccomp:\\t2" in told


def test_the_time_of_an_episode_is_bounded_over_its_runs(pool: Pool) -> None:
    with pool.open() as sandbox:
        sandbox._left_seconds = 0.3
        assert sandbox.run("import time; time.sleep(5)").seconds < 0.6
        assert sandbox.run("1").status == "timeout"
        assert "used up its time" in sandbox.run("1").stderr


def test_two_identical_episodes_do_not_share_random_numbers(pool: Pool) -> None:
    with pool.open() as one, pool.open() as other:
        code = "import random; random.random()"
        assert one.run(code).stdout != other.run(code).stdout


def test_a_hanging_tool_does_not_hold_up_an_event_loop(pool: Pool) -> None:
    async def heartbeat(sandbox: PooledSandbox) -> list[float]:
        hang = asyncio.create_task(asyncio.to_thread(sandbox.run, "while True: pass"))
        beats = [time.monotonic()]
        while not hang.done():
            await asyncio.sleep(0.01)
            beats.append(time.monotonic())
        assert (await hang).status == "interrupted"
        return beats

    with pool.open() as sandbox:
        beats = asyncio.run(heartbeat(sandbox))
    assert len(beats) > 20
    assert max(b - a for a, b in itertools.pairwise(beats)) < 0.3


def test_a_snippet_is_compiled_as_plain_python_is(sandbox: PooledSandbox) -> None:
    assert sandbox.run("def f(x: int): ...\nf.__annotations__['x'] is int").stdout == "True\n"
    assert sandbox.run("  1 + 1").stdout == "2\n"  # models often indent a lone expression
    assert "unexpected indent" in sandbox.run("  x = 1").stderr
    assert sandbox.run("x = 3; x").stdout == "3\n"
    assert "line 1\n    1 +\n" in sandbox.run("1 +").stderr
