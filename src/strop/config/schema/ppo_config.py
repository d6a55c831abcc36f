"""Sections ``ppo``, ``value`` and ``value_loss_fn``: policy gradients with a critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, PathText, follows, sets, subsection
from strop.config.schema.grpo_config import AlgorithmConfig, PolicyGradientConfig
from strop.learner.model_config import ModelConfig
from strop.models.tokenizer_config import TokenizerConfig
from strop.problems import Problem
from strop.trainer.training_config import AsyncConfig


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
