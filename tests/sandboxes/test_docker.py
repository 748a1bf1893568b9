import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sat.errors import SandboxError
from agent_sat.sandboxes import Pool
from tests.sandboxes.conftest import LIMITS, open_pool

pytestmark = pytest.mark.docker


@pytest.fixture
def pool(pools: dict[str, Pool]) -> Iterator[Pool]:
    yield open_pool("docker", pools)


def containers(engine_user: Pool) -> list[dict[str, object]]:
    from agent_sat.sandboxes.docker import HOST_LABEL, connect

    engine = connect()
    try:
        return engine.api.containers(all=True, filters={"label": HOST_LABEL})
    finally:
        engine.close()


def test_a_container_is_reset_and_used_again(pool: Pool) -> None:
    with pool.open() as sandbox:
        sandbox.run("open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')")
    before = len(containers(pool))
    for _ in range(3):
        with pool.open() as sandbox:
            assert sandbox.run("import os; os.listdir('/tmp') + os.listdir('/dev/shm')").stdout == "[]\n"
    assert len(containers(pool)) == before


def test_containers_have_the_walls_that_were_asked_for(pool: Pool) -> None:
    from agent_sat.sandboxes.docker import connect

    with pool.open():
        engine = connect()
        host = engine.api.inspect_container(str(containers(pool)[0]["Id"]))["HostConfig"]
        engine.close()
    assert host["NetworkMode"] == "none" and host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"] and host["IpcMode"] == "private"
    assert host["NanoCpus"] == 1_000_000_000 and host["PidsLimit"] == LIMITS.num_processes + 2
    assert host["Memory"] == host["MemorySwap"] == (LIMITS.memory_mib + 128) << 20
    assert "nr_inodes" in host["Tmpfs"]["/work"]


def test_the_loss_of_a_container_is_infra_and_then_mended(pool: Pool) -> None:
    from agent_sat.sandboxes.docker import connect

    with pool.open() as sandbox:
        slot = sandbox._slot
        engine = connect()
        engine.api.kill(slot._container._identity)  # pyright: ignore
        engine.close()
        assert sandbox.run("1").status == "infra"
        assert sandbox.run("1").stdout == "1\n"


def test_the_sudden_death_of_the_host_ends_its_containers(pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal
        from agent_sat.sandboxes.docker import docker_pool
        sandbox = docker_pool().open()
        print(sandbox.run("1").stdout.strip(), os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid = ended.stdout.split()[1]
    end = time.monotonic() + 20
    while any(str(c["Labels"]).count(f":{pid}:") for c in containers(pool)):
        assert time.monotonic() < end, "a container outlived its host"
        time.sleep(0.1)


def test_containers_of_a_dead_run_are_removed_at_the_next_start(pool: Pool) -> None:
    import socket

    from agent_sat.sandboxes.docker import HOST_LABEL, IMAGE, connect, docker_pool

    engine = connect()
    dead = f"{socket.gethostname()}:{2**22 + 1}:5"  # no process can have this number
    left = engine.api.create_container(IMAGE, ["true"], labels={HOST_LABEL: dead})["Id"]
    docker_pool(LIMITS).close()
    with pytest.raises(Exception, match="No such container"):
        engine.api.inspect_container(left)
    engine.close()


def test_an_image_that_is_not_there_is_told_with_the_way_to_build_it(pool: Pool) -> None:
    from agent_sat.sandboxes.docker import docker_pool

    with pytest.raises(SandboxError, match=r"no image 'nowhere'.*images\.build"):
        docker_pool(LIMITS, image="nowhere")
