"""Sections ``distillation``, ``teacher`` and ``loss_fn`` of a run that learns from a teacher."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.config.generation import Device, Precision
from strop.config.grpo import AlgorithmConfig
from strop.config.model import Model, follows, subsection
from strop.config.policy import TokenizerConfig
from strop.config.training import AsyncConfig, RolloutTrainingConfig


class DistillationConfig(RolloutTrainingConfig):
    """Distillation on what the student samples."""

    num_generations_per_prompt: int = Field(1, ge=1, description="Rollouts sampled for each prompt (rollouts).")
    topk_logits_k: int = Field(
        64, ge=1, description="The teacher's most likely tokens that the student is compared on, for topk_distillation (tokens)."
    )
    async_distillation: AsyncConfig = subsection(AsyncConfig)

    @property
    def asynchronous(self) -> AsyncConfig:
        return self.async_distillation


class DistillationAlgorithmConfig(AlgorithmConfig):
    """How the student follows the teacher."""

    name: str = Field(
        "topk_distillation",
        min_length=1,
        description="topk_distillation (a divergence on the teacher's most likely tokens), distillation (the per-token reverse KL as "
        "advantage), or module:Class.",
    )


class DistillationLossConfig(Model):
    """The divergence of topk_distillation."""

    kl_type: Literal["forward", "reverse", "mixed", "jsd"] = Field(
        "mixed",
        description="forward is KL(teacher || student), reverse KL(student || teacher), mixed both, jsd the Jensen-Shannon divergence.",
    )
    mixed_kl_weight: float = Field(0.5, ge=0, le=1, description="Share of the forward KL in mixed.")
    beta: float = Field(0.5, gt=0, lt=1, description="The teacher's share of the middle in jsd.")
    zero_outside_topk: bool = Field(
        False,
        description="Give what lies outside the teacher's tokens an event of its own; false renormalises both distributions on them.",
    )


class TeacherTokenizerConfig(TokenizerConfig):
    """The teacher's tokenizer, which must be the student's."""


class TeacherConfig(Model):
    """The model that is learned from. It only scores."""

    model_name: str = Field(..., min_length=1, description="A hub name or a folder; self is the policy, shown demonstrations.")
    tokenizer: TeacherTokenizerConfig = subsection(TeacherTokenizerConfig)
    device: Device = follows("..policy.device", alone="auto", description="As policy.device.")
    precision: Precision = follows("..policy.precision", alone="bfloat16", description="bfloat16 or float32.")
    logprob_mb_tokens: int = follows(
        "..policy.sequence_packing.logprob_mb_tokens", alone=2048, ge=1, description="Budget of a micro-batch (tokens)."
    )
    hosts: int = Field(
        0,
        ge=0,
        description="Processes of its own, each with the whole teacher, that share the groups of a batch; 0: it is where the policy is "
        "(processes). Only with Ray.",
    )
    offload: bool = Field(False, description="Keep it in CPU memory between uses.")
    environments: tuple[str, ...] | None = Field(
        None, strict=False, description="Aliases of env whose rollouts this teacher scores; null is all. For several teachers."
    )
    weight: float = Field(1.0, gt=0, description="Share of this teacher where several score the same rollouts.")
    demonstration: str | None = Field(
        None,
        description="With model_name self: what is added to the question that the teacher reads, with {answer} for the task's answer.",
    )
    self_weights: Literal["initial", "current", "ema"] = Field(
        "initial",
        description="With model_name self: the policy as it was before training, as it is, or its moving average (policy.ema).",
    )
