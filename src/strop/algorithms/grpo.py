"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) and the variants that are settings of it.

Dr.GRPO: normalize=False, aggregation="constant_length". DAPO's clip-higher: clip_high > clip_low. GSPO: sequence_ratio=True.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.functional import (
    Aggregation,
    KlEstimator,
    aggregate,
    clipped_surrogate,
    group_advantages,
    kl_estimate,
    sequence_mean,
    varies,
)
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """The default advantage is (r - mean) / (population standard deviation + eps) within a group."""

    baseline: bool = True
    leave_one_out: bool = False
    normalize: bool = True
    advantage_low: float | None = None  # clip advantages from below
    advantage_high: float | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    on_policy_ratio: bool = False  # the ratio is exp(logprob - stop_gradient(logprob)), 1 in value
    sequence_ratio: bool = False  # one ratio per rollout, its geometric mean (GSPO, 2507.18071)
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None
    kl_penalty: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in_reward: bool = False
    kl_input_clamp: float | None = 20.0
    kl_output_clamp: float | None = 10.0
    drop_constant_groups: bool = False  # dynamic sampling (DAPO): a group that does not vary makes room for another
    overlong_filtering: bool = False  # a truncated rollout counts in the baseline, not in the loss

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reference_logprobs"}) if self.kl_penalty else frozenset()

    def keep(self, group: Group) -> bool:
        return varies(group.rewards) if self.drop_constant_groups else True

    def trains(self, group: Group) -> Tensor:
        return torch.tensor([not (self.overlong_filtering and rollout.truncated) for rollout in group.rollouts])

    def advantages(self, group: Group) -> Tensor:
        return self._relative(group.rewards)

    def _relative(self, rewards: Tensor) -> Tensor:
        relative = group_advantages(rewards, baseline=self.baseline, leave_one_out=self.leave_one_out, normalize=self.normalize)
        if self.advantage_low is None and self.advantage_high is None:
            return relative
        return relative.clamp(self.advantage_low, self.advantage_high)

    def credit(self, batch: Batch) -> Batch:
        """With the KL in the reward: r - beta x (sum of a rollout's token KLs), then relative to its group."""
        if not (self.kl_penalty and self.kl_in_reward):
            return batch
        logprobs = batch.extra("policy_logprobs") if "policy_logprobs" in batch.extras else batch.sampler_logprobs
        penalty = self._kl(logprobs, batch) * batch.mask
        per_rollout = torch.zeros(batch.num_sequences).index_add(0, batch.sequence, penalty)
        rewards = batch.rewards.double() - self.kl_penalty * per_rollout.double()
        advantages = torch.zeros_like(rewards)
        for group in range(batch.num_groups):
            members = batch.group == group
            advantages[members] = self._relative(rewards[members])
        return replace(batch, advantages=advantages.float()[batch.sequence])

    def _kl(self, logprobs: Tensor, batch: Batch) -> Tensor:
        reference = batch.extra("reference_logprobs")
        return kl_estimate(
            logprobs, reference, self.kl_estimator, input_clamp=self.kl_input_clamp, output_clamp=self.kl_output_clamp
        )

    def _ratio(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """policy / policy before the update, [N]. With one optimizer step a batch the two are the same weights."""
        current = logprobs.detach()
        before = current if self.on_policy_ratio else batch.extras.get("policy_logprobs", current)
        difference = logprobs - before
        if self.sequence_ratio:
            shared = sequence_mean(difference.detach(), batch)[batch.sequence]
            difference = shared + logprobs - current
        return torch.exp(difference)

    def idle(self, batch: Batch, learner: str = "policy") -> Tensor:
        """Without a KL term in the loss a token with advantage 0 has no gradient: groups that do not vary, mostly."""
        if self.kl_penalty and not self.kl_in_reward:
            return super().idle(batch, learner)
        signal = torch.zeros(batch.num_sequences).index_add(0, batch.sequence, (batch.advantages * batch.mask).abs())
        return signal == 0

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        ratio = self._ratio(outputs.logprobs, batch)
        objective = clipped_surrogate(ratio, batch.advantages, low=self.clip_low, high=self.clip_high, dual=self.dual_clip)
        loss = -aggregate(objective, batch, self.aggregation, self.constant_length)
        clipped = ((ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)).float()
        logged = {
            "probs_ratio": metrics.total(aggregate(ratio.detach(), batch).item()),
            "probs_ratio_max": metrics.maximum(ratio.detach().max().item() if len(ratio) else 0.0),
            "ratio_outside_clip": metrics.total(aggregate(clipped, batch).item()),
        }
        if self.kl_penalty:
            kl = self._kl(outputs.logprobs, batch)
            logged["kl_penalty"] = metrics.total(aggregate(kl.detach(), batch).item())
            if not self.kl_in_reward:
                loss = loss + self.kl_penalty * aggregate(kl, batch, self.aggregation, self.constant_length)
        logged["loss"] = metrics.total(loss.item())
        return loss, logged
