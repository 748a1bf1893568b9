"""Tries what the sandboxes need on this machine, for `agent-sat doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from agent_sat.errors import SandboxError
from agent_sat.sandboxes.inside import landlock, seccomp
from agent_sat.sandboxes.launch import Tier
from agent_sat.sandboxes.local import TIERS, LocalBackend
from agent_sat.types import SandboxLimits

ADVICE = {
    "jail": "allow unprivileged user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on "
    "Ubuntu, user.max_user_namespaces above 0 elsewhere), or use the Docker backend",
    "confined": "use a kernel from 5.13 on with Landlock among its security modules, and an interpreter that "
    "other users may read: as root, episodes run under another id",
    "process": "use an interpreter that other users may read: as root, episodes run under another id",
    "docker": "start an engine, name it in DOCKER_HOST, run `python -m agent_sat.sandboxes.images.build`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Whether one way to run snippets works here."""

    name: str  # a tier of the local backend, or "docker"
    works: bool
    reason: str  # why it does not
    advice: str  # how to get it


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What this machine offers for sandboxes."""

    findings: tuple[Finding, ...]
    landlock_abi: int  # 0: none
    system_calls_known: bool  # there is a seccomp table for this machine
    root: bool

    @property
    def tier(self) -> str:
        """The strongest tier of the local backend that works, or ""."""
        return next(
            (finding.name for finding in self.findings if finding.works and finding.name in TIERS), ""
        )


def probe(limits: SandboxLimits = SandboxLimits(), *, docker: bool = True) -> Probe:  # noqa: B008  it is frozen
    """Try every tier with a real episode and the Docker engine with a real container; leaves nothing."""
    findings = [try_backend(tier, limits) for tier in TIERS]
    if docker:
        findings.append(try_backend("docker", limits))
    return Probe(
        findings=tuple(findings),
        landlock_abi=landlock.abi(),
        system_calls_known=os.uname().machine in seccomp.ARCHITECTURES,
        root=os.geteuid() == 0,
    )


def try_backend(name: Tier | Literal["docker"], limits: SandboxLimits) -> Finding:
    try:
        if name == "docker":
            from agent_sat.sandboxes.docker import IMAGE, DockerBackend

            DockerBackend(limits, image=IMAGE, runtime=None, preload=(), warm_up="").close()
        else:
            LocalBackend(limits, tiers=(name,), preload=(), warm_up="").close()
    except SandboxError as error:
        return Finding(name=name, works=False, reason=str(error), advice=ADVICE[name])
    return Finding(name=name, works=True, reason="", advice="")
