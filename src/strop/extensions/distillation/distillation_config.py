"""The configuration of ``strop distillation``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from strop.algorithm_factory import AlgorithmSetting
from strop.algorithms.base import Algorithm
from strop.base_config import BaseConfig, Device, PathText, Precision, follows, subsection
from strop.config.cluster_checks import count_devices
from strop.config.schema.grpo_config import AlgorithmConfig
from strop.config.schema.run_config import RolloutRunConfig
from strop.distributed.cluster_config import RoleConfig
from strop.extensions.distillation.distillation import TEACHER_COLUMNS
from strop.extensions.distillation.teacher_role_config import TeacherRoleConfig
from strop.learner.model_config import ScoringModelConfig, check_weights_dtype
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.models.tokenizer_config import TokenizerConfig
from strop.monitoring.console_columns import (
    ACCURACY,
    ENTROPY,
    GRAD_NORM,
    LEARNING_RATE,
    LENGTH,
    MISMATCH,
    SCORE,
    SPEED,
    TRUNCATED,
    Column,
)
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


class TeacherConfig(ScoringModelConfig):
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

    @property
    def on_ranks(self) -> bool:
        return not self.hosts

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_hosts(key)
        yield from self._check_demonstration(key)

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        if unknown := sorted(set(self.environments or ()) - set(config.env)):
            yield Problem(f"{key}.environments", f"found {unknown}, but env has {sorted(config.env)}", "Set it to some of these.")
        if self.model_name == "self" and self.self_weights == "ema" and not config.policy.ema.enabled:
            yield Problem(f"{key}.self_weights", "found ema, but there is no moving average", "Set policy.ema.enabled=true.")
        uses_ray = count_devices(config).uses_ray
        if self.model_name == "self" and uses_ray:
            yield Problem(
                f"{key}.model_name",
                "found self, which works in one process only: ranks hold shards of the policy",
                "Name a model, or set cluster.backend=local.",
            )
        if uses_ray and not self.hosts and self.model_name != "self" and self.device != config.policy.device:
            yield Problem(
                f"{key}.device",
                f"found {self.device} with policy.device = {config.policy.device}, but its shards are on the policy's devices",
                f"Leave it unset; {key}.offload=true keeps the shards in CPU memory, {key}.hosts=1 gives it a separate process.",
            )
        if self.hosts and not uses_ray:
            yield Problem(
                f"{key}.hosts",
                f"found {self.hosts}, but teacher processes are Ray actors, and this run has no Ray",
                "Set cluster.backend=ray, or set it to 0.",
            )

    def summarize(self) -> str:
        """Describe it in the run's summary."""
        name = f"the policy ({self.self_weights}), given a demonstration" if self.model_name == "self" else self.model_name
        where = f", in {self.hosts} {'process' if self.hosts == 1 else 'processes'} of its own" if self.hosts else ""
        return f"{name}{where}, for {', '.join(self.environments)}" if self.environments else name + where

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


class DistillationRunConfig(RolloutRunConfig):
    """Distillation from a teacher on rollouts of the student."""

    section: ClassVar[str] = "distillation"
    learns: ClassVar[str] = "learns from rollouts with a teacher"
    columns: ClassVar[frozenset[str]] = RolloutRunConfig.columns | TEACHER_COLUMNS
    console: ClassVar[tuple[Column, ...]] = (
        Column("KL teacher", "train/kl_reverse", 4),
        Column("KL teacher", "train/teacher_kl", 4, unless="train/kl_reverse"),
        ACCURACY,
        SCORE,
        LENGTH,
        TRUNCATED,
        ENTROPY,
        GRAD_NORM,
        LEARNING_RATE,
        MISMATCH,
        SPEED,
    )

    distillation: DistillationConfig = subsection(DistillationConfig)
    algorithm: DistillationAlgorithmConfig = subsection(DistillationAlgorithmConfig)
    loss_fn: DistillationLossConfig = subsection(DistillationLossConfig)
    teacher: TeacherConfig
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict, description="More teachers, by name.")

    @property
    def all_teachers(self) -> dict[str, TeacherConfig]:
        """Every teacher by its key: ``teacher``, ``teachers.NAME``."""
        return {"teacher": self.teacher, **{f"teachers.{name}": teacher for name, teacher in self.teachers.items()}}

    @classmethod
    def suits(cls, algorithm: Algorithm) -> bool:
        return super().suits(algorithm) and bool(algorithm.requires & TEACHER_COLUMNS)

    def algorithm_settings(self) -> Iterator[AlgorithmSetting]:
        from strop.runs.run_algorithm import shaping_settings

        if self.has_divergence:
            loss = self.loss_fn
            yield AlgorithmSetting("loss_fn.kl_type", "kl_type", loss.kl_type)
            yield AlgorithmSetting("loss_fn.mixed_kl_weight", "mixed_kl_weight", loss.mixed_kl_weight)
            yield AlgorithmSetting("loss_fn.beta", "beta", loss.beta)
            outside = "bucket" if loss.zero_outside_topk else "renormalise"
            yield AlgorithmSetting("loss_fn.zero_outside_topk", "outside", outside)
        yield from shaping_settings("distillation", self.distillation.reward_shaping)

    @property
    def has_divergence(self) -> bool:
        """Whether the loss is a divergence, rather than a policy gradient."""
        return self.algorithm.name == "topk_distillation"

    def needs_option(self, option: str, value: Any) -> bool:
        return bool(value) or not self.has_divergence

    @property
    def filled_columns(self) -> frozenset[str]:
        return TEACHER_COLUMNS

    @property
    def scoring_models(self) -> Mapping[str, ScoringModelConfig]:
        return {key: teacher for key, teacher in self.all_teachers.items() if teacher.model_name != "self"}

    @property
    def further_processes(self) -> Sequence[tuple[RoleConfig, int]]:
        role = TeacherRoleConfig.of(self.cluster.roles)
        return [*super().further_processes, (role, sum(teacher.hosts for teacher in self.all_teachers.values()))]

    def summarize_models(self) -> Iterator[str]:
        yield from (f"teacher     {teacher.summarize()}" for teacher in self.all_teachers.values())

    def errors(self, key: str) -> Iterator[Problem]:
        general = [teacher for teacher in self.all_teachers.values() if teacher.environments is None]
        if len(general) > 1 and self.has_divergence:
            yield Problem(
                "teachers",
                "several teachers are for all environments, and the top-k tokens of their mixture are unknown",
                "Give each its environments (teachers.NAME.environments), or set algorithm.name=distillation.",
            )
