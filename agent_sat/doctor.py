"""What a machine offers for training: found by trying, with the next step where something is missing."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LEAST_SHM_GIB = 1.0
LEAST_DISK_GIB = 5.0
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at."""

    name: str
    works: bool
    found: str
    advice: str = ""  # empty where it works


def examine(*, docker: bool) -> list[Finding]:
    """Everything, in the order a run needs it. Starts and ends real sandboxes; leaves nothing."""
    return [*packages(), machine(), *folders(), accelerators(), *sandboxes(docker=docker)]


def packages() -> list[Finding]:
    needed = {
        "torch": "",
        "transformers": "",
        "ray": "",
        "sglang": "the in-process engine needs none; it is for GPUs",
    }
    return [package(name, advice) for name, advice in needed.items()]


def package(name: str, advice: str) -> Finding:
    try:
        return Finding(name=name, works=True, found=version(name))
    except PackageNotFoundError:
        missing = advice or f"pip install -c constraints.txt {name}"
        return Finding(name=name, works=False, found="not installed", advice=missing)


def machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0))
    advice = "" if cores > 1 else "engine and learner want a core each; on one they take turns"
    return Finding(
        name="cores, memory", works=cores > 1, found=f"{cores} cores, {memory:.0f} GiB", advice=advice
    )


def folders() -> list[Finding]:
    return [
        folder(
            Path("/dev/shm"), LEAST_SHM_GIB, "Ray keeps objects there; in a container give it --shm-size=2g"
        ),
        folder(
            Path.cwd(), LEAST_DISK_GIB, "token records and checkpoints go below run_dir; choose another one"
        ),
    ]


def folder(path: Path, least_gib: float, advice: str) -> Finding:
    if not path.is_dir():
        return Finding(name=str(path), works=False, found="not there", advice=advice)
    free = shutil.disk_usage(path).free / GIB
    works = free >= least_gib
    return Finding(name=str(path), works=works, found=f"{free:.1f} GiB free", advice="" if works else advice)


def accelerators() -> Finding:
    import torch

    found = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    advice = "" if found else "small models train on the CPU; for others install a CUDA build of torch"
    return Finding(name="GPUs", works=bool(found), found=", ".join(found) or "none", advice=advice)


def sandboxes(*, docker: bool) -> list[Finding]:
    from agent_sat.sandboxes.doctor import probe

    return [
        Finding(
            name=f"sandbox {one.name}",
            works=one.works,
            found="works" if one.works else one.reason,
            advice=one.advice,
        )
        for one in probe(docker=docker).findings
    ]
