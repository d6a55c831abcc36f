"""Sections ``sft``, ``dpo`` and ``rm``: training on recorded conversations and preferences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, sets, subsection
from strop.config.schema.grpo_config import AlgorithmConfig
from strop.config.schema.policy_config import RecordedPolicyConfig
from strop.problems import Problem
from strop.trainer.training_config import RecordedTrainingConfig

MOST_EXAMPLES = 32  # for an optimizer step, if policy.train_global_batch_size is not set


class SftConfig(RecordedTrainingConfig):
    """Supervised fine-tuning."""

    only_unmask_final: bool = Field(
        False, description="Take the loss on the last assistant turn only; false is on all assistant turns."
    )


class SftAlgorithmConfig(AlgorithmConfig):
    """The supervised loss."""

    name: str = Field("sft", min_length=1, description="sft, or module:Class.")


class DpoConfig(RecordedTrainingConfig):
    """Preference optimisation. Options of other algorithms are keys of algorithm."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("precompute_reference",)

    reference_policy_kl_penalty: float | None = sets(
        "beta",
        None,
        gt=0,
        description="Beta: a larger one keeps the policy closer to the reference. null is the algorithm's own (dpo: 0.05).",
    )
    preference_average_log_probs: bool | None = sets(
        "average_log_probs",
        None,
        description="Compare means over tokens instead of sums. null is the algorithm's own (dpo: false).",
    )
    sft_average_log_probs: bool | None = Field(
        None,
        description="Take the mean over the tokens of each chosen answer in the SFT term instead of the sum. null is the "
        "algorithm's own.",
    )
    preference_loss_weight: float | None = sets(
        "preference_weight", None, ge=0, description="Weight of the preference loss; null is the algorithm's own (1)."
    )
    sft_loss_weight: float | None = sets(
        "sft_weight",
        None,
        ge=0,
        description="Weight of the negative log-likelihood of chosen answers; null is the algorithm's own (dpo: 0).",
    )
    precompute_reference: bool = Field(
        False,
        description="Compute the reference's log-probabilities of all data once before training, into the log folder; false "
        "keeps a frozen copy of the policy and computes them at each step.",
    )


class DpoAlgorithmConfig(AlgorithmConfig):
    """The preference loss."""

    name: str = Field(
        "dpo",
        min_length=1,
        description="dpo, ipo, cdpo, robust_dpo, exo_pair, nca_pair, bco_pair, sppo_hard, discopop, aot, aot_unpaired, apo_zero, apo_down, "
        "slic, simpo, alphapo, cpo, orpo, kto, apo_zero_unpaired, or module:Class.",
    )


class RmConfig(RecordedTrainingConfig):
    """Reward modelling."""

    use_margin: bool = sets("use_margin", False, description="Require the scores of a pair to differ by the data's margin.")
    centering: float = sets(
        "centering",
        0.0,
        ge=0,
        description="Weight of the squared sum of a pair's scores, which centres them at 0 (arXiv 2312.09244).",
    )


class RmAlgorithmConfig(AlgorithmConfig):
    """The loss of a reward model."""

    name: str = Field("reward_model", min_length=1, description="reward_model, or module:Class.")


class RewardModelConfig(BaseConfig):
    """The kind of reward model."""

    identity_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(True, description="Train a sequence classifier with one label.")
    reward_model_type: Literal["bradley_terry", "regression"] = Field(
        "bradley_terry", description="Scores whose differences say which answer is better."
    )

    def errors(self, key: str) -> Iterator[Problem]:
        if not self.enabled:
            yield Problem(
                f"{key}.enabled", "found false, but strop rm trains a sequence classifier with one label", "Set it to true."
            )


class RmPolicyConfig(RecordedPolicyConfig):
    """The model that becomes a reward model."""

    reward_model_cfg: RewardModelConfig = subsection(RewardModelConfig)
