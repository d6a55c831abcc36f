"""The keys that the training sections (``grpo``, ``sft``, ...) share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.base_config import BaseConfig, follows, sets, subsection, validate_section
from strop.rollouts.reward_scaling_config import RewardScalingConfig


class TrainingConfig(BaseConfig):
    """How long a run trains, when it validates and when it stops."""

    max_num_epochs: int | None = Field(1, ge=1, description="Passes over the training data; null is unlimited (passes).")
    max_num_steps: int = Field(1_000_000, ge=-1, description="Stop after this many steps; -1 never does (steps).")
    val_period: int = Field(10, ge=0, description="Validate every this many steps; 0 turns it off (steps).")
    val_at_start: bool = Field(False, description="Validate before the first step.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    seed: int = Field(42, ge=0, description="Seed of all randomness of the run.")
    stop_at_validation_metric: str | None = Field(
        None, description="Stop early on this validation metric, such as accuracy; null is off."
    )
    stop_at_validation_threshold: float | None = Field(
        None, description="Stop when stop_at_validation_metric reaches this value (the metric's unit)."
    )
    stop_at_validation_patience: int | None = Field(
        None, ge=1, description="Stop when stop_at_validation_metric has not improved for this many validations in a row."
    )
    stop_at_validation_higher_is_better: bool = Field(
        True, description="Whether a larger stop_at_validation_metric is better; false for a loss."
    )
    max_errors_in_a_row: int = Field(
        16, ge=1, description="Stop after this many groups in a row were dropped for an error (groups)."
    )

    @property
    def last_step(self) -> int:
        """The step after which training stops; a very large number if it never does."""
        return self.max_num_steps if self.max_num_steps >= 0 else 1 << 60


class RewardShapingConfig(BaseConfig):
    """Soft overlong punishment (DAPO, arXiv 2503.14476): the reward falls over the last tokens before the longest response."""

    enabled: bool = Field(False, description="Penalise rollouts close to the longest response.")
    overlong_buffer_length: int = Field(
        128, ge=1, description="Tokens before max_response_length over which the penalty grows (tokens)."
    )
    overlong_buffer_penalty: float = Field(1.0, ge=0, description="Full penalty, at max_response_length (reward).")
    max_response_length: int = follows(
        "...policy.max_total_sequence_length",
        standalone=512,
        ge=1,
        description="Sampled tokens of the longest response (tokens).",
    )
    stop_properly_penalty_coef: float | None = Field(
        None, ge=0, le=1, description="Multiply the rewards of truncated rollouts by this; null does not."
    )


class AsyncConfig(BaseConfig):
    """Generation that runs ahead of training."""

    enabled: bool = Field(
        False, description="Sample the next groups while the learner trains; false is synchronous, on-policy training."
    )
    max_trajectory_age_steps: int = Field(
        1,
        ge=0,
        description="Most steps between the policy that began a rollout and the one that trains on it (steps).",
    )
    in_flight_weight_updates: bool = Field(
        False,
        description="Publish new weights while groups are sampled and continue with them, so that a rollout has tokens of "
        "several versions, each recorded. false finishes the groups in flight first.",
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False,
        description="With in_flight_weight_updates, recompute the KV cache of running rollouts with the new weights; false "
        "keeps the old cache.",
    )
    order: Literal["fifo", "windowed", "drop_too_old"] = Field(
        "fifo",
        description="Which group is trained on next. fifo: in the order they began; windowed: any finished one among the "
        "oldest, as long as no other gets too old; drop_too_old: as they finish, dropping those that are too old "
        "by then.",
    )
    window: int | None = Field(
        None, ge=1, description="For order=windowed, how many of the oldest groups; null is one step's (groups)."
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="Groups begun and not yet trained on; null is (max_trajectory_age_steps + 1) x num_prompts_per_step, the "
        "most without groups that get too old (groups).",
    )


class RolloutTrainingConfig(TrainingConfig):
    """Rollouts and validation of runs that sample."""

    num_prompts_per_step: int = Field(32, ge=1, description="Groups trained on per step (prompts).")
    num_generations_per_prompt: int = Field(
        16, ge=1, description="Rollouts sampled for each prompt: the group size G (rollouts)."
    )
    max_rollout_turns: int = Field(1, ge=1, description="Most turns of the policy in a conversation (turns).")
    val_start_at: int = Field(
        -1, ge=-1, description="No validation by val_period before this step; -1 is from the start (steps)."
    )
    max_val_samples: int | None = Field(256, ge=1, description="Tasks of each validation; null is all (tasks).")
    val_num_generations_per_prompt: int = Field(1, ge=1, description="Rollouts sampled for each validation task (rollouts).")
    overlong_filtering: bool | None = sets(
        "overlong_filtering",
        None,
        description="Mask rollouts truncated by the length limit in the loss; their rewards still count in the baseline. "
        "null is the algorithm's own (grpo: false).",
    )
    use_dynamic_sampling: bool | None = sets(
        "drop_constant_groups",
        None,
        description="Drop groups with equal rewards and sample others in their place (DAPO). null is the algorithm's own "
        "(grpo: false).",
    )
    dynamic_sampling_max_gen_batches: int = Field(
        10,
        ge=1,
        description="Stop when one step has sampled this many batches of groups and still lacks groups to train on (batches).",
    )
    reward_scaling: RewardScalingConfig = subsection(RewardScalingConfig)
    reward_shaping: RewardShapingConfig = subsection(RewardShapingConfig)

    @property
    def rollouts_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def async_config(self) -> AsyncConfig:
        """The section of asynchronous training."""
        return validate_section(AsyncConfig, {})

    @property
    def max_staleness(self) -> int:
        """k of the rollout stream: up to (k + 1) x groups per step are in flight."""
        return self.async_config.max_trajectory_age_steps if self.async_config.enabled else 0

    @property
    def epochs_per_batch(self) -> int:
        """Optimizer passes over one batch of rollouts."""
        return 1


class RecordedTrainingConfig(TrainingConfig):
    """Validation of runs on recorded data."""

    val_batches: int = Field(
        -1, ge=-1, description="Batches of val_global_batch_size examples in each validation; -1 is all (batches)."
    )
    val_global_batch_size: int = Field(32, ge=1, description="Examples of a validation batch (examples).")
    val_micro_batch_size: int = Field(
        1,
        ge=1,
        description="Accepted for NeMo-RL recipes, without effect: policy.sequence_packing.logprob_mb_tokens cuts "
        "micro-batches (examples).",
    )
