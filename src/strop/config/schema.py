"""The two configurations: a training run and an evaluation. Every key of them is documented in docs/configuration.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from strop.config.checkpointing import CheckpointingConfig
from strop.config.cluster import ClusterConfig
from strop.config.data import DataConfig, DataEntryConfig, EvalDataConfig
from strop.config.environment import EnvironmentConfig
from strop.config.evaluation import EvalConfig, EvalGenerationConfig, EvalTokenizerConfig
from strop.config.generation import GenerationConfig
from strop.config.grpo import AlgorithmConfig, GrpoConfig, LossConfig
from strop.config.logger import LoggerConfig
from strop.config.model import Model, subsection
from strop.config.policy import PolicyConfig


def _null_is_empty(values: object) -> object:
    """``env:`` and ``math:`` with nothing under them set nothing."""
    if isinstance(values, Mapping):
        return {alias: {} if options is None else options for alias, options in values.items()}
    return {} if values is None else values


Environments = Annotated[dict[str, EnvironmentConfig], BeforeValidator(_null_is_empty)]
ENVIRONMENTS_DOC = "Alias -> environment. An alias is what env_name in data names."


class GrpoRunConfig(Model):
    """Group-relative policy optimisation."""

    grpo: GrpoConfig = subsection(GrpoConfig)
    loss_fn: LossConfig = subsection(LossConfig)
    algorithm: AlgorithmConfig = subsection(AlgorithmConfig)
    checkpointing: CheckpointingConfig = subsection(CheckpointingConfig)
    policy: PolicyConfig
    data: DataConfig = subsection(DataConfig)
    env: Environments = Field(default_factory=dict, description=ENVIRONMENTS_DOC)
    logger: LoggerConfig = subsection(LoggerConfig)
    cluster: ClusterConfig = subsection(ClusterConfig)


class EvalRunConfig(Model):
    """Evaluation of a model on a set of tasks."""

    eval: EvalConfig = subsection(EvalConfig)
    generation: EvalGenerationConfig
    tokenizer: EvalTokenizerConfig
    data: EvalDataConfig = subsection(EvalDataConfig)
    env: Environments = Field(default_factory=dict, description=ENVIRONMENTS_DOC)
    cluster: ClusterConfig = subsection(ClusterConfig)


def environment_of(config: GrpoRunConfig | EvalRunConfig, entry: DataEntryConfig) -> str | None:
    """The alias an entry's tasks are scored by; None where it names none and there is not exactly one."""
    if entry.env_name is not None:
        return entry.env_name
    return next(iter(config.env)) if len(config.env) == 1 else None


def generation_of(config: GrpoRunConfig | EvalRunConfig) -> tuple[str, GenerationConfig]:
    """The generation section and its dotted key."""
    if isinstance(config, GrpoRunConfig):
        return "policy.generation", config.policy.generation
    return "generation", config.generation
