"""One optimizer step in plain numbers, and the evaluation of objectives on it, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.algorithms.base import TokenOutputs
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import GroupRewards, Objective, PolicyTokens
from strop.types import Batch
from support.algorithms import grpo
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn

Rows = Sequence[Sequence[float]]  # one number per token, grouped by rollout


@dataclass(frozen=True)
class Step:
    batch: Batch
    logprobs: Tensor  # [N] float64, a leaf
    entropy: Tensor  # [N]

    @property
    def outputs(self) -> TokenOutputs:
        return TokenOutputs(self.logprobs, self.entropy)

    def tokens(self, old_logprobs: Tensor | None = None) -> PolicyTokens:
        """Build the objective's input like PolicyGradient. ``before``: old log-probabilities; default: the learner before the update."""
        older = self.batch.columns.get("policy_logprobs", self.logprobs.detach())
        return PolicyTokens(
            logprobs=self.logprobs,
            old_logprobs=older if old_logprobs is None else old_logprobs,
            rollout_logprobs=self.batch.rollout_logprobs,
            entropy=self.entropy,
            advantages=self.batch.advantages,
            batch=self.batch,
        )


def make_step(
    logprobs: Rows,
    advantages: Sequence[float],
    *,
    old: Rows | None = None,
    rollout: Rows | None = None,
    entropy: Rows | None = None,
    kept: Sequence[bool] | None = None,
) -> Step:
    """Build the step of one group. ``now``: log-probabilities under the current policy; ``before``: under the learner before the update;
    ``sampler``: as recorded while sampling (default: ``before``). ``counted``: which rollouts a filter kept."""
    lengths = torch.tensor([len(row) for row in logprobs])
    rollouts = [make_rollout([5, 6], sampled_turn([7] * len(row)), reward=float(place)) for place, row in enumerate(logprobs)]
    batch = pack_for([make_group(*rollouts)], grpo())
    mask = torch.tensor([True] * len(logprobs) if kept is None else list(kept)).double().repeat_interleave(lengths)
    older = old if old is not None else logprobs
    batch = replace(
        batch,
        advantages=torch.tensor(list(advantages), dtype=torch.float64).repeat_interleave(lengths),
        rollout_logprobs=flatten_rows(rollout if rollout is not None else older),
        mask=mask,
    )
    batch = batch.with_totals()
    if old is not None:
        batch = batch.with_column("policy_logprobs", flatten_rows(old))
    return Step(
        batch,
        flatten_rows(logprobs).requires_grad_(),
        flatten_rows(entropy) if entropy is not None else torch.zeros(len(mask)).double(),
    )


def flatten_rows(rows: Rows) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@dataclass(frozen=True)
class ObjectiveResult:
    value: list[float]  # [N]
    gradient: list[float]  # [N] gradient of the sum of the values with respect to each log-probability
    columns: dict[str, list[float]]  # [N]


def evaluate_objective(objective: Objective, step: Step) -> ObjectiveResult:
    """Evaluate an objective on a step, after ``prepare_step`` if it needs step outputs."""
    tokens = step.tokens()
    if objective.needs_step_outputs:
        surveyed = step.batch.with_columns(objective.prepare_step(replace(tokens, logprobs=tokens.logprobs.detach())))
        tokens = replace(tokens, batch=surveyed)
    step.logprobs.grad = None
    value, columns = objective(tokens)
    (value * step.batch.mask).sum().backward()
    assert step.logprobs.grad is not None
    return ObjectiveResult(
        value.tolist(), step.logprobs.grad.tolist(), {name: column.tolist() for name, column in columns.items()}
    )


def loss_gradients(algorithm: PolicyGradient, step: Step) -> tuple[float, list[float], dict[str, float]]:
    """Return (loss, gradient with respect to each log-probability [N], metrics) of an algorithm, prepared as in the training loop."""
    detached = TokenOutputs(step.logprobs.detach(), step.entropy)
    batch = algorithm.prepare_step(step.batch, detached if algorithm.needs_step_outputs else None)
    step.logprobs.grad = None
    loss, logged = algorithm.loss(step.outputs, batch)
    loss.backward()
    assert step.logprobs.grad is not None
    return float(loss.detach()), step.logprobs.grad.tolist(), {name: metric.value for name, metric in logged.items()}


def make_group_rewards(*rewards: float, lengths: Sequence[int] | None = None, greedy: float | None = None) -> GroupRewards:
    sizes = [1] * len(rewards) if lengths is None else list(lengths)
    return GroupRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64), lengths=torch.tensor(sizes, dtype=torch.float64), greedy_reward=greedy
    )
