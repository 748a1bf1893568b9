"""Methods as data: one row of values a method, and what turns a row into bound functions.

Importing this module does not import torch; `resolve` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from agent_sat.algo.settings import AlgorithmConfig
from agent_sat.errors import ConfigError

if TYPE_CHECKING:
    from agent_sat.algo.trust import Surrogate


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A resolved method: its settings and its parts, bound to their parameters."""

    name: str
    settings: AlgorithmConfig
    trust_region: Callable[..., Surrogate]  # (Terms) -> Surrogate
    correction: Callable[..., Any] | None  # (log-ratio [N]) -> [N]
    masks: tuple[Callable[..., Any], ...]  # (Terms) -> [N] bool

    @property
    def denominator(self) -> Literal["behavior", "recomputed"]:
        """What the ratio divides by; only a synchronous run may leave it open."""
        return self.settings.denominator or "behavior"

    @property
    def uses_sat(self) -> bool:
        return self.settings.reference != "off"

    @property
    def needs_step_reference(self) -> bool:
        """SAT's q spans the micro-batches: observe all of them without gradient, fit, then run them."""
        return self.uses_sat and self.settings.scope == "step"

    @property
    def needs_recomputed(self) -> bool:
        """The loss reads log mu~, so the learner must keep the weights that sampled."""
        s = self.settings
        return (
            s.denominator == "recomputed"
            or (self.uses_sat and s.anchor == "implementation")
            or (self.correction is not None and s.correction_ratio == "implementation")
            or ("kpop" in s.masks and s.kpop_side == "recomputed")
        )

    @property
    def needs_reference(self) -> bool:
        """The loss reads the log-probabilities of a frozen reference model."""
        return self.settings.kl_coefficient > 0


def nearest(word: str, allowed: list[str]) -> str:
    """', nearest: x' for an error message, or nothing."""
    close = get_close_matches(word, allowed, n=1, cutoff=0.5)
    return f"; nearest: {close[0]!r}" if close else ""


def resolve(name: str, overrides: Mapping[str, object] | None = None) -> Method:
    """The method of that name with some fields replaced, its parts looked up and bound.

    `name` is a key of METHODS, with "+r3" for routing replay, or my_package.module:function, which is GRPO
    with that trust region. Raises ConfigError for unknown names or values and for wrong combinations.
    """
    from agent_sat.algo.correct import CORRECTIONS
    from agent_sat.algo.mask import MASKS
    from agent_sat.algo.trust import TRUST_REGIONS

    settings = _settings(name, overrides or {})
    _refuse_wrong_combinations(name, settings)
    has_correction = settings.correction != "none"
    return Method(
        name=name,
        settings=settings,
        trust_region=_bind("trust_region", settings.trust_region, TRUST_REGIONS, settings),
        correction=_bind("correction", settings.correction, CORRECTIONS, settings)
        if has_correction
        else None,
        masks=tuple(_bind("masks", mask, MASKS, settings) for mask in settings.masks),
    )


def _settings(name: str, overrides: Mapping[str, object]) -> AlgorithmConfig:
    preset = name.removesuffix("+r3")
    if ":" in preset:
        row: dict[str, object] = {**METHODS["grpo"], "trust_region": preset}
    elif preset in METHODS:
        row = METHODS[preset]
    else:
        raise ConfigError(
            f"method {name!r} is none of {', '.join(METHODS)} (each also with '+r3')"
            f"{nearest(preset, list(METHODS))}"
        )
    replay = {"replay_routes": True} if name.endswith("+r3") else {}
    try:
        return AlgorithmConfig.model_validate({**row, **replay, **overrides})
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(detail) for detail in error.errors())) from error


def _explain(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        fields = list(AlgorithmConfig.model_fields)
        return f"algorithm.{key} is no field of a method{nearest(key, fields)}"
    return f"algorithm.{key} = {detail['input']!r}: {detail['msg']}"


def _bind(kind: str, name: str, table: dict[str, Callable[..., Any]], settings: AlgorithmConfig) -> Callable:
    """The named function with its keyword-only parameters taken from the settings, or from `parameters`."""
    function = _imported(kind, name) if ":" in name else table.get(name)
    if function is None:
        raise ConfigError(
            f"algorithm.{kind} {name!r} is none of {', '.join(table)} and no my_package.module:function"
            f"{nearest(name, list(table))}"
        )
    values = {**dict(settings), **settings.parameters}
    wanted = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    missing = [p.name for p in wanted if p.name not in values and p.default is p.empty]
    if missing:
        raise ConfigError(
            f"algorithm.{kind} {name!r} needs {', '.join(missing)}: set algorithm.parameters.{missing[0]}"
        )
    return partial(function, **{p.name: values[p.name] for p in wanted if p.name in values})


def _imported(kind: str, name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.{kind} {name!r} cannot be imported: {error}") from error


WITHOUT_RATIO = frozenset({"reinforce"})
WITHOUT_RADIUS = frozenset({"none", "reinforce", "spo", "drpo"})


def _refuse_wrong_combinations(name: str, s: AlgorithmConfig) -> None:
    corrected = s.correction != "none" and s.trust_region not in WITHOUT_RATIO
    counted_twice = corrected and (s.correction_ratio == "policy" or s.denominator != "recomputed")
    sat = s.reference != "off"
    rules = [
        (
            counted_twice,
            f"correction {s.correction!r} on the {s.correction_ratio} ratio counts the same ratio twice: "
            f"trust region {s.trust_region!r} already divides by {s.denominator or 'behavior'}. Use "
            'correction_ratio = "implementation" with denominator = "recomputed", or trust_region = '
            '"reinforce"',
        ),
        (
            sat and s.trust_region in WITHOUT_RADIUS,
            f"SAT contracts a clip radius, and trust_region {s.trust_region!r} has none: use clip, "
            "dual_clip, up or cispo",
        ),
        (
            s.advantage == "turn_return" and s.granularity == "sequence",
            "a sequence ratio averages per-turn advantages away: use granularity turn or token with "
            "advantage = turn_return",
        ),
        (
            s.aggregation == "constant" and s.constant is None,
            "aggregation = constant needs algorithm.constant, the tokens a sequence's sum is divided by",
        ),
        (
            sat and s.anchor == "ema" and s.scope == "microbatch",
            "anchor = ema averages over steps, so it needs scope = step",
        ),
        (
            s.icepop_low >= s.icepop_high,
            f"icepop_low {s.icepop_low} is not below icepop_high {s.icepop_high}",
        ),
        (
            s.seqclip_low >= s.seqclip_high,
            f"seqclip_low {s.seqclip_low} is not below seqclip_high {s.seqclip_high}",
        ),
    ]
    _raise_broken(name, rules)


def check(
    method: Method,
    *,
    top_p: float,
    num_experts: int,
    replay_nucleus: bool,
    keeps_weights: bool,
    asynchronous: bool,
) -> None:
    """Raise ConfigError where the method does not fit the run around it; the reason is in the message."""
    rules = [
        (
            top_p < 1 and not replay_nucleus,
            f"rollout top_p {top_p} < 1 without nucleus replay: the trainer would give probability to tokens "
            "that could not be sampled. Turn on nucleus replay or sample with top_p = 1",
        ),
        (
            method.settings.replay_routes and num_experts < 2,
            "routing replay (R3) needs a mixture-of-experts model, and this one is dense",
        ),
        (
            method.needs_recomputed and not keeps_weights,
            "it reads log mu~, and the learner keeps no published weights to recompute it with",
        ),
        (
            asynchronous and method.settings.denominator is None,
            "an asynchronous run must say what the ratio divides by: set algorithm.denominator to "
            "behavior or recomputed",
        ),
    ]
    _raise_broken(method.name, rules)


def _raise_broken(name: str, rules: list[tuple[bool, str]]) -> None:
    broken = [reason for is_broken, reason in rules if is_broken]
    if broken:
        raise ConfigError(f"method {name!r}: {'; '.join(broken)}")


_GRPO: dict[str, object] = {"denominator": "behavior", "aggregation": "sequence_mean"}
_GSPO: dict[str, object] = {**_GRPO, "granularity": "sequence"}
_ON_RECOMPUTED: dict[str, object] = {"denominator": "recomputed", "correction_ratio": "implementation"}
_DPPO: dict[str, object] = {**_GRPO, "trust_region": "none"}

METHODS: dict[str, dict[str, object]] = {
    "grpo": _GRPO,
    "gspo": _GSPO,
    "gspo-turn": {**_GRPO, "granularity": "turn"},
    "sat-grpo": {**_GRPO, "reference": "global"},
    "sat-grpo-turn": {**_GRPO, "reference": "turn"},
    "sat-gspo": {**_GSPO, "reference": "global"},
    "sat-gspo-turn": {**_GSPO, "reference": "turn"},
    "grpo-narrow": {**_GRPO, "eps_low": 0.05, "eps_high": 0.05},
    "sat-grpo-ceiling": {**_GRPO, "reference": "global", "anchor": "ceiling"},
    "sat-grpo-ema": {**_GRPO, "reference": "global", "anchor": "ema"},
    "sat-grpo-implementation": {**_GRPO, "reference": "global", "anchor": "implementation"},
    "dapo": {**_GRPO, "eps_high": 0.28, "aggregation": "token_mean"},
    "dr_grpo": {**_GRPO, "advantage": "dr_grpo", "aggregation": "constant", "constant": 1024},
    "dual_clip": {**_GRPO, "trust_region": "dual_clip"},
    "spo": {**_GRPO, "trust_region": "spo"},
    "drpo": {**_GRPO, "trust_region": "drpo"},
    "up": {**_GRPO, "trust_region": "up"},
    "cispo": {
        **_GRPO,
        "trust_region": "cispo",
        "eps_low": 1.0,
        "eps_high": 0.28,
        "aggregation": "token_mean",
    },
    "tis": {
        **_GRPO,
        "trust_region": "reinforce",
        "correction": "tis",
        "correction_ratio": "policy",
        "aggregation": "token_mean",
    },
    "grpo+tis": {**_GRPO, **_ON_RECOMPUTED, "correction": "tis"},
    "gspo+tis": {**_GSPO, **_ON_RECOMPUTED, "correction": "tis"},
    "decoupled": {**_GRPO, **_ON_RECOMPUTED, "correction": "tis", "tis_cap": float("inf")},
    "icepop": {**_GRPO, **_ON_RECOMPUTED, "correction": "icepop"},
    "kpop": {**_GRPO, **_ON_RECOMPUTED, "masks": ("kpop",)},
    "seqclip": {**_GSPO, "masks": ("seqclip",)},
    "dppo": {**_GRPO, "masks": ("dppo_tv",), "dppo_delta": 1e-3},
    "dppo-tv": {**_DPPO, "masks": ("dppo_tv",), "dppo_delta": 0.15},
    "dppo-kl": {**_DPPO, "masks": ("dppo_kl",), "dppo_delta": 0.05},
    "dppo-kl-clip": {**_GRPO, "masks": ("dppo_kl",), "dppo_delta": 0.05},
    "reinforce++": {**_GRPO, "advantage": "reinforce_plus_plus", "aggregation": "token_mean"},
    "rloo": {**_GRPO, "advantage": "rloo"},
}
