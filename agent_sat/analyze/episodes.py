"""The episodes of a run by index: a list needs their short fields, only an opened one its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from agent_sat.analyze.runs import Run, Window
from agent_sat.log.run import STEP_NAME

LONG_FIELDS = (
    b', "prompt": '  # the writer puts all short fields before it; no JSON string can hold it unescaped
)
TOKEN_FIELDS = ["offset", "logprob", "behavior_logprob", "entropy", "ratio", "version", "lag", "advantage"]
TOKEN_FIELDS += ["q", "contraction", "gate", "clipped", "changed", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One episode in a list, and where its line lies."""

    step: int
    group: int
    member: int
    task: str
    options: dict[str, Any]
    reward: float
    ending: str
    num_turns: int
    num_tokens: int
    seconds: float
    max_abs: float | None  # largest |d|; None where no token was recorded
    changed: int  # tokens whose gradient SAT took
    gated: int
    path: Path
    start: int  # bytes into the file
    length: int

    def public(self) -> dict[str, Any]:
        """What a page may see of it."""
        shown = asdict(self)
        return {name: shown[name] for name in shown if name not in ("path", "start", "length")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which episodes to list; None and empty take all."""

    window: Window = field(default_factory=Window)
    group: int | None = None
    member: int | None = None
    ending: str | None = None
    option: str | None = None  # "level=3"
    least_abs: float | None = None  # largest |d| at least this
    changed: bool | None = None

    def takes(self, entry: Entry) -> bool:
        options = {f"{name}={value}" for name, value in entry.options.items()}
        return (
            entry.step in self.window
            and self.group in (None, entry.group)
            and self.member in (None, entry.member)
            and self.ending in (None, "", entry.ending)
            and (not self.option or self.option in options)
            and (self.least_abs is None or (entry.max_abs or 0.0) >= self.least_abs)
            and self.changed in (None, entry.changed > 0)
        )


class EpisodeIndex:
    """Entries of a run's episodes, read file by file as they are asked for and then kept."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._files = run.episode_files()
        self._known: dict[Path, list[Entry]] = {}

    def search(self, query: Query, *, offset: int = 0, limit: int = 100) -> tuple[list[Entry], bool]:
        """Entries in order of step, group and member from the offset-th match, and whether more follow."""
        found: list[Entry] = []
        for entry in self._matches(query):
            if offset > 0:
                offset -= 1
            elif len(found) < limit:
                found.append(entry)
            else:
                return found, True
        return found, False

    def _matches(self, query: Query) -> Iterator[Entry]:
        for path in self._files:
            named = STEP_NAME.match(path.name)
            if named is not None and int(named[1]) not in query.window:
                continue
            yield from (entry for entry in self.entries(path) if query.takes(entry))

    def entries(self, path: Path) -> list[Entry]:
        if path not in self._known:
            self._known[path] = sorted(
                _read_entries(self._run, path), key=lambda e: (e.step, e.group, e.member, e.start)
            )
        return self._known[path]

    def steps(self) -> list[int]:
        """Steps that have an episode file, by the files' names."""
        return [int(named[1]) for path in self._files if (named := STEP_NAME.match(path.name))]

    def facets(self, num_files: int) -> dict[str, list[str]]:
        """Endings and task options met in a few files spread over the run, for a page's choices."""
        spread = self._files[:: max(1, len(self._files) // num_files)]
        entries = [entry for path in spread for entry in self.entries(path)]
        options = {f"{name}={value}" for entry in entries for name, value in entry.options.items()}
        return {"endings": sorted({entry.ending for entry in entries}), "options": sorted(options)[:200]}

    def find(self, step: int, group: int, member: int) -> Entry | None:
        query = Query(window=Window(step, step + 1), group=group, member=member)
        found, _ = self.search(query, limit=1)
        return found[0] if found else None

    def open(self, entry: Entry) -> dict[str, Any]:
        """The whole episode, its turns with a `tokens` table: field -> values by offset, or None."""
        with entry.path.open("rb") as file:
            file.seek(entry.start)
            episode = json.loads(file.read(entry.length))
        tokens = step_tokens(self._run, entry.step, ["group", "member", "turn", *TOKEN_FIELDS])
        own = tokens.filter((pl.col("group") == entry.group) & (pl.col("member") == entry.member))
        for number, turn in enumerate(episode["turns"]):
            rows = own.filter(pl.col("turn") == number).sort("offset").select(TOKEN_FIELDS)
            turn["tokens"] = {n: _listed(rows[n]) for n in rows.columns} if rows.height else None
        return episode


def _listed(values: pl.Series) -> list[Any]:
    return values.round_sig_figs(6).fill_nan(None).to_list() if values.dtype.is_float() else values.to_list()


def _read_entries(run: Run, path: Path) -> Iterator[Entry]:
    lines = list(_headers(path))
    sizes: dict[tuple[int, int, int], dict[str, Any]] = {}
    for step in sorted({header["step"] for header, _, _ in lines}):
        sizes |= _token_sizes(run, step)
    for header, start, length in lines:
        size = sizes.get((header["step"], header["group"], header["member"]), {})
        yield Entry(
            **{name: header[name] for name in ("step", "group", "member", "reward", "ending", "num_turns")},
            num_tokens=header["num_tokens"],
            seconds=header["seconds"],
            task=str(header["task"]),
            options=header["options"],
            max_abs=size.get("max_abs"),
            changed=size.get("changed", 0),
            gated=size.get("gated", 0),
            path=path,
            start=start,
            length=length,
        )


def _headers(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Short fields and place of each line, its texts unparsed; torn lines are left out."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            cut = line.find(LONG_FIELDS)
            try:
                header = json.loads(line[:cut] + b"}") if cut >= 0 else json.loads(line)
            except ValueError:
                header = _parsed(line)
            if header is not None:
                yield header, start, len(line)
            start += len(line)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _token_sizes(run: Run, step: int) -> dict[tuple[int, int, int], dict[str, Any]]:
    names = ["group", "member", "logprob", "behavior_logprob", "changed", "gate"]
    d = (pl.col("logprob").cast(pl.Float64) - pl.col("behavior_logprob").cast(pl.Float64)).abs()
    sizes = (
        step_tokens(run, step, names)
        .with_columns(size=pl.when(d.is_finite()).then(d))
        .group_by("group", "member")
        .agg(max_abs=pl.col("size").max(), changed=pl.col("changed").sum(), gated=pl.col("gate").sum())
    )
    return {(step, row["group"], row["member"]): row for row in sizes.iter_rows(named=True)}


def step_tokens(run: Run, step: int, columns: Sequence[str]) -> pl.DataFrame:
    """Token rows of one step: from the file named after it, or from all where there is none."""
    named = run.directory.tokens_of(step)
    files = [named] if named.is_file() else run.token_files()
    if not files:
        return pl.DataFrame(schema={name: pl.Float64 for name in columns})
    rows = [pl.scan_parquet(path).filter(pl.col("step") == step).select(columns).collect() for path in files]
    return pl.concat(rows)
