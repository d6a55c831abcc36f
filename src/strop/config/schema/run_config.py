"""The root configurations: one for each kind of training run, and one for evaluation. docs/configuration.md lists every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field

from strop import plugins
from strop.algorithms.critic import VALUES
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.kl import KL_WEIGHT, REFERENCE_LOGPROBS
from strop.base_config import BaseConfig, iter_sections, subsection
from strop.checkpointing.checkpointing_config import CheckpointingConfig
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
from strop.config.schema.policy_config import PolicyConfig
from strop.data.data_config import DataConfig, DataEntryConfig, EvalDataConfig
from strop.distributed.cluster_config import ClusterConfig, RoleConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig, ScoringModelConfig
from strop.monitoring.console_columns import ROLLOUT_COLUMNS, VALUE_COLUMNS, Column
from strop.monitoring.logger_config import LoggerConfig, WatchdogConfig
from strop.rollouts.reward_shaping_config import RewardPenaltiesConfig
from strop.trainer.training_config import RolloutTrainingConfig, TrainingConfig

if TYPE_CHECKING:
    from strop.algorithm_factory import AlgorithmSetting
    from strop.algorithms.base import Algorithm
    from strop.data.sources.source import DataSource


def _null_to_empty(values: object) -> object:
    """Read an ``env``, or an alias in it, without any key as empty."""
    if isinstance(values, Mapping):
        return {alias: {} if options is None else options for alias, options in values.items()}
    return {} if values is None else values


def _check_run_name(name: str) -> str:
    if not name or name.startswith(("/", "~")) or ".." in name.split("/"):
        raise ValueError("the name becomes a folder in logs/ and in results/; write a relative path without ..")
    return name


OF_PAIRS = ("chosen_key", "rejected_key", "label_key", "margin_key")  # keys of an entry of data
OF_RAW_TEXT = ("text_key", "characters_per_sample")

RunName = Annotated[str, AfterValidator(_check_run_name)]
Environments = Annotated[dict[str, EnvironmentConfig], BeforeValidator(_null_to_empty)]
ENVIRONMENTS_DOC = "Environments by alias; env_name in data selects one."


class TrainingRunConfig(BaseConfig):
    """Sections of every training run, and what is different about a kind of run. GRPO and PPO are core's; extensions declare others in
    the entry points ``strop.runs``, by the names of their sections, and where their groups come from in ``strop.sources``.
    """

    unrelated_keys: ClassVar[tuple[str, ...]] = ("run_name",)

    section: ClassVar[str]  # name of its training section, and of its command
    learns: ClassVar[str]  # what its algorithms do, in messages: "learns from recorded conversations"
    columns: ClassVar[frozenset[str]] = frozenset({REFERENCE_LOGPROBS, POLICY_LOGPROBS, POLICY_SQUARES, KL_WEIGHT})
    """The columns that its algorithms may require (``Algorithm.requires``)."""
    unread_keys: ClassVar[tuple[str, ...]] = ()  # keys of an entry of data that it does not read
    console: ClassVar[tuple[Column, ...]]  # columns of its console, the most important first
    trains_scores: ClassVar[bool] = False  # the policy is a sequence classifier with one label, such as a reward model
    most_groups: ClassVar[int] = 32  # groups of a step, if ``groups_per_step`` is not set

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

    @classmethod
    def suits(cls, algorithm: Algorithm) -> bool:
        """Return whether a run of this kind provides what the algorithm learns from."""
        return False

    def algorithm_settings(self) -> Iterator[AlgorithmSetting]:
        """Yield the keys that choose a part of the algorithm or set several of its options. Other keys say themselves what they set
        (``strop.base_config.sets``).
        """
        return iter(())

    def needs_option(self, option: str, value: Any) -> bool:
        """Return whether an algorithm without an option is refused because a key sets it to ``value``."""
        return True

    @property
    def groups_key(self) -> str:
        """The dotted key of ``groups_per_step``."""
        return "policy.train_global_batch_size"

    @property
    def groups_per_step(self) -> int | None:
        """Groups of a training step; None: all there are, at most ``most_groups``."""
        return self.policy.train_global_batch_size

    @property
    def filled_columns(self) -> frozenset[str]:
        """The columns that its source fills (``RunSource.make_columns``), rather than a model that core makes for them."""
        return frozenset()

    @property
    def scoring_models(self) -> Mapping[str, ScoringModelConfig]:
        """Models of other names than the policy's that only score, by their dotted keys."""
        return {}

    @property
    def further_processes(self) -> Sequence[tuple[RoleConfig, int]]:
        """Processes of Ray in addition to ranks and engines, spread over the nodes: the role and number of each kind."""
        return ()

    def read_rows(self, source: DataSource) -> Sequence[Any]:
        """Return what a run without environments trains on of some rows. Raises DataError for rows that it cannot learn from."""
        return ()

    def summarize_models(self) -> Iterator[str]:
        """Yield lines of the run's summary about models alongside the policy."""
        return iter(())


class RolloutRunConfig(TrainingRunConfig):
    """A run that samples its training data."""

    unread_keys: ClassVar[tuple[str, ...]] = (*OF_PAIRS, *OF_RAW_TEXT, "system_key", "tool_key")
    console: ClassVar[tuple[Column, ...]] = ROLLOUT_COLUMNS

    env: Environments = Field(default_factory=dict, description=ENVIRONMENTS_DOC)

    @property
    def rollout_training(self) -> RolloutTrainingConfig:
        section: RolloutTrainingConfig = getattr(self, self.section)
        return section

    @classmethod
    def suits(cls, algorithm: Algorithm) -> bool:
        return not algorithm.recorded_data and algorithm.requires <= cls.columns

    @property
    def groups_key(self) -> str:
        return f"{self.section}.num_prompts_per_step"

    @property
    def groups_per_step(self) -> int:
        return self.rollout_training.num_prompts_per_step

    @property
    def further_processes(self) -> Sequence[tuple[RoleConfig, int]]:
        return [(self.cluster.roles.environment, self.cluster.environment_hosts)] * len(self.env)


class GrpoRunConfig(RolloutRunConfig):
    """GRPO, and every other policy gradient without a critic."""

    section: ClassVar[str] = "grpo"
    learns: ClassVar[str] = "learns from the rewards of rollouts"

    grpo: GrpoConfig = subsection(GrpoConfig)
    loss_fn: LossConfig = subsection(LossConfig)
    reward_penalties: RewardPenaltiesConfig = subsection(RewardPenaltiesConfig)


class PpoRunConfig(RolloutRunConfig):
    """Policy gradients with a critic."""

    section: ClassVar[str] = "ppo"
    learns: ClassVar[str] = "learns from rollouts with a critic"
    columns: ClassVar[frozenset[str]] = RolloutRunConfig.columns | {VALUES}
    console: ClassVar[tuple[Column, ...]] = (*ROLLOUT_COLUMNS, *VALUE_COLUMNS)

    ppo: PpoConfig = subsection(PpoConfig)
    algorithm: PpoAlgorithmConfig = subsection(PpoAlgorithmConfig)
    loss_fn: LossConfig = subsection(LossConfig)
    value_loss_fn: ValueLossConfig = subsection(ValueLossConfig)
    value: ValueConfig

    @classmethod
    def suits(cls, algorithm: Algorithm) -> bool:
        return super().suits(algorithm) and VALUES in algorithm.requires


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


class RunKinds(Mapping[str, type[TrainingRunConfig]]):
    """The kinds of training runs, by section: core's, and those of extensions, which are imported when they are asked for."""

    _core: ClassVar[Mapping[str, type[TrainingRunConfig]]] = {"grpo": GrpoRunConfig, "ppo": PpoRunConfig}

    def __getitem__(self, section: str) -> type[TrainingRunConfig]:
        if section not in self:
            raise KeyError(section)
        kind: type[TrainingRunConfig] = self._core.get(section) or plugins.load("runs", section)
        return kind

    def __contains__(self, section: object) -> bool:
        return section in self._core or section in plugins.declared("runs")

    def __iter__(self) -> Iterator[str]:
        return iter({**self._core, **plugins.declared("runs")})

    def __len__(self) -> int:
        return len({**self._core, **plugins.declared("runs")})


TRAINING_RUNS: Mapping[str, type[TrainingRunConfig]] = RunKinds()


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
