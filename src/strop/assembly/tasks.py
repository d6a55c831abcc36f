"""The ``data`` and ``env`` sections -> streams of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from strop.config.data import DataEntryConfig
from strop.config.environment import EnvironmentConfig
from strop.data.errors import DataError
from strop.data.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError, reward_marks
from strop.environments.hosted import HostedDescription
from strop.environments.mixture import Component, Mixture
from strop.environments.registry import environment_class, make_environment

Entries = Sequence[DataEntryConfig]
T = TypeVar("T")


Environments = Mapping[str, EnvironmentConfig]
Hosted = Mapping[str, Environment[Any]]
"""By alias, environments that live in other processes; the others are made here."""


def training_tasks(
    data: Entries, env: Environments, *, seed: int, shuffle: bool, max_epochs: int | None, hosted: Hosted = MappingProxyType({})
) -> Mixture:
    several = len(data) > 1
    components = [_component(entry, env, seed, "train", hosted, weight=entry.weight if several else None) for entry in data]
    return Mixture(tuple(components), seed=seed, shuffle=shuffle, max_epochs=max_epochs)


def validation_tasks(
    data: Entries | None, train: Entries, env: Environments, *, seed: int, hosted: Hosted = MappingProxyType({})
) -> Mixture | None:
    """The validation entries, else what the training entries hold out for it, else none."""
    entries = _validation_entries(data, train)
    if not entries:
        return None
    components = [_component(entry, env, seed, "validation", hosted, weight=None) for entry in entries]
    return Mixture(tuple(components), seed=seed, shuffle=False)


def _validation_entries(data: Entries | None, train: Entries) -> Entries:
    return data if data is not None else [entry for entry in train if entry.split_validation_size]


def descriptions(train: Entries, validation: Entries | None, env: Environments, *, seed: int) -> Mapping[str, HostedDescription]:
    """By alias, what another process needs to make the environments of a run, and their tasks."""
    sources: dict[str, list[DataSource]] = {}
    for entries, part in ((train, "train"), (_validation_entries(validation, train), "validation")):
        for entry in entries:
            sources.setdefault(alias_of(entry, env), []).append(_tasks_source(entry, seed, part))
    found: dict[str, HostedDescription] = {}
    for alias, own in sources.items():
        config = env.get(alias, EnvironmentConfig(type=None))
        distinct = tuple(source for place, source in enumerate(own) if source not in own[:place])
        found[alias] = HostedDescription(alias=alias, name=config.type or alias, options=config.options, sources=distinct)
    return found


def _tasks_source(entry: DataEntryConfig, seed: int, part: str) -> DataSource:
    """Generated tasks are of one part or the other too."""
    source = data_source(entry, seed, part)
    return source if entry.dataset_name is not None else replace(source, part="train" if part == "train" else "validation")


def _component(
    entry: DataEntryConfig, env: Environments, seed: int, part: str, hosted: Hosted, *, weight: float | None
) -> Component:
    alias = alias_of(entry, env)
    environment = hosted.get(alias) or _environment(alias, env.get(alias, EnvironmentConfig(type=None)))
    try:
        tasks = environment.tasks(_tasks_source(entry, seed, part))
    except (DataError, EnvironmentConfigError):
        raise
    except Exception as error:  # whatever an environment from outside does
        where = f"env.{alias}: {environment.title}.tasks"
        raise EnvironmentConfigError(f"{where} raised {type(error).__name__}: {error}") from error
    return Component(alias, environment, tasks, weight)


def data_source(entry: DataEntryConfig, seed: int, part: str) -> DataSource:
    """The rows of an entry; where it holds some out, those that are for ``part``: train or validation."""
    return DataSource(
        dataset_name=entry.dataset_name,
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


def reward_names(data: Entries, env: Mapping[str, EnvironmentConfig]) -> tuple[str, ...]:
    """The rewards that the environments of these entries give."""
    aliases = {alias: env.get(alias, EnvironmentConfig(type=None)) for alias in (alias_of(entry, env) for entry in data)}
    kinds = [_of_alias(alias, environment_class, config.type or alias) for alias, config in aliases.items()]
    return tuple(dict.fromkeys(name for kind in kinds for name in reward_marks(kind)))


def alias_of(entry: DataEntryConfig, env: Mapping[str, EnvironmentConfig]) -> str:
    """The environment that scores an entry's tasks. Raises EnvironmentConfigError where that is open."""
    alias = entry.env_name or (next(iter(env)) if len(env) == 1 else None)
    if alias is None:
        raise EnvironmentConfigError(f"data: an entry names no env_name, and env has {sorted(env)}; name the one that scores it")
    return alias


def _environment(alias: str, config: EnvironmentConfig) -> Environment[Any]:
    return _of_alias(alias, make_environment, config.type or alias, config.options)


def _of_alias(alias: str, make: Callable[..., T], *arguments: Any) -> T:
    """What ``make`` makes. Raises EnvironmentConfigError that names the key."""
    try:
        return make(*arguments)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"env.{alias}: {error}") from error
