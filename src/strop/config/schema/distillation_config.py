"""Sections ``distillation``, ``teacher`` and ``loss_fn`` of a run that learns from a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from strop.base_config import BaseConfig, Device, PathText, Precision, follows, subsection
from strop.config.schema.grpo_config import AlgorithmConfig
from strop.learner.learner_config import WithLearner
from strop.learner.model_config import check_weights_dtype
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.models.tokenizer_config import TokenizerConfig
from strop.problems import Problem
from strop.trainer.training_config import AsyncConfig, RolloutTrainingConfig


class DistillationConfig(RolloutTrainingConfig):
    """Distillation on rollouts of the student."""

    num_generations_per_prompt: int = Field(1, ge=1, description="Rollouts sampled for each prompt (rollouts).")
    topk_logits_k: int = Field(
        64, ge=1, description="Number of most likely teacher tokens compared by topk_distillation (tokens)."
    )
    async_distillation: AsyncConfig = subsection(AsyncConfig)

    @property
    def async_config(self) -> AsyncConfig:
        return self.async_distillation


class DistillationAlgorithmConfig(AlgorithmConfig):
    """How the student follows the teacher."""

    name: str = Field(
        "topk_distillation",
        min_length=1,
        description="topk_distillation (a divergence on the teacher's most likely tokens), distillation (the per-token "
        "reverse KL as advantage), or module:Class.",
    )


class DistillationLossConfig(BaseConfig):
    """The divergence of topk_distillation."""

    kl_type: Literal["forward", "reverse", "mixed", "jsd"] = Field(
        "mixed",
        description="forward is KL(teacher || student), reverse KL(student || teacher), mixed both, jsd the Jensen-Shannon divergence.",
    )
    mixed_kl_weight: float = Field(0.5, ge=0, le=1, description="Weight of the forward KL in mixed.")
    beta: float = Field(0.5, gt=0, lt=1, description="Weight of the teacher in the mixture of jsd.")
    zero_outside_topk: bool = Field(
        False,
        description="Count all probability outside the teacher's top k as one more event; false renormalises both "
        "distributions over the top k.",
    )


class TeacherTokenizerConfig(TokenizerConfig):
    """The teacher's tokenizer, which must be the student's."""


class TeacherConfig(WithLearner):
    """A teacher, which only scores rollouts."""

    identity_keys: ClassVar[tuple[str, ...]] = ("model_name", "demonstration", "self_weights")
    unrelated_keys: ClassVar[tuple[str, ...]] = ("device", "logprob_mb_tokens", "hosts", "offload")

    model_name: PathText = Field(
        ..., min_length=1, description="A hub name or a folder; self is the policy, prompted with a demonstration."
    )
    tokenizer: TeacherTokenizerConfig = subsection(TeacherTokenizerConfig)
    device: Device = follows("..policy.device", standalone="auto", description="As policy.device.")
    precision: Precision = follows("..policy.precision", standalone="bfloat16", description="bfloat16 or float32.")
    weights_dtype: Precision = follows(
        ".precision",
        standalone="bfloat16",
        description="Data type of its weights. float32 with precision bfloat16 rounds them in each forward pass, for twice the memory.",
    )
    logprob_mb_tokens: int | None = follows(
        "..policy.sequence_packing.logprob_mb_tokens",
        standalone=None,
        ge=1,
        description="Token budget of a micro-batch; null is the policy's (tokens).",
    )
    hosts: int = Field(
        0,
        ge=0,
        description="Processes, each with the whole teacher, that share the groups of a batch; 0 keeps it in the policy's processes, "
        "sharded over its ranks (processes). Only with Ray.",
    )
    offload: bool = Field(False, description="Keep it in CPU memory between uses.")
    dtensor_cfg: DtensorConfig = subsection(DtensorConfig)
    environments: tuple[str, ...] | None = Field(
        None, strict=False, description="With several teachers: aliases of env whose rollouts this one scores; null is all."
    )
    weight: float = Field(1.0, gt=0, description="Weight of this teacher if several score the same rollouts.")
    demonstration: str | None = Field(
        None,
        description="With model_name self: text added to the question that the teacher reads, with {answer} for the task's "
        "answer.",
    )
    self_weights: Literal["initial", "current", "ema"] = Field(
        "initial",
        description="With model_name self: the policy before training (initial), as it is (current), or its moving average "
        "(ema, with policy.ema).",
    )

    @field_validator("weights_dtype")
    @classmethod
    def _check_weights_dtype(cls, weights_dtype: str, values: ValidationInfo) -> str:
        return check_weights_dtype(weights_dtype, values)

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_hosts(key)
        yield from self._check_demonstration(key)

    def warnings(self, key: str) -> Iterator[Problem]:
        if not self.dtensor_cfg.enabled and self.uses_torch:
            yield Problem(f"{key}.dtensor_cfg.enabled", "it has no effect: a teacher runs on the torch backend")
        for name, used in (
            ("activation_checkpointing", self.dtensor_cfg.activation_checkpointing),
            ("activation_offload", self.dtensor_cfg.activation_offload),
            ("lora_cfg.enabled", self.dtensor_cfg.lora_cfg.enabled),
        ):
            if used:
                yield Problem(f"{key}.dtensor_cfg.{name}", "it has no effect: a teacher only scores")

    def _check_demonstration(self, key: str) -> Iterator[Problem]:
        if self.model_name == "self" and self.demonstration is None:
            yield Problem(
                f"{key}.demonstration",
                "found null, and without a demonstration the policy and its teacher are the same model",
                "Set it.",
            )
        elif self.model_name != "self" and self.demonstration is not None:
            yield Problem(
                f"{key}.demonstration",
                "only the policy as its own teacher uses it",
                f"Set {key}.model_name=self, or the demonstration to null.",
            )

    def _check_hosts(self, key: str) -> Iterator[Problem]:
        if self.hosts and self.model_name == "self":
            yield Problem(
                f"{key}.hosts",
                f"found {self.hosts}, but model_name is self, and a policy that teaches itself runs in the learner",
                "Set it to 0, or name a model.",
            )
        elif self.hosts and self.learner.needs_ranks:
            yield Problem(
                f"{key}.hosts",
                f"found {self.hosts}, but each of these processes holds all of the teacher, and {self.learner.title} runs on the "
                "learner's ranks",
                f"Set it to 0, or {key}.{self.learner_key}.enabled=false.",
            )
        elif self.hosts and (size := self.dtensor_cfg.ranks_of_one_copy) > 1:
            yield Problem(
                f"{key}.hosts",
                f"found {self.hosts}, but {key}.dtensor_cfg shards the teacher over {size} ranks, and each of these processes holds all "
                "of it",
                "Set it to 0, which shards the teacher over the ranks of the learner, or the sizes to 1.",
            )
