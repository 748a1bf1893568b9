"""One schema for a run: TOML in, a checked frozen Config out; the only place that reads the environment."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent_sat.algo.methods import AlgorithmConfig, Method, check, resolve
from agent_sat.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    path: str | None = None
    """Folder of a Hugging Face checkpoint; without it a model is made from `architecture` and `config`."""
    architecture: str = "Qwen3MoeForCausalLM"
    """A causal-LM class of transformers, used when `path` is absent."""
    config: dict[str, Any] = {}
    """Keyword arguments of that class's configuration, used when `path` is absent."""
    tokenizer: str | None = None
    """A folder, or `characters`, the quickstart's own; default: the checkpoint's, or `characters` without one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the trainer and in the engine."""
    experts_implementation: Literal["auto", "eager", "grouped_mm", "batched_mm"] = "auto"
    """How mixture-of-experts layers multiply; `auto` takes grouped_mm, 5 to 40 times faster on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer or self.path or "characters"


class WarmStartConfig(Section):
    steps: Annotated[int, Field(ge=0)] = 0
    """Supervised steps on the environment's demonstrations before reinforcement learning; 0 is none."""
    batch_size: Positive = 32
    """Demonstrations a step."""
    learning_rate: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate; 30 steps of warm-up, then linear decay to a tenth."""
    slips: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    """Rates of the demonstrator's deliberate mistakes, by the environment's names for them."""
    context_weight: Annotated[float, Field(ge=0)] = 0.1
    """Loss weight of tokens the model does not write; a little of it teaches copying sooner."""
    threads: Positive = 2
    """CPU threads while nothing else runs."""
    cache: bool = True
    """Keep the result under `cache_dir`, found again by content: same start for every method compared."""
    cache_dir: str | None = None
    """Where warm starts are kept; default: $XDG_CACHE_HOME/agent-sat or ~/.cache/agent-sat."""


class EnvConfig(Section):
    id: str = "agent_sat/Lookup-v0"
    """A registered gymnasium id; your own as `my_package.module:Id-v0`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""
    choices: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    """Options of `reset`, one value a task, in turn; success is reported by the first one."""
    step_timeout_seconds: Seconds = 120.0
    """A step that takes longer ends the episode as an environment failure."""

    @property
    def stratum(self) -> str | None:
        return next(iter(self.choices), None)


class SandboxConfig(Section):
    backend: Literal["local", "docker"] = "local"
    """`local`: a process jail without a daemon; `docker`: one container an episode."""
    tier: Literal["jail", "confined", "process"] = "jail"
    """`local`: the weakest confinement accepted (docs/threat-model.md); the strongest that works is used."""
    preload: list[str] | None = None
    """Modules imported before any episode starts, e.g. ["numpy", "sympy"]; default: common ones of Python's own."""
    image: str = "agent-sat-python"
    """`docker`: the image of the containers."""
    runtime: Literal["runsc"] | None = None
    """`docker`: another container runtime, runsc is gVisor."""
    episode_seconds: Seconds = 60.0
    """Time of all tool calls of one episode."""
    timeout_seconds: Seconds = 5.0
    """Wall time of one tool call."""
    memory_mib: Positive = 512
    """Memory of one episode's interpreter."""
    num_processes: Positive = 32
    """Processes and threads of one episode."""
    output_bytes: Positive = 8192
    """Output of one call that is kept, head and tail."""
    file_mib: Positive = 16
    """Largest file a call may write."""


class EngineConfig(Section):
    backend: Literal["local"] = "local"
    """`local`: the in-process engine."""
    max_sessions: Positive | None = None
    """Episodes with a KV cache at once; default: one step's episodes."""
    threads: Positive = 1
    """CPU threads of the engine's process."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type the engine computes in; default: the trainer's. Another one is an implementation mismatch by intent."""
    record_routes: bool = True
    """Record the routed experts of every token (mixture-of-experts models)."""


class RolloutConfig(Section):
    tasks_per_step: Positive = 16
    """Groups consumed by one optimizer step."""
    group_size: Positive = 8
    """Episodes of one task, whose rewards are compared."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer uses the same."""
    top_p: Fraction = 1.0
    """Nucleus sampling; below 1 needs its kept sets replayed."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k likeliest tokens; -1 is all."""
    max_length: Positive = 160
    """Tokens of an episode, prompt and tool output included: the context of the engine."""
    max_response_tokens: Positive = 160
    """Tokens after the first prompt, tool output included."""
    stop: list[str] = []
    """Tokens that end a turn besides the end-of-sequence token, e.g. `</python>`."""
    num_workers: Positive = 1
    """Processes that drive episodes; groups go to the least busy one, so no size has to divide another."""
    concurrency: Positive | None = None
    """Groups in flight at most; default: as many as the engine holds."""
    group_timeout_seconds: Seconds = 3600.0
    """A group that takes longer ends the run: something hangs."""


class TrainConfig(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Constant after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm above which the gradient is scaled down."""
    micro_batch_tokens: Positive = 16384
    """Tokens of one forward and backward pass; the result does not depend on it."""
    logprob_chunk: Positive = 4096
    """Tokens whose [tokens, vocabulary] logits are held at once."""
    max_skipped_steps: Positive = 3
    """Steps in a row with a non-finite loss or gradient that end the run."""
    threads: Positive = 1
    """CPU threads of the learner's process."""
    step_timeout_seconds: Seconds = 3600.0
    """An optimizer step that takes longer ends the run: something hangs."""
    checkpoint_interval: Positive = 50
    """Steps between checkpoints; one is always made at the end and at Ctrl-C."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""


class StalenessConfig(Section):
    bound: Annotated[int, Field(ge=0)] = 1
    """No token is trained with a larger lag, in optimizer updates; 0 is synchronous."""
    broadcast_interval: Positive = 1
    """Optimizer updates between two publications of weights to the engine."""


class ClusterConfig(Section):
    address: str | None = None
    """Address of a running Ray cluster; without it one is started here and stopped at the end."""
    num_cpus: Positive | None = None
    """Cores the run may use; default: those of the machine."""
    object_store_mib: Positive = 256
    """Shared memory of a Ray that is started here."""


class LogConfig(Section):
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Copy the metrics to Weights & Biases."""
    wandb_project: str = "agent-sat"
    """Project name there."""
    tokens: bool = True
    """Write one row per sampled token (`tokens/`)."""
    episodes: bool = True
    """Write every episode as text (`episodes/`)."""
    mismatch_causes: bool = False
    """Recompute log mu~ at every token's own version, also where the method does not need it: splits the
    mismatch into policy lag and implementation, for one or more forward passes a step."""


class EvalConfig(Section):
    num_tasks: Positive = 200
    """Held-out tasks, the same at every evaluation."""
    samples: Positive = 1
    """Sampled episodes a task, beside one greedy episode."""
    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 is only before and after training."""
    enabled: bool = True
    """Evaluate before and after training."""


class Config(Section):
    name: str
    """Name of the run."""
    run_dir: str | None = None
    """Where the run is written; default: runs/<name>."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of tasks, sampling and initial weights."""
    steps: Positive
    """Optimizer steps."""
    method: str = "sat-grpo"
    """A preset of the method table (docs/methods.md); `[algorithm]` overrides its parts."""
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    env: EnvConfig = EnvConfig()
    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    staleness: StalenessConfig = StalenessConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def sizes_fit(self) -> Config:
        rollout, staleness = self.rollout, self.staleness
        if staleness.bound < staleness.broadcast_interval - 1:
            raise ValueError(
                f"staleness.bound {staleness.bound} is less than broadcast_interval - 1 = "
                f"{staleness.broadcast_interval - 1}: a group could never be used in time; "
                f"set staleness.bound={staleness.broadcast_interval - 1} or more"
            )
        if rollout.group_size > self.max_sessions:
            raise ValueError(
                f"engine.max_sessions {self.max_sessions} cannot hold one group of "
                f"rollout.group_size {rollout.group_size}; set engine.max_sessions={rollout.group_size} or more"
            )
        if self.model.path is not None and not Path(self.model.path).is_dir():
            raise ValueError(f"model.path {self.model.path!r} is not a folder; give a checkpoint on disk")
        if self.model.path is not None and not (Path(self.model.path) / "config.json").is_file():
            raise ValueError(
                f"model.path {self.model.path!r} holds no config.json; give a checkpoint on disk"
            )
        return self

    @property
    def max_sessions(self) -> int:
        return self.engine.max_sessions or self.rollout.tasks_per_step * self.rollout.group_size

    @property
    def concurrency(self) -> int:
        """Groups in flight at most."""
        return self.rollout.concurrency or max(1, self.max_sessions // self.rollout.group_size)

    @property
    def directory(self) -> Path:
        return Path(self.run_dir or f"runs/{self.name}").absolute()  # actors have another working directory

    @property
    def num_experts(self) -> int:
        """Experts a layer, by the model's own configuration; 0 for a dense model."""
        values = self.model.config
        if self.model.path is not None:
            values = json.loads((Path(self.model.path) / "config.json").read_text())
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((int(values[name]) for name in names if name in values), 0)

    def resolve_method(self) -> Method:
        """The method with its overrides. Raises ConfigError for combinations that are wrong."""
        method = resolve(self.method, self.algorithm.model_dump(exclude_unset=True))
        check(
            method,
            top_p=self.rollout.top_p,
            num_experts=self.num_experts,
            replay_nucleus=True,  # kept sets are recorded whenever sampling truncates, and always replayed
            keeps_weights=True,
            asynchronous=self.staleness.bound > 0,
        )
        return method


def cache_dir(config: WarmStartConfig) -> Path:
    if config.cache_dir:
        return Path(config.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-sat" / "warm_start"


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file, apply `section.key=value` overrides and check everything.

    Raises ConfigError that names the value, what is allowed and the nearest valid choice.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [str(p) for p in Path("configs").glob("**/*.toml")], n=1)
        raise ConfigError(f"no config file {str(path)!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides or []:
        apply_override(values, override)
    return parse(values)


def parse(values: dict[str, Any]) -> Config:
    """Check a nested dict of settings. Raises ConfigError."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error
    config.resolve_method()
    return config


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set `section.key=value` in place; the value is TOML, a bare word is a string."""
    key, found, text = override.partition("=")
    if not found:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    *sections, name = key.strip().split(".")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
    table[name] = text if takes_text([*sections, name]) else toml_value(text)


def toml_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def takes_text(path: list[str]) -> bool:
    """Whether the field at `path` only takes strings, so that `on` or `12:30:00` stays what was typed."""
    annotation: Any = Config
    for name in path:
        fields = getattr(annotation, "model_fields", {})
        if name not in fields:
            return False
        annotation = fields[name].annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds == [str]
    if typing.get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in typing.get_args(annotation))
    return annotation is str


def explain(error: ValidationError) -> str:
    """One line a fault: where, what is wrong, the value, and the nearest valid key."""
    lines = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            valid = valid_keys([str(part) for part in fault["loc"][:-1]])
            near = difflib.get_close_matches(str(fault["loc"][-1]), valid, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(f"unknown key {where!r}{hint} Valid here: {', '.join(valid)}")
        elif fault["type"] == "missing":
            lines.append(f"{where!r} is missing")
        elif where:
            lines.append(f"{where} = {fault['input']!r}: {fault['msg']}")
        else:
            lines.append(fault["msg"].removeprefix("Value error, "))
    return "\n".join(lines)


def valid_keys(path: list[str]) -> list[str]:
    annotation: Any = Config
    for name in path:
        fields = getattr(annotation, "model_fields", {})
        annotation = fields[name].annotation if name in fields else None
    return sorted(getattr(annotation, "model_fields", {}))


def to_toml(config: Config) -> str:
    """The resolved config as TOML, the method's own settings written out, that `load` reads back to the same run."""
    values = config.model_dump(mode="json", exclude_none=True)
    values["algorithm"] = config.resolve_method().settings.model_dump(mode="json", exclude_none=True)
    top = [f"{key} = {toml_text(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, table in values.items():
        if isinstance(table, dict):
            top += ["", f"[{section}]"]
            top += [f"{key} = {toml_text(value)}" for key, value in table.items()]
    return "\n".join(top) + "\n"


def toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_text(str(k))} = {toml_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return repr(value)
