"""One pool a backend for the whole session: starting them is what takes time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from agent_sat.errors import SandboxError
from agent_sat.sandboxes import Pool, PooledSandbox, local_pool
from agent_sat.types import SandboxLimits, ToolResult

LIMITS = SandboxLimits(
    timeout_seconds=0.6, memory_mib=256, num_processes=24, output_bytes=2000, file_mib=4, episode_seconds=20.0
)
BACKENDS = ["local", pytest.param("docker", marks=pytest.mark.docker)]


def open_docker_pool() -> Pool:
    """A pool of containers; without an engine that is a failure under CI and a skip elsewhere."""
    from agent_sat.sandboxes.docker import docker_pool

    try:
        return docker_pool(LIMITS, max_open=16)
    except SandboxError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must have a Docker engine (.ci/docker-engine starts one): {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[str, Pool]]:
    """The pools opened so far, by backend."""
    opened: dict[str, Pool] = {}
    with ExitStack() as stack:
        stack.callback(lambda: [pool.close() for pool in opened.values()])
        yield opened


@pytest.fixture(params=BACKENDS)
def pool(request: pytest.FixtureRequest, pools: dict[str, Pool]) -> Pool:
    return open_pool(request.param, pools)


def open_pool(backend: str, pools: dict[str, Pool]) -> Pool:
    if backend not in pools:
        pools[backend] = local_pool(LIMITS, tier="process") if backend == "local" else open_docker_pool()
    return pools[backend]


@pytest.fixture
def sandbox(pool: Pool) -> Iterator[PooledSandbox]:
    with pool.open() as sandbox:
        yield sandbox


def run_fairly(sandbox: PooledSandbox, code: str, timeout_seconds: float | None = None) -> ToolResult:
    """Run `code` again while this machine is too busy to let it run: `infra` is then the right answer."""
    result = sandbox.run(code, timeout_seconds=timeout_seconds)
    for _ in range(8):
        if result.status != "infra":
            break
        result = sandbox.run(code, timeout_seconds=timeout_seconds)
    return result
