"""Preference losses on pairs that the policy samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.algorithms.base import Plan
from strop.algorithms.functional import sequence_sum, varies
from strop.extensions.recorded.preference.referenced import ComparedPreference
from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class OnlineDPO(ComparedPreference):
    """Online DPO (arXiv 2402.04792): a preference loss on rollouts of the policy itself, the best of each group against the worst.

    -log sigmoid(beta d), or with ``loss_type`` ipo (d - 1 / (2 beta))^2, with d = h(best) - h(worst) of a group.

    The best rollout has the highest reward of its group and the worst the lowest, the first of equal ones. A group whose rewards do not
    vary has no pair: it does not count, or with ``drop_constant_groups`` another one is sampled in its place. The other
    rollouts of a larger group do not count, but cost as much. The advantage of the best rollout is 1, of the worst -1 and of the others 0.

    Metrics: those of ``dpo``, over pairs; pairs, the number of groups with a pair.
    """

    recorded_data: ClassVar[Literal[""]] = ""  # type: ignore[assignment]
    beta: float = 0.1
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    drop_constant_groups: bool = False  # dynamic sampling, as in DAPO

    def validate(self, plan: Plan) -> Iterator[str]:
        if plan.group_size < 2:
            yield (
                f"the group size is {plan.group_size}, but a pair is two rollouts of a group; raise num_generations_per_prompt to 2 or "
                "more"
            )

    def keep(self, group: Group) -> bool:
        return not self.drop_constant_groups or varies(group.rewards)

    def advantages(self, group: Group) -> Tensor:
        sides = torch.zeros(len(group.rollouts), dtype=torch.float64)
        if varies(group.rewards):
            sides[group.rewards.argmax()], sides[group.rewards.argmin()] = 1.0, -1.0
        return sides

    def rollout_mask(self, group: Group) -> Tensor:
        return self.advantages(group) != 0

    def zero_gradient(self, batch: Batch, learner: str = "policy") -> Tensor:
        return sequence_sum(batch.advantages.abs(), batch) == 0

    def as_pairs(self, values: Tensor, batch: Batch) -> Tensor:
        """Arrange a column of rollouts [S] as (best, worst) of each group, [P, 2]; 0 for a group without a pair in this batch."""
        side = sequence_sum(batch.advantages, batch)
        pairs = values.new_zeros(batch.num_groups, 2)
        return pairs.index_add(0, batch.group, torch.stack([values * (side > 0), values * (side < 0)], 1))

    def chosen_tokens(self, batch: Batch) -> Tensor:
        return batch.advantages > 0

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        gap = chosen - rejected
        if self.loss_type == "ipo":
            return (gap - 1 / (2 * self.beta)).square()
        return -torch.nn.functional.logsigmoid(self.beta * gap)

    def report(self, batch: Batch) -> dict[str, float]:
        return {"train/pairs": float(batch.totals.groups)}
