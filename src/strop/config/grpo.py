"""Sections ``grpo``, ``loss_fn`` and ``algorithm``: how many rollouts, what is learned from them, for how long."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from strop.config.model import Model, follows, subsection

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]


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


class AdvantageConfig(Model):
    """How rewards become credit."""

    name: str | None = Field(
        None,
        description="An advantage by name, such as group_relative or leave_one_out, or module:Class; null is the algorithm's own.",
    )


class AsyncGrpoConfig(Model):
    """Generation that runs ahead of training."""

    enabled: bool = Field(
        False, description="Sample the next groups while the learner trains; false is synchronous, on-policy training."
    )
    max_trajectory_age_steps: int = Field(
        1,
        ge=0,
        description="No rollout is trained on by a policy more than this many steps newer than the one that began it (steps).",
    )


class GrpoConfig(Model):
    """The loop: batches, validation, filtering, when to stop."""

    num_prompts_per_step: int = Field(32, ge=1, description="Groups trained on per step (prompts).")
    num_generations_per_prompt: int = Field(
        16, ge=1, description="Rollouts sampled for each prompt: the group size G (rollouts)."
    )
    max_rollout_turns: int = Field(1, ge=1, description="Longest conversation of policy and environment (turns of the policy).")
    max_num_epochs: int | None = Field(1, ge=1, description="Passes over the training data; null is unbounded (passes).")
    max_num_steps: int = Field(1_000_000, ge=0, description="Training stops after this many steps (steps).")
    update_epochs: int = Field(1, ge=1, description="Optimizer passes over one batch of rollouts (passes).")
    normalize_rewards: bool | None = Field(
        None,
        description="Divide advantages by the group's standard deviation; false is Dr. GRPO's choice. Null is the algorithm's own "
        "(grpo: true).",
    )
    use_leave_one_out_baseline: bool | None = Field(
        None,
        description="The baseline of a rollout is the mean reward of the other rollouts of its group (RLOO). Null is the algorithm's own "
        "(grpo: false).",
    )
    minus_baseline: bool | None = Field(
        None,
        description="Subtract the baseline; false leaves the plain reward as advantage. Null is the algorithm's own (grpo: true).",
    )
    adv_estimator: AdvantageConfig = subsection(AdvantageConfig)
    val_period: int = Field(10, ge=0, description="Validate every so many steps; 0 turns it off (steps).")
    val_start_at: int = Field(
        -1, ge=-1, description="No validation by val_period before this step; -1 is from the start (steps)."
    )
    val_at_start: bool = Field(False, description="Validate before the first step.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    max_val_samples: int | None = Field(256, ge=1, description="Validation tasks used each time; null is all of them (tasks).")
    val_num_generations_per_prompt: int = Field(1, ge=1, description="Rollouts sampled for each validation task (rollouts).")
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
    overlong_filtering: bool | None = Field(
        None,
        description="Leave rollouts that ran into the length limit out of the loss (their rewards still count in the baseline). Null is "
        "the algorithm's own (grpo: false).",
    )
    advantage_clip_low: float | None = Field(None, description="Advantages are raised to at least this; null does not clip.")
    advantage_clip_high: float | None = Field(None, description="Advantages are cut to at most this; null does not clip.")
    seed: int = Field(42, ge=0, description="The seed all of the run's randomness derives from.")
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
    max_errors_in_a_row: int = Field(
        16, ge=1, description="The run stops when this many groups one after another were dropped for an error (groups)."
    )
    reward_scaling: RewardScalingConfig = subsection(RewardScalingConfig)
    reward_shaping: RewardShapingConfig = subsection(RewardShapingConfig)
    async_grpo: AsyncGrpoConfig = subsection(AsyncGrpoConfig)

    @property
    def rollouts_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def max_staleness(self) -> int:
        """k of the stream: (k + 1) x groups per step may be in flight."""
        return self.async_grpo.max_trajectory_age_steps if self.async_grpo.enabled else 0


class LossConfig(Model):
    """The clipped policy-gradient loss and its distance to the reference policy."""

    reference_policy_kl_penalty: float | None = Field(
        None,
        ge=0,
        description="Weight of the KL term; 0 leaves it out and loads no reference policy. Null is the algorithm's own (grpo: 0).",
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="Estimator of the KL divergence: k1 (log ratio), k2 (half its square), k3 (non-negative, low variance). Null is the "
        "algorithm's own (grpo: k3).",
    )
    use_on_policy_kl_approximation: bool = Field(
        False, description="Multiply the KL estimate in the loss by the probability ratio, which makes its gradient unbiased."
    )
    kl_input_clamp_value: float | None = Field(
        20.0, gt=0, description="Log ratios are clamped to plus or minus this before the estimator; null does not clamp (nats)."
    )
    kl_output_clamp_value: float | None = Field(
        10.0, gt=0, description="The estimate is clamped to plus or minus this; null does not clamp (nats)."
    )
    ratio_clip_min: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The probability ratio is clipped below at 1 minus this. Null is the algorithm's own (grpo: 0.2).",
    )
    ratio_clip_max: float | None = Field(
        None,
        ge=0,
        description="The probability ratio is clipped above at 1 plus this; larger than ratio_clip_min is clip-higher. Null is the "
        "algorithm's own (grpo: 0.2).",
    )
    ratio_clip_c: float | None = Field(
        None,
        gt=1,
        description="Dual clip: bound of the loss at this times the advantage where the advantage is negative; null is off.",
    )
    token_level_loss: bool | None = Field(
        None,
        description="Mean over all tokens of the batch; false is the mean over sequences of their token means. Null is the algorithm's own "
        "(grpo: true).",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="How token losses become one number: token_mean, sequence_mean, sequence_sum, or constant_length "
        "(Dr. GRPO: sum / (sequences x constant_length)); null follows token_level_loss.",
    )
    constant_length: int | None = Field(None, ge=1, description="Divisor of aggregation constant_length (tokens).")
    force_on_policy_ratio: bool = Field(
        False,
        description="Take the ratio as exactly 1 in value, keeping its gradient; right when a batch makes a single optimizer "
        "step.",
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="One ratio per sequence, the geometric mean over its tokens (GSPO)."
    )
    use_cispo: bool = Field(False, description="Clip the weight of the gradient instead of the objective (CISPO).")
    disable_ppo_ratio: bool = Field(False, description="No ratio at all: advantage times log-probability (REINFORCE).")
    positive_example_nll_weight: float = Field(
        0.0, ge=0, description="Weight of the negative log-likelihood of rollouts with a positive reward (VAPO)."
    )
    use_importance_sampling_correction: bool = Field(
        False,
        description="Multiply by the learner's probability over the sampler's, token by token, to correct for their mismatch.",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        None,
        description="How that weight is bounded: tis (cut at the ratio), icepop (0 outside [ratio_min, ratio]), seq-mask-tis "
        "(rollouts whose geometric mean lies outside [ratio_min, ratio] are dropped, the others keep their weights); null: no bound.",
    )
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0, description="Upper bound of the weight (ratio).")
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0, description="Lower bound of the weight (ratio).")
    entropy_bonus: float | None = Field(
        None, ge=0, description="Weight of the policy's entropy in the loss; null is the algorithm's own (0)."
    )
    use_kl_in_reward: bool = Field(False, description="Subtract the KL estimate from the reward and leave it out of the loss.")

    @property
    def resolved_aggregation(self) -> Aggregation | None:
        """The aggregation that the two keys ask for; None is the algorithm's own."""
        if self.aggregation is not None or self.token_level_loss is None:
            return self.aggregation
        return "token_mean" if self.token_level_loss else "sequence_mean"


class AlgorithmConfig(Model):
    """Which algorithm turns groups into a loss."""

    name: str = Field(
        "grpo",
        min_length=1,
        description="An algorithm of Strop by the name of its file in strop/algorithms, or module:Class for one from outside.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of the algorithm. A part is {name: .., option: ..}: advantage, objective, corrections (a list), selection, "
        "shaping, kl. Keys of other sections that are set win over these.",
    )
