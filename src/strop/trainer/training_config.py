"""The keys that the training sections (``grpo``, ``sft``, ...) share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, follows, sets, subsection, validate_section
from strop.problems import Problem
from strop.rollouts.reward_shaping_config import RewardScalingConfig


class TrainingConfig(BaseConfig):
    """How long a run trains, when it validates and when it stops."""

    identity_keys: ClassVar[tuple[str, ...]] = ("seed",)

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

    max_skipped_steps_in_a_row: int = Field(
        10, ge=1, description="Stop after this many steps in a row whose gradients were all not finite (steps)."
    )

    @property
    def last_step(self) -> int:
        """The step after which training stops; a very large number if it never does."""
        return self.max_num_steps if self.max_num_steps >= 0 else 1 << 60

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_early_stop(f"{key}.stop_at_validation")

    def _check_early_stop(self, key: str) -> Iterator[Problem]:
        ends = [name for name in ("threshold", "patience") if getattr(self, f"stop_at_validation_{name}") is not None]
        if self.stop_at_validation_metric is None and ends:
            yield Problem(f"{key}_metric", f"found null, but {key}_{ends[0]} is set", "Set both, or both to null.")
        elif self.stop_at_validation_metric is not None and not ends:
            yield Problem(
                f"{key}_threshold", f"found null, but {key}_metric is set", f"Set it, or {key}_patience, or all three to null."
            )


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
        None,
        ge=0,
        le=1,
        description="Multiply the rewards of truncated rollouts by this, in place of the penalty of long ones; null does not.",
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


class FailuresConfig(BaseConfig):
    """Rollouts that fail: the policy's own failures get a reward, and others are left out of their group."""

    reward: float | None = Field(
        0.0,
        description="Reward of a rollout that the policy made fail, by a crash or a time limit, before reward_scaling; null asks "
        "the environment, which scores what there is.",
    )
    retries: int = Field(
        0, ge=0, description="Sample a rollout that failed by no fault of the policy again, at most this often (attempts)."
    )
    min_rollouts: int = Field(
        2,
        ge=1,
        description="Drop a group if fewer of its rollouts than this can be trained on, because others were left out (rollouts).",
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
    failures: FailuresConfig = subsection(FailuresConfig)
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

    @property
    def max_slots(self) -> int:
        """The most groups that may be in flight without one getting too old."""
        return (self.async_config.max_trajectory_age_steps + 1) * self.num_prompts_per_step

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        yield from self._check_window(f"{key}.async_{key}")
        yield from self._check_slots(f"{key}.async_{key}")

    def _check_window(self, key: str) -> Iterator[Problem]:
        section = self.async_config
        if section.window is not None and section.order != "windowed":
            yield Problem(
                f"{key}.window",
                f"found {section.window}, but {key}.order is {section.order}, which has no window",
                f"Set {key}.order=windowed, or {key}.window=null.",
            )

    def _check_slots(self, key: str) -> Iterator[Problem]:
        section, least, most = self.async_config, self.num_prompts_per_step, self.max_slots
        if section.slots is not None and section.slots < least:
            yield Problem(
                f"{key}.slots",
                f"found {section.slots}, but a step has {least} groups, which all occupy slots until it is trained",
                f"Set it to {least} or more, above {least} to sample while the learner trains, or to null.",
            )
        if section.slots is not None and section.slots > most and section.order != "drop_too_old":
            yield Problem(
                f"{key}.slots",
                f"found {section.slots}, but with {key}.order={section.order} the run would train on rollouts older than "
                f"{key}.max_trajectory_age_steps={section.max_trajectory_age_steps}",
                f"Set it to {most} or less, or to null; or {key}.order=drop_too_old, which drops groups that are too old.",
            )

    def warnings(self, key: str) -> Iterator[Problem]:
        async_key = f"{key}.async_{key}"
        if self.async_config.enabled and self.max_staleness == 0:
            yield Problem(
                f"{async_key}.enabled", f"it has no effect: {async_key}.max_trajectory_age_steps=0 is synchronous training"
            )
        elif self.async_config.enabled:
            yield from self._warn_unused_recomputation(async_key)
            yield from self._warn_unused_window(async_key)
            yield from self._warn_unused_order(async_key)

    def _warn_unused_recomputation(self, key: str) -> Iterator[Problem]:
        section = self.async_config
        if section.recompute_kv_cache_after_weight_updates and not section.in_flight_weight_updates:
            yield Problem(
                f"{key}.recompute_kv_cache_after_weight_updates",
                f"it has no effect: with {key}.in_flight_weight_updates=false no rollout is running when weights are published",
            )

    def _warn_unused_window(self, key: str) -> Iterator[Problem]:
        section = self.async_config
        full = section.slots is None or section.slots >= self.max_slots
        if section.order == "windowed" and full and not self.use_dynamic_sampling:
            yield Problem(
                f"{key}.slots",
                f"found {section.slots or 'null'}: with all slots in use each group is due when its turn comes, so that none can be "
                "overtaken unless others were dropped, and windowed is the same as fifo",
                f"Set it lower, for instance to {max(self.max_slots - self.num_prompts_per_step // 2, 1)}.",
            )

    def _warn_unused_order(self, key: str) -> Iterator[Problem]:
        section = self.async_config
        if section.order != "fifo" and not section.in_flight_weight_updates:
            yield Problem(
                f"{key}.order",
                f"found {section.order}, which saves little time: with {key}.in_flight_weight_updates=false all groups in flight, also "
                "slow ones, finish before weights are published",
                f"Set {key}.in_flight_weight_updates=true, or {key}.order=fifo, which makes runs reproducible.",
            )
