"""One optimizer step in plain numbers, and the evaluation of objectives on it, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.algorithms.base import TokenOutputs
from strop.algorithms.parts import GroupRewards, Objective, PolicyTokens
from strop.algorithms.policy_gradient import PolicyGradient
from strop.data.packing import pack, with_totals
from strop.types import Batch
from support.algorithms import grpo
from support.rollouts import group_of, rollout_of, sampled

Rows = Sequence[Sequence[float]]  # one number per token, grouped by rollout


@dataclass(frozen=True)
class Step:
    batch: Batch
    logprobs: Tensor  # [N] float64, a leaf
    entropy: Tensor  # [N]

    @property
    def outputs(self) -> TokenOutputs:
        return TokenOutputs(self.logprobs, self.entropy)

    def tokens(self, before: Tensor | None = None) -> PolicyTokens:
        """Build the objective's input like PolicyGradient. ``before``: old log-probabilities; default: the learner before the update."""
        older = self.batch.extras.get("policy_logprobs", self.logprobs.detach())
        return PolicyTokens(
            logprobs=self.logprobs,
            before=older if before is None else before,
            sampler=self.batch.sampler_logprobs,
            entropy=self.entropy,
            advantages=self.batch.advantages,
            batch=self.batch,
        )


def step_of(
    now: Rows,
    advantages: Sequence[float],
    *,
    before: Rows | None = None,
    sampler: Rows | None = None,
    entropy: Rows | None = None,
    counted: Sequence[bool] | None = None,
) -> Step:
    """Build the step of one group. ``now``: log-probabilities under the current policy; ``before``: under the learner before the update;
    ``sampler``: as recorded while sampling (default: ``before``). ``counted``: which rollouts a filter kept."""
    lengths = torch.tensor([len(row) for row in now])
    rollouts = [rollout_of([5, 6], sampled([7] * len(row)), reward=float(place)) for place, row in enumerate(now)]
    batch = pack([group_of(*rollouts)], grpo())
    mask = torch.tensor([True] * len(now) if counted is None else list(counted)).double().repeat_interleave(lengths)
    older = before if before is not None else now
    batch = replace(
        batch,
        advantages=torch.tensor(list(advantages), dtype=torch.float64).repeat_interleave(lengths),
        sampler_logprobs=flat(sampler if sampler is not None else older),
        mask=mask,
    )
    batch = with_totals(batch)
    if before is not None:
        batch = batch.with_extra("policy_logprobs", flat(before))
    return Step(batch, flat(now).requires_grad_(), flat(entropy) if entropy is not None else torch.zeros(len(mask)).double())


def flat(rows: Rows) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@dataclass(frozen=True)
class Found:
    value: list[float]  # [N]
    slope: list[float]  # [N] gradient of the sum of the values with respect to each log-probability
    columns: dict[str, list[float]]  # [N]


def evaluate(objective: Objective, step: Step) -> Found:
    """Evaluate an objective on a step, after ``prepare_step`` if it needs step outputs."""
    tokens = step.tokens()
    if objective.surveys:
        surveyed = step.batch.with_extras(objective.survey(replace(tokens, logprobs=tokens.logprobs.detach())))
        tokens = replace(tokens, batch=surveyed)
    step.logprobs.grad = None
    value, columns = objective(tokens)
    (value * step.batch.mask).sum().backward()
    assert step.logprobs.grad is not None
    return Found(value.tolist(), step.logprobs.grad.tolist(), {name: column.tolist() for name, column in columns.items()})


def slopes(algorithm: PolicyGradient, step: Step) -> tuple[float, list[float], dict[str, float]]:
    """Return (loss, gradient with respect to each log-probability [N], metrics) of an algorithm, prepared as in the training loop."""
    detached = TokenOutputs(step.logprobs.detach(), step.entropy)
    batch = algorithm.survey(step.batch, detached if algorithm.surveys else None)
    step.logprobs.grad = None
    loss, logged = algorithm.loss(step.outputs, batch)
    loss.backward()
    assert step.logprobs.grad is not None
    return float(loss.detach()), step.logprobs.grad.tolist(), {name: metric.value for name, metric in logged.items()}


def group(*rewards: float, lengths: Sequence[int] | None = None, greedy: float | None = None) -> GroupRewards:
    sizes = [1] * len(rewards) if lengths is None else list(lengths)
    return GroupRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64), lengths=torch.tensor(sizes, dtype=torch.float64), greedy=greedy
    )
