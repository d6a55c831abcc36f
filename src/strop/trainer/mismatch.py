"""Mismatch between sampler and learner: overall, by position and by age of the weights, with limits that warn or stop the run.

    d = learner's log-probability before this step's updates - sampler's log-probability, of each counted token

d has two causes: the sampler computes another distribution than the learner with the same weights (a bug, rounding, a quantized
engine), or the policy has changed since the rollout was sampled. Only the first is an error. The limits therefore apply to the tokens
of the newest weights in the batch: those of age 0, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.base import TokenOutputs
from strop.base_config import validate_section
from strop.generation.generation_config import MismatchConfig
from strop.openmp import call_in_thread
from strop.stopping import EndRun
from strop.trainer.listeners import RunListener, StepView
from strop.types import Batch

POSITION_BUCKETS = (1, 16, 64, 256, 1024, 4096)  # last position of each bucket, counted from 1; one more bucket is open
MAX_AGE = 8  # ages from here on share one bucket
MIN_SHARE = 0.01  # share of the tokens that an age must have for the limits to apply to it


class MismatchTooLarge(EndRun):
    """Sampler and learner have disagreed by more than the limit for too many steps. The message gives the measurements."""


@dataclass(frozen=True, kw_only=True)
class MismatchStats:
    """Mismatch statistics of a set of tokens. All means are over its tokens."""

    tokens: int
    error: float  # mean of exp|d|, the factor by which the two probabilities of a token differ; 1 is perfect
    max_error: float  # the largest exp|d|
    kl: float  # nats per token: expm1(d) - d, an estimate of KL(sampler || learner) that is never negative
    reverse_kl: float  # nats per token: exp(d) d - expm1(d), the same estimate of KL(learner || sampler)
    above_2: float  # share of tokens with exp|d| above 2


@dataclass(frozen=True, kw_only=True)
class MismatchReport:
    overall: MismatchStats
    # Position among the rollout's sampled tokens, as "1", "2_16", "17_64", ..; empty buckets are left out.
    by_position: Mapping[str, MismatchStats]
    # Steps between the weights that sampled a token and the weights before the update; MAX_AGE includes all older ones.
    by_age: Mapping[int, MismatchStats]
    checked_age: int  # the lowest age with enough tokens; the limits apply to it

    @property
    def checked(self) -> MismatchStats:
        return self.by_age.get(self.checked_age, self.overall)

    def metrics(self) -> dict[str, float]:
        """Return the metrics under ``train/``. Those by position or age are left out if there is only one bucket."""
        overall = self.overall
        logged = {
            "train/token_mult_prob_error": overall.error,
            "train/token_mult_prob_error_max": overall.max_error,
            "train/gen_kl_error": overall.kl,
            "train/gen_kl_error_reverse": overall.reverse_kl,
            "train/token_ratio_above_2": overall.above_2,
        }
        buckets = {f"position_{name}": stats for name, stats in self.by_position.items()} if len(self.by_position) > 1 else {}
        if len(self.by_age) > 1:
            buckets |= {f"age_{age}" + ("_on" if age == MAX_AGE else ""): stats for age, stats in self.by_age.items()}
        for name, stats in buckets.items():
            logged[f"train/mismatch/{name}/token_mult_prob_error"] = stats.error
            logged[f"train/mismatch/{name}/gen_kl_error"] = stats.kl
        return logged


def measure_mismatch(batch: Batch, logprobs: Tensor, version: int) -> MismatchReport:
    """Compare the learner's log-probabilities with the sampler's over counted tokens.

    ``logprobs`` [N] are the learner's before the update, with weights of ``version``.
    """
    counted = batch.mask > 0
    difference = (logprobs.detach() - batch.rollout_logprobs)[counted].double().cpu()
    positions = positions_in_rollout(batch)[counted].cpu()
    ages = (version - batch.versions[counted].cpu()).clamp(0, MAX_AGE)
    bucket = torch.bucketize(positions, torch.tensor(POSITION_BUCKETS))
    by_age = {int(age): mismatch_stats(difference[ages == age]) for age in ages.unique()}
    checkable = [age for age, stats in by_age.items() if stats.tokens >= MIN_SHARE * len(difference)]
    return MismatchReport(
        overall=mismatch_stats(difference),
        by_position={_bucket_name(int(index)): mismatch_stats(difference[bucket == index]) for index in bucket.unique()},
        by_age=by_age,
        checked_age=min(checkable, default=0),
    )


def mismatch_stats(difference: Tensor) -> MismatchStats:
    """Return the statistics of ``difference`` [n] float64: learner - sampler, in nats. Without tokens the match is perfect."""
    if not len(difference):
        return MismatchStats(tokens=0, error=1.0, max_error=1.0, kl=0.0, reverse_kl=0.0, above_2=0.0)
    factor, ratio = difference.abs().exp(), difference.exp()
    weighted = torch.where(ratio == 0, 0.0, ratio * difference)  # a token with probability 0 under the learner adds 0 to its KL
    return MismatchStats(
        tokens=len(difference),
        error=float(factor.mean()),
        max_error=float(factor.max()),
        kl=float((torch.expm1(difference) - difference).mean()),
        reverse_kl=float((weighted - torch.expm1(difference)).mean()),
        above_2=float((factor > 2).double().mean()),
    )


def positions_in_rollout(batch: Batch) -> Tensor:
    """Return the position of each token among the sampled tokens of its rollout, counted from 1, [N] int64."""
    order = torch.argsort(batch.sequence, stable=True)
    counts = torch.bincount(batch.sequence, minlength=batch.num_sequences)
    first = torch.cumsum(counts, 0) - counts
    positions = torch.empty_like(batch.sequence)
    positions[order] = torch.arange(len(order), device=order.device) - first[batch.sequence[order]] + 1
    return positions


def _bucket_name(bucket: int) -> str:
    low = POSITION_BUCKETS[bucket - 1] + 1 if bucket else 1
    if bucket == len(POSITION_BUCKETS):
        return f"{low}_on"
    return str(low) if low == POSITION_BUCKETS[bucket] else f"{low}_{POSITION_BUCKETS[bucket]}"


@dataclass
class MismatchGuard(RunListener):
    """Measures each step and checks it against the limits."""

    name = "mismatch"
    limits: MismatchConfig = field(default_factory=lambda: validate_section(MismatchConfig, {}))
    exact: bool = False  # policy.exact_on_policy: no token of the current weights may differ in a single bit
    steps_above_stop: int = 0  # consecutive steps above ``stop``
    last_warning: int | None = None  # the step of the last warning
    report: MismatchReport | None = None  # for the step being stored

    async def on_step(self, step: StepView) -> dict[str, float]:
        outputs = step.result.old_outputs
        if not isinstance(outputs, TokenOutputs):
            return {}
        self.report = await call_in_thread(measure_mismatch, step.batch, outputs.logprobs, step.step - 1)
        return self.report.metrics()

    async def on_log(self, step: StepView) -> dict[str, float]:
        """Warn, or raise MismatchTooLarge. This runs once the step is stored, so that its tokens can be inspected."""
        report, self.report = self.report, None
        if report is not None and (warning := self.check(step.step, report)) is not None:
            step.tracker.note(f"warning: {warning}")
        return {}

    async def state_dict(self) -> Any:
        return {"steps_above_stop": self.steps_above_stop, "last_warning": self.last_warning}

    def load_state_dict(self, state: Any) -> None:
        self.steps_above_stop, self.last_warning = state["steps_above_stop"], state["last_warning"]

    def check(self, step: int, report: MismatchReport) -> str | None:
        """Return a warning, if one is due.

        Raises MismatchTooLarge after ``stop_after`` consecutive steps above ``stop``, and with ``exact`` at the first bit that differs.
        """
        if self.exact:
            _check_exact(step, report)
        limits, error = self.limits, report.checked.error
        self.steps_above_stop = self.steps_above_stop + 1 if _exceeds(error, limits.stop) else 0
        if self.steps_above_stop >= limits.stop_after:
            raise MismatchTooLarge(
                f"step {step}: {_describe(report)}. That is above policy.generation.mismatch.stop = {limits.stop:g} for "
                f"{self.steps_above_stop} steps in a row. The learner's policy is not the one that sampled these rollouts, so training on "
                f"them is meaningless. {_suggest_causes(report)}"
            )
        if not _exceeds(error, limits.warn) or (self.last_warning is not None and step < self.last_warning + limits.warn_every):
            return None
        self.last_warning = step
        return (
            f"mismatch: step {step}: {_describe(report)}; expected is about 1.00 to 1.05 (policy.generation.mismatch.warn = "
            f"{limits.warn:g}). {_suggest_causes(report)}"
        )


def _check_exact(step: int, report: MismatchReport) -> None:
    current = report.by_age.get(0)
    if current is not None and current.max_error != 1.0:
        raise MismatchTooLarge(
            f"step {step}: policy.exact_on_policy is true, but learner and engine differ by a factor of up to {current.max_error:.9g} "
            f"on {current.tokens} tokens that the current weights sampled (mean {current.error:.9g}): something computes in another order "
            "of additions, or the engine has other weights. Set it to false to train as before, and report the model and the processor"
        )


def _exceeds(error: float, limit: float | None) -> bool:
    """Return whether the error exceeds the limit. NaN exceeds every limit."""
    return limit is not None and (math.isnan(error) or error > limit)


def _describe(report: MismatchReport) -> str:
    checked = report.checked
    tokens = (
        f"on {checked.tokens} tokens that the current weights sampled"
        if report.checked_age == 0
        else f"on {checked.tokens} tokens of weights {report.checked_age} steps old (too few tokens have newer weights, so part of the "
        "difference is the policy's own change)"
    )
    return (
        f"sampler and learner differ by a factor of {checked.error:.3f} (train/token_mult_prob_error), "
        f"at most {checked.max_error:.3g}, {tokens}; KL(sampler, learner) {checked.kl:.3g} nats per token"
    )


def _suggest_causes(report: MismatchReport) -> str:
    worst = max(report.by_position.items(), key=lambda item: item[1].error, default=None)
    where = f"It is worst at position {worst[0].replace('_', ' to ', 1).replace('to on', 'and later')}. " if worst else ""
    return (
        f"Likely causes: the engine did not receive the weights, or it has another precision or quantization, other sampling settings or "
        f"another model implementation. {where}Look at rollouts/step_*_ratios.jsonl (the tokens that differ most) and at 'Sampler and "
        "learner disagree' in docs/troubleshooting.md"
    )
