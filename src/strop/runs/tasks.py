"""Create mixtures of tasks from the ``data`` and ``env`` sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from strop.config import RolloutRunConfig
from strop.data.builtin_dataset import Purpose
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource, Part
from strop.data.task_order import find_task_orders
from strop.environments.base import EnvironmentConfigError
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.handle import EnvironmentHandle, LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.environments.registry import gives_turn_states, list_marks, make_environment
from strop.environments.remote import EnvironmentDescription
from strop.environments.resources import configure_resources, read_sections
from strop.environments.rewards import RewardMark
from strop.safety.exits import contain_exits

T = TypeVar("T")
EnvironmentConfigs = Mapping[str, EnvironmentConfig]
RemoteEnvironments = Mapping[str, EnvironmentHandle[Any]]
"""Environments in other processes, by alias; the others are created in this process."""


def make_training_tasks(config: RolloutRunConfig, remote: RemoteEnvironments = MappingProxyType({})) -> Mixture:
    """Make the mixture of training tasks."""
    configure_resources(read_sections(config))  # before an environment asks for one
    training, data = config.rollout_training, config.data
    mixture = make_mixture(
        data.train, config.env, "train", remote, seed=training.seed, shuffle=data.shuffle, max_epochs=training.max_num_epochs
    )
    for order in find_task_orders(data):
        slots = count_slots(config)
        mixture = mixture.with_order(order, list_reward_marks(config), slots=slots, groups_per_step=training.num_prompts_per_step)
    return mixture


def count_slots(config: RolloutRunConfig) -> int:
    """Return the number of groups that may be started and not yet trained on."""
    training = config.rollout_training
    configured = training.async_config.slots if training.max_staleness else None
    return (training.max_staleness + 1) * training.num_prompts_per_step if configured is None else configured


def make_validation_tasks(config: RolloutRunConfig, remote: RemoteEnvironments = MappingProxyType({})) -> Mixture | None:
    """Make the mixture of validation tasks; None if there are none."""
    entries = config.data.validation_entries
    return make_mixture(entries, config.env, "validation", remote, seed=config.rollout_training.seed) if entries else None


def make_mixture(
    entries: Sequence[DataEntryConfig],
    env: EnvironmentConfigs,
    part: Part,
    remote: RemoteEnvironments = MappingProxyType({}),
    *,
    seed: int,
    shuffle: bool = False,
    max_epochs: int | None = None,
    purpose: Purpose | None = None,
) -> Mixture:
    """Make a mixture of the tasks of data entries; several entries of training tasks are mixed by their shares.

    ``purpose``: chooses the split of a built-in set; None: the purpose of the part."""
    weighted = part == "train" and len(entries) > 1
    sources = [DataSource.from_entry(entry, seed=seed, part=part, purpose=purpose, shuffle=shuffle) for entry in entries]
    components = [
        _make_component(entry, env, source, remote, weight=entry.share if weighted else None)
        for entry, source in zip(entries, sources, strict=True)
    ]
    return Mixture(tuple(components), seed=seed, shuffle=shuffle, max_epochs=max_epochs)


def describe_environments(config: RolloutRunConfig) -> Mapping[str, EnvironmentDescription]:
    """Return, by alias, the settings with which another process can create an environment of the run and its tasks."""
    sources: dict[str, list[DataSource]] = {}
    env, seed = config.env, config.rollout_training.seed
    parts: list[tuple[Part, Sequence[DataEntryConfig]]] = [
        ("train", config.data.train),
        ("validation", config.data.validation_entries),
    ]
    for part, entries in parts:
        for entry in entries:
            known = sources.setdefault(resolve_alias(entry, env), [])
            source = DataSource.from_entry(entry, seed=seed, part=part, shuffle=part == "train" and config.data.shuffle)
            known += [] if source in known else [source]
    return {
        alias: EnvironmentDescription(
            alias=alias,
            name=_environment_config(env, alias).type_of(alias),
            options=_environment_config(env, alias).options,
            sources=tuple(distinct),
            resources=read_sections(config),
        )
        for alias, distinct in sources.items()
    }


def _make_component(
    entry: DataEntryConfig, env: EnvironmentConfigs, source: DataSource, remote: RemoteEnvironments, *, weight: float | None
) -> Component:
    alias = resolve_alias(entry, env)
    config = _environment_config(env, alias)
    environment: EnvironmentHandle[Any] | None = remote.get(alias)
    if environment is None:
        environment = LocalEnvironment(_call_for_alias(alias, make_environment, config.type_of(alias), config.options))
    try:
        with contain_exits():
            tasks = environment.tasks(source)
    except (DataError, EnvironmentConfigError):
        raise
    except Exception as error:  # user-defined environments may raise any exception
        where = f"env.{alias}: {environment.traits.title}.tasks"
        raise EnvironmentConfigError(f"{where} raised {type(error).__name__}: {error}") from error
    return Component(alias, environment, tasks, weight, name_data(entry) or alias)


def name_data(entry: DataEntryConfig) -> str:
    """Return a short name for an entry's data set; empty for generated tasks."""
    name = entry.data_name or ""
    if entry.is_file:
        return Path(name).stem
    return name if name in BUILTIN_DATASETS else name.rstrip("/").rpartition("/")[2]


def list_reward_names(config: RolloutRunConfig, of_steps: bool = False) -> tuple[str, ...]:
    """Return the names of the rewards of the training tasks' environments; ``of_steps``: only step rewards."""
    listed = list_reward_marks(config).values()
    return tuple(dict.fromkeys(name for marks in listed for name, mark in marks.items() if mark.per_turn or not of_steps))


def list_reward_marks(config: RolloutRunConfig) -> Mapping[str, Mapping[str, RewardMark]]:
    """Return how the rewards of the training tasks count, by environment and name."""
    return _ask_environments(config, list_marks)


def _ask_environments(config: RolloutRunConfig, listing: Callable[[str, Mapping[str, Any]], T]) -> dict[str, T]:
    """Return the result of ``listing`` for each environment of the training tasks."""
    used = [resolve_alias(entry, config.env) for entry in config.data.train]
    aliases = {alias: _environment_config(config.env, alias) for alias in used}
    return {alias: _call_for_alias(alias, listing, each.type_of(alias), each.options) for alias, each in aliases.items()}


def have_turn_states(config: RolloutRunConfig) -> bool:
    """Return whether an environment of the training tasks reports the state in which a turn was taken."""
    aliases = {resolve_alias(entry, config.env) for entry in config.data.train}
    return any(
        _call_for_alias(alias, gives_turn_states, _environment_config(config.env, alias).type_of(alias)) for alias in aliases
    )


def resolve_alias(entry: DataEntryConfig, env: EnvironmentConfigs) -> str:
    """Return the alias of the environment that scores an entry's tasks. Raises EnvironmentConfigError if the choice is ambiguous."""
    alias = entry.env_name or (next(iter(env)) if len(env) == 1 else None)
    if alias is None:
        raise EnvironmentConfigError(
            f"data: an entry has no env_name, and env has {sorted(env)}; set it to the one that scores its tasks"
        )
    return alias


def _environment_config(env: EnvironmentConfigs, alias: str) -> EnvironmentConfig:
    """Return the section of an alias; an alias without a section is the name of an environment."""
    return env.get(alias, EnvironmentConfig(type=None))


def _call_for_alias(alias: str, make: Callable[..., T], *arguments: Any) -> T:
    """Return ``make(*arguments)``; an EnvironmentConfigError is raised with the environment's key in its message."""
    try:
        return make(*arguments)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"env.{alias}: {error}") from error
