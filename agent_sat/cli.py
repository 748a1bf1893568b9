"""The command line: arguments in, one clear error or a table out."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_sat.config import Config, load, to_toml
from agent_sat.errors import AgentSatError, ConfigError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train tool-using language-model agents by asynchronous reinforcement learning, "
    "with the mismatch between sampling and training policy visible by tool turn.",
)
console = Console()
errors = Console(stderr=True)

FIXED_ON_RESUME = ("method", "algorithm", "seed", "name", "run_dir", "model", "env", "warm_start")
RunDir = Annotated[Path, typer.Argument(help="A run directory, as `agent-sat train` names it at the end")]


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.toml] [section.key=value]...",
            help="A config, e.g. configs/quickstart.toml, and settings that override it, e.g. method=gspo seed=1",
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from the newest checkpoint of a run directory")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Everything in this process, without Ray")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the resolved config and stop")] = False,
) -> None:
    """Train an agent; Ctrl-C saves a checkpoint, --resume goes on from it.

    Examples: `agent-sat train configs/quickstart.toml method=gspo seed=1`,
    `agent-sat train --resume runs/quickstart`.
    """
    from agent_sat import commands
    from agent_sat.log.run import RunDirectory

    overrides = [argument for argument in arguments or [] if "=" in argument]
    configs = [argument for argument in arguments or [] if "=" not in argument]
    if len(configs) != (resume is None):
        raise ConfigError(
            "give either one config file or --resume RUNDIR, e.g. agent-sat train configs/quickstart.toml"
        )
    run = RunDirectory.open(resume) if resume else None
    if run and (fixed := [o for o in overrides if o.split("=")[0].split(".")[0] in FIXED_ON_RESUME]):
        raise ConfigError(f"{fixed[0]!r} cannot change when a run is resumed; start a new one for it")
    settings = load(run.config if run else configs[0], overrides)
    if show:
        console.print(to_toml(settings), highlight=False, markup=False, soft_wrap=True)
        return
    outcome = asyncio.run(commands.train(settings, local=local, resume=run))
    tell_outcome(outcome.run.path, settings, interrupted=outcome.interrupted)
    if outcome.interrupted:
        raise typer.Exit(commands.INTERRUPTED)


@app.command()
def eval(
    run_dir: RunDir,
    tasks: Annotated[int | None, typer.Option(min=1, help="Held-out tasks; default: as configured")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sampled episodes a task, beside one greedy")] = 4,
) -> None:
    """Success on held-out tasks by level, greedy and sampled, with 95 % intervals."""
    from agent_sat import commands
    from agent_sat.evaluate import as_record
    from agent_sat.log.run import RunDirectory

    run = RunDirectory.open(run_dir)
    step, scores = asyncio.run(commands.evaluate_run(run, num_tasks=tasks, num_samples=samples))
    console.print(success_table({f"step {step}": as_record(step, scores)}))


@app.command()
def analyze(
    run_dir: RunDir,
    steps: Annotated[str, typer.Option(help="A range of steps, first:last, e.g. 10:50 or 40:")] = ":",
    out: Annotated[Path | None, typer.Option(help="Also write one self-contained HTML page")] = None,
) -> None:
    """Mismatch, tails and clipping by tool turn, lag and KL group; --out writes the interactive report."""
    from agent_sat.analyze.report import write_report
    from agent_sat.analyze.tables import print_all

    print_all(run_dir, steps)
    if out is not None:
        console.print(
            f"report written to {write_report(run_dir, out, steps)}", highlight=False, soft_wrap=True
        )


@app.command()
def view(
    run_dir: RunDir,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; 0 takes a free one")] = 8765,
) -> None:
    """Every episode, token by token, in a browser on this machine; Ctrl-C ends it."""
    from agent_sat.analyze.viewer import serve

    serve(run_dir, port)


@app.command()
def compare(
    config: Annotated[Path | None, typer.Argument(help="A run's TOML file; not with --runs")] = None,
    methods: Annotated[str, typer.Option(help="Presets, the baseline first")] = "sat-grpo,sat-grpo-turn",
    lags: Annotated[str, typer.Option(help="Optimizer updates between two publications of weights")] = "1",
    seeds: Annotated[str, typer.Option(help="Each seed is a paired observation")] = "0,1,2",
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting of every run, key=value")] = None,
    runs: Annotated[list[Path] | None, typer.Option(help="Compare these finished runs instead")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the comparison")] = Path("runs/compare"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once; default: one per two cores")] = None,
) -> None:
    """Train a grid of methods, lags and seeds from identical warm starts, then compare it with intervals.

    Example: `agent-sat compare configs/quickstart.toml --methods sat-grpo,sat-grpo-turn --lags 1,8 --seeds 0,1,2`.
    Called again it goes on with what is missing.
    """
    from agent_sat.analyze.compare_report import compare as write_comparison
    from agent_sat.analyze.compare_report import markdown
    from agent_sat.grid import default_jobs, make_grid, numbers, run_grid, split

    if (config is None) == (not runs):
        raise ConfigError(
            "give either a config file or --runs DIR, e.g. agent-sat compare configs/quickstart.toml"
        )
    if config is not None:
        grid = make_grid(
            config,
            methods=list(split(methods, "methods")),
            lags=numbers(lags, "lags"),
            seeds=numbers(seeds, "seeds"),
            overrides=set_ or [],
        )
        runs = run_grid(config, grid, out, jobs=jobs or default_jobs(), say=tell)
    comparison = write_comparison(runs or [], out)
    console.print(markdown(comparison), markup=False, highlight=False, soft_wrap=True)
    tell(f"written to {out}/comparison.html, comparison.md and comparison.json")


@app.command()
def doctor(
    docker: Annotated[bool, typer.Option(help="Also try a real container")] = True,
) -> None:
    """What this machine offers: sandboxes tried for real, packages, cores, memory, disk, GPUs."""
    from agent_sat.doctor import examine

    table = Table(title="this machine")
    for name in ("what", "found", "how to get it"):
        table.add_column(name, overflow="fold")
    for finding in examine(docker=docker):
        style = "green" if finding.works else "yellow"
        table.add_row(finding.name, Text(finding.found, style=style), Text(finding.advice))
    console.print(table)


def tell(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def tell_outcome(path: Path, config: Config, *, interrupted: bool) -> None:
    """Success before and after, mismatch by turn, where the run is and what to type next."""
    from agent_sat.analyze.tables import print_by_turn

    records = [json.loads(line) for line in evaluations(path)]
    if records:
        found = {f"step {records[0]['step']}": records[0], f"step {records[-1]['step']}": records[-1]}
        console.print(success_table(found, config.env.stratum))
    if any((path / "tokens").glob("*.parquet")):
        print_by_turn(path)
    console.print(f"run written to {path}", highlight=False, soft_wrap=True)
    if interrupted and not any((path / "checkpoints").glob("step_*")):
        tell("stopped before there was anything to keep; start it again")
    elif interrupted:
        console.print(
            f"stopped; go on with: agent-sat train --resume {path}", highlight=False, soft_wrap=True
        )
    else:
        console.print(
            f"next: agent-sat analyze {path} --out report.html   |   agent-sat view {path}   |   agent-sat eval {path}",
            highlight=False,
            soft_wrap=True,
        )


def evaluations(path: Path) -> list[str]:
    file = path / "eval.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def success_table(records: dict[str, dict], stratum: str | None = "level") -> Table:
    """Rates with Wilson intervals: one row a kind and stratum, one column a record."""
    from agent_sat.evaluate import Score

    table = Table(title="success on held-out tasks, % (95 % interval)")
    table.add_column("episodes")
    table.add_column(stratum or "tasks", justify="right")
    for name in records:
        table.add_column(name, justify="right")
    columns = [
        {(s["kind"], s["stratum"]): Score(**s) for s in record["scores"]} for record in records.values()
    ]
    for key in columns[-1]:
        cells = []
        for column in columns:
            score = column.get(key, Score(kind=key[0], stratum=key[1], successes=0, total=0))
            low, high = score.interval()
            cells.append(f"{100 * score.rate:.1f} ({100 * low:.0f} to {100 * high:.0f})")
        table.add_row(*key, *cells)
    return table


def main() -> None:
    """The console script: what a user can mend is one line on stderr and exit code 2, a failed run 1."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except ConfigError as error:
        errors.print(f"error: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except asyncio.CancelledError:
        raise SystemExit(130) from None
    except AgentSatError as error:
        errors.print(f"failed: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
