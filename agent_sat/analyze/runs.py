"""A run directory as the analysis sees it: config, metrics, and its tokens in pieces that fit memory."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from agent_sat.errors import ConfigError
from agent_sat.log.metrics import read_metrics
from agent_sat.log.run import STEP_NAME, RunDirectory

CHUNK_ROWS = 1_000_000  # token rows held at once; bounds the memory of every analysis


@dataclass(frozen=True, slots=True)
class Window:
    """Steps start <= step < stop, as in a slice; None is open."""

    start: int | None = None
    stop: int | None = None

    @staticmethod
    def parse(text: str) -> Window:
        """`A:B`, `A:`, `:B` or one step `A`. Raises ConfigError for anything else."""
        if re.fullmatch(r"\d+", text):
            return Window(int(text), int(text) + 1)
        if (found := re.fullmatch(r"(\d*):(\d*)", text)) is None:
            raise ConfigError(f"steps {text!r} is no range of steps: write A:B (A up to B-1), A:, :B or A")
        start, stop = (int(part) if part else None for part in found.groups())
        if start is not None and stop is not None and start >= stop:
            raise ConfigError(f"steps {text!r} is empty: the range goes from A up to B-1")
        return Window(start, stop)

    def __contains__(self, step: int) -> bool:
        return (self.start is None or step >= self.start) and (self.stop is None or step < self.stop)

    def filter(self) -> pl.Expr:
        low = pl.lit(True) if self.start is None else pl.col("step") >= self.start
        high = pl.lit(True) if self.stop is None else pl.col("step") < self.stop
        return low & high

    def __str__(self) -> str:
        if self == Window():
            return "all steps"
        last = "the last" if self.stop is None else self.stop - 1
        return f"steps {self.start or 0} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run read from disk; its tokens and episodes stay there until asked for."""

    directory: RunDirectory
    config: dict[str, Any]  # resolved config; empty where the run left none
    manifest: dict[str, Any]
    metrics: list[dict[str, Any]]  # one a step, in order
    evaluations: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.directory.path.resolve().name)

    @property
    def method(self) -> str:
        return str(self.config.get("method", "?"))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", self.manifest.get("seed", 0)))

    def token_files(self) -> list[Path]:
        return _in_order(self.directory.tokens, ".parquet")

    def episode_files(self) -> list[Path]:
        return _in_order(self.directory.episodes, ".jsonl")

    def token_chunks(self, window: Window, columns: list[str]) -> Iterator[pl.DataFrame]:
        """The token record in frames of about CHUNK_ROWS rows, whatever files it was cut into."""
        held: list[pl.DataFrame] = []
        for path in self.token_files():
            rows = pl.scan_parquet(path).filter(window.filter()).select(columns).collect()
            for start in range(0, rows.height, CHUNK_ROWS):
                held.append(rows.slice(start, CHUNK_ROWS))
                if sum(frame.height for frame in held) >= CHUNK_ROWS:
                    yield pl.concat(held)
                    held = []
        if held:
            yield pl.concat(held)


def open_run(path: str | Path) -> Run:
    """Read a run directory. Raises ConfigError where there is none or where it holds no records yet."""
    directory = RunDirectory(Path(path))
    if not (directory.tokens.is_dir() or directory.metrics.is_file()):
        directory = RunDirectory.open(path)
        raise ConfigError(
            f"run {path} has no records yet: metrics.jsonl and tokens/ appear with its first step"
        )
    return Run(
        directory=directory,
        config=_config(directory),
        manifest=_manifest(directory),
        metrics=read_metrics(directory.metrics) if directory.metrics.is_file() else [],
        evaluations=read_metrics(directory.evaluations) if directory.evaluations.is_file() else [],
    )


def _config(directory: RunDirectory) -> dict[str, Any]:
    if not directory.config.is_file():
        return {}
    try:
        return tomllib.loads(directory.config.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{directory.config} is damaged: {error}") from error


def _manifest(directory: RunDirectory) -> dict[str, Any]:
    try:
        return directory.read_manifest()
    except json.JSONDecodeError as error:
        raise ConfigError(f"{directory.manifest} is damaged: {error}") from error


def _in_order(folder: Path, suffix: str) -> list[Path]:
    """The records of a folder by step; files under other names come last, by name."""
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if path.suffix == suffix and not path.name.startswith(".")]
    number = {path: int(found[1]) if (found := STEP_NAME.match(path.name)) else 2**62 for path in files}
    return sorted(files, key=lambda path: (number[path], path.name))
