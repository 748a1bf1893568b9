"""The run directory: where each record lies, and how it stays whole through crashes and resumption."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from agent_sat.errors import ConfigError

State = Literal["running", "finished", "interrupted", "failed"]
PACKAGES = ("agent-sat", "torch", "transformers", "ray", "numpy", "polars", "pydantic", "gymnasium", "wandb")
STEP_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The names of everything a run leaves on disk."""

    path: Path

    @staticmethod
    def create(path: str | os.PathLike[str]) -> RunDirectory:
        """A new run directory. Raises ConfigError unless `path` is absent, an empty writable folder, or one whose
        run ended before it left a step or a checkpoint.
        """
        run = RunDirectory(Path(path))
        if run.path.is_dir() and any(run.path.iterdir()) and not run.never_began():
            resume = (
                f"continue it with `agent-sat train --resume {run.path}`, or " if run.config.exists() else ""
            )
            raise ConfigError(
                f"run_dir {run.path} is not empty: {resume}choose a run_dir that does not exist yet"
            )
        try:
            for part in (run.tokens, run.episodes, run.checkpoints):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir {run.path} cannot be created: {error}; choose a writable path"
            ) from error
        return run

    @staticmethod
    def open(path: str | os.PathLike[str]) -> RunDirectory:
        """An existing run directory. Raises ConfigError where there is none, naming the runs beside it."""
        run = RunDirectory(Path(path))
        if run.config.is_file():
            return run
        parent = run.path.parent
        near = sorted(str(found.parent) for found in parent.glob("*/config.toml")) if parent.is_dir() else []
        hint = (
            f"runs beside it: {', '.join(near[:8])}" if near else "start one with `agent-sat train RUN.toml`"
        )
        raise ConfigError(f"{run.path} is no run directory (it holds no config.toml); {hint}")

    def never_began(self) -> bool:
        """Whether a run was started here and left nothing worth keeping."""
        lines = any(path.exists() and path.stat().st_size for path in (self.metrics, self.evaluations))
        return self.config.is_file() and not lines and not any(self.checkpoints.glob("step_*"))

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def tokens_of(self, step: int) -> Path:
        return self.tokens / f"step_{step:06d}.parquet"

    def episodes_of(self, step: int) -> Path:
        return self.episodes / f"step_{step:06d}.jsonl"

    def checkpoint_of(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def begin(self, *, seed: int, from_step: int = 0, accelerators: Sequence[str] = ()) -> str:
        """Open a session in the manifest and give the run's id, the same through every resumption."""
        manifest = self.read_manifest()
        session = {
            "state": "running",
            "started": _now(),
            "from_step": from_step,
            "command": list(sys.argv),
            "versions": versions(),
            "git": git_state(),
            "hardware": hardware(accelerators),
        }
        manifest.setdefault("run_id", uuid.uuid4().hex[:12])
        manifest |= {"seed": seed, "state": "running"}
        manifest["sessions"] = [*manifest.get("sessions", []), session]
        write_json(self.manifest, manifest)
        return manifest["run_id"]

    def end(self, state: State, *, cause: str = "") -> None:
        """Close the open session of the manifest with how it ended and why."""
        manifest = self.read_manifest()
        manifest["state"] = state
        manifest["sessions"][-1] |= {"state": state, "ended": _now(), "cause": cause}
        write_json(self.manifest, manifest)

    def read_manifest(self) -> dict[str, Any]:
        return json.loads(self.manifest.read_text()) if self.manifest.exists() else {}

    def forget_after(self, step: int) -> None:
        """Drop records later than `step` (and torn lines), so that a resumed run holds each step once."""
        for path in (self.metrics, self.evaluations):
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if 0 <= _step_of_line(line) <= step]
                write_text(path, "".join(f"{line}\n" for line in kept))
        for folder in (self.tokens, self.episodes):
            for path in folder.glob("*") if folder.is_dir() else ():
                found = STEP_NAME.match(path.name)
                if found is None or int(found[1]) > step:
                    path.unlink()


def _step_of_line(line: str) -> int:
    """The step of a JSON line; -1 where a crash tore it."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` when the body succeeds, so readers never see half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or leave the one that was there."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Python and the installed packages a result depends on, read without importing any of them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, str | bool]:
    """Commit of the working directory and whether files differ from it; empty outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()


def hardware(accelerators: Sequence[str] = ()) -> dict[str, Any]:
    """What the run had to work with; `accelerators` are named by the caller, which may know torch."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "accelerators": list(accelerators),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
