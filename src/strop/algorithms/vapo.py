"""VAPO (arXiv 2504.05118): PPO with a critic for long reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.clip import Clip
from strop.algorithms.gae import Gae
from strop.algorithms.parts import Objective
from strop.algorithms.ppo import PPO


@dataclass(frozen=True, kw_only=True)
class VAPO(PPO):
    """The critic's targets are plain returns (lambda 1), the policy's lambda is 1 - 1 / (0.05 l) for a rollout of l tokens,
    the clip is DAPO's, correct rollouts are also imitated with weight 0.1, and the critic trains alone for 50 steps.

    A rollout of at most 20 tokens has lambda 0. Correct is a reward above 0. The paper begins with a critic that was a reward
    model and samples 16 rollouts a prompt; both are the run's to set. It does not say whether advantages are whitened; here
    they are, as PPO's.

    Metrics: PPO's.
    """

    advantage: Gae = Gae(lambda_value=1.0, length_adaptive_alpha=0.05)
    objective: Objective = Clip(low=0.2, high=0.28)
    positive_nll: float = 0.1
    policy_training_start_step: int = 50
