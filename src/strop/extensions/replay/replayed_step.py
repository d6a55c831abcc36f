"""One step of a replayed run: its metrics compared with the logged ones, its gradient, how far weights and rollouts moved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.base import Outputs, TokenOutputs
from strop.config import TrainingRunConfig
from strop.data.packing import pack
from strop.extensions.replay.replay_plan import ReplayError
from strop.extensions.replay.stored_groups import StoredStep
from strop.learner.client import LearnerClient
from strop.metrics import Metrics
from strop.runs.models import resolve_device
from strop.runs.monitors.token_trace import trace_tokens
from strop.trainer.listeners import UpdateResult
from strop.trainer.mismatch import measure_mismatch
from strop.trainer.run import TrainingRun
from strop.trainer.step_metrics import group_metrics, progress_metrics
from strop.trainer.update import update
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class ComparedMetrics:
    """How the metrics of a step compare with those that the run logged."""

    step: int
    compared: int
    different: Mapping[str, tuple[float, float]]  # name -> (logged, replayed)
    not_compared: Sequence[str]  # logged by the run and not computed by a replay: times, validation, weights sent

    @property
    def equal(self) -> bool:
        return bool(self.compared) and not self.different


def compare_metrics(step: int, logged: Mapping[str, float], computed: Mapping[str, float]) -> ComparedMetrics:
    """Compare what a step computed with what it logged, to the last digit."""
    known = {name: value for name, value in logged.items() if name in computed}
    return ComparedMetrics(
        step=step,
        compared=len(known),
        different={name: (value, computed[name]) for name, value in known.items() if not _same(value, computed[name])},
        not_compared=sorted(set(logged) - set(computed)),
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


FACTOR = 10.0  # how many times the difference of one pair of passes another pair may differ by


@dataclass(frozen=True, kw_only=True)
class EqualPasses:
    """A step that was trained twice as it was, from the same weights."""

    compared: int
    different: Mapping[str, tuple[float, float]]  # metric -> (first pass, second pass)

    def explains(self, name: str, logged: float, replayed: float) -> bool:
        """Whether a metric of the run and of a replay differ by no more than equal passes may.

        Two passes may have one metric in common by chance, so each may differ by as much of its size as metrics usually do."""
        first, second = self.different.get(name, (replayed, replayed))
        usual = (
            median(abs(one - other) / max(abs(one), abs(other)) for one, other in self.different.values())
            if self.different
            else 0.0
        )
        return abs(logged - replayed) <= FACTOR * max(abs(first - second), usual * max(abs(first), abs(second)))

    def unexplained(self, found: ComparedMetrics) -> list[str]:
        """Return the metrics that differ from what was logged by more than that."""
        return [name for name, pair in sorted(found.different.items()) if not self.explains(name, *pair)]


def passes_may_differ(config: TrainingRunConfig) -> bool:
    return not config.policy.deterministic and resolve_device(config.policy.device).type != "cpu"


def compare_passes(step: int, first: Mapping[str, float], second: Mapping[str, float]) -> EqualPasses:
    found = compare_metrics(step, first, second)
    return EqualPasses(compared=found.compared, different=found.different)


@dataclass(frozen=True, kw_only=True, eq=False)
class MovedRollout:
    """A rollout that a step trained on, and how far the step moved it."""

    group: int
    sample: int
    task_id: str
    reward: float
    advantage: float  # mean over its tokens
    tokens: int  # counted in the loss
    moved: (
        float  # nats: the policy's log-probability of its counted tokens after the step less before; of a reward model, its score
    )
    gradient: float  # norm of the derivatives of the loss for the logits of its tokens
    clipped: int  # tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedStep:
    """What a step computed."""

    metrics: Mapping[str, float]
    rollouts: Sequence[MovedRollout]
    gradient: Tensor  # [parameters] float32, of the first optimizer step of the policy, before it is clipped
    change: Tensor  # [parameters] float32, of the policy's weights over the whole step
    tokens: int
    clipped_tokens: int | None  # None: the objective has no bound


@dataclass(frozen=True)
class ObservedLearner(LearnerClient):
    """A learner in this process whose first gradient is kept."""

    gradients: list[Tensor] = field(default_factory=list)

    async def step(self) -> Metrics:
        if not self.gradients:
            self.gradients.append(_flatten([_gradient(each) for each in _parameters(self)]))
        return await super().step()


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedStep:
    """A step that was trained again."""

    batch: Batch
    result: UpdateResult
    metrics: Mapping[str, float]  # as the loop logs them, without times and what a replay does not do


async def train_again(run: TrainingRun, stored: StoredStep) -> TrainedStep:
    """Train a step as the loop does, on what it trained on; then the run is after it. Raises ReplayError."""
    groups = stored.groups
    if len(groups) < run.options.groups_per_step:
        raise ReplayError(
            f"the step has {len(groups)} groups, and one needs {run.options.groups_per_step}: the stored rollouts are cut"
        )
    run.timer.start_step()
    batch = pack(groups, run.algorithm.group_credit(groups), share_prefixes=run.options.share_prefixes)
    batch = run.algorithm.token_credit(await run.columns.fill(batch, groups))
    result = await update(run, batch)
    recorded = bool(run.algorithm.recorded_data)
    staleness = [] if recorded else [run.step - group.version for group in groups]
    collected = group_metrics(groups, stored.dropped, staleness, recorded=recorded)
    progress = progress_metrics(run.last_metrics, result.metrics, groups, run.options.tasks_per_epoch)
    outputs = result.old_outputs
    mismatch: Mapping[str, float] = {}
    if isinstance(outputs, TokenOutputs) and not recorded:
        mismatch = measure_mismatch(batch, outputs.logprobs, run.step).metrics()
    run.step, run.last_metrics = run.step + 1, {**collected, **result.metrics, **progress, **mismatch}
    if recorded:
        run.stream.release(len(groups))
    return TrainedStep(batch=batch, result=result, metrics=run.last_metrics)


async def replay_step(run: TrainingRun, stored: StoredStep) -> ReplayedStep:
    """Train the step as the loop does, and follow its gradient, its weights and its tokens."""
    policy = ObservedLearner(run.learners["policy"].caller)
    run.learners = {**run.learners, "policy": policy}
    before = _flatten(_parameters(policy))
    trained = await train_again(run, stored)
    batch, result = trained.batch, trained.result
    tokens = trace_tokens(run.algorithm, batch, result.passes, run.tracker.note)
    fields = [{}] * batch.num_sequences if tokens is None else tokens.split(_sampled(stored.groups))
    clipped = [sum(each["clipped"]) if each.get("clipped") is not None else None for each in fields]
    return ReplayedStep(
        metrics=trained.metrics,
        rollouts=_describe(stored.groups, batch, result.old_outputs, await policy.score(batch), fields),
        gradient=policy.gradients[0] if policy.gradients else torch.zeros_like(before),
        change=_flatten(_parameters(policy)) - before,
        tokens=int((batch.mask > 0).sum()),
        clipped_tokens=None if all(each is None for each in clipped) else sum(each or 0 for each in clipped),
    )


def _parameters(learner: LearnerClient) -> list[Tensor]:
    target: Any = getattr(learner.caller, "target", None)
    if target is None:
        raise ReplayError("the learner of a replay is in another process; this cannot be")
    return list(target.parameters)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten().float().cpu() for each in tensors]).clone()


def _sampled(groups: Sequence[Group]) -> list[tuple[bool, ...]]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    paths = [(rollout.turns, *(branch.turns for branch in rollout.branches)) for rollout in rollouts]
    return [tuple(turn.sampled for turns in each for turn in turns for _ in range(len(turn.tokens))) for each in paths]


def _describe(
    groups: Sequence[Group], batch: Batch, before: Outputs, after: Outputs, fields: Sequence[Mapping[str, Any]]
) -> list[MovedRollout]:
    moved = _per_rollout((_values(after) - _values(before)) * (batch.mask > 0), batch)
    lengths = _per_rollout((batch.mask > 0).double(), batch)
    everything = _per_rollout(torch.ones_like(batch.mask), batch)
    advantages = _per_rollout(batch.advantages, batch)
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    return [
        MovedRollout(
            group=group.index,
            sample=rollout.sample,
            task_id=rollout.task.id,
            reward=rollout.reward,
            advantage=advantages[place] / max(everything[place], 1.0),
            tokens=int(lengths[place]),
            moved=moved[place],
            gradient=_norm(fields[place].get("loss_gradients", {})),
            clipped=sum(fields[place].get("clipped") or ()),
        )
        for place, (group, rollout) in enumerate(rollouts)
    ]


def _values(outputs: Outputs) -> Tensor:
    return outputs.logprobs if isinstance(outputs, TokenOutputs) else outputs.values


def _per_rollout(values: Tensor, batch: Batch) -> list[float]:
    """Sum over the predicted tokens of each rollout, [N] -> S numbers."""
    sums: list[float] = (
        torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.sequence, values.double()).tolist()
    )
    return sums


def _norm(gradients: Mapping[str, Sequence[float]]) -> float:
    columns = [torch.tensor(values, dtype=torch.float64) for name, values in gradients.items() if "/" not in name]
    return float(torch.stack(columns).sum(0).norm()) if columns else 0.0
