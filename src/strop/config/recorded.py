"""Sections ``sft``, ``dpo`` and ``rm``: training on recorded conversations and preferences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.config.grpo import AlgorithmConfig
from strop.config.model import Model, subsection
from strop.config.policy import PolicyConfig
from strop.config.training import RecordedTrainingConfig


class SftConfig(RecordedTrainingConfig):
    """Supervised fine-tuning."""

    only_unmask_final: bool = Field(
        False, description="Teach only the last of the assistant's turns; false teaches all of them, and nothing else."
    )


class SftAlgorithmConfig(AlgorithmConfig):
    """The supervised loss."""

    name: str = Field("sft", min_length=1, description="sft, or module:Class for one from outside.")


class DpoConfig(RecordedTrainingConfig):
    """Preference optimisation. For algorithms without a reference, or with options of their own, see algorithm.kwargs."""

    reference_policy_kl_penalty: float | None = Field(
        None, gt=0, description="Beta: how far the policy may go from the reference. Null is the algorithm's own (dpo: 0.05)."
    )
    preference_average_log_probs: bool | None = Field(
        None, description="Compare means over tokens, not sums. Null is the algorithm's own (dpo: false)."
    )
    sft_average_log_probs: bool | None = Field(
        None,
        description="The SFT term is a mean over the tokens of each chosen answer, not their sum. Null is the algorithm's own.",
    )
    preference_loss_weight: float | None = Field(
        None, ge=0, description="Weight of the preference loss; null is the algorithm's own (1)."
    )
    sft_loss_weight: float | None = Field(
        None, ge=0, description="Weight of the negative log-likelihood of chosen answers; null is the algorithm's own (dpo: 0)."
    )
    precompute_reference: bool = Field(
        False,
        description="Compute the reference's log-probabilities of all data once, before training, into the log folder; false keeps a "
        "frozen copy of the policy and computes them at each step.",
    )


class DpoAlgorithmConfig(AlgorithmConfig):
    """The preference loss."""

    name: str = Field(
        "dpo",
        min_length=1,
        description="dpo, ipo, cdpo, robust_dpo, simpo, orpo, apo_zero, apo_down, slic, kto, or module:Class for one from outside.",
    )


class RmConfig(RecordedTrainingConfig):
    """Reward modelling."""

    use_margin: bool = Field(False, description="Ask the scores of a pair to differ by the data's margin.")
    centering: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's scores, which keeps them around 0 (arXiv 2312.09244)."
    )


class RmAlgorithmConfig(AlgorithmConfig):
    """The loss of a reward model."""

    name: str = Field("reward_model", min_length=1, description="reward_model, or module:Class for one from outside.")


class RewardModelConfig(Model):
    """What kind of reward model is trained."""

    enabled: bool = Field(True, description="Train a sequence classifier with one label.")
    reward_model_type: Literal["bradley_terry", "regression"] = Field(
        "bradley_terry", description="Scores whose differences say which answer is better."
    )


class RmPolicyConfig(PolicyConfig):
    """The model that becomes a reward model."""

    reward_model_cfg: RewardModelConfig = subsection(RewardModelConfig)
