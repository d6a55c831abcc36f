"""The root configurations: one for each kind of training run, and one for evaluation. docs/configuration.md lists every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field

from strop.base_config import BaseConfig, iter_sections, subsection
from strop.checkpointing.checkpointing_config import CheckpointingConfig, RecordedCheckpointingConfig
from strop.config.schema.distillation_config import (
    DistillationAlgorithmConfig,
    DistillationConfig,
    DistillationLossConfig,
    TeacherConfig,
)
from strop.config.schema.evaluation_config import (
    EvalClusterConfig,
    EvalConfig,
    EvalGenerationConfig,
    EvalTokenizerConfig,
    assign_graders,
)
from strop.config.schema.grpo_config import (
    AlgorithmConfig,
    GrpoConfig,
    LossConfig,
    PpoAlgorithmConfig,
    PpoConfig,
    ValueConfig,
    ValueLossConfig,
)
from strop.config.schema.policy_config import PolicyConfig, RecordedPolicyConfig
from strop.config.schema.recorded_config import (
    DpoAlgorithmConfig,
    DpoConfig,
    RmAlgorithmConfig,
    RmConfig,
    RmPolicyConfig,
    SftAlgorithmConfig,
    SftConfig,
)
from strop.data.data_config import DataConfig, DataEntryConfig, EvalDataConfig
from strop.distributed.cluster_config import ClusterConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig
from strop.monitoring.logger_config import LoggerConfig, WatchdogConfig
from strop.rollouts.reward_penalties_config import RewardPenaltiesConfig
from strop.trainer.training_config import RecordedTrainingConfig, RolloutTrainingConfig, TrainingConfig


def _null_to_empty(values: object) -> object:
    """Read an ``env``, or an alias in it, without any key as empty."""
    if isinstance(values, Mapping):
        return {alias: {} if options is None else options for alias, options in values.items()}
    return {} if values is None else values


def _check_run_name(name: str) -> str:
    if not name or name.startswith(("/", "~")) or ".." in name.split("/"):
        raise ValueError("the name becomes a folder in logs/ and in results/; write a relative path without ..")
    return name


RunName = Annotated[str, AfterValidator(_check_run_name)]
Environments = Annotated[dict[str, EnvironmentConfig], BeforeValidator(_null_to_empty)]
ENVIRONMENTS_DOC = "Environments by alias; env_name in data selects one."


class TrainingRunConfig(BaseConfig):
    """Sections of every training run. ``section`` is the name of its training section."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("run_name",)

    section: ClassVar[str]

    run_name: RunName | None = Field(
        None,
        description="Name of the run: its folders are logs/NAME and results/NAME, and ${run_name} stands for it in any value. "
        "{overrides} in it stands for the command line's settings.",
    )
    algorithm: AlgorithmConfig = subsection(AlgorithmConfig)
    checkpointing: CheckpointingConfig = subsection(CheckpointingConfig)
    policy: PolicyConfig
    data: DataConfig = subsection(DataConfig)
    logger: LoggerConfig = subsection(LoggerConfig)
    watchdog: WatchdogConfig = subsection(WatchdogConfig)
    cluster: ClusterConfig = subsection(ClusterConfig)

    @property
    def training(self) -> TrainingConfig:
        section: TrainingConfig = getattr(self, self.section)
        return section


class RolloutRunConfig(TrainingRunConfig):
    """A run that samples its training data."""

    env: Environments = Field(default_factory=dict, description=ENVIRONMENTS_DOC)

    @property
    def rollout_training(self) -> RolloutTrainingConfig:
        section: RolloutTrainingConfig = getattr(self, self.section)
        return section


class RecordedRunConfig(TrainingRunConfig):
    """A run on recorded data."""

    checkpointing: RecordedCheckpointingConfig = subsection(RecordedCheckpointingConfig)
    policy: RecordedPolicyConfig

    @property
    def recorded_training(self) -> RecordedTrainingConfig:
        section: RecordedTrainingConfig = getattr(self, self.section)
        return section


class GrpoRunConfig(RolloutRunConfig):
    """GRPO, and every other policy gradient without a critic."""

    section: ClassVar[str] = "grpo"
    grpo: GrpoConfig = subsection(GrpoConfig)
    loss_fn: LossConfig = subsection(LossConfig)
    reward_penalties: RewardPenaltiesConfig = subsection(RewardPenaltiesConfig)


class PpoRunConfig(RolloutRunConfig):
    """Policy gradients with a critic."""

    section: ClassVar[str] = "ppo"
    ppo: PpoConfig = subsection(PpoConfig)
    algorithm: PpoAlgorithmConfig = subsection(PpoAlgorithmConfig)
    loss_fn: LossConfig = subsection(LossConfig)
    value_loss_fn: ValueLossConfig = subsection(ValueLossConfig)
    value: ValueConfig


class DistillationRunConfig(RolloutRunConfig):
    """Distillation from a teacher on rollouts of the student."""

    section: ClassVar[str] = "distillation"
    distillation: DistillationConfig = subsection(DistillationConfig)
    algorithm: DistillationAlgorithmConfig = subsection(DistillationAlgorithmConfig)
    loss_fn: DistillationLossConfig = subsection(DistillationLossConfig)
    teacher: TeacherConfig
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict, description="More teachers, by name.")

    @property
    def all_teachers(self) -> dict[str, TeacherConfig]:
        """Every teacher by its key: ``teacher``, ``teachers.NAME``."""
        return {"teacher": self.teacher, **{f"teachers.{name}": teacher for name, teacher in self.teachers.items()}}


class SftRunConfig(RecordedRunConfig):
    """Supervised fine-tuning on conversations."""

    section: ClassVar[str] = "sft"
    sft: SftConfig = subsection(SftConfig)
    algorithm: SftAlgorithmConfig = subsection(SftAlgorithmConfig)


class DpoRunConfig(RecordedRunConfig):
    """Preference optimisation on pairs of answers, or on unpaired preferences (KTO)."""

    section: ClassVar[str] = "dpo"
    dpo: DpoConfig = subsection(DpoConfig)
    algorithm: DpoAlgorithmConfig = subsection(DpoAlgorithmConfig)


class RmRunConfig(RecordedRunConfig):
    """A reward model from pairs of answers."""

    section: ClassVar[str] = "rm"
    rm: RmConfig = subsection(RmConfig)
    algorithm: RmAlgorithmConfig = subsection(RmAlgorithmConfig)
    policy: RmPolicyConfig


class EvalRunConfig(BaseConfig):
    """Evaluation of a model on a set of tasks."""

    eval: EvalConfig = subsection(EvalConfig)
    generation: EvalGenerationConfig
    tokenizer: EvalTokenizerConfig
    data: EvalDataConfig = subsection(EvalDataConfig)
    env: Environments = Field(default_factory=dict, description=ENVIRONMENTS_DOC)
    cluster: EvalClusterConfig = subsection(EvalClusterConfig)

    def with_graders(self) -> Self:
        """Return the configuration with the environments that grade its built-in sets as usually reported."""
        if self.data.sets:
            sets, env = assign_graders(self.data.sets, self.env)
            return replace(self, data=replace(self.data, sets=sets), env=env)
        (data,), env = assign_graders([self.data], self.env)
        return replace(self, data=data, env=env)


TRAINING_RUNS: Mapping[str, type[TrainingRunConfig]] = {
    kind.section: kind for kind in (GrpoRunConfig, PpoRunConfig, SftRunConfig, DpoRunConfig, RmRunConfig, DistillationRunConfig)
}


def list_trained_models(config: TrainingRunConfig) -> list[tuple[str, ModelConfig]]:
    """Return (dotted key, section) of every trained model."""
    models: list[tuple[str, ModelConfig]] = [("policy", config.policy)]
    return [*models, ("value", config.value)] if isinstance(config, PpoRunConfig) else models


def environment_alias(config: RolloutRunConfig | EvalRunConfig, entry: DataEntryConfig) -> str | None:
    """Return the alias of the environment that scores an entry's tasks; None if it sets none and env does not have exactly one."""
    if entry.env_name is not None:
        return entry.env_name
    return next(iter(config.env)) if len(config.env) == 1 else None


def generation_section(config: TrainingRunConfig | EvalRunConfig) -> tuple[str, GenerationConfig]:
    """Return the dotted key of the generation section, and the section."""
    if isinstance(config, TrainingRunConfig):
        return "policy.generation", config.policy.generation
    return "generation", config.generation


def iter_model_names(config: BaseConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of every model that a configuration names: trained ones, teachers, critics and reward models."""
    for key, section in iter_sections(config):
        name = getattr(section, "model_name", None)
        if isinstance(name, str) and name != "self":
            yield f"{key}.model_name", name
    if isinstance(config, RolloutRunConfig | EvalRunConfig):
        for alias, environment in config.env.items():
            name = _name_reward_model(alias, environment)
            if name is not None:
                yield f"env.{alias}.model_name", name


def _name_reward_model(alias: str, environment: EnvironmentConfig) -> str | None:
    name: Any = environment.options.get("model_name")
    return name if environment.type_of(alias) == "reward_model" and isinstance(name, str) else None
