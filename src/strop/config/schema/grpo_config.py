"""Sections ``grpo``, ``loss_fn`` and ``algorithm``; ``ppo``, ``value`` and ``value_loss_fn`` of a policy gradient with a critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from strop.base_config import BaseConfig, PathText, follows, sets, subsection
from strop.learner.model_config import ModelConfig
from strop.models.tokenizer_config import TokenizerConfig
from strop.problems import Problem
from strop.trainer.training_config import AsyncConfig, RolloutTrainingConfig

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]


class AdvantageConfig(BaseConfig):
    """How advantages are estimated."""

    name: str | None = Field(
        None,
        description="Name of an advantage, such as group_relative or leave_one_out, or module:Class; null is the algorithm's "
        "own. NeMo-RL's grpo, gdpo, reinforce_plus_plus and raw_reward, and their options in this section, are translated.",
    )
    deviation: Literal["population", "unbiased", "others"] | None = sets(
        "advantage.deviation",
        None,
        description="Standard deviation by which advantages are divided: population, unbiased (Bessel's correction), or others (the "
        "unbiased one of the group's other rewards, NeMo-RL's with a leave-one-out baseline). null is the algorithm's own (grpo: "
        "population).",
    )


class PolicyGradientConfig(RolloutTrainingConfig):
    """Common keys of policy gradients with and without a critic."""

    advantage_clip_low: float | None = sets("advantage_low", None, description="Lower clip of advantages; null does not clip.")
    advantage_clip_high: float | None = sets("advantage_high", None, description="Upper clip of advantages; null does not clip.")
    seq_logprob_error_threshold: float | None = sets(
        "seq_logprob_error_threshold",
        None,
        ge=1,
        description="Exclude rollouts from the loss if their mean exp|learner's log-probability - engine's| exceeds this, for instance "
        "2; null keeps all (ratio).",
    )


class GrpoConfig(PolicyGradientConfig):
    """Advantages and optimizer passes of policy gradients without a critic."""

    normalize_rewards: bool | None = sets(
        "advantage.normalize",
        None,
        description="Divide advantages by the group's standard deviation; false as in Dr. GRPO. null is the algorithm's own "
        "(grpo: true).",
    )
    use_leave_one_out_baseline: bool | None = sets(
        "advantage.leave_one_out",
        None,
        description="Use the mean reward of the group's other rollouts as baseline (RLOO). null is the algorithm's own "
        "(grpo: false).",
    )
    minus_baseline: bool | None = sets(
        "advantage.baseline",
        None,
        description="Subtract the baseline; false takes the reward as advantage. null is the algorithm's own (grpo: true).",
    )
    adv_estimator: AdvantageConfig = subsection(AdvantageConfig)
    update_epochs: int = Field(1, ge=1, description="Optimizer passes over one batch of rollouts (passes).")
    async_grpo: AsyncConfig = subsection(AsyncConfig)

    @property
    def async_config(self) -> AsyncConfig:
        return self.async_grpo

    @property
    def epochs_per_batch(self) -> int:
        return self.update_epochs


class LossConfig(BaseConfig):
    """The clipped policy-gradient loss and its KL term."""

    reference_policy_kl_penalty: float | None = sets(
        "kl.weight",
        None,
        ge=0,
        description="Weight of the KL term; 0 leaves it out and loads no reference policy. null is the algorithm's own "
        "(grpo: 0).",
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] | None = sets(
        "kl.estimator",
        None,
        description="Estimator of the KL divergence: k1 (log ratio), k2 (half its square), k3 (non-negative, low variance). "
        "null is the algorithm's own (grpo: k3).",
    )
    use_on_policy_kl_approximation: bool | None = sets(
        "kl.unbiased",
        None,
        description="Multiply the KL estimate in the loss by the ratio of policy to sampler, which gives k1 and k3 the gradient of "
        "the KL divergence, also with stale rollouts; refused with k2. false, as in NeMo-RL, keeps the estimate and its gradient "
        "through the sampling probability (algorithm.kl.score_gradient); null is the algorithm's own (grpo: neither).",
    )
    kl_input_clamp_value: float | None = Field(
        20.0, gt=0, description="Clamp log ratios to plus or minus this before the estimator; null does not clamp (nats)."
    )
    kl_output_clamp_value: float | None = Field(
        10.0, gt=0, description="Clamp the estimate to plus or minus this; null does not clamp (nats)."
    )
    ratio_clip_min: float | None = sets(
        "objective.low",
        None,
        ge=0,
        le=1,
        description="Clip the probability ratio below at 1 minus this. null is the algorithm's own (grpo: 0.2).",
    )
    ratio_clip_max: float | None = sets(
        "objective.high",
        None,
        ge=0,
        description="Clip the probability ratio above at 1 plus this; larger than ratio_clip_min is clip-higher. null is the "
        "algorithm's own (grpo: 0.2).",
    )
    ratio_clip_c: float | None = sets(
        "objective.dual",
        None,
        gt=1,
        description="Dual clip: where the advantage is negative, bound the loss at this times the advantage; null is off.",
    )
    token_level_loss: bool | None = Field(
        None,
        description="Mean over all tokens of the batch; false is the mean over sequences of their token means. null is the "
        "algorithm's own (grpo: true).",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="Reduction of token losses: token_mean, sequence_mean, sequence_sum, or constant_length (Dr. GRPO: sum / "
        "(sequences x constant_length)); null follows token_level_loss.",
    )
    constant_length: int | None = sets(
        "constant_length", None, ge=1, description="Divisor of aggregation constant_length (tokens)."
    )
    force_on_policy_ratio: bool = sets(
        "on_policy_ratio",
        False,
        description="Set the ratio to 1, keeping its gradient; right when a batch makes one optimizer step.",
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="One ratio per sequence, the geometric mean over its tokens (GSPO)."
    )
    use_cispo: bool = Field(False, description="Clip the weight of the gradient instead of the objective (CISPO).")
    disable_ppo_ratio: bool = Field(False, description="Use no ratio: advantage times log-probability (REINFORCE).")
    positive_example_nll_weight: float = sets(
        "positive_nll", 0.0, ge=0, description="Weight of the negative log-likelihood of rollouts with a positive reward (VAPO)."
    )
    use_importance_sampling_correction: bool = Field(
        False,
        description="Multiply each token's loss by the learner's probability over the engine's, to correct their mismatch.",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        None,
        description="Bound of that weight: tis (cut at the ratio), icepop (0 outside [ratio_min, ratio]), seq-mask-tis (drop "
        "rollouts with a geometric mean outside [ratio_min, ratio], leave the others); null is none.",
    )
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0, description="Upper bound of the weight (ratio).")
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0, description="Lower bound of the weight (ratio).")
    entropy_bonus: float | None = sets(
        "entropy_bonus", None, ge=0, description="Weight of the policy's entropy in the loss; null is the algorithm's own (0)."
    )
    use_kl_in_reward: bool = Field(
        False, description="Subtract the KL estimate from the reward instead of adding it to the loss."
    )

    @property
    def resolved_aggregation(self) -> Aggregation | None:
        """The aggregation selected by ``aggregation`` and ``token_level_loss``; None is the algorithm's own."""
        if self.aggregation is not None or self.token_level_loss is None:
            return self.aggregation
        return "token_mean" if self.token_level_loss else "sequence_mean"


class AlgorithmConfig(BaseConfig):
    """The algorithm that turns groups into a loss."""

    identity_keys: ClassVar[tuple[str, ...]] = ("name",)

    name: str = Field(
        "grpo",
        min_length=1,
        description="Name of one of Strop's algorithms, or module:Class.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of the algorithm; kwargs may be omitted: algorithm.objective.high. A part is {name: .., option: ..}: "
        "advantage, objective, corrections (a list), selection, shaping, kl. Keys set in other sections take precedence over kwargs.",
    )
    options: dict[str, Any] = Field(default_factory=dict, exclude=True)  # every other key: the algorithm's fields

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        own = {name: value for name, value in values.items() if name in ("name", "kwargs")}
        return {**own, "options": {name: value for name, value in values.items() if name not in own}}

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        return {"name": self.name, "kwargs": self.kwargs, **self.options}


class GaeConfig(BaseConfig):
    """Generalised advantage estimation (arXiv 1506.02438)."""

    name: Literal["gae"] = Field("gae", description="The only estimator with a critic.")
    gae_lambda: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Lambda per token: 0 trusts the critic, 1 the rewards; null is the algorithm's own (ppo: 0.95).",
    )
    gae_gamma: float | None = sets(
        "advantage.gamma", None, gt=0, le=1, description="Discount per token; null is the algorithm's own (ppo: 1)."
    )
    normalize_advantages: bool | None = sets(
        "advantage.whiten",
        None,
        description="Whiten advantages over all tokens of the batch; null is the algorithm's own (ppo: true).",
    )
    deviation: Literal["population", "unbiased"] | None = sets(
        "advantage.deviation",
        None,
        description="Standard deviation that whitening divides by, plain or with Bessel's correction; null is unbiased where "
        "normalize_advantages is true, else the algorithm's own (ppo: population).",
    )
    gae_lambda_policy: float | None = sets(
        "advantage.lambda_policy", None, ge=0, le=1, description="Lambda of the policy's advantages; null is gae_lambda."
    )
    gae_lambda_value: float | None = sets(
        "advantage.lambda_value",
        None,
        ge=0,
        le=1,
        description="Lambda of the critic's targets (decoupled GAE); null is the algorithm's own (ppo: gae_lambda).",
    )
    length_adaptive_alpha: float | None = sets(
        "advantage.length_adaptive_alpha",
        None,
        ge=0,
        description="Above 0, lambda of the policy is 1 - 1 / (alpha x length of the rollout) (VAPO); 0 is off, null is the "
        "algorithm's own (ppo: 0).",
    )


class PpoConfig(PolicyGradientConfig):
    """Proximal policy optimisation with a critic."""

    ppo_epochs: int = Field(1, ge=1, description="Optimizer passes over one batch of rollouts (passes).")
    policy_training_start_step: int | None = sets(
        "policy_training_start_step",
        None,
        ge=0,
        description="Train only the critic before this step (steps); null is the algorithm's own (ppo: 0).",
    )
    adv_estimator: GaeConfig = subsection(GaeConfig)
    async_ppo: AsyncConfig = subsection(AsyncConfig)

    @property
    def async_config(self) -> AsyncConfig:
        return self.async_ppo

    @property
    def epochs_per_batch(self) -> int:
        return self.ppo_epochs


class PpoAlgorithmConfig(AlgorithmConfig):
    """The algorithm that turns rollouts and values into losses."""

    name: str = Field("ppo", min_length=1, description="ppo, vapo, bi_level_gae, or module:Class.")


class ValueLossConfig(BaseConfig):
    """The critic's loss: half the squared error of returns, clipped."""

    scale: float | None = sets(
        "value_scale", None, gt=0, description="Weight of the value loss; null is the algorithm's own (ppo: 1)."
    )
    cliprange: float | None = Field(
        0.2,
        ge=0,
        description="Clip a value to at most this far from its value before the update (reward); null or 0 does not clip. An algorithm "
        "with its own bound keeps it if this is 0.2.",
    )


class ValueTokenizerConfig(TokenizerConfig):
    """The critic's tokenizer, which must be the policy's."""


class ValueConfig(ModelConfig):
    """The critic: a separate network, or a head on the policy's."""

    identity_keys: ClassVar[tuple[str, ...]] = ("head_only",)

    model_name: PathText = follows(
        "..policy.model_name", standalone=..., min_length=1, description="A causal LM or a sequence classifier with one label."
    )
    tokenizer: ValueTokenizerConfig = subsection(ValueTokenizerConfig)
    head_only: bool = Field(
        False, description="Use a linear layer on the policy's hidden states as critic, without gradient into the policy."
    )
    max_total_sequence_length: int = follows(
        "..policy.max_total_sequence_length", standalone=512, ge=2, description="As the policy's (tokens)."
    )

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        if self.head_only and self.dtensor_cfg.lora_cfg.enabled:
            yield Problem(
                f"{key}.dtensor_cfg.lora_cfg.enabled",
                "found true, but with value.head_only the critic is one linear layer, which has no adapters",
                "Set it to false, or value.head_only=false.",
            )
