"""GDPO (arXiv 2601.05242): normalizes each of several rewards within its group before adding them, so that none dominates.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import EPS
from strop.algorithms.group_advantages import Deviation, group_advantages
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class DecoupledRewards(Advantage):
    """The sum over rewards k of weight_k (R_k - mean_k) / (deviation_k + eps) in the group, divided by its deviation in the batch.

    A reward that does not vary in a group adds exactly 0. The mean of the sum over the batch is 0, because it is 0 in each group; it is
    not subtracted again, so that groups without signal keep a credit of 0. The deviation in the batch is over rollouts, as in the paper
    and TRL; verl whitens over tokens. ``weights`` maps the names of rewards to weights; rewards without a weight are ignored. A list has
    one weight for each reward, in the order of their names, and null is weight 1 for each, including those that an environment only logs,
    as in NeMo-RL. The environment's own weights are not used.

    ``deviation`` is the deviation within each group; unless it is population, both deviations have Bessel's correction. With
    others, the credit of a group does not add up to 0, and the mean over the batch is subtracted.
    """

    needs_named_rewards: ClassVar[bool] = True
    weights: Mapping[str, float] | tuple[float, ...] | None = field(default_factory=dict)
    leave_one_out: bool = False
    normalize: bool = True
    deviation: Deviation = "population"

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from super().validate(plan)
        known = ", ".join(plan.environment_rewards) or "train/rewards/* in the log"
        if not isinstance(self.weights, Mapping):
            yield from self._check_unnamed_weights(plan, known)
            return
        if len(self.weights) < 2:
            yield (
                f"GDPO normalizes each reward separately and adds them, but {len(self.weights)} rewards have a weight; set the "
                f"weights of at least two in algorithm.kwargs.advantage.weights (available: {known}), or choose grpo for a "
                "single reward"
            )
        unknown = [name for name in self.weights if name not in plan.environment_rewards]
        if plan.environment_rewards and unknown:
            yield f"GDPO has weights for rewards that no environment returns: {', '.join(unknown)}; available are {known}"

    def _check_unnamed_weights(self, plan: Plan, known: str) -> Iterator[str]:
        found = len(plan.environment_rewards)
        wanted = 2 if self.weights is None else len(self.weights)
        if self.weights is not None and wanted < 2:
            yield f"GDPO normalizes each reward separately and adds them, but has {wanted} weights; choose grpo for a single reward"
        elif found and (found < wanted if self.weights is None else found != wanted):
            needed = "at least 2 rewards" if self.weights is None else f"a reward for each of {wanted} weights"
            yield f"GDPO needs {needed}, but the environments return {found}: {known}; set the weights by name, or choose grpo"

    def named_weights(self, names: Iterable[str]) -> Mapping[str, float]:
        """Return the weight of each reward. Raises ValueError if there are not as many weights as rewards."""
        names = sorted(names)
        if isinstance(self.weights, tuple):
            if len(self.weights) != len(names):
                raise ValueError(f"GDPO has {len(self.weights)} weights, but the rewards of this group are {names}")
            return dict(zip(names, self.weights, strict=True))
        return self.weights or dict.fromkeys(names, 1.0)

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the weighted sum of the normalized rewards, [G]. Raises ValueError if the group has no reward with a weight."""
        weights = self.named_weights(group.by_name)
        weighted = {name: rewards for name, rewards in group.by_name.items() if name in weights}
        if not weighted:
            raise ValueError(f"GDPO has weights for {sorted(weights)}, but the rewards of this group are {sorted(group.by_name)}")
        return torch.stack([weights[name] * self._relative(rewards) for name, rewards in weighted.items()]).sum(0)

    def _relative(self, rewards: Tensor) -> Tensor:
        return group_advantages(rewards, leave_one_out=self.leave_one_out, normalize=self.normalize, deviation=self.deviation)

    def token_advantages(self, batch: Batch) -> Tensor:
        tokens = torch.bincount(batch.sequence, minlength=batch.num_sequences)
        sums = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.sequence, batch.advantages.double())
        credit = (sums / tokens.clamp(min=1))[tokens > 0]
        if self.deviation == "population":
            mean, deviation = 0.0, credit.square().mean().sqrt()
        else:
            mean = float(credit.mean()) if self.deviation == "others" else 0.0
            deviation = ((credit - mean).square().sum() / max(len(credit) - 1, 1)).sqrt()
        return ((batch.advantages.double() - mean) / (deviation + EPS)).to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class GDPO(PolicyGradient):
    """Each reward normalized by its group, their sum by the batch, PPO's clip, mean over all tokens of the batch."""

    advantage: Advantage = DecoupledRewards()
    objective: Objective = Clip()
