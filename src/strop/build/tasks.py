"""Make mixtures of tasks from the ``data`` and ``env`` sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from strop.data.data_config import DataEntryConfig
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource, Part
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
    parts: list[tuple[Part, DataEntries]] = [("train", train), ("validation", _validation_entries(validation, train))]
    for part, entries in parts:
        for entry in entries:
            known = sources.setdefault(resolve_alias(entry, env), [])
            source = DataSource.from_entry(entry, seed=seed, part=part)
            known += [] if source in known else [source]
    return {
        alias: EnvironmentDescription(
            alias=alias,
            name=_environment_config(env, alias).type_of(alias),
            options=_environment_config(env, alias).options,
            sources=tuple(distinct),
        )
        for alias, distinct in sources.items()
    }


def _make_component(
    entry: DataEntryConfig, env: EnvironmentConfigs, seed: int, part: Part, remote: RemoteEnvironments, *, weight: float | None
) -> Component:
    alias = resolve_alias(entry, env)
    config = _environment_config(env, alias)
    environment = remote.get(alias) or _call_for_alias(alias, make_environment, config.type_of(alias), config.options)
    try:
        tasks = environment.tasks(DataSource.from_entry(entry, seed=seed, part=part))
    except (DataError, EnvironmentConfigError):
        raise
    except Exception as error:  # user-defined environments may raise anything
        where = f"env.{alias}: {environment.title}.tasks"
        raise EnvironmentConfigError(f"{where} raised {type(error).__name__}: {error}") from error
    return Component(alias, environment, tasks, weight)


def list_reward_names(data: DataEntries, env: Mapping[str, EnvironmentConfig]) -> tuple[str, ...]:
    """Return the names of the rewards that the environments of these entries give."""
    aliases = {alias: _environment_config(env, alias) for alias in (resolve_alias(entry, env) for entry in data)}
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


def _environment_config(env: EnvironmentConfigs, alias: str) -> EnvironmentConfig:
    """Return the section of an alias; an alias without one is the name of an environment."""
    return env.get(alias, EnvironmentConfig(type=None))


def _call_for_alias(alias: str, make: Callable[..., T], *arguments: Any) -> T:
    """Return ``make(*arguments)``; an EnvironmentConfigError is raised with the key of the environment in its message."""
    try:
        return make(*arguments)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"env.{alias}: {error}") from error
