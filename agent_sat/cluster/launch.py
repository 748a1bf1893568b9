"""Starts a run's actors on a Ray cluster, or on one made for the occasion, and ends them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray

from agent_sat.cluster.in_process import Parts
from agent_sat.cluster.parts import Worker, build_engine
from agent_sat.cluster.remote import Host, RemoteEngine, RemoteLearner, RemoteRollouts, answer
from agent_sat.config import Config
from agent_sat.errors import AgentSatError, ConfigError
from agent_sat.log.run import RunDirectory
from agent_sat.loop import timeout
from agent_sat.train.learner import PolicyLearner

CONNECT_SECONDS = 5
START_SECONDS = 120
CLOSE_SECONDS = 10
MANY = 1000  # calls an actor may have open at once: every open episode awaits one


@asynccontextmanager
async def on_ray(config: Config, run: RunDirectory | None) -> AsyncIterator[Parts]:
    """Engine, workers and learner as actors. Raises ConfigError if the cluster is too small or not there."""
    connect(config)
    try:
        engine_host, learner_host = host(config.engine.threads), host(config.train.threads)
        worker_hosts = [host(0) for _ in range(config.rollout.num_workers)]
        engine = RemoteEngine(engine_host)
        starting = [
            ("the engine", engine_host.build.remote(build_engine, config)),
            ("the learner", learner_host.build.remote(PolicyLearner, config, run)),
            *(("a worker", one.build.remote(Worker, config, engine)) for one in worker_hosts),
        ]
        async with timeout(START_SECONDS, "starting engine, learner and workers on the cluster"):
            await asyncio.gather(*(answer(ready, who) for who, ready in starting))
        rollouts = RemoteRollouts(worker_hosts)
        yield Parts(engine=engine, rollouts=rollouts, learner=RemoteLearner(learner_host))
        with suppress(TimeoutError, AgentSatError):  # the run is over; what is left ends with its process
            async with asyncio.timeout(CLOSE_SECONDS):
                await rollouts.close()
                await engine.close()
    finally:
        ray.shutdown()


def host(num_threads: int) -> Any:
    """An actor with its own count of threads, which is also its claim on the cluster's cores."""
    threads = {"OMP_NUM_THREADS": str(max(1, num_threads)), "TOKENIZERS_PARALLELISM": "false"}
    options = {"num_cpus": num_threads, "max_concurrency": MANY, "runtime_env": {"env_vars": threads}}
    return ray.remote(Host).options(**options).remote()


def connect(config: Config) -> None:
    """Join the configured cluster, or start one that ends with this process and reports to nobody."""
    needed = config.engine.threads + config.train.threads
    if config.cluster.address is not None:
        join(config.cluster.address)
        found = int(ray.cluster_resources().get("CPU", 0))
        if found < needed:
            ray.shutdown()
            raise ConfigError(
                f"the cluster has {found} CPUs, this run needs {needed} (engine.threads "
                f"{config.engine.threads} + train.threads {config.train.threads}); lower them or add nodes"
            )
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=max(needed, config.cluster.num_cpus or os.cpu_count() or 1),
        object_store_memory=config.cluster.object_store_mib * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def join(address: str) -> None:
    """Connect to a running cluster; one that is not there is found out in seconds, not in Ray's own minutes."""
    host_name, _, port = address.removeprefix("ray://").partition(":")
    try:
        if port:
            socket.create_connection((host_name, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, ValueError) as error:
        raise ConfigError(
            f"cluster.address {address!r}: no Ray cluster answers there ({error}); start one with "
            "`ray start --head`, or leave the key out to have one started"
        ) from error
