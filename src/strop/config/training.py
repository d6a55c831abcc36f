"""What every training section (``grpo``, ``sft``, ...) has: for how long, when to validate, when to stop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.config.model import Model, follows, subsection


class TrainingConfig(Model):
    """For how long a run trains, and when it is measured."""

    max_num_epochs: int | None = Field(1, ge=1, description="Passes over the training data; null is unbounded (passes).")
    max_num_steps: int = Field(1_000_000, ge=-1, description="Training stops after this many steps; -1 never does (steps).")
    val_period: int = Field(10, ge=0, description="Validate every so many steps; 0 turns it off (steps).")
    val_at_start: bool = Field(False, description="Validate before the first step.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    seed: int = Field(42, ge=0, description="The seed all of the run's randomness derives from.")
    stop_at_validation_metric: str | None = Field(
        None, description="Stop early on this validation metric, such as accuracy; null never does."
    )
    stop_at_validation_threshold: float | None = Field(
        None, description="The run stops when stop_at_validation_metric reaches this value (the metric's unit)."
    )
    stop_at_validation_patience: int | None = Field(
        None, ge=1, description="The run stops when stop_at_validation_metric was not better for this many validations in a row."
    )
    stop_at_validation_higher_is_better: bool = Field(
        True, description="Whether more of stop_at_validation_metric is better; false for a loss."
    )
    max_errors_in_a_row: int = Field(
        16, ge=1, description="The run stops when this many groups one after another were dropped for an error (groups)."
    )

    @property
    def last_step(self) -> int:
        """The step after which training stops; a very large number for never."""
        return self.max_num_steps if self.max_num_steps >= 0 else 1 << 60


class RewardScalingConfig(Model):
    """A linear map of rewards, clipped to the source range first."""

    enabled: bool = Field(False, description="Map rewards from the source range to the target range.")
    source_min: float = Field(0.0, description="Lower end of the source range (reward).")
    source_max: float = Field(1.0, description="Upper end of the source range (reward).")
    target_min: float = Field(0.0, description="What source_min becomes (reward).")
    target_max: float = Field(1.0, description="What source_max becomes (reward).")


class RewardShapingConfig(Model):
    """Soft overlong punishment (DAPO, arXiv 2503.14476): the reward falls over the last tokens before the longest response."""

    enabled: bool = Field(False, description="Punish rollouts that come near the longest response.")
    overlong_buffer_length: int = Field(
        128, ge=1, description="Over how many tokens before max_response_length the punishment grows (tokens)."
    )
    overlong_buffer_penalty: float = Field(1.0, ge=0, description="The whole punishment, at max_response_length (reward).")
    max_response_length: int = follows(
        "...policy.max_total_sequence_length", alone=512, ge=1, description="Sampled tokens of the longest response (tokens)."
    )
    stop_properly_penalty_coef: float | None = Field(
        None, ge=0, le=1, description="Rewards of rollouts that a length limit cut are multiplied by this; null leaves them."
    )


class AsyncConfig(Model):
    """Generation that runs ahead of training."""

    enabled: bool = Field(
        False, description="Sample the next groups while the learner trains; false is synchronous, on-policy training."
    )
    max_trajectory_age_steps: int = Field(
        1,
        ge=0,
        description="No rollout is trained on by a policy more than this many steps newer than the one that began it (steps).",
    )
    in_flight_weight_updates: bool = Field(
        False,
        description="Publish new weights while groups are sampled, which go on with them: a rollout may be of several versions, and each "
        "token knows its own. False finishes the groups in flight first, so that each is of one version.",
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False,
        description="With in_flight_weight_updates, compute the cached keys and values of running rollouts again with the new weights; "
        "false keeps those of the old.",
    )
    order: Literal["fifo", "windowed", "drop_too_old"] = Field(
        "fifo",
        description="Which group is trained on next. fifo: as they were begun; windowed: any finished one among the oldest, as long as "
        "no other gets too old; drop_too_old: as they finish, and what is too old by then is dropped.",
    )
    window: int | None = Field(
        None, ge=1, description="For order=windowed: how many of the oldest groups; null is those of one step (groups)."
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="Groups begun and not yet trained on; null is (max_trajectory_age_steps + 1) x num_prompts_per_step, which is the most "
        "where nothing may get too old (groups).",
    )


class RolloutTrainingConfig(TrainingConfig):
    """Training on rollouts."""

    num_prompts_per_step: int = Field(32, ge=1, description="Groups trained on per step (prompts).")
    num_generations_per_prompt: int = Field(
        16, ge=1, description="Rollouts sampled for each prompt: the group size G (rollouts)."
    )
    max_rollout_turns: int = Field(1, ge=1, description="Longest conversation of policy and environment (turns of the policy).")
    val_start_at: int = Field(
        -1, ge=-1, description="No validation by val_period before this step; -1 is from the start (steps)."
    )
    max_val_samples: int | None = Field(256, ge=1, description="Validation tasks used each time; null is all of them (tasks).")
    val_num_generations_per_prompt: int = Field(1, ge=1, description="Rollouts sampled for each validation task (rollouts).")
    overlong_filtering: bool | None = Field(
        None,
        description="Leave rollouts that ran into the length limit out of the loss (their rewards still count in the baseline). Null is "
        "the algorithm's own (grpo: false).",
    )
    use_dynamic_sampling: bool | None = Field(
        None,
        description="Drop groups whose rewards are all equal and sample others in their place (DAPO). Null is the algorithm's own "
        "(grpo: false).",
    )
    dynamic_sampling_max_gen_batches: int = Field(
        10,
        ge=1,
        description="The run stops when one step has sampled this many batches of groups and still lacks kept ones (batches).",
    )
    reward_scaling: RewardScalingConfig = subsection(RewardScalingConfig)
    reward_shaping: RewardShapingConfig = subsection(RewardShapingConfig)

    @property
    def rollouts_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def asynchronous(self) -> AsyncConfig:
        """How far rollouts may run ahead of training."""
        return AsyncConfig.model_validate({})

    @property
    def max_staleness(self) -> int:
        """k of the stream: (k + 1) x groups per step may be in flight."""
        return self.asynchronous.max_trajectory_age_steps if self.asynchronous.enabled else 0

    @property
    def epochs_per_batch(self) -> int:
        """Optimizer passes over one batch of rollouts."""
        return 1


class RecordedTrainingConfig(TrainingConfig):
    """Training on recorded data."""

    val_batches: int = Field(
        -1, ge=-1, description="Validation batches of val_global_batch_size examples used each time; -1 is all (batches)."
    )
    val_global_batch_size: int = Field(32, ge=1, description="Examples of one validation batch (examples).")
    val_micro_batch_size: int = Field(
        1,
        ge=1,
        description="Taken for recipes that have it; micro-batches are cut by policy.sequence_packing.logprob_mb_tokens (examples).",
    )
