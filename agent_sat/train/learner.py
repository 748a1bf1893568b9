"""The learner: groups in, one optimizer step, new weights out; a plain class that never heard of Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from agent_sat.algo.advantage import STEP_ADVANTAGES
from agent_sat.algo.diagnose import Tally, finish, tally
from agent_sat.algo.loss import policy_loss
from agent_sat.algo.reference import Reference, fit, observe
from agent_sat.config import Config
from agent_sat.data.batch import make_batch, micro_batches
from agent_sat.data.samples import samples_of
from agent_sat.data.tokenizer import load_tokenizer
from agent_sat.log.run import RunDirectory
from agent_sat.log.tokens import TokenText
from agent_sat.rollout.chat import chat_of
from agent_sat.train import checkpoint, optim, warm_start
from agent_sat.train.model import TokenLogprobs, build_model, token_logprobs
from agent_sat.train.policies import PastPolicies, ReferencePolicy
from agent_sat.train.records import Pass, StepRecorder
from agent_sat.train.weights import snapshot
from agent_sat.types import Batch, Group, Metrics, Position, Sample, StepReport, WarmStep


class PolicyLearner:
    """Model, optimizer and method of a run."""

    def __init__(self, config: Config, run: RunDirectory | None = None) -> None:
        torch.set_num_threads(config.train.threads)
        disable_progress_bar()  # of transformers: the run shows its own
        self.config = config
        self.method = config.resolve_method()
        self.tokenizer = load_tokenizer(config.model.tokenizer_name)
        self.model = build_model(config.model, self.tokenizer, seed=config.seed)
        self.optimizer = optim.make_optimizer(self.model, config.train)
        self.recorder = (
            StepRecorder(run=run, config=config.log, text=TokenText(self._decode)) if run else None
        )
        self.guard = optim.SkipGuard(config.train.max_skipped_steps)
        self.version = 0
        self.sat_reference: Reference | None = (
            None  # the last step's: what an averaged reference goes on from
        )
        self.past: PastPolicies | None = None
        self.frozen: ReferencePolicy | None = None
        self._run = run
        self._warming: Iterator[WarmStep] | None = None

    def step(self, step: int, groups: list[Group]) -> StepReport:
        """One optimizer step on whole groups. A step without a trained token, or whose loss or gradient is not
        finite, makes no update and says so. Raises TrainingDiverged after a few such steps in a row.
        """
        started = time.monotonic()
        samples = sorted((s for group in groups for s in samples_of(group)), key=len)
        batch = self.make_batch(samples)
        num_tokens = int(batch.mask.sum()) if batch is not None else 0
        if batch is None or num_tokens == 0:
            self.guard.skipped("no token to train on")
            return self._report(step, "no token to train on", 0, {}, started)
        optim.set_learning_rate(self.optimizer, self.config.train, self.version)
        passes = self.backward([self.fill(micro) for micro in self.cut(batch, samples)])
        metrics, skipped = self.update(passes)
        metrics |= finish(self._tally(passes), self.method.settings)
        if replayed := [one.routes for one in passes if one.routes is not None]:
            metrics |= sum(replayed[1:], start=replayed[0]).metrics()
        if self.past is not None:
            metrics["memory/kept_versions_mib"] = self.past.num_mib
        if self.recorder is not None:
            self.recorder.record(step, groups, samples, passes, self.version)
        if not skipped:
            self.version += 1
        return self._report(step, skipped, num_tokens, metrics, started)

    def make_batch(self, samples: list[Sample]) -> Batch | None:
        if not samples:
            return None
        settings = self.method.settings
        return make_batch(
            samples,
            aggregation=settings.aggregation,
            constant=settings.constant,
            step_advantage=STEP_ADVANTAGES.get(settings.advantage),
            device=self.model.device,
        )

    def cut(self, batch: Batch, samples: list[Sample]) -> list[Batch]:
        """Micro-batches of whole samples."""
        ends = np.cumsum([0, *(len(sample) for sample in samples)]).tolist()
        ranges = micro_batches([len(sample) for sample in samples], self.config.train.micro_batch_tokens)
        return [batch.cut(ends[first], ends[last]) for first, last in ranges]

    def fill(self, batch: Batch) -> Batch:
        """The log-probabilities of the other policies that the method or the diagnostics read."""
        if self.past is not None:
            batch = replace(batch, recomputed_logprobs=self.past.recompute(batch, live_version=self.version))
        if self.method.needs_reference:
            if self.frozen is None:
                folder = self._run.checkpoints / "reference" if self._run else None
                self.frozen = ReferencePolicy(self.model, folder, chunk=self.config.train.logprob_chunk)
            batch = replace(batch, reference_logprobs=self.frozen.logprobs(batch))
        return batch

    def backward(self, micro: list[Batch]) -> list[Pass]:
        """Accumulate the step's gradient over its micro-batches."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        reference = self.fit_reference(micro)
        passes = []
        for cut in micro:
            live = self._logprobs(cut)
            batch = self._live_recomputed(cut, live.logprobs)
            out = policy_loss(
                self.method,
                batch,
                logprobs=live.logprobs,
                entropy=live.entropy,
                version=self.version,
                reference=reference,
            )
            out.loss.backward()
            passes.append(
                Pass(
                    batch=batch,
                    logprobs=live.logprobs.detach(),
                    entropy=live.entropy.detach(),
                    routes=live.routes,
                    output=replace(out, loss=out.loss.detach()),
                )
            )
        return passes

    def fit_reference(self, micro: list[Batch]) -> Reference | None:
        """SAT's reference over the whole step: with several micro-batches this takes a pass without gradient,
        with one the loss fits it on the way.
        """
        averaged = self.method.settings.anchor == "ema"
        if not self.method.needs_step_reference or (len(micro) == 1 and not averaged):
            return None
        observed = []
        with torch.no_grad():
            for batch in micro:
                logprobs = self._logprobs(batch).logprobs
                observed.append(observe(self.method, self._live_recomputed(batch, logprobs), logprobs))
        self.sat_reference = fit(self.method.settings, observed, previous=self.sat_reference)
        return self.sat_reference

    def update(self, passes: list[Pass]) -> tuple[Metrics, str]:
        """Clip and step, unless something is not finite: (metrics, why no update was made)."""
        norm = optim.clip_gradient(self.model, self.config.train.max_grad_norm)
        loss = sum(float(one.output.loss) for one in passes)
        metrics = {
            "loss/policy": loss,
            "train/grad_norm": float(norm),
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
            "train/micro_batches": len(passes),
        }
        if np.isfinite(loss) and torch.isfinite(norm):
            self.optimizer.step()
            self.guard.updated()
            return metrics, ""
        broken = optim.non_finite_gradients(self.model)
        reason = f"a non-finite loss {loss}" if not np.isfinite(loss) else "a non-finite gradient"
        reason += f" (gradients of {', '.join(broken[:3])})" if broken else ""
        self.guard.skipped(reason)
        return metrics, reason

    def publish(self) -> tuple[int, dict[str, Tensor]]:
        """(version, host copies of the weights by name)."""
        weights = snapshot(self.model)
        if self.method.needs_recomputed or self.config.log.mismatch_causes:
            if self.past is None:
                self.past = PastPolicies(
                    self.model,
                    chunk=self.config.train.logprob_chunk,
                    replay=self.method.settings.replay_routes,
                )
            self.past.keep(self.version, weights, oldest=self.version - self.config.staleness.bound)
        return self.version, weights

    def save(self, path: str, position: Position) -> None:
        folder = Path(path)
        checkpoint.save(
            folder,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            sat_reference=self.sat_reference,
            position=position,
        )
        checkpoint.keep_newest(folder.parent, self.config.train.keep_checkpoints)

    def load(self, path: str) -> Position:
        position, self.sat_reference = checkpoint.load(Path(path), model=self.model, optimizer=self.optimizer)
        self.version = position.version
        return position

    def warm_start(self, num_steps: int) -> WarmStep | None:
        """Up to `num_steps` more supervised steps: the last one done, or None once the warm start is over."""
        if self._warming is None:
            self._warming = self._warm_start()
        done = list(islice(self._warming, num_steps))
        return done[-1] if done else None

    def _warm_start(self) -> Iterator[WarmStep]:
        config = self.config.warm_start
        if config.steps == 0:
            return
        chat = chat_of(self.tokenizer, self.config.rollout.stop)
        demonstrations = warm_start.Demonstrations(self.config, self.tokenizer, chat)
        path = warm_start.cache_path(self.config, demonstrations)
        if config.cache and warm_start.load_cached(self.model, path):
            return
        torch.set_num_threads(config.threads)
        yield from warm_start.warm_start(self.model, demonstrations, config)
        torch.set_num_threads(self.config.train.threads)
        if config.cache:
            warm_start.store(self.model, path)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids)))

    def _logprobs(self, batch: Batch) -> TokenLogprobs:
        return token_logprobs(
            self.model,
            batch,
            chunk=self.config.train.logprob_chunk,
            entropy_gradient=self.method.settings.entropy_coefficient > 0,
            replay=self.method.settings.replay_routes,
        )

    def _live_recomputed(self, batch: Batch, logprobs: Tensor) -> Batch:
        """Tokens sampled at the trainer's own version have log mu~ = log pi: no pass of their own is needed."""
        if batch.recomputed_logprobs is None:
            return batch
        live = batch.versions == self.version
        return replace(
            batch, recomputed_logprobs=torch.where(live, logprobs.detach(), batch.recomputed_logprobs)
        )

    def _tally(self, passes: list[Pass]) -> Tally:
        tallies = [
            tally(self.method, one.batch, one.output, logprobs=one.logprobs, entropy=one.entropy)
            for one in passes
        ]
        return sum(tallies[1:], start=tallies[0])

    def _report(
        self, step: int, skipped: str, num_tokens: int, metrics: Metrics, started: float
    ) -> StepReport:
        return StepReport(
            step=step,
            version=self.version,
            skipped=skipped,
            num_tokens=num_tokens,
            metrics=metrics,
            seconds=time.monotonic() - started,
        )
