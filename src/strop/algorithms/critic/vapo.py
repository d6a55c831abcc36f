"""VAPO (arXiv 2504.05118): PPO with a critic for long reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.critic.gae import Gae
from strop.algorithms.critic.ppo import PPO
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.parts import Objective


@dataclass(frozen=True, kw_only=True)
class VAPO(PPO):
    """PPO with plain returns (lambda 1) as the critic's targets, a policy lambda of 1 - 1 / (0.05 l) for a rollout of l tokens, DAPO's
    clip, a log-likelihood term of weight 0.1 on correct rollouts, and 50 steps in which only the critic trains.

    A rollout of at most 20 tokens has lambda 0. A rollout with a reward above 0 is correct. The paper initializes the critic from a reward
    model and samples 16 rollouts per prompt; set both in the run's configuration. The paper does not say whether advantages are whitened;
    here they are, as in PPO.

    Metrics: PPO's.
    """

    advantage: Gae = Gae(lambda_value=1.0, length_adaptive_alpha=0.05)
    objective: Objective = Clip(low=0.2, high=0.28)
    positive_nll: float = 0.1
    policy_training_start_step: int = 50
