"""Make mixtures of tasks from the ``data`` and ``env`` sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from strop.data.data_config import DataEntryConfig
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.mixture import Component, Mixture
from strop.environments.registry import list_rewards, make_environment
from strop.environments.remote import EnvironmentDescription

T = TypeVar("T")
DataEntries = Sequence[DataEntryConfig]
EnvironmentConfigs = Mapping[str, EnvironmentConfig]
RemoteEnvironments = Mapping[str, Environment[Any]]
"""Environments in other processes, by alias; the others are made in this process."""


def make_training_tasks(
    data: DataEntries,
    env: EnvironmentConfigs,
    *,
    seed: int,
    shuffle: bool,
    max_epochs: int | None,
    remote: RemoteEnvironments = MappingProxyType({}),
) -> Mixture:
    """Make the mixture of training tasks. ``remote``: environments in other processes, by alias."""
    weighted = len(data) > 1
    components = [_make_component(entry, env, seed, "train", remote, weight=entry.weight if weighted else None) for entry in data]
    return Mixture(tuple(components), seed=seed, shuffle=shuffle, max_epochs=max_epochs)


def make_validation_tasks(
    data: DataEntries | None,
    train: DataEntries,
    env: EnvironmentConfigs,
    *,
    seed: int,
    remote: RemoteEnvironments = MappingProxyType({}),
) -> Mixture | None:
    """Make the validation tasks: from the validation entries, else from the held-out part of the training entries, else None."""
    entries = _validation_entries(data, train)
    if not entries:
        return None
    components = [_make_component(entry, env, seed, "validation", remote, weight=None) for entry in entries]
    return Mixture(tuple(components), seed=seed, shuffle=False)


def _validation_entries(data: DataEntries | None, train: DataEntries) -> DataEntries:
    return data if data is not None else [entry for entry in train if entry.split_validation_size]


def describe_environments(
    train: DataEntries, validation: DataEntries | None, env: EnvironmentConfigs, *, seed: int
) -> Mapping[str, EnvironmentDescription]:
    """Return by alias what another process needs to make an environment of the run and its tasks."""
    sources: dict[str, list[DataSource]] = {}
    for entries, part in ((train, "train"), (_validation_entries(validation, train), "validation")):
        for entry in entries:
            sources.setdefault(resolve_alias(entry, env), []).append(_make_task_source(entry, seed, part))
    descriptions: dict[str, EnvironmentDescription] = {}
    for alias, alias_sources in sources.items():
        config = env.get(alias, EnvironmentConfig(type=None))
        distinct = tuple(source for index, source in enumerate(alias_sources) if source not in alias_sources[:index])
        descriptions[alias] = EnvironmentDescription(
            alias=alias, name=config.type_of(alias), options=config.options, sources=distinct
        )
    return descriptions


def _make_task_source(entry: DataEntryConfig, seed: int, part: str) -> DataSource:
    """Return the source of an entry's tasks. Generated tasks, which have no rows to split, also belong to one part."""
    source = make_data_source(entry, seed, part)
    generated = entry.dataset_name is None and entry.rows is None
    return replace(source, part="train" if part == "train" else "validation") if generated else source


def _make_component(
    entry: DataEntryConfig, env: EnvironmentConfigs, seed: int, part: str, remote: RemoteEnvironments, *, weight: float | None
) -> Component:
    alias = resolve_alias(entry, env)
    config = env.get(alias, EnvironmentConfig(type=None))
    environment = remote.get(alias) or _call_for_alias(alias, make_environment, config.type_of(alias), config.options)
    try:
        tasks = environment.tasks(_make_task_source(entry, seed, part))
    except (DataError, EnvironmentConfigError):
        raise
    except Exception as error:  # user-defined environments may raise anything
        where = f"env.{alias}: {environment.title}.tasks"
        raise EnvironmentConfigError(f"{where} raised {type(error).__name__}: {error}") from error
    return Component(alias, environment, tasks, weight)


def make_data_source(entry: DataEntryConfig, seed: int, part: str) -> DataSource:
    """Return the source of an entry's rows. If the entry holds out a validation split: the rows of ``part``, train or validation."""
    return DataSource(
        dataset_name=entry.dataset_name,
        rows=entry.rows,
        subset=entry.subset,
        split=entry.split,
        input_key=entry.input_key,
        output_key=entry.output_key,
        messages_key=entry.messages_key,
        chosen_key=entry.chosen_key,
        rejected_key=entry.rejected_key,
        label_key=entry.label_key,
        margin_key=entry.margin_key,
        prompt_file=entry.prompt_file,
        system_prompt=entry.system_prompt,
        system_prompt_file=entry.system_prompt_file,
        size=entry.size,
        repeat=entry.repeat,
        seed=entry.seed if entry.seed is not None else seed,
        split_validation_size=entry.split_validation_size,
        part=("train" if part == "train" else "validation") if entry.split_validation_size else "all",
    )


def list_reward_names(data: DataEntries, env: Mapping[str, EnvironmentConfig]) -> tuple[str, ...]:
    """Return the names of the rewards that the environments of these entries give."""
    aliases = {alias: env.get(alias, EnvironmentConfig(type=None)) for alias in (resolve_alias(entry, env) for entry in data)}
    listed = [_call_for_alias(alias, list_rewards, config.type_of(alias), config.options) for alias, config in aliases.items()]
    return tuple(dict.fromkeys(name for names in listed for name in names))


def resolve_alias(entry: DataEntryConfig, env: Mapping[str, EnvironmentConfig]) -> str:
    """Return the alias of the environment that scores an entry's tasks. Raises EnvironmentConfigError if the choice is ambiguous."""
    alias = entry.env_name or (next(iter(env)) if len(env) == 1 else None)
    if alias is None:
        raise EnvironmentConfigError(
            f"data: an entry has no env_name, and env has {sorted(env)}; set it to the one that scores its tasks"
        )
    return alias


def _call_for_alias(alias: str, make: Callable[..., T], *arguments: Any) -> T:
    """Return ``make(*arguments)``; an EnvironmentConfigError is raised with the key of the environment in its message."""
    try:
        return make(*arguments)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"env.{alias}: {error}") from error
